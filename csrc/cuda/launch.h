// Launchers of the CUDA kernels: plain C, so that the bindings need no CUDA compiler and the kernels no torch.
//
// A launcher starts its kernels on `stream`, a cudaStream_t, waits for nothing, and returns a cudaError_t, 0 for success.
// Tensors are dense, row-major, unless strides are given (in elements); `type` is the element type of those that name no
// other; statistics, sums and parts are fp32. Sizes may be anything, zero included; pointers need no more than their
// element's alignment. Null stands for an operand that is absent.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum MerakType { MERAK_FLOAT = 0, MERAK_BFLOAT16 = 1, MERAK_HALF = 2 };
enum MerakActivation { MERAK_SILU = 0, MERAK_GELU = 1, MERAK_GELU_TANH = 2 };

const char* merak_error_string(int status);

// ---- Norms: x [rows, width]; weight and bias [width], of `type` or of fp32

// With residual: sum = x + residual, and sum is normed. With mean: LayerNorm, which has a bias; without: RMSNorm.
int merak_norm(int type, const void* x, const void* residual, const void* weight, const void* bias, int weight_type,
               void* y, void* sum, float* mean, float* rstd, int64_t rows, int64_t width, double eps, void* stream);

// Rows of `parts`, float [1 or 2 with mean, this many, width], which the backward needs to work in.
int64_t merak_norm_parts(int type, int64_t rows, int64_t width);

// grad_sum, where there is one, is added to grad_x. grad_weight and grad_bias are of weight_type.
int merak_norm_backward(int type, const void* grad, const void* grad_sum, const void* x, const void* weight,
                        int weight_type, const float* mean, const float* rstd, void* grad_x, float* parts,
                        void* grad_weight, void* grad_bias, int64_t rows, int64_t width, void* stream);

// ---- Activations: gate, up and x [rows, width]; the *_stride from row to row

int merak_gated(int type, int activation, const void* gate, const void* up, void* y, int64_t rows, int64_t width,
                int64_t gate_stride, int64_t up_stride, void* stream);

int merak_gated_backward(int type, int activation, const void* grad, const void* gate, const void* up, void* grad_gate,
                         void* grad_up, int64_t rows, int64_t width, int64_t gate_stride, int64_t up_stride,
                         int64_t grad_gate_stride, int64_t grad_up_stride, void* stream);

// activation(x + bias); bias [width] of `type` or of fp32.
int merak_bias_activation(int type, int activation, const void* x, const void* bias, int bias_type, void* y,
                          int64_t rows, int64_t width, void* stream);

// Rows of `parts`, float [this many, width], which a backward with a bias needs to work in.
int64_t merak_bias_parts(int type, int64_t rows, int64_t width);

// Without bias neither parts nor grad_bias.
int merak_bias_activation_backward(int type, int activation, const void* grad, const void* x, const void* bias,
                                   int bias_type, void* grad_x, float* parts, void* grad_bias, int64_t rows,
                                   int64_t width, void* stream);

// ---- Residual: residual + dropout(x + bias), x and residual [rows, width]

// seed: int64 in device memory, null for no dropout.
int merak_bias_dropout_add(int type, const void* x, const void* bias, int bias_type, const void* residual, double p,
                           const int64_t* seed, void* y, int64_t rows, int64_t width, void* stream);

// grad_bias of `type`, with parts as above, or both null.
int merak_bias_dropout_add_backward(int type, const void* grad, double p, const int64_t* seed, void* grad_x,
                                    float* parts, void* grad_bias, int64_t rows, int64_t width, void* stream);

// ---- Rotary

// x, with `dims` (at most 6) leading dimensions of sizes[] and strides x_strides[], features of stride 1; cos and sin
// of angle_type, `type` or fp32, with angle_strides[], 0 where they broadcast; y dense.
int merak_rotary(int type, const void* x, const void* cos, const void* sin, int angle_type, void* y, int dims,
                 const int64_t* sizes, const int64_t* x_strides, const int64_t* angle_strides, int64_t features,
                 int64_t rotated, int interleaved, int inverse, void* stream);

#ifdef __cplusplus
}
#endif
