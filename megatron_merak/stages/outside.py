"""The error for a number of a batch that has no row in what the model looks it up in."""

from collections.abc import Mapping

from torch import Tensor

from ..errors import DataError
from ..graph.lowering.lookups import Outside


def refusal(found: Outside, batch: Mapping[str, Tensor], microbatch: int) -> DataError:
    """Return the error. microbatch: the number of the batch among those that run together."""
    entry, place = found.place(batch)
    lookup = found.lookup
    rows = f"{found.rows:,} rows, 0 to {found.rows - 1}"
    whose = lookup.table or "the table that is looked up in"
    remedy = "Use the tokenizer and the settings of this model, or resize its table before training"
    if lookup.classes:
        whose = "the loss"
        rows = f"{found.rows:,} classes, 0 to {found.rows - 1}"
        remedy = (
            f"Give targets of this model's vocabulary or classes, and {lookup.ignored} "
            "where none counts"
        )
    if not entry:
        remedy = "Shorten the samples, or build the model with a larger table"
        source = f"computed from {' and '.join(lookup.entries) or 'the length of its rows'}"
        return DataError(
            "index",
            found.value,
            f"{source} of micro-batch {microbatch}, and {whose} has {rows}",
            remedy,
        )
    sample, *inside = place or (0,)
    where = f"sample {sample}" + f" at position {', '.join(map(str, inside))}" * bool(inside)
    reason = f"in {where} of micro-batch {microbatch}, and {whose} has {rows}"
    return DataError(f"batch entry {entry}", found.value, reason, remedy)
