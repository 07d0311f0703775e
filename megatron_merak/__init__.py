"""megatron_merak: data x tensor x pipeline parallel training of transformers.

``import megatron_merak as mm`` loads nothing heavy; a public name is imported when it is first
used.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Engine": "engine.engine",
    "Interrupted": "parallel.interruption",
    "MerakArguments": "hf_trainer.arguments.merak_arguments",
    "MerakSeq2SeqArguments": "hf_trainer.seq2seq",
    "MerakSeq2SeqTrainer": "hf_trainer.seq2seq",
    "MerakTrainer": "hf_trainer.trainer",
    "from_pretrained": "checkpoint.hf",
    "init_empty_weights": "graph.capture.empty",
}

__version__ = "0.1.0.dev0"
__all__ = [
    "Engine",
    "Interrupted",
    "MerakArguments",
    "MerakSeq2SeqArguments",
    "MerakSeq2SeqTrainer",
    "MerakTrainer",
    "from_pretrained",
    "init_empty_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
