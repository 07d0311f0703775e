"""One script through one trainer, and all that can be seen of it; and how two of them are
compared.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import parse
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.cases import CASES

RUN = {
    **{
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 3,
        "per_device_train_batch_size": 2,
    },
    **{
        "max_steps": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
    },
    **{"eval_steps": 2, "save_steps": 2, "per_device_eval_batch_size": 3},
    "adam_epsilon": 1e-4,  # else the rounding of a zero gradient moves biases that change no loss
}
TIMED = ("runtime", "per_second", "preparation_time")
# samples, seed; trained ones are a multiple of a step's
TRAINED, EVALUATED, PREDICTED = (16, 1), (7, 5), (5, 9)


def see(kind: type, arguments: type, name: str, directory: str, **changes: Any) -> dict[str, Any]:
    """Train, evaluate, save, predict. ``changes``: of arguments."""
    case = CASES[name]
    changes = {**RUN, **case.changes, **changes}

    def trainer() -> Any:
        data = case.data(*TRAINED), case.data(*EVALUATED)
        given = {"compute_metrics": case.metrics, "compute_loss_func": case.loss}
        return case.derive(kind)(
            case.build(), arguments(directory, **changes), case.collate, *data, **given
        )

    used = trainer()
    output = used.train()
    if case.resumes:
        used = trainer()
        output = used.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
    used.save_model(f"{directory}/last")
    predicted = used.predict(case.data(*PREDICTED))
    kept = sorted(path.name for path in Path(directory).glob("checkpoint-*"))
    state = json.loads((Path(directory) / kept[-1] / "trainer_state.json").read_text())
    state["log_history"] = [untimed(entry) for entry in state["log_history"]]
    state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
    return {
        "keys": [list(entry) for entry in used.state.log_history],
        "logs": [untimed(entry) for entry in used.state.log_history],
        "output": [
            output.global_step,
            output.training_loss,
            list(output.metrics),
            untimed(output.metrics),
        ],
        "state": state,
        "checkpoints": kept,
        "metrics": untimed(predicted.metrics),
        "labels": predicted.label_ids,
        "predictions": predicted.predictions,
    }


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not any(part in key for part in TIMED)}


def files(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The JSON files of a saved model, and its tensors."""
    texts = {path.name: json.loads(path.read_text()) for path in directory.glob("*config.json")}
    tensors = {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}
    return texts, tensors


def transformers_run(name: str, replicas: int, directory: str) -> dict[str, Any]:
    """HuggingFace's Trainer on one process, with as many micro-batches as all replicas have."""
    found = see(
        Trainer, TrainingArguments, name, directory, gradient_accumulation_steps=2 * replicas
    )
    if CASES[name].resumes and parse(transformers.__version__) < parse("5.19"):
        return averaged_over_its_own_steps(found)
    return found


def transformers_rank(rank: int, world: int, name: str, directory: str) -> dict[str, Any]:
    """HuggingFace's Trainer on this rank."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    return see(Trainer, TrainingArguments, name, directory, gradient_accumulation_steps=2)


def averaged_over_its_own_steps(found: dict[str, Any]) -> dict[str, Any]:
    """transformers before 5.19 divides the losses of a resumed run by the steps of both: by 4,
    where it ran 2.
    """
    steps, loss, *rest = found["output"]
    for record in (*found["logs"], *found["state"]["log_history"], rest[-1]):
        record.update({key: 2 * value for key, value in record.items() if key == "train_loss"})
    return found | {"output": [steps, 2 * loss, *rest]}


def merak_run(
    rank: int, world: int, name: str, directory: str, tp: int, pp: int, changes: dict
) -> dict[str, Any]:
    """MerakTrainer on this rank."""
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    return see(
        MerakTrainer,
        MerakArguments,
        name,
        directory,
        **{"gradient_accumulation_steps": 2, **degrees, **changes},
    )


def alike(ours: Any, theirs: Any, path: str = "") -> None:
    """Equal; floats and arrays of them to what sums in another order leave after a few steps."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            alike(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), path
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            alike(our, their, f"{path}[{place}]")
    elif isinstance(theirs, float):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=path)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, path
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=path)
    else:
        assert ours == theirs, path


def same_files(name: str, ours: Path, theirs: Path) -> None:
    """The same files of a model, the same tensors in them; what was trained went the same way."""
    (our_texts, our_tensors), (their_texts, their_tensors) = files(ours), files(theirs)
    assert our_texts.keys() == their_texts.keys()
    for text, values in their_texts.items():
        assert our_texts[text] == values, text
    assert our_tensors.keys() == their_tensors.keys()
    with tempfile.TemporaryDirectory() as directory:
        CASES[name].build().save_pretrained(directory)
        begun = files(Path(directory))[1]
    way = apart = 0.0
    for key, tensor in their_tensors.items():
        assert (our_tensors[key].dtype, our_tensors[key].shape) == (tensor.dtype, tensor.shape), key
        moved, other = (tensor - begun[key]).double(), (our_tensors[key] - tensor).double()
        assert moved.any() or not other.any(), f"{key} was not trained there"
        way, apart = way + moved.square().sum().item(), apart + other.square().sum().item()
    assert 0 < way and apart < 1e-4 * way
