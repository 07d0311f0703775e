"""The settings of the optimizer and of its learning-rate and weight-decay schedules."""

import dataclasses

from .settings import Needs, Section, flag_name, setting

_DECOUPLED = Needs("decoupled_lr", remedy="Give both, or leave it out")
_WSD = Needs("lr_decay_style", ("WSD",))
_CHANGING = Needs(
    "weight_decay_incr_style",
    ("linear", "cosine"),
    reason="has no effect while --weight-decay-incr-style is {found}",
    remedy="Use --weight-decay-incr-style linear or cosine, or leave it out",
)


def _of(optimizer: str) -> Needs:
    """Return what the settings of one optimizer need."""
    remedy = f"Leave it out, or use --optimizer {optimizer}"
    return Needs(
        "optimizer", (optimizer,), reason="has no effect with --optimizer {found}", remedy=remedy
    )


_BYTES = {"fp32": 4, "bf16": 2}  # of a moment of Adam
_SEEN = 2.0**-8  # what bf16 numbers are apart, at least: a smaller part of one rounds away
_AWARE = Needs("use_precision_aware_optimizer")
_WIDER = "Use bf16, which needs no scale of its own, or fp32"


def _moment() -> str:
    """A setting of the type in which a moment of Adam is stored."""
    not_yet = {"fp16": _WIDER, "fp8": _WIDER}
    return setting("fp32", choices=tuple(_BYTES), not_yet=not_yet, needs=(_of("adam"), _AWARE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning-rate and weight-decay schedules."""

    optimizer: str = setting("adam", choices=("adam", "sgd", "lion"), not_yet={"muon": ""})
    """The optimizer; adam is AdamW."""
    lr: float | None = setting(None, above=0)
    """Peak learning rate."""
    min_lr: float | None = setting(None, least=0, megatron=0.0)
    """Learning rate at the end of the decay (unset: a tenth of --lr)."""
    decoupled_lr: float | None = setting(None, above=0)
    """Peak learning rate of the word embedding and the output layer (unset: --lr)."""
    decoupled_min_lr: float | None = setting(None, least=0, needs=_DECOUPLED)
    """Their learning rate at the end of the decay (unset: --min-lr, or a tenth of
    --decoupled-lr).
    """
    lr_decay_style: str = setting(
        "cosine",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        megatron="linear",
    )
    """Shape of the learning rate after warm-up."""
    lr_decay_iters: int | None = setting(None, least=1)
    """Iteration at which the decay ends (unset: --train-iters)."""
    lr_decay_samples: int | None = setting(None, least=1)
    """Samples at which the decay ends, in runs of --train-samples (unset: --train-samples)."""
    lr_warmup_iters: int = setting(0, least=0)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = setting(0, least=0)
    """Samples of linear warm-up, in runs of --train-samples."""
    lr_warmup_fraction: float | None = setting(None, least=0, below=1)
    """Warm-up as a fraction of the decay, instead of --lr-warmup-iters or --lr-warmup-samples."""
    lr_warmup_init: float = setting(0.0, least=0)
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: str = setting(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the final decay with --lr-decay-style WSD."""
    lr_wsd_decay_iters: int | None = setting(None, least=1, needs=_WSD)
    """Iterations of the final decay with --lr-decay-style WSD."""
    lr_wsd_decay_samples: int | None = setting(None, least=1, needs=_WSD)
    """Samples of the final decay with --lr-decay-style WSD, in runs of --train-samples."""
    weight_decay: float = setting(0.1, least=0, megatron=0.01)
    """Weight decay; not applied to biases and norms."""
    start_weight_decay: float | None = setting(None, least=0, needs=_CHANGING)
    """Weight decay at the start of the run, if it changes."""
    end_weight_decay: float | None = setting(None, least=0, needs=_CHANGING)
    """Weight decay at the end of the run, if it changes."""
    weight_decay_incr_style: str = setting("constant", choices=("constant", "linear", "cosine"))
    """How weight decay moves from --start-weight-decay to --end-weight-decay."""
    clip_grad: float = setting(1.0, least=0)
    """Gradient norm to clip to; 0 disables clipping."""
    adam_beta1: float = setting(0.9, least=0, below=1, needs=_of("adam"))
    """Decay of Adam's first moment."""
    adam_beta2: float = setting(0.95, least=0, below=1, megatron=0.999, needs=_of("adam"))
    """Decay of Adam's second moment."""
    adam_eps: float = setting(1e-8, above=0, needs=_of("adam"))
    """Epsilon added to the square root of Adam's second moment."""
    use_precision_aware_optimizer: bool = setting(False, needs=_of("adam"))
    """Let --exp-avg-dtype and --exp-avg-sq-dtype say in which types Adam's moments are stored;
    without them they are fp32.
    """
    exp_avg_dtype: str = _moment()
    """Type in which Adam's first moment is stored, rounded to nearest; it is computed in fp32."""
    exp_avg_sq_dtype: str = _moment()
    """Type in which Adam's second moment is stored, rounded to nearest; it is computed in fp32."""
    sgd_momentum: float = setting(0.9, least=0, below=1, needs=_of("sgd"))
    """Momentum of --optimizer sgd."""
    lion_beta1: float = setting(0.95, least=0, below=1, needs=_of("lion"))
    """Weight of the momentum in the sum of momentum and gradient whose sign is Lion's update."""
    lion_beta2: float = setting(0.98, least=0, below=1, needs=_of("lion"))
    """Decay of Lion's momentum."""

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the settings that this optimizer alone has."""
        needed = _of(self.optimizer)
        found = {row.name: row.metadata.get("needs") for row in dataclasses.fields(self)}
        return tuple(
            name
            for name, needs in found.items()
            if needed in (needs if isinstance(needs, tuple) else (needs,))
        )

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per parameter, beside an fp32 copy of a 16-bit one."""
        adam = float(_BYTES[self.exp_avg_dtype] + _BYTES[self.exp_avg_sq_dtype])
        return {"adam": adam, "lion": 4.0, "sgd": 4.0 if self.sgd_momentum else 0.0}[self.optimizer]

    def stuck_moments(self) -> tuple[str, ...]:
        """Return a sentence on each moment whose type rounds away by how much it falls in a step."""
        lines = []
        for moment, decay in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
            beta = getattr(self, decay)
            if getattr(self, moment) == "bf16" and 1 - beta < _SEEN:
                lines.append(
                    f"{flag_name(moment)} bf16 with {flag_name(decay)} {beta}: a moment that falls "
                    "by less than 1/256 in a step is rounded to what it was, so it can rise only. "
                    "Use 0.996 or less, or fp32."
                )
        return tuple(lines)

    @property
    def final_lr(self) -> float:
        """``min_lr``, or a tenth of ``lr`` if unset; one of them is needed."""
        if self.min_lr is not None:
            return self.min_lr
        assert self.lr is not None, "without --lr nothing is trained"
        return 0.1 * self.lr

    @property
    def decay(self) -> int | None:
        """Where the decay ends, in the run's unit (iterations or samples); None: at the end of the
        run.
        """
        return self.lr_decay_iters or self.lr_decay_samples

    @property
    def warmup(self) -> int:
        """The length of the warm-up in the same unit, unless it is a fraction."""
        return self.lr_warmup_iters or self.lr_warmup_samples

    @property
    def anneal(self) -> int | None:
        """The length of WSD's final decay in the same unit."""
        return self.lr_wsd_decay_iters or self.lr_wsd_decay_samples
