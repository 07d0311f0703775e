"""Pairs of layouts: under the first a run is saved, under the second it is resumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 6
SAVED = 3  # steps before the checkpoint, in the midst of an epoch
BATCH = 8
SAMPLES = STEPS * BATCH
DOORS = {
    "gpt": "`merak-pretrain`, GPT",
    "llama": "`merak-pretrain-hf`, Llama",
    "qwen3_moe": "`merak-pretrain-hf`, Qwen3-MoE",
    "mixtral": "`merak-pretrain-hf`, Mixtral",
    "trainer": "`MerakTrainer`, Llama",
    "trainer_moe": "`MerakTrainer`, Qwen3-MoE",
}


@dataclass(frozen=True)
class Layout:
    """How ranks divide a run.

    micro:    samples of a micro-batch.
    sharding: what replicas share; "" for nothing.
    batch:    samples of a step.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    micro: int = 2
    sharding: str = ""
    batch: int = BATCH

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        degrees = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep")}
        words = [f"dp{self.dp}", *(f"{name}{size}" for name, size in degrees.items() if size > 1)]
        words += ["sp"] if self.sp and self.ep == 1 else []
        words += [self.sharding] if self.sharding else []
        words.append(f"{self.batch // (self.micro * self.dp)} x {self.micro}")
        return " ".join(words)

    def settings(self) -> dict[str, Any]:
        """The degrees, by the names of MerakArguments; flags are the same with dashes."""
        found: dict[str, Any] = {}
        if self.tp > 1:
            found["tensor_model_parallel_size"] = self.tp
        if self.pp > 1:
            found["pipeline_model_parallel_size"] = self.pp
        if self.cp > 1:
            found["context_parallel_size"] = self.cp
        if self.ep > 1:
            found["expert_model_parallel_size"] = self.ep
        if self.sp or self.ep > 1 and self.tp > 1:
            found["sequence_parallel"] = True
        if self.sharding:
            found["data_parallel_sharding_strategy"] = self.sharding
        return found


@dataclass(frozen=True)
class Pair:
    """A run that is resumed under another layout.

    more:  arguments of both runs, beside those of the layouts.
    says:  what is special.
    saved: steps before the checkpoint.
    rows:  samples of an epoch of MerakTrainer.
    kind:  of its data set: "rows" of one length, "ragged" ones, or a "stream".
    apart: what losses may differ by, relative: what sums in another order leave in a few steps.
    """

    door: str
    before: Layout
    after: Layout
    more: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    saved: int = SAVED
    rows: int = SAMPLES
    kind: str = "rows"
    apart: float = 2e-5

    @property
    def name(self) -> str:
        return f"{self.door}: {self.before.name} -> {self.after.name}" + (
            f" ({self.says})" if self.says else ""
        )

    @property
    def same_batch(self) -> bool:
        """Whether steps have the same samples, so that losses can be compared."""
        return self.before.batch == self.after.batch


def parsed(text: str) -> Layout:
    """Return the layout that a text such as "dp2 tp2 optim m1" says; m4: micro-batches of 4, b16:
    batches of 16.
    """
    values: dict[str, Any] = {}
    for word in text.split():
        if word == "sp":
            values["sp"] = True
        elif word.startswith(("optim", "no_shard")):
            values["sharding"] = word
        elif word[0] in "mb":
            values[{"m": "micro", "b": "batch"}[word[0]]] = int(word[1:])
        else:
            values[word[:2]] = int(word[2:])
    return Layout(**values)


def _pairs(door: str, texts: Sequence[str]) -> list[Pair]:
    found = []
    for text in texts:
        before, after = text.split(" -> ")
        found.append(Pair(door, parsed(before), parsed(after)))
    return found


def _special(door: str, text: str, says: str, **more: Any) -> Pair:
    before, after = text.split(" -> ")
    own = {name: more.pop(name) for name in ("saved", "rows", "kind", "apart") if name in more}
    return Pair(door, parsed(before), parsed(after), more, says, **own)


GROUPED = {"train_sampling_strategy": "group_by_length", "kind": "ragged"}

