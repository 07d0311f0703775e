"""Documents of packed rows, found in attention masks, so that attention can be computed document by document.

mask    1                documents   [[1, 0, 2, 5]]: where each begins, then the end of the row, after
        1 1                          1, as every token attends to all tokens before it in its document
            1
            1 1
            1 1 1
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@torch.no_grad()
def documents(mask: Tensor) -> Tensor:
    """mask [b, 1, s, s] bool -> [b, 2 or more] int64 on the CPU.

    Of each row: 1 if tokens attend to everything before them in their document and nothing else, or
    0; where documents begin; then s as padding.

    A document ends where no later token attends to it and it attends to no later token. A row is
    one document off the CPU, whose kernels do not work by document, where a token attends to
    nothing, and for a mask without values.
    """
    rows = mask.shape[0]
    length = mask.shape[-1]
    one_document = torch.tensor([[0, 0, length]]).expand(rows, -1)
    if mask.device.type != "cpu" or isinstance(mask, FakeTensor):
        return one_document
    seen = mask[:, 0].to(torch.uint8)
    count = seen.sum(-1)
    if not bool(count.all()):
        return one_document
    first = seen.argmax(-1)
    last = length - 1 - seen.flip(-1).argmax(-1)
    place = torch.arange(length)
    ahead = torch.cat((first.new_full((rows, 1), -1), last.cummax(-1).values[:, :-1]), -1)
    begins = (ahead < place) & (first.flip(-1).cummin(-1).values.flip(-1) >= place)
    start = torch.where(begins, place, 0).cummax(-1).values
    causal = ((first == start) & (last == place) & (count == place - start + 1)).all(-1)
    starts = [
        [int(c), *b.nonzero().flatten().tolist()] for c, b in zip(causal, begins, strict=True)
    ]
    width = max(map(len, starts)) + 1
    return torch.tensor([row + [length] * (width - len(row)) for row in starts])


def spans(apart: Tensor) -> list[tuple[bool, list[tuple[int, int]]]]:
    """Return for each row of ``documents`` whether it is causal, and (begin, end) of each document.

    [] without values, or if no row has two documents.
    """
    if isinstance(apart, FakeTensor):
        return []
    bounds_of = [
        (bool(c), [p for p in pairwise(places) if p[0] < p[1]]) for c, *places in apart.tolist()
    ]
    return bounds_of if any(len(bounds) > 1 for _, bounds in bounds_of) else []
