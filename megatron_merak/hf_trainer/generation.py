"""``generate`` of transformers for a model that is sharded over ranks.

The loop is transformers' own and runs on every rank: logits processors, sampling, beams, stopping criteria. It gets a
stand-in for the model, whose forward runs the captured model under its plan and returns the logits of the last position
on every rank. Nothing is cached: each token costs a forward of all tokens before it. These are padded at the end to one
of a few lengths, since each length is captured once:

    prompt + new tokens   . 7 8 9 | 4 5          place of the last token: 5
    as it runs            . 7 8 9   4 5 0 0      only its logits, [rows, vocabulary], are communicated

Replicas, and within them micro-batches that fill the pipeline, share the rows.
"""

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from ..errors import ConfigError
from ..graph.capture.fake_model import forward_parameters
from ..graph.capture.inspected import inspected_model
from ..parallel.agree import gather_json, together
from ..stages.blueprint import ModelTask
from ..stages.captured import CapturedModel
from ..stages.guard import Guard
from ..stages.traced import MASK, OwnLoss
from .batches.neutral import NeutralPadding
from .batches.padding import Padding

PLACE = "merak_place"
NEXT = "next"
_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
_TOGETHER = (
    "Give every rank the same inputs, and processors and criteria that depend on these alone"
)
# Keywords of a forward that say how to run it, not on what.
_MANNER = ("use_cache", "return_dict", "logits_to_keep", "num_logits_to_keep", "encoder_outputs")
_CACHED = (
    "no keys and values are cached",
    "Leave it out: every token runs the forward of all tokens before it",
)
_OTHER = (
    "it would run, or run by, something that is not captured",
    "Leave it out, or call generate of a whole model",
)
_CLOCK = (
    "the clocks of ranks differ, and all have to stop at the same token",
    "Use max_new_tokens",
)
_LOGITS = (
    "only logits leave the last stage",
    "Use output_scores or output_logits, or a whole model",
)
_REFUSED = {
    **dict.fromkeys(
        ("past_key_values", "cache_implementation", "prefill_chunk_size", "inputs_embeds"), _CACHED
    ),
    **dict.fromkeys(
        ("assistant_model", "custom_generate", "negative_prompt_ids", "synced_gpus"), _OTHER
    ),
    **dict.fromkeys(("decoder_inputs_embeds", "encoder_outputs", "guidance_scale"), _OTHER),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _LOGITS),
    "max_time": _CLOCK,
}


