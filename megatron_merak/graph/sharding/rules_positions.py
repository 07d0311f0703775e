"""The rule of attention whose queries are sharded by positions: each rank computes those of its
positions, of all heads, with the keys and values of all.
"""

from dataclasses import replace

from torch.fx import Node

from ... import ops
from ..ir.nodes import is_random, operands
from ..ir.operators import is_causal
from .known import Known
from .placement import Decision, Layout, ShardSpec
from .rules_value import argument


def ring_of_positions(p: Known, node: Node) -> Decision:
    """The rule of attention to keys and values that stay on their ranks, and go round."""
    query, key, value = operands(node, 0, 1, 2)
    layout = p.layout(query)
    others = [p.layout(key), p.layout(value)]
    shapes = [p.shape(x) for x in (query, key, value)]
    assert layout is not None
    if any(len(shape) != 4 for shape in shapes):
        raise p.cannot_shard(node, "has no batch, heads, positions and features")
    for each in (layout, *others):
        if each is None or each.dim != 2 or len(each.blocks) > 1 or each.padded:
            raise p.cannot_shard(
                node, "has queries, keys or values that are not those of positions"
            )
    if shapes[1][:3] != shapes[2][:3] or shapes[0][0] != shapes[1][0]:
        raise p.cannot_shard(node, "has other keys than values")
    if shapes[0][1] % shapes[1][1] or shapes[0][3] != shapes[1][3]:
        raise p.cannot_shard(node, "has heads of keys that do not serve those of queries")
    if is_random(node):
        raise p.cannot_shard(node, "has dropout")
    mask = argument(node, "attn_mask")
    to_shard: dict[Node, ShardSpec] = {}
    if isinstance(mask, Node):
        if mask.meta["grad"]:
            raise p.cannot_shard(node, "has a mask that is trained")
        _cut_rows(p, node, mask, layout, to_shard)
    if is_causal(node) and (mask is not None or shapes[0][2] != shapes[1][2]):
        raise p.cannot_shard(node, "has a causal mask of another form")
    return Decision(layout, to_shard)


def _cut_rows(
    p: Known, node: Node, mask: Node, layout: Layout, to_shard: dict[Node, ShardSpec]
) -> None:
    """Let a rank have those rows of a mask that are of its queries."""
    shape = p.shape(mask)
    dim = len(shape) - 2
    rows = replace(layout, dim=dim)
    own = p.layout(mask)
    if own is not None and not own.same_shards(rows):
        raise p.cannot_shard(node, "takes a mask that is sharded differently")
    if own is None and dim >= 0 and shape[dim] > 1:
        p.shard_operand(to_shard, mask, rows.spec())


def attention_of_positions(p: Known, node: Node, starts: tuple[int, ...]) -> Decision:
    """starts: the position of the first query of each chunk that this rank has."""
    query, key, value = operands(node, 0, 1, 2)
    layout = p.layout(query)
    rank = len(p.shape(query))
    if layout is None or layout.dim != rank - 2 or len(layout.blocks) > 1:
        raise p.cannot_shard(node, "has queries that are not sharded by positions")
    if p.sharded([key, value]):
        raise p.cannot_shard(node, "needs the keys and values of all positions")
    mask = argument(node, "attn_mask")
    to_shard: dict[Node, ShardSpec] = {}
    if isinstance(mask, Node):
        _cut_rows(p, node, mask, layout, to_shard)
    if not is_causal(node):
        return Decision(layout, to_shard)
    if rank != 4 or mask is not None or p.shape(query)[2] != p.shape(key)[2]:
        raise p.cannot_shard(node, "has a causal mask of another form")
    dropout = argument(node, "dropout_p")
    args = (query, key, value, starts, dropout, argument(node, "scale"))
    return Decision(layout, args=args, target=ops.causal_chunks)