PAIRS = [
    *_pairs(
        "gpt",
        [
            "dp1 -> dp2",
            "dp1 -> dp4 optim m1",
            "dp4 optim -> dp1 m8",
            "dp2 optim -> dp2 optim_grads_params m4",
            "dp2 optim_grads_params -> dp4 optim_grads",
            "dp4 optim_grads_params -> dp2 tp2",
            "tp2 -> pp2 m1",
            "pp2 m1 -> tp2 m4",
            "tp2 pp2 -> dp2 optim",
            "dp2 -> tp2 pp2 m1",
            "dp2 tp2 optim m1 -> dp2 pp2 optim_grads m1",
            "dp2 pp2 optim_grads_params m1 -> dp1",
            "tp2 sp -> dp4 optim_grads_params",
            "dp2 m4 -> dp2 m1",
            "dp8 optim m1 -> dp2",
            "dp1 -> dp2 tp2 pp2 optim m1",
        ],
    ),
    _special("gpt", "dp2 -> dp4 optim", "a second epoch", train_iters=8),
    _special("gpt", "dp1 -> dp2 tp2", "loaded in advance", num_workers=2),
    _special("gpt", "dp4 optim_grads_params m1 -> tp2 pp2", "bf16", bf16=True, apart=2e-2),
    _special("gpt", "dp2 optim -> tp2", "SGD", optimizer="sgd"),
    _special("gpt", "dp1 -> dp2 b12", "another batch", train_samples=SAMPLES),
    _special("gpt", "dp2 optim -> dp4 m1 b4", "another batch", train_samples=SAMPLES),
    *_pairs(
        "llama",
        [
            "dp1 -> cp2",
            "cp2 -> dp2 optim",
            "dp2 cp2 optim m1 -> dp2 tp2 optim_grads_params m1",
            "tp2 -> cp2 m4",
            "pp2 m1 -> cp2",
            "dp4 optim_grads_params -> dp2 cp2 optim",
            "cp2 pp2 -> dp1",
            "dp1 -> cp2 pp2 m1",
            "cp2 tp2 -> dp2 pp2 optim_grads_params m1",
            "dp2 optim_grads -> tp2 pp2",
            "tp2 sp -> dp2 optim_grads_params",
        ],
    ),
    _special("llama", "dp2 optim_grads_params -> cp2", "bf16", bf16=True, apart=2e-2),
    *_pairs(
        "qwen3_moe",
        [
            "dp1 -> tp2 ep2",
            "tp2 ep2 -> dp2 optim",
            "tp2 ep2 -> dp4 optim_grads_params",
            "dp2 tp2 ep2 optim -> cp2",
            "cp2 -> tp2 ep2",
            "pp2 -> tp2 ep2",
            "tp2 ep2 pp2 -> dp2 optim_grads",
            "dp2 optim_grads_params -> dp2 tp2 ep2 optim_grads_params m1",
            "tp2 -> tp2 ep2",
            "tp2 cp2 ep2 -> dp2 optim",
            "dp1 -> tp2 cp2 ep2",
            "dp1 -> dp2 ep2",
            "dp2 ep2 optim -> dp1",
            "dp4 ep4 m1 -> dp2 ep2 optim_grads_params",
            "dp2 tp2 ep4 optim m1 -> tp2 ep2",
            "tp2 ep2 -> dp4 ep2 optim m1",
            "dp2 ep2 -> cp2 ep2",
            "cp2 ep2 -> dp2 pp2 ep2 m1",
        ],
    ),
    *_pairs(
        "mixtral",
        ["tp2 ep2 -> dp2", "dp2 optim -> tp2 ep2", "cp2 -> dp1"],
    ),
    *_pairs(
        "trainer",
        [
            "dp1 m4 -> dp2",
            "dp2 -> dp4 optim_grads_params",
            "dp4 optim -> dp1 m8",
            "tp2 m4 -> dp2 optim",
            "pp2 -> cp2 m4",
            "dp2 cp2 optim -> tp2 pp2",
        ],
    ),
    _special("trainer", "dp1 m4 -> dp2", "grouped by length", **GROUPED),
    _special("trainer", "dp4 optim -> tp2 m4", "grouped by length", **GROUPED),
    _special("trainer", "dp2 -> dp1 m4", "in the second epoch", saved=8, num_train_epochs=2),
    _special("trainer", "dp1 -> dp4 m1", "at the end of an epoch", saved=6, num_train_epochs=2),
    _special("trainer", "dp1 m4 -> dp2 m4 b16", "another batch"),
    _special("trainer", "dp1 m4 -> dp2 m4 b16", "another batch, grouped by length", **GROUPED),
    _special("trainer", "dp1 m4 -> dp2", "44 samples, the last step is smaller", rows=44),
    _special("trainer", "dp1 m4 -> dp2", "a stream", kind="stream", max_steps=STEPS),
    _special("trainer", "dp2 -> tp2 m4", "loaded in advance", dataloader_num_workers=2),
    _special("trainer", "dp2 optim -> tp2 m4", "Muon", optim="muon"),
    _special("trainer", "tp2 m4 -> dp2 optim_grads_params", "Adafactor", optim="adafactor"),
    *_pairs(
        "trainer_moe",
        [
            "tp2 ep2 m4 -> dp2",
            "dp2 optim -> tp2 ep2 m4",
            "dp2 ep2 -> tp2 ep2 m4",
            "dp4 ep2 optim m1 -> dp2 ep2",
            "dp2 -> dp2 tp2 ep4",
        ],
    ),
]
REFUSED = [
    *_pairs(
        "gpt",
        [
            "dp1 -> dp3",
            "dp2 -> dp2 m3",
            "dp1 -> tp2 sp ep2",
        ],
    ),
    *_pairs(
        "llama",
        ["dp1 -> tp2 ep2"],
    ),
    *_pairs(
        "qwen3_moe",
        ["dp1 -> dp2 ep4"],
    ),
    _special("trainer", "dp1 m4 -> dp2 m16 b32", "24 samples, batches of 32"),
]
