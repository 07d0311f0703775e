"""Flags of Megatron-LM's tools/preprocess_data.py that merak-preprocess has not: they change
nothing, or are refused.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .taken import Taken

_SENTENCES = "sentences are for BERT and T5, and documents are written whole"
_TRIALS = "Leave it out, and compare the MB/s that short runs with other --workers show"
_NOT_SPLIT = Taken("sentences are not split", any_value=True)

# Further ones are of earlier versions.
PREPROCESSING_TAKEN: Mapping[str, Taken] = MappingProxyType(
    {
        "--keep-newlines": Taken("sentences are not split, and text is kept as it is"),
        "--lang": _NOT_SPLIT,
        "--log-interval": Taken("progress is shown every half minute", any_value=True),
        "--make-vocab-size-divisible-by": Taken("ids are not padded", any_value=True),
        "--dataset-impl": Taken("there is one format", ("mmap",)),
        "--chunk-size": Taken("a worker gets about 1 MB of text at a time", any_value=True),
    }
)

PREPROCESSING_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--split-sentences": f"Leave it out: {_SENTENCES}",
        "--dataset-impl": "Leave it out: there is one format, mmap",
        "--vocab": "Use --vocab-file",
        "--trust-remote-code": "Leave it out: no code is run, and --tokenizer-model is a "
        "tokenizer.json or a directory with one",
        **dict.fromkeys(
            "--find-optimal-num-workers --workers-to-check --max-documents --performance-dir".split(),
            _TRIALS,
        ),
    }
)
