"""The table of sharding rules, by operator: what a sharded operand means for the result.

An operator without a rule needs replicated operands.
"""

from .known import Rule
from .rules_across import amax, gather, index, logsumexp, maximum, nll_loss, softmax
from .rules_einsum import einsum
from .rules_product import addmm, attention, depthwise, grouped, linear, matmul
from .rules_shape import (
    expand,
    index_select,
    join,
    like,
    movedim,
    narrow,
    other_dims,
    permute,
    repeat,
    repeat_interleave,
    select,
    slice_,
    split,
    squeeze,
    unbind,
    unsqueeze,
    view,
    view_as_complex,
)
from .rules_value import POINTWISE, along, norm, pointwise, reduction, selection
from .rules_vocabulary import cross_entropy, embedding
from .rules_write import batched, index_add, index_put, new_tensor, scatter_piece, unfold


def _rows(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


STARTERS: dict[str, Rule] = {  # these shard weights although their operands are replicated
    "linear": linear,
    **_rows("addmm baddbmm", addmm),
    **_rows("mm bmm matmul", matmul),
    **_rows("_grouped_mm transformers.grouped_mm_fallback", grouped),
    "einsum": einsum,
    "embedding": embedding,
}

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    # views, permutations, pieces, joins, indexing
    **_rows("view reshape _unsafe_view flatten unflatten", view),
    **_rows("transpose transpose_ permute t numpy_T swapaxes swapdims mT mH adjoint", permute),
    **_rows("movedim moveaxis", movedim),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **_rows("expand broadcast_to", expand),
    **_rows("expand_as view_as reshape_as", like),
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    **_rows("split chunk split_with_sizes tensor_split", split),
    "unbind": unbind,
    "select": select,
    "slice": slice_,
    "narrow": narrow,
    **_rows("cat concat concatenate stack", join),
    "index.Tensor": index,
    "index_select": index_select,
    "gather": gather,
    **_rows("roll flip tril triu pad constant_pad_nd", other_dims),
    **_rows("view_as_complex view_as_real", view_as_complex),
    # values written piece by piece
    **_rows("new_zeros new_ones new_full new_empty", new_tensor),
    **_rows("slice_scatter select_scatter", scatter_piece),
    "index_put": index_put,
    **_rows("index_add index_copy scatter scatter_add", index_add),
    "unfold": unfold,
    **_rows("linalg_solve_triangular linalg_inv triangular_solve", batched),
    # reductions, scans and the like
    **_rows(
        "mean sum prod var std amin linalg_vector_norm argmin any all count_nonzero", reduction
    ),
    "min.dim": reduction,
    **_rows("max.dim argmax", maximum),
    **_rows("cumsum cumprod logcumsumexp glu", along),
    "logsumexp": logsumexp,
    "amax": amax,
    **_rows("softmax log_softmax _softmax _log_softmax", softmax),
    **_rows("layer_norm rms_norm", norm),
    **_rows("topk sort", selection),
    # products
    "scaled_dot_product_attention": attention,
    **_rows("conv1d conv2d", depthwise),
    "cross_entropy_loss": cross_entropy,
    **_rows("nll_loss nll_loss_nd", nll_loss),
}
