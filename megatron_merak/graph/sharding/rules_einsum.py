"""The rule of einsum: what is divided is a letter."""

from torch.fx import Node

from .padding import zeros
from .placement import Cut, Decision, Split
from .propagate import Propagation

COLUMN = "column parallel: its output features are divided"


def einsum(p: Propagation, node: Node) -> Decision | None:
    """A letter of the result stays divided; one that is summed with a weight gives a partial sum."""
    terms, result = _terms(p, node)
    operands = node.args[1]
    divided = p.divided(operands)
    if not divided:
        return _column(p, node, terms, result)
    if any(len(dict.fromkeys(term)) < len(term) for term in (*terms, result)):
        raise p.unfit(node, "takes a diagonal")
    first = p.layout(divided[0])
    letter = terms[list(operands).index(divided[0])][first.dim]
    p.explain(divided[0], COLUMN if letter in result else "row parallel: its input features are divided")
    cuts: dict[Node, Cut] = {}
    for x, term in zip(operands, terms, strict=True):
        split = p.layout(x)
        if split and (term[split.dim] != letter or not split.same(Split(split.dim, first.blocks, (), first.padded))):
            raise p.unfit(node, "multiplies values that are divided differently")
        if split is None and letter in term and p.shape(x)[term.index(letter)] != 1:
            why = "row parallel: its input is divided" if letter not in result else "divided like what it multiplies"
            p.bring_as(cuts, x, Cut(term.index(letter), first.blocks, first.padded), why)
    if letter in result:
        made = Split(result.index(letter), first.blocks, p.origins(divided), first.padded)
        return Decision(made, cuts, fills=zeros(p, node, cuts))
    if not any(p.weight(x) and letter in term for x, term in zip(operands, terms, strict=True)):
        raise p.unfit(node, "contracts the divided dimension")
    fills = zeros(p, node, cuts)
    holders = [x for x, term in zip(operands, terms, strict=True) if letter in term]
    if first.padded and len(holders) == 1:  # a plain sum would give its padding a gradient
        fills[holders[0]] = 0
    return Decision(None, cuts, fills=fills, reduce=True)


def _column(p: Propagation, node: Node, terms: list[str], result: str) -> Decision | None:
    """Divide a weight along the first of its letters that only it brings into the result."""
    for x, term in zip(node.args[1], terms, strict=True):
        name = p.weight(x)
        others = "".join(other for y, other in zip(node.args[1], terms, strict=True) if y is not x)
        for dim, letter in enumerate(term if name else ""):
            extent = p.shape(x)[dim]
            if letter not in result or letter in others or extent % p.tp:
                continue
            blocks = p.choices.blocks.get((p.choices.role(name), extent), (extent,))
            if p.demand(x, Cut(dim, blocks), COLUMN):
                p.column(name, extent, node)
                return Decision(Split(result.index(letter), blocks, (name,), rows=(0, 1)))
    return None


def _terms(p: Propagation, node: Node) -> tuple[list[str], str]:
    """The letters of each operand and of the result, an ellipsis written out in capitals."""
    left, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = "".join(terms)
        result = "".join(sorted(letter for letter in dict.fromkeys(once) if once.count(letter) == 1))
    wide = [len(p.shape(x)) - len(term) + 3 for x, term in zip(node.args[1], terms, strict=True) if "..." in term]
    spare = [c for c in "ZYXWVUTSRQPONM" if c not in left][: max(wide, default=0)][::-1]
    made = []
    for x, term in zip(node.args[1], terms, strict=True):
        count = len(p.shape(x)) - len(term) + 3
        made.append(term.replace("...", "".join(spare[len(spare) - count :])) if "..." in term else term)
    return made, result.replace("...", "".join(spare))