class Generator:
    """Generates as ``model`` would with the weights of ``engine``, which captured it.

    padding: of the model's batches.

    ``generate`` is collective over all ranks.
    """

    def __init__(self, engine: CapturedModel, model: nn.Module, padding: Padding):
        self.engine = engine
        self.mesh = engine.mesh
        self.inner: Any = inspected_model(model)
        signature: Any = _Signature(type(self.inner))
        self._columns = forward_parameters(signature)[0]
        self._masked = not engine.is_causal and MASK in self._columns
        self._question = OwnLoss(_logits_at_place)
        self._neutral = NeutralPadding(replace(padding, mask=False), self.mesh, self._question)
        self._vocabulary: int | None = None

    def generate(
        self, inputs: Tensor | None, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> Any:
        """Return on every rank what ``model.generate(inputs, config, **kwargs)`` returns on one
        process.

        The result is on the device of the inputs. Random numbers are those of the first rank's
        generator. Raises ConfigError.
        """
        self._refuse(kwargs)
        share_generators(self.mesh)
        device = next(
            (x.device for x in (inputs, *kwargs.values()) if isinstance(x, Tensor)),
            self.mesh.device,
        )
        inputs = self._here(inputs)
        kwargs = {name: self._here(value) for name, value in kwargs.items()}
        if self.inner.config.is_encoder_decoder:
            kwargs |= self._instead_of_encoder(inputs, kwargs)
        self._failed = False
        try:
            generated = self._stand_in().generate(inputs, generation_config=config, **kwargs)
        except Exception:
            if not self._failed:
                self._agree(-2)
            raise
        self._agree(-1)
        return generated.to(device) if isinstance(generated, Tensor) else generated

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        kind = type(self.inner)
        inner: Any = self.inner
        if not (isinstance(self.inner, GenerationMixin) and inner.can_generate()):
            remedy = "Generate with a model of transformers that has a language modelling head"
            raise ConfigError(
                "generate", kind.__name__, "the model class cannot generate tokens", remedy
            )
        if kind.generate is not GenerationMixin.generate:
            reason = "its class overrides generate and does more than call its forward"
            raise ConfigError(
                "generate",
                kind.__name__,
                reason,
                "Use save_model and from_pretrained, and generate with that model",
            )
        refuse(kwargs)

    def _here(self, value: Any) -> Any:
        return value.to(self.mesh.device) if isinstance(value, Tensor) else value

    def _instead_of_encoder(
        self, inputs: Tensor | None, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the encoder's input in place of its outputs, to be repeated for beams: the encoder
        runs with the decoder.
        """
        name = self.inner.main_input_name
        main_input = kwargs.get(name) if inputs is None else inputs
        if main_input is None:
            raise ConfigError(
                "generate", f"(no {name})", "the encoder has no input", f"Give inputs or {name}"
            )
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=main_input)}

    def _stand_in(self) -> Any:
        """Return a model of the same class and configuration whose forward is this object's."""
        kind = type(self.inner)
        stand_in: Any = object.__new__(
            type(kind.__name__, (_StandIn, kind), {"__module__": kind.__module__})
        )
        vars(stand_in).update(
            {name: each for name, each in vars(self.inner).items() if not isinstance(each, Guard)}
        )
        vars(stand_in)["merak_device"] = self.mesh.device

        def forward(**arguments: Any) -> Any:
            self._failed = True  # unless all goes well: then ranks agree on what comes next
            answer = self._forward(arguments)
            self._failed = False
            return answer

        forward.__signature__ = inspect.signature(_Signature(kind).forward)  # type: ignore[attr-defined]
        vars(stand_in)["forward"] = forward
        return stand_in

    def _forward(self, arguments: Mapping[str, Any]) -> Any:
        batch = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for name, value in arguments.items():
            if name not in batch and name not in _MANNER and value:
                raise ConfigError(
                    "generate", name, "a captured forward takes tensors", "Leave it out"
                )
        seq2seq = self.inner.config.is_encoder_decoder
        if seq2seq:
            batch[self.inner.main_input_name] = arguments["encoder_outputs"].last_hidden_state
        tokens = batch["decoder_input_ids" if seq2seq else "input_ids"]
        self._agree(zlib.crc32(tokens.cpu().numpy().tobytes()))
        logits = self._logits(self._plain(batch, tokens), tokens)[:, None]
        return Seq2SeqLMOutput(logits=logits) if seq2seq else CausalLMOutputWithPast(logits=logits)

    def _plain(self, batch: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        """Return the batch without entries that have no effect.

        These are a mask that masks nothing, unless the model needs one for padding at the end, and
        positions that count from 0.
        """
        rows, length = tokens.shape
        unpadded = MASK not in batch or bool((batch[MASK] == 1).all())
        if self.inner.config.is_encoder_decoder:
            source = batch[self.inner.main_input_name]
            return (
                batch
                if MASK in batch or MASK not in self._columns
                else batch | {MASK: torch.ones_like(source)}
            )
        if unpadded:
            batch.pop(MASK, None)
        positions = batch.get("position_ids")
        if (
            positions is not None
            and unpadded
            and torch.equal(positions, torch.arange(length).to(positions)[None])
        ):
            del batch["position_ids"]
        elif positions is not None and positions.dim() == 2:
            batch["position_ids"] = positions.expand(rows, -1)
        return batch | ({MASK: torch.ones_like(tokens)} if unpadded and self._masked else {})

    def _logits(self, batch: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the logits of the last token of every row on every rank: [rows,
        vocabulary] fp32.
        """
        rows, (replicas, stages) = len(tokens), (self.mesh.grid.dp, self.mesh.grid.pp)
        divides = all(len(value) == rows for value in batch.values())
        size = -(-rows // (replicas * stages)) if divides else rows
        count = -(-rows // (replicas * size)) if divides else 1
        batch = {name: value.cpu() for name, value in batch.items()}
        place = torch.tensor([tokens.shape[1] - 1])
        batches = []
        for number in range(count):
            first = (self.mesh.dp_rank * count + number) * size if divides else 0
            which = torch.arange(first, first + size).clamp(max=rows - 1)
            batches.append(
                {name: value[which] if divides else value for name, value in batch.items()}
                | {PLACE: place}
            )
        outputs = self.engine.evaluate(self._padded(batches), (NEXT,), self._question)
        logits = (
            None if outputs is None else torch.cat([output[NEXT] for output in outputs]).float()
        )
        return self._everywhere(logits, count * size)[:rows]

    def _padded(self, batches: list[dict[str, Tensor]]) -> list:
        """Pad batches to one of a few lengths, as far as padding was shown to be neutral."""
        padded, unsettled = self._neutral.propose(batches, (NEXT,))
        with together(self.mesh.control, "cpu"):  # a replica has rows of its own
            self.engine.refuse_outside(padded, False, ModelTask(self._question, (NEXT,)))
        while unsettled is not None:  # on all ranks: their batches have the same shapes
            self._neutral.settle(self.engine, batches[unsettled], padded[unsettled], (NEXT,))
            padded, unsettled = self._neutral.propose(batches, (NEXT,))
        return padded

    def _everywhere(self, logits: Tensor | None, rows: int) -> Tensor:
        """Return the rows of all replicas: [replicas x rows, vocabulary]. Collective over all
        ranks.
        """
        mesh = self.mesh
        if self._vocabulary is None:
            widths = gather_json(None if logits is None else logits.shape[1], mesh.control, "cpu")
            self._vocabulary = next(width for width in widths if width is not None)
        source = self.engine.output_rank(mesh.dp_rank)
        if logits is None:
            logits = torch.empty(rows, self._vocabulary, device=mesh.device)
        logits = logits.contiguous()
        if mesh.model is not None:
            dist.broadcast(logits, source, group=mesh.model)
        if mesh.dp is None:
            return logits
        parts = [torch.empty_like(logits) for _ in range(mesh.grid.dp)]
        dist.all_gather(parts, logits, group=mesh.dp)
        return torch.cat(parts)

    def _agree(self, code: int) -> None:
        """Raise ConfigError on every rank unless all have the same tokens, or the same end (a
        negative code).
        """
        if self.mesh.control is None:
            return
        codes = torch.tensor([code, -code])
        dist.all_reduce(codes, dist.ReduceOp.MAX, group=self.mesh.control)
        if codes[0] != -codes[1]:
            raise ConfigError(
                "generate", "(the next token)", "ranks computed different tokens", _TOGETHER
            )


class _Signature:
    """Stands for an instance of a model class; it has the signature of the class's forward only."""

    def __init__(self, kind: type[nn.Module]):
        signature = inspect.signature(kind.forward)

        def forward() -> None: ...

        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        self.forward: Callable = forward


class _StandIn:
    """Mixed into the class of the model that it stands for."""

    @property
    def device(self) -> torch.device:
        return self.merak_device  # type: ignore[attr-defined]

    def _prepare_generation_config(
        self, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        config, rest = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        refuse(
            {name: getattr(config, name, None) for name in _REFUSED if name != "encoder_outputs"}
        )
        mode = config.get_generation_mode()
        if mode not in _MODES:
            known = ", ".join(each.value for each in _MODES)
            raise ConfigError(
                "generate",
                mode.value,
                "it needs more than the logits of the next token",
                f"Use {known}",
            )
        config.use_cache = False
        return config, rest


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of ``generate``, or a value of its configuration, that is
    not supported.
    """
    for name, (reason, remedy) in _REFUSED.items():
        value = arguments.get(name)
        if (
            value is not None
            and value is not False
            and not (name == "guidance_scale" and value == 1)
        ):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise ConfigError(f"generate: {name}", shown, reason, remedy)


def _logits_at_place(model: nn.Module, batch: dict[str, Any]) -> tuple[None, dict[str, Tensor]]:
    place = batch[PLACE]
    inputs = {name: value for name, value in batch.items() if name != PLACE}
    keeps = "logits_to_keep" in forward_parameters(model)[0]
    outputs = model(**inputs, **({"logits_to_keep": place} if keeps else {}))
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return None, {NEXT: (logits if keeps else logits.index_select(1, place))[:, 0]}


def share_generators(mesh: Any) -> None:
    """Set every rank's default random generators to the state of the first rank's. Collective over
    all ranks.
    """
    if mesh.control is None:
        return
    state = torch.get_rng_state()
    dist.broadcast(state, group=mesh.control, group_src=0)
    torch.set_rng_state(state)
    if mesh.device.type == "cuda":
        state = torch.cuda.get_rng_state(mesh.device)
        dist.broadcast(state, group=mesh.control, group_src=0)
        torch.cuda.set_rng_state(state, mesh.device)
