// The module _C: host-side cores that take no traced tensor. Each file of this folder and of comm/ adds its own part.
#include <pybind11/pybind11.h>

namespace merak {

void bind_calls(pybind11::module_& module);
void bind_indices(pybind11::module_& module);
void bind_moments(pybind11::module_& module);
void bind_partition(pybind11::module_& module);
void bind_search(pybind11::module_& module);
void bind_shared_memory(pybind11::module_& module);
void bind_simulate(pybind11::module_& module);

}  // namespace merak

PYBIND11_MODULE(_C, module) {
  module.doc() = "Host-side cores of megatron_merak.";
  merak::bind_calls(module);
  merak::bind_indices(module);
  merak::bind_moments(module);
  merak::bind_partition(module);
  merak::bind_search(module);
  merak::bind_shared_memory(module);
  merak::bind_simulate(module);
}
