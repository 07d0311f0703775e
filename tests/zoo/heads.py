"""The model types there are, and the head that trains each: read off transformers' own auto
mappings.
"""

from dataclasses import dataclass

from transformers.models.auto import modeling_auto

# A type stands under the first of these mappings that names it. Bert has a causal head too, but is
# a masked model.
ORDER = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "SEMANTIC_SEGMENTATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING",
    "TIME_SERIES_PREDICTION",
    "TIME_SERIES_CLASSIFICATION",
)
# ... unless its own name is more telling: Whisper's decoder is in the causal mapping.
FIRST = {"whisper": "SPEECH_SEQ_2_SEQ", "reformer": "CAUSAL_LM"}


@dataclass(frozen=True)
class Head:
    """One row of the zoo: a model type, the auto mapping it was found in and the class that trains
    it.
    """

    model_type: str
    mapping: str
    class_name: str
    causal: bool  # the type has a causal language model, under whatever head it stands here


def mapping_of(name: str) -> dict[str, str]:
    """model type -> class name of one auto mapping; a tuple of classes stands for its first."""
    found = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
    return {
        key: value[0] if isinstance(value, tuple | list) else value for key, value in found.items()
    }


def heads() -> dict[str, Head]:
    """Every model type with a head that gives a loss, by name, in the order of ``ORDER`` and of the
    alphabet.
    """
    causal = mapping_of("CAUSAL_LM")
    found: dict[str, Head] = {}
    for name in ORDER:
        classes = mapping_of(name)
        for model_type in sorted(classes):
            if model_type not in found and FIRST.get(model_type, name) == name:
                found[model_type] = Head(
                    model_type, name, classes[model_type], model_type in causal
                )
    return found
