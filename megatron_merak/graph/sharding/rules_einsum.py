"""The rule of einsum, where the sharded dimension is a letter."""

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from ..ir.nodes import constant
from .known import Known
from .padding import zeros
from .placement import Decision, Layout, ShardSpec
from .rules_product import COLUMN, ROW


def einsum(p: Known, node: Node) -> Decision | None:
    """A sharded letter stays sharded if the result has it; else the result is a partial sum."""
    terms, output = _terms(p, node)
    operands: Sequence[Node] = constant(node, 1)
    sharded = p.sharded(operands)
    if not sharded:
        return _column(p, node, terms, output)
    if any(len(dict.fromkeys(term)) < len(term) for term in (*terms, output)):
        raise p.cannot_shard(node, "takes a diagonal")
    first = p.sharded_layout(sharded[0])
    letter = terms[list(operands).index(sharded[0])][first.dim]
    p.explain_pin(sharded[0], COLUMN if letter in output else ROW)
    to_shard: dict[Node, ShardSpec] = {}
    for x, term in zip(operands, terms, strict=True):
        layout = p.layout(x)
        if layout and (
            term[layout.dim] != letter or not layout.same_shards(replace(first, dim=layout.dim))
        ):
            raise p.cannot_shard(node, "multiplies values that are sharded differently")
        if layout is None and letter in term and p.shape(x)[term.index(letter)] != 1:
            why = (
                "sharded like what it multiplies"
                if letter in output
                else "row parallel: its input is sharded"
            )
            p.shard_operand(
                to_shard, x, ShardSpec(term.index(letter), first.blocks, first.padded), why
            )
    if letter in output:
        layout = Layout(output.index(letter), first.blocks, p.origins(sharded), first.padded)
        return Decision(layout, to_shard, fills=zeros(p, node, to_shard))
    if not any(
        p.parameter_of(x) and letter in term for x, term in zip(operands, terms, strict=True)
    ):
        raise p.cannot_shard(node, "contracts the sharded dimension")
    fills = zeros(p, node, to_shard)
    having_letter = [x for x, term in zip(operands, terms, strict=True) if letter in term]
    if first.padded and len(having_letter) == 1:  # a plain sum would give its padding a gradient
        fills[having_letter[0]] = 0
    return Decision(None, to_shard, fills=fills, reduce=True)


def _column(p: Known, node: Node, terms: list[str], output: str) -> Decision | None:
    """Shard a weight along the first of its letters that the result has from it alone."""
    for x, term in zip(constant(node, 1), terms, strict=True):
        name = p.parameter_of(x)
        others = "".join(
            other for y, other in zip(constant(node, 1), terms, strict=True) if y is not x
        )
        if name is None:
            continue
        for dim, letter in enumerate(term):
            extent = p.shape(x)[dim]
            if letter not in output or letter in others or extent % p.tp:
                continue
            blocks = p.assumptions.blocks.get((p.assumptions.role(name), extent), (extent,))
            if p.shard_parameter(x, ShardSpec(dim, blocks), COLUMN):
                p.record_column(name, extent, node)
                return Decision(Layout(output.index(letter), blocks, (name,), features=(0, 1)))
    return None


def _terms(p: Known, node: Node) -> tuple[list[str], str]:
    """Return the letters of each operand, and of the result, with an ellipsis written out in
    capitals.
    """
    left, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        output = "".join(
            sorted(letter for letter in dict.fromkeys(letters) if letters.count(letter) == 1)
        )
    operands: Sequence[Node] = constant(node, 1)
    with_ellipsis = [(x, term) for x, term in zip(operands, terms, strict=True) if "..." in term]
    widths = [len(p.shape(x)) - len(term) + 3 for x, term in with_ellipsis]
    spare = [c for c in "ZYXWVUTSRQPONM" if c not in left][: max(widths, default=0)][::-1]
    expanded = []
    for x, term in zip(operands, terms, strict=True):
        width = len(p.shape(x)) - len(term) + 3
        expanded.append(
            term.replace("...", "".join(spare[len(spare) - width :])) if "..." in term else term
        )
    return expanded, output.replace("...", "".join(spare))
