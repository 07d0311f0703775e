"""A batch for a model, from its head, its configuration and the signature of its forward."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .configs import LENGTH
from .heads import Head
from .overrides import BATCHES

CLASSES = (
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
)
TARGET = 16  # tokens of a label sequence that is not the input itself
SPOKEN = 3  # ... in fewer frames than it has
HIDDEN_LABELS = 4  # the first labels of each sample do not count
FRAMES = 64  # of a spectrogram
# Beside text: the argument of the forward that holds it, and the name of its placeholder token in
# the configuration.
MODALITIES = {
    "image": ("pixel_values", "image_pixel_values"),
    "audio": ("input_features", "input_values"),
}


def batch_for(
    head: Head,
    config: PreTrainedConfig,
    model_class: type[nn.Module],
    size: int,
    seed: int = 0,
    places: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Tensors by name of the forward's argument, ``size`` samples along the first dimension of
    each.

    ``places``: a modality beside the text, and how many tokens of each sample stand for it.
    """
    draw = Draw(config, size, torch.Generator().manual_seed(seed))
    accepted = inspect.signature(model_class.forward).parameters
    main = getattr(model_class, "main_input_name", "input_ids")
    batch: dict[str, Any] = {}
    for name in dict.fromkeys((main, *accepted)):
        demanded = name in accepted and (
            name == main or accepted[name].default is inspect.Parameter.empty
        )
        if demanded and name not in ("self", "kwargs", "args", "labels"):
            made = draw.named(name)
            batch |= {} if made is None else {name: made}
    if places:
        batch |= beside_text(places, accepted, batch["input_ids"], draw)
    if head.mapping == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        batch |= {"pixel_values": draw.pixel_values(), "return_loss": True}
        if "pixel_values" not in accepted:
            batch["pixel_values_videos"] = draw.named("pixel_values_videos")
            del batch["pixel_values"]
    else:
        batch |= labels(head, batch, draw)
    for name, value in BATCHES.get(head.model_type, {}).items():
        batch[name] = draw.named(value) if isinstance(value, str) else value
        if value == "attention_mask":
            batch[name] = torch.ones_like(batch["input_ids"])
    return {name: value for name, value in batch.items() if value is not None}


def modality_of(config: PreTrainedConfig, model_class: type[nn.Module], name: str) -> str | None:
    """The argument that takes images or audio beside text, if this model has one."""
    accepted = inspect.signature(model_class.forward).parameters
    if "input_ids" not in accepted or placeholder(config, name) is None:
        return None
    return next((argument for argument in MODALITIES[name] if argument in accepted), None)


def placeholder(config: PreTrainedConfig, name: str) -> int | None:
    found = (getattr(config, f"{name}_token_{kind}", None) for kind in ("id", "index"))
    return next((token for token in found if isinstance(token, int)), None)


def beside_text(
    places: tuple[str, int], accepted: Mapping[str, Any], ids: Tensor, draw: "Draw"
) -> dict[str, Any]:
    """Images or audio, their masks, and the text with its placeholder tokens."""
    name, count = places
    argument = next(argument for argument in MODALITIES[name] if argument in accepted)
    ids = torch.cat(
        [
            ids[:, :HIDDEN_LABELS],
            ids.new_full((len(ids), count), placeholder(draw.config, name)),
            ids,
        ],
        1,
    )
    made = {argument: draw.named(argument), "input_ids": ids}
    for mask in ("input_features_mask", "feature_attention_mask", "audio_attention_mask"):
        if name == "audio" and mask in accepted:
            made[mask] = torch.ones(draw.size, made[argument].shape[-1], dtype=torch.long)
    if "token_type_ids" in accepted:
        made["token_type_ids"] = (ids == placeholder(draw.config, name)).long()
    return made


