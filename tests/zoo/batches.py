"""A batch for a model, from its head, its configuration and the signature of its forward."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .configs import LENGTH
from .heads import Head
from .overrides import BATCHES

TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
CLASSES = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
TARGET = 16  # tokens of a label sequence that is not the input itself
HIDDEN_LABELS = 4  # the first labels of each sample do not count


def batch_for(
    head: Head, config: PreTrainedConfig, model_class: type[nn.Module], size: int, seed: int = 0
) -> dict[str, Any]:
    """Tensors by name of the forward's argument, ``size`` samples along the first dimension of each."""
    draw = Draw(config, size, torch.Generator().manual_seed(seed))
    accepted = inspect.signature(model_class.forward).parameters
    main = getattr(model_class, "main_input_name", "input_ids")
    batch: dict[str, Any] = {}
    for name in dict.fromkeys((main, *accepted)):
        if name in accepted and (name == main or accepted[name].default is inspect.Parameter.empty):
            if name not in ("self", "kwargs", "args", "labels") and hasattr(draw, name):
                batch[name] = getattr(draw, name)()
    if head.mapping == "ZERO_SHOT_IMAGE_CLASSIFICATION":
        batch |= {"pixel_values": draw.pixel_values(), "return_loss": True}
    else:
        batch |= labels(head, accepted, batch, draw)
    for name, value in BATCHES.get(head.model_type, {}).items():
        batch[name] = getattr(draw, value)() if isinstance(value, str) else value
    return {name: value for name, value in batch.items() if value is not None}


def labels(head: Head, accepted: Any, batch: dict[str, Any], draw: "Draw") -> dict[str, Any]:
    ids = batch.get("input_ids")
    if head.mapping == "QUESTION_ANSWERING":
        return {"start_positions": draw.classes(LENGTH // 2), "end_positions": draw.classes(LENGTH // 2)}
    if head.mapping == "TIME_SERIES_CLASSIFICATION":
        return {"target_values": draw.classes(2)}
    if head.mapping in CLASSES:
        return {"labels": draw.classes(2)}
    if head.mapping == "SEMANTIC_SEGMENTATION":
        return {"labels": draw.integers((draw.size, *batch["pixel_values"].shape[-2:]), 0, 2)}
    if head.mapping == "TOKEN_CLASSIFICATION":
        return {"labels": draw.integers((draw.size, LENGTH), 0, 2)}
    if draw.config.is_encoder_decoder or head.mapping in ("SPEECH_SEQ_2_SEQ", "CTC") or ids is None:
        return {"labels": draw.tokens(TARGET)}
    target = ids.clone()
    target[:, :HIDDEN_LABELS] = -100
    return {"labels": target}


class Draw:
    """Random inputs, a method for each name of a forward's argument."""

    def __init__(self, config: PreTrainedConfig, size: int, generator: torch.Generator):
        self.config, self.size, self.generator = config, size, generator
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these fields in the configuration or in one of its parts."""
        parts = [self.config, *(v for v in vars(self.config).values() if isinstance(v, PreTrainedConfig))]
        found = (getattr(part, name, None) for name in names for part in parts)
        return next((value for value in found if value is not None), default)

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.size, *shape, generator=self.generator)

    def classes(self, count: int) -> Tensor:
        return self.integers((self.size,), 0, count)

    def tokens(self, length: int) -> Tensor:
        return self.integers((self.size, length), 8, min(240, self.setting("vocab_size", default=256)))

    def input_ids(self) -> Tensor:
        return self.tokens(LENGTH)

    def decoder_input_ids(self) -> Tensor:
        return self.tokens(TARGET)

    def attention_mask(self) -> Tensor:
        return torch.ones(self.size, LENGTH, dtype=torch.long)

    def pixel_values(self) -> Tensor:
        side = self.setting("image_size", "img_size", "input_size", default=32)
        height, width = side if isinstance(side, tuple | list) else (side, side)
        return self.normal(self.setting("num_channels", "in_channels", "in_chans", default=3), height, width)

    def pixel_values_videos(self) -> Tensor:
        frames = self.setting("num_frames", "frames_per_clip", default=4)
        return self.normal(frames, *self.pixel_values().shape[1:])

    def past_values(self) -> Tensor:
        return self.normal(
            self.setting("context_length", default=LENGTH), self.setting("num_input_channels", default=1)
        )

    def input_values(self) -> Tensor:
        return self.normal(400)

    def input_features(self) -> Tensor:
        return self.normal(self.setting("num_mel_bins", "feature_size", default=16), 64)

    def bbox(self) -> Tensor:
        corner = self.integers((self.size, LENGTH, 2), 0, 50)
        return torch.cat([corner, corner + 10], dim=-1)
