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

// ---- Norms: x [rows, width], of which `inner` rows are side by side, and `outer` elements are from the first of these to
// the first of the next; weight and bias [width], of `type` or of fp32

// With residual: sum = x + residual, and sum is normed. With mean: LayerNorm, which has a bias; without: RMSNorm.
int merak_norm(int type, const void* x, int64_t inner, int64_t outer, const void* residual, const void* weight,
               const void* bias, int weight_type, void* y, void* sum, float* mean, float* rstd, int64_t rows,
               int64_t width, double eps, void* stream);

// Rows of `parts`, float [1 or 2 with mean, this many, width], which the backward needs to work in.
int64_t merak_norm_parts(int type, int64_t rows, int64_t width);

// grad_sum, where there is one, is added to grad_x. grad_weight and grad_bias are of weight_type.
int merak_norm_backward(int type, const void* grad, const void* grad_sum, const void* x, int64_t inner, int64_t outer,
                        const void* weight, int weight_type, const float* mean, const float* rstd, void* grad_x,
                        float* parts, void* grad_weight, void* grad_bias, int64_t rows, int64_t width, void* stream);

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

// Rows of `parts`, float [this many, width], which a backward with a bias needs to work in.
int64_t merak_residual_parts(int type, int64_t rows, int64_t width);

// grad_bias of `type`, with parts, or both null.
int merak_bias_dropout_add_backward(int type, const void* grad, double p, const int64_t* seed, void* grad_x,
                                    float* parts, void* grad_bias, int64_t rows, int64_t width, void* stream);

// ---- Rotary

// x, with `dims` (at most 6) leading dimensions of sizes[] and strides x_strides[], features of stride 1; cos and sin
// of angle_type, `type` or fp32, with angle_strides[], 0 where they broadcast; y of y_strides[], x itself or apart.
int merak_rotary(int type, const void* x, const void* cos, const void* sin, int angle_type, void* y, int dims,
                 const int64_t* sizes, const int64_t* x_strides, const int64_t* angle_strides, const int64_t* y_strides,
                 int64_t features, int64_t rotated, int interleaved, int inverse, void* stream);

// ---- Softmax over keys

// scores [batch, heads, queries, keys]; mask bool with mask_strides[3], 0 where it broadcasts, keys of stride 1.
int merak_masked_softmax(int type, const void* scores, const bool* mask, const int64_t* mask_strides, void* to,
                         int64_t batch, int64_t heads, int64_t queries, int64_t keys, double scale, int causal,
                         void* stream);

// All [matrices, queries, keys].
int merak_masked_softmax_backward(int type, const void* grad, const void* probabilities, void* to, int64_t matrices,
                                  int64_t queries, int64_t keys, double scale, int causal, void* stream);

// ---- Cross entropy: logits of `stride` from row to row; classes start .. start + classes, and padding up to columns

// stats [rows, 3], with smoothing [rows, 5].
int merak_cross_entropy_stats(int type, const void* logits, const int64_t* target, float* stats, int64_t rows,
                              int64_t stride, int64_t start, int64_t classes, int smoothing, void* stream);

// stats and grad [rows, terms], terms 3 or 5; to, of to_stride, may be logits.
int merak_cross_entropy_grad(int type, const void* logits, void* to, const int64_t* target, const float* stats,
                             const float* grad, int terms, int64_t rows, int64_t columns, int64_t stride,
                             int64_t to_stride, int64_t start, int64_t classes, void* stream);

// In place. The loss of a target that is none of the classes is infinite.
int merak_exponentiate(int type, void* logits, const int64_t* target, float* loss, float* total, int64_t rows,
                       int64_t columns, int64_t stride, int64_t classes, void* stream);

// ---- Flat buffers of `count` elements; types where they may differ

// copy may be null; moments are fp32 or bf16.
int merak_adamw(float* master, int exp_avg_type, void* exp_avg, int exp_avg_sq_type, void* exp_avg_sq, int grad_type,
                const void* grad, int copy_type, void* copy, int64_t count, double rate, double beta1, double beta2,
                double eps, double weight_decay, int64_t step, double scale, void* stream);

// Elements of `parts`, which the sum needs to work in: the same for all devices, and so is the sum, to the bit.
int64_t merak_sum_of_squares_parts(int type, int64_t count);

int merak_sum_of_squares(int type, const void* from, int64_t count, double* parts, double* to, void* stream);

// into += scale * from
int merak_accumulate(int into_type, void* into, int from_type, const void* from, int64_t count, double scale,
                     void* stream);

// into = scale * from
int merak_cast(int into_type, void* into, int from_type, const void* from, int64_t count, double scale, void* stream);

// into[index[k]] += from[order[k]] for rows of `width`: index ascending, order stable, so that rows add up in order. An
// index outside of the table_rows fails the launch, as it does in torch.
int merak_add_rows(int into_type, void* into, const int64_t* index, const int64_t* order, int from_type,
                   const void* from, int64_t count, int64_t table_rows, int64_t width, void* stream);

// to[t] = the sum of from[places[t k]] and the k - 1 rows behind it in places, for t < tokens and rows of `width`, in
// order and in fp32. A place outside of the `count` rows fails the launch.
int merak_sums_of_rows(int type, const void* from, const int64_t* places, int64_t k, void* to, int64_t tokens,
                       int64_t count, int64_t width, void* stream);

// ---- Sums over ranks

// Bytes of every rank's buffer, zero at first, for messages of up to `capacity` bytes, a multiple of 16.
int64_t merak_all_reduce_bytes(int64_t capacity);

// to = the sum over 2, 4 or 8 ranks of from; they may be the same. buffers: those of all ranks, as this process maps
// them. Calls in the same order on all ranks, one at a time; patience: seconds to wait for a peer before the launch
// fails.
int merak_all_reduce(void* const* buffers, int rank, int world, int64_t capacity, const void* from, void* to,
                     int64_t count, int type, int two_shot, double patience, void* stream);

// ---- Messages between ranks: counters of 32 bits, which wrap around, in memory that both map

// What comes after it on the stream waits until the counter has reached `value`; after `patience` seconds the launch
// fails.
int merak_await_counter(const void* counter, int64_t value, double patience, void* stream);

// What came before it on the stream is seen by whoever sees the counter at `value`.
int merak_raise_counter(void* counter, int64_t value, void* stream);

#ifdef __cplusplus
}
#endif
