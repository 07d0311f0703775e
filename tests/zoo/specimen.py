"""``tiny(model_type)``: a small model of that type with weights worth testing, and a batch that
trains it.
"""

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .batches import MODALITIES, batch_for, modality_of
from .configs import RECIPES, tiny_config, walk
from .heads import Head, heads

LARGEST = 4_000_000  # parameters: more is no tiny model
BATCH = 2  # samples
# of the noise on every weight: default initialisation hides defects (zero biases, equal norms)
SPREAD = 0.08


@dataclass(frozen=True)
class Specimen:
    """A model type ready to train: ``model()`` makes it anew, equal to the bit each time."""

    head: Head
    config: PreTrainedConfig
    recipe: str
    places: tuple[str, int] | None = None

    @property
    def model_class(self) -> type[nn.Module]:
        return getattr(transformers, self.head.class_name)

    def config_value(self, name: str) -> Any:
        """A field of the configuration, or of its part about text."""
        return getattr(self.config, name, getattr(self.config.get_text_config(), name, None))

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The unmodified model in training mode, weights drawn in float32."""
        return randomise(self.empty()).to(dtype)

    def empty(self) -> nn.Module:
        """The model as transformers makes and initialises it; honours whatever context it is made
        under.
        """
        with uninitialised_memory_is_seen(), torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.model_class._from_config(self.config).train()

    def batch(
        self, size: int = BATCH, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """``size`` samples; floating-point inputs of ``dtype``."""
        made = batch_for(self.head, self.config, self.model_class, size, seed, self.places)
        return {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in made.items()
        }


def tiny(model_type: str) -> Specimen:
    """The first recipe under which the model can be made and trained. Raises LookupError with the
    reason otherwise.
    """
    head = heads().get(model_type)
    if head is None:
        raise LookupError(f"{model_type} is under no head that trains")
    reasons: list[str] = []
    for recipe in RECIPES:
        try:
            plain = Specimen(head, config_for(head, recipe), recipe)
        except Exception as error:
            reasons.append(describe(error))
            continue
        reason = too_large(plain)
        if reason:
            reasons.append(reason)
            continue
        for specimen in (plain, *with_modalities(plain)):
            reason = fault(specimen)
            if not reason:
                return specimen
            reasons.append(reason)
    raise LookupError(reasons[0])


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def fault(specimen: Specimen) -> str:
    """Why it does not train; empty when it does."""
    from .eager import trains

    try:
        return trains(specimen)
    except Exception as error:
        return describe(error)


def with_modalities(plain: Specimen) -> Iterator[Specimen]:
    """With images or audio beside the text. How many placeholder tokens they need, the model's own
    error tells.
    """
    for name in MODALITIES:
        if modality_of(plain.config, plain.model_class, name) is None:
            continue
        once = replace(plain, places=(name, 1))
        told = re.search(r"features:? (\d+)", fault(once))
        yield replace(plain, places=(name, int(told[1]) // BATCH)) if told else once


def config_for(head: Head, recipe: str) -> PreTrainedConfig:
    """The part of the type's tiny configuration that the head's class takes: its text half, say."""
    config = tiny_config(head.model_type, recipe)
    wanted = getattr(transformers, head.class_name).config_class
    if wanted is not None and not isinstance(config, wanted):
        config = next((part for part in walk(config) if isinstance(part, wanted)), config)
    if head.mapping == "CAUSAL_LM" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def too_large(specimen: Specimen) -> str:
    """Counted without memory, where the class can be made so."""
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in specimen.model_class(specimen.config).parameters())
    except Exception:
        return ""
    return f"the heuristics leave {count:,} parameters" if count > LARGEST else ""


def randomise(model: nn.Module) -> nn.Module:
    """Noise on every parameter, from (name, shape) alone; what nobody initialised is drawn
    whole.
    """
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not value.is_floating_point():
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(value.shape, generator=generator) * SPREAD
            value.copy_(torch.where(value.isfinite(), value, 0.0) + noise)
    return model


@contextlib.contextmanager
def uninitialised_memory_is_seen() -> Iterator[None]:
    """``torch.empty`` gives NaN: a model that forgets to initialise something is the same each
    time.
    """
    before, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