def labels(head: Head, batch: Mapping[str, Any], draw: "Draw") -> dict[str, Any]:
    ids = batch.get("input_ids", batch.get("inputs"))
    if head.mapping == "QUESTION_ANSWERING":
        return {
            "start_positions": draw.classes(LENGTH // 2),
            "end_positions": draw.classes(LENGTH // 2),
        }
    if head.mapping == "TIME_SERIES_CLASSIFICATION":
        return {"target_values": draw.classes(draw.setting("num_targets", default=2))}
    if head.mapping in CLASSES:
        return {"labels": draw.classes(2)}
    if head.mapping == "SEMANTIC_SEGMENTATION":
        return {"labels": draw.integers((draw.size, *batch["pixel_values"].shape[-2:]), 0, 2)}
    if head.mapping == "TOKEN_CLASSIFICATION":
        return {"labels": draw.integers((draw.size, LENGTH), 0, 2)}
    if head.mapping == "CTC":
        return {"labels": draw.tokens(SPOKEN)}
    if draw.config.is_encoder_decoder or ids is None:
        return {"labels": draw.tokens(TARGET)}
    target = ids.clone()
    target[:, :HIDDEN_LABELS] = -100
    return {"labels": target}


class Draw:
    """Random inputs, a method for each name of a forward's argument."""

    def __init__(self, config: PreTrainedConfig, size: int, generator: torch.Generator):
        self.config, self.size, self.generator = config, size, generator

    def named(self, argument: str) -> Tensor | None:
        """The input that an argument of this name takes, None if there is no telling."""
        name = {"image_pixel_values": "pixel_values", "inputs": "input_ids"}.get(argument, argument)
        return getattr(self, name)() if hasattr(self, name) else None

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these fields in the configuration or in one of its parts."""
        parts = [
            self.config,
            *(v for v in vars(self.config).values() if isinstance(v, PreTrainedConfig)),
        ]
        found = (getattr(part, name, None) for name in names for part in parts)
        return next((value for value in found if value is not None), default)

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.size, *shape, generator=self.generator)

    def classes(self, count: int) -> Tensor:
        return self.integers((self.size,), 0, count)

    def tokens(self, length: int) -> Tensor:
        return self.integers(
            (self.size, length), 8, min(240, self.setting("vocab_size", default=256))
        )

    def input_ids(self) -> Tensor:
        return self.tokens(LENGTH)

    def decoder_input_ids(self) -> Tensor:
        return self.tokens(TARGET)

    def decoder_attention_mask(self) -> Tensor:
        return torch.ones(self.size, TARGET, dtype=torch.long)

    def pixel_values(self) -> Tensor:
        side = self.setting("image_size", "img_size", "input_size", default=32)
        height, width = side if isinstance(side, tuple | list) else (side, side)
        return self.normal(
            self.setting("num_channels", "in_channels", "in_chans", default=3), height, width
        )

    def images(self) -> Tensor:
        return self.pixel_values().unsqueeze(1)

    def codes(self) -> Tensor:
        return self.integers((self.size, TARGET, self.setting("num_codebooks")), 8, 240)

    def pixel_values_videos(self) -> Tensor:
        frames = self.setting("num_frames", "frames_per_clip", default=4)
        return self.normal(frames, *self.pixel_values().shape[1:])

    def past_values(self) -> Tensor:
        return self.normal(
            self.setting("context_length", default=LENGTH),
            self.setting("num_input_channels", default=1),
        )

    def input_values(self) -> Tensor:
        return self.normal(2000)

    def spectrogram(self) -> Tensor:
        return self.normal(
            self.setting("max_length", default=FRAMES),
            self.setting("num_mel_bins", "input_dim", default=16),
        )

    def frame_mask(self) -> Tensor:
        return torch.ones(self.size, FRAMES, dtype=torch.long)

    def input_features(self) -> Tensor:
        return self.normal(self.setting("num_mel_bins", "feature_size", default=16), FRAMES)

    def bbox(self) -> Tensor:
        corner = self.integers((self.size, LENGTH, 2), 0, 50)
        return torch.cat([corner, corner + 10], dim=-1)
