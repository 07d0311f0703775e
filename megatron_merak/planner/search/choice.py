"""A point of the space that is searched: the settings by which a job is distributed over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from megatron_merak.config import ParallelConfig, nearest
from megatron_merak.config.parallel import A2A_P2P, CP_COMM_TYPES, OVERLAPS, SCHEDULES, SHARDINGS
from megatron_merak.config.rank_order import mistake, normal
from megatron_merak.errors import ConfigError

# recompute -> --recompute-granularity, --recompute-method
RECOMPUTATIONS: Mapping[str, tuple[str | None, str | None]] = MappingProxyType(
    {
        "none": (None, None),
        "selective": ("selective", None),
        "capacity": ("full", "capacity"),
        "stage-aware": ("full", "stage-aware"),
        "full": ("full", None),
    }
)
ONE_STAGE = "1f1b"  # the schedule of a rank that has no neighbours, and the default


@dataclass(frozen=True)
class Layer:
    """How a layer is divided over ranks.

    tp: that share its weights; ``cp``: its sequences; ``ep``: its experts; ``etp``: each of these.
    kind: how those of ``cp`` exchange, see ``--cp-comm-type``; "": as where nothing is said.
    """

    tp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    kind: str = ""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def expert_copies(self) -> int:
        """Number of copies of the layer that divide its experts; 1: none do."""
        return max(1, self.ep * self.etp // self.tp)

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows of tokens are sent to the ranks of their experts."""
        return self.ep * self.etp > 1

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``ParallelConfig`` that say the same."""
        settings = {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "cp_comm_type": self.kind or None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp if self.exchanges_rows else None,
        }
        # where no ranks divide experts, there is no room to be had
        return (
            settings
            if self.exchanges_rows
            else settings | {"moe_expert_rank_capacity_factor": None}
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings of a job, by short names; the defaults are those of the flags.

    tp, pp:    degrees.
    cp:        ranks that share each sequence.
    kind:      how these exchange; "": as where nothing is said.
    ep:        parts that the experts of a layer are divided into.
    etp:       ranks that shard each expert of such a part.
    mb:        samples of a micro-batch.
    sp:        whether activations are sharded along the sequence.
    schedule:  of the pipeline.
    chunks:    stages per pipeline rank.
    overlap:   of tensor-parallel collectives.
    sharding:  over replicas.
    recompute: a key of ``RECOMPUTATIONS``.
    order:     of ranks.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    kind: str = ""
    ep: int = 1
    etp: int = 1
    mb: int = 1
    sp: bool = False
    schedule: str = ONE_STAGE
    chunks: int = 1
    overlap: str = "weight-gradient"
    sharding: str = "no_shard"
    recompute: str = "none"
    order: str = normal(None)

    @property
    def layer(self) -> Layer:
        return Layer(self.tp, self.cp, self.ep, self.etp, self.kind)

    @property
    def parts(self) -> int:
        """The number of moving parts: settings that are not their defaults, micro-batch aside."""
        ignored = ("mb", "chunks")
        names = [row.name for row in fields(self) if row.name not in ignored]
        return sum(getattr(self, name) != getattr(DEFAULT, name) for name in names)

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``ParallelConfig``, and ``micro_batch_size``, that say the same."""
        granularity, method = RECOMPUTATIONS[self.recompute]
        chunked = self.chunks > 1 and self.schedule != "auto"
        return {
            **self.layer.settings(),
            "pipeline_model_parallel_size": self.pp,
            "rank_order": None if self.order == DEFAULT.order else self.order,
            "micro_batch_size": self.mb,
            "sequence_parallel": self.sp,
            "pipeline_schedule": None if self.schedule == ONE_STAGE else self.schedule,
            "num_virtual_stages_per_pipeline_rank": self.chunks if chunked else None,
            "tp_comm_overlap": self.overlap,
            "data_parallel_sharding_strategy": None
            if self.sharding == DEFAULT.sharding
            else self.sharding,
            "recompute_granularity": granularity,
            "recompute_method": method,
        }

    def applied(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return ``parallel`` with these settings instead of its own."""
        settings = self.settings()
        del settings["micro_batch_size"]
        return replace(
            parallel,
            **settings,
            use_distributed_optimizer=False,
            use_tp_pp_dp_mapping=False,
            recompute_num_layers=None,
        )

    def __str__(self) -> str:
        """Return what is not the default, as ``--fix`` reads it."""
        return ",".join(
            f"{row.name}={_text(getattr(self, row.name))}"
            for row in fields(self)
            if row.name in ("tp", "pp", "mb") or getattr(self, row.name) != row.default
        )


DEFAULT = Choice()
NAMES = tuple(row.name for row in fields(Choice))
# The settings that a search decides, and how a pin calls them.
SEARCHED: Mapping[str, str] = MappingProxyType(
    {
        "tensor_model_parallel_size": "tp",
        "context_parallel_size": "cp",
        "cp_comm_type": "kind",
        "pipeline_model_parallel_size": "pp",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
        "rank_order": "order",
        "use_tp_pp_dp_mapping": "order",
        "micro_batch_size": "mb",
        "sequence_parallel": "sp",
        "pipeline_schedule": "schedule",
        "num_virtual_stages_per_pipeline_rank": "chunks",
        "tp_comm_overlap": "overlap",
        "use_distributed_optimizer": "sharding",
        "data_parallel_sharding_strategy": "sharding",
        "recompute_granularity": "recompute",
        "recompute_method": "recompute",
        "recompute_num_layers": "recompute",
    }
)
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kind": tuple(kind for kind in CP_COMM_TYPES if kind != A2A_P2P),
        "schedule": SCHEDULES,
        "overlap": OVERLAPS,
        "sharding": SHARDINGS,
        "recompute": tuple(RECOMPUTATIONS),
    }
)


def pinned(name: str, text: str, flag: str) -> Any:
    """Return the value of a field of ``Choice`` from text, for ``flag``. Raises ConfigError."""
    if name not in NAMES:
        close = nearest(name, NAMES)
        hint = f"The nearest is {close}" if close else f"Use {', '.join(NAMES)}"
        raise ConfigError(flag, name, "it is not a setting that is searched", hint)
    if name in ("tp", "pp", "cp", "ep", "etp", "mb", "chunks"):
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(flag, f"{name}={text}", "it is not a number", "Give 1 or more")
        return int(text)
    if name == "sp":
        if text not in ("on", "off"):
            raise ConfigError(flag, f"sp={text}", "it is neither on nor off", "Give on or off")
        return text == "on"
    if name == "order":
        if reason := mistake(text):
            raise ConfigError(flag, f"order={text}", reason, "Write it like tp-pp-dp")
        return normal(text)
    if text not in _CHOICES[name]:
        use = f"Use {', '.join(_CHOICES[name])}"
        raise ConfigError(flag, f"{name}={text}", "it is not one of the choices", use)
    return text


def pins_of(text: str, flag: str) -> dict[str, Any]:
    """Return the fields of ``Choice`` in a list like "tp=8,pp=4". Raises ConfigError."""
    pins: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ConfigError(flag, part, "it is not NAME=VALUE", "Write it like tp=8,pp=4")
        if name in pins:
            raise ConfigError(flag, text, f"it says {name} twice", "Say it once")
        pins[name] = pinned(name, value, flag)
    return pins


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
