"""The columns of samples that a model or its collator can use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.trainer_utils import RemoveColumnsCollator

from ...errors import ConfigError


class UsedColumns(RemoveColumnsCollator):
    """A collator of samples that have lost the columns that are no parameter of the model's
    forward.

    collator: makes a batch of samples.
    columns:  those that are kept.

    Raises ConfigError if samples have lost all of them, and the collator cannot do without.
    """

    def __init__(self, collator: Callable[[list], Mapping[str, Any]], columns: Sequence[str]):
        super().__init__(collator, columns)

    def __call__(self, features: list) -> Any:
        kept = [self._remove_columns(feature) for feature in features]
        if any(kept) or not any(features):
            return self.data_collator(kept)
        try:
            return self.data_collator(kept)
        except Exception as error:
            has = ", ".join(map(str, features[0]))
            reason = (
                f"no column of the samples ({has}) is a parameter of the model's forward, "
                "which names "
            )
            reason += ", ".join(self.signature_columns)
            remedy = "Set remove_unused_columns=False, or name the columns in the forward"
            raise ConfigError("remove_unused_columns", True, reason, remedy) from error
