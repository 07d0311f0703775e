// Stands in for libtorch_cuda where the CUDA bindings run on CPU tensors: there is one stream, and no device to guard.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" {

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }

}  // extern "C"
