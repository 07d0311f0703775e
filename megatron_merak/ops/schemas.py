"""Every operation that has, or may have, a compiled kernel: name -> arguments and results.

The compiled libraries implement these schemas and define none. ``...`` are any leading dimensions,
and rows their product; statistics are fp32. A name that ends in an underscore writes into its first
argument.
"""

NORM = {
    # x [..., h], weight and bias [h]; mean and rstd [...]. add_*: sum = x + residual is normed;
    # grad_sum is its own gradient besides, and what is returned first the gradient of x and of
    # residual alike.
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    "rms_norm_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    "layer_norm": "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, "
    "Tensor rstd)",
    "layer_norm_backward": (
        "(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, "
        "Tensor)"
    ),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor y, Tensor sum, Tensor "
        "rstd)"
    ),
    "add_rms_norm_backward": (
        "(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor rstd) -> (Tensor, "
        "Tensor)"
    ),
    "add_layer_norm": (
        "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
        " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)"
    ),
    "add_layer_norm_backward": (
        "(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd)"
        " -> (Tensor, Tensor, Tensor)"
    ),
}

POINTWISE = {
    # activation: silu, gelu, gelu_tanh. gate and up [..., f]; gate_up [..., 2f], gate first.
    "gated": "(Tensor gate, Tensor up, str activation) -> Tensor",
    "gated_backward": "(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    "gated_merged": "(Tensor gate_up, str activation) -> Tensor",
    "gated_merged_backward": "(Tensor grad, Tensor gate_up, str activation) -> Tensor",
    # activation(x + bias): x [..., f], bias [f]; without bias the second result of the backward is
    # empty.
    "bias_gelu": "(Tensor x, Tensor? bias, str activation) -> Tensor",
    "bias_gelu_backward": "(Tensor grad, Tensor x, Tensor? bias, str activation) -> (Tensor, "
    "Tensor)",
    # residual + dropout(x + bias): seed int64 [1], None for p = 0; the mask is a function of seed
    # and place.
    "bias_dropout_add": "(Tensor x, Tensor? bias, Tensor? residual, float p, Tensor? seed) -> "
    "Tensor",
    "bias_dropout_add_backward": "(Tensor grad, float p, Tensor? seed, bool bias) -> (Tensor, "
    "Tensor)",
    # x [..., d] turned by cos and sin, [..., r / 2], which broadcast to x; the last d - r features
    # pass. rotary_ writes into a tensor whose features lie side by side: x itself, or one apart
    # from it.
    "rotary": "(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
    "rotary_": "(Tensor(a!) into, Tensor x, Tensor cos, Tensor sin, bool interleaved, bool "
    "inverse) -> ()",
}

REDUCTIONS = {
    # softmax(scale * scores) over keys: scores [b, n, s, t]; mask bool [1 or b, 1 or n, 1 or s, t],
    # False hides; causal hides keys past i + t - s. A row with all keys hidden is zero.
    "masked_softmax": "(Tensor scores, Tensor? mask, float scale, bool causal) -> Tensor",
    "masked_softmax_backward": "(Tensor grad, Tensor probabilities, float scale, bool causal) -> "
    "Tensor",
    # logits [t, v] -> e = exp(logits - max), less its row's sum at the target; classes beyond
    # ``classes`` are 0. loss and total, the row's sum, fp32 [t].
    "exponentiate_": "(Tensor(a!) logits, Tensor target, int classes) -> (Tensor loss, Tensor "
    "total)",
    # One pass over the classes start .. start + classes of a shard, logits [t, v]: fp32 [t, 3], a
    # row's maximum, sum of exp(x - maximum), and target's x (-inf: in another shard); with
    # smoothing [t, 5], sum and number of x > -inf too.
    "cross_entropy_stats": "(Tensor logits, Tensor target, int start, int classes, bool "
    "smoothing) -> Tensor",
    # Its backward, for stats and their gradient [t, 3 or 5]; the maximum counts as a constant. Of
    # class x that is exp(x - maximum) grad[1], and at the target grad[2] besides; for x > -inf
    # grad[3].
    "cross_entropy_grad": (
        "(Tensor logits, Tensor target, Tensor stats, Tensor grad, int start, int classes) -> "
        "Tensor"
    ),
    "cross_entropy_grad_": (
        "(Tensor(a!) logits, Tensor target, Tensor stats, Tensor grad, int start, int classes) "
        "-> ()"
    ),
}

FLAT = {
    # Over flat buffers [n]. copy: low-precision parameters that get the rounded master. scale: of
    # the gradient. exp_avg and exp_avg_sq: fp32 or bf16, each.
    "adamw_": (
        "(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor(d!)? "
        "copy, float lr,"
        " float beta1, float beta2, float eps, float weight_decay, int step, float scale) -> ()"
    ),
    "sum_of_squares": "(Tensor x) -> Tensor",  # fp64 scalar
    "accumulate_": "(Tensor(a!) into, Tensor x, float scale) -> ()",  # into += scale * x
    "cast_": "(Tensor(a!) into, Tensor x, float scale) -> ()",  # into = scale * x, in into's type
    # into[index] += rows; index int64 [t]
    "add_rows_": "(Tensor(a!) into, Tensor index, Tensor rows) -> ()",
    # sums of rows [n, h] over k places each: places int64 [t k]
    "sums_of_rows": "(Tensor rows, Tensor places, int k) -> Tensor",
}

SCHEMAS = NORM | POINTWISE | REDUCTIONS | FLAT

# Made of torch's own operations on every device; a graph, and what counts operations, sees each as one.
COMPOSED = {
    # rows [n, i] with the matrix of their group, of [e, i, o]; ends [e], where rows of each end
    "product_by_group": "(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    # into[g] (+)= left^T right of the rows of group g: into [e, a, b], left [n, a], right [n, b]
    "add_products_": ("(Tensor(a!) into, Tensor left, Tensor right, Tensor ends, bool add) -> ()"),
}
