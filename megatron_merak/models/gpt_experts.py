"""The feed-forward part of a layer with routed experts, as transformers stores it: weights of all
experts in one tensor, and rows of tokens sorted by expert.

Sources: Fedus et al., "Switch Transformers", 2021, equations 4 to 6, of the balance of experts; Zoph
et al., "ST-MoE", 2022, equation 5, of the size of a router's logits.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .gpt_dense import LlamaFeedForward, Matrices


class Routing(NamedTuple):
    """Where tokens go.

    weights:   of each token's experts, fp32 [t, k].
    experts:   their numbers, int64 [t, k].
    kept:      whether they have room for the token, bool [t, k]; None: they have for all.
    auxiliary: the router's auxiliary loss, fp32 []; None: it has none.
    """

    weights: Tensor
    experts: Tensor
    kept: Tensor | None
    auxiliary: Tensor | None


def counts_of(experts: Tensor, number: int) -> Tensor:
    """Return how often each of ``number`` experts is among ``experts``, [number]."""
    # CPUs count floating point alone, deterministic GPUs whole numbers alone.
    counted = experts.float() if experts.device.type == "cpu" else experts.int()
    return torch.histc(counted, number, 0, number - 1)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [n, i] with the weight of their expert, of [e, o, i]: [n, o].

    ends: int32 [e], where the rows of each expert end.
    """
    # torch's own product is traced for bf16 alone
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights.mT, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weights.mT, ends)


def largest_of_each(scores: Tensor, number: int) -> Tensor:
    """Return whether each of ``scores`` is among the largest of its column, bool [t, e]; of equal
    ones the first are.
    """
    order = torch.sort(scores, stable=True, dim=0, descending=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(0, order[:number], True)


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.num_experts is not None
        self.experts = config.num_experts
        self.top = config.moe_router_topk
        self.pre_softmax = config.moe_router_pre_softmax
        self.capacity_factor = config.moe_expert_capacity_factor
        self.by_position = config.moe_token_drop_policy == "position"
        self.wide = config.moe_router_dtype == "fp32"
        self.balance = config.moe_aux_loss_coeff
        self.size = config.moe_z_loss_coeff or 0.0
        self.std = config.init_method_std
        self.weight = nn.Parameter(torch.empty(self.experts, config.hidden_size))

    def draw(self, key: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of "weight"."""
        return torch.empty(self.weight.shape).normal_(0.0, self.std, generator=generator)

    def forward(self, x: Tensor, samples: int) -> Routing:
        """x: [t, h], the tokens of one sample after those of another."""
        if self.wide:
            logits = F.linear(x.float(), self.weight.float())
        else:
            logits = F.linear(x, self.weight).float()
        if self.pre_softmax:
            weights, experts = logits.softmax(-1).topk(self.top, -1)
        else:
            weights, experts = logits.topk(self.top, -1)
            weights = weights.softmax(-1)
        auxiliary = self._auxiliary(logits, experts) if self.training else None
        return Routing(weights, experts, self._kept(weights, experts, samples), auxiliary)

    def _kept(self, weights: Tensor, experts: Tensor, samples: int) -> Tensor | None:
        """Return which experts of each token have room for it: those tokens stay whose weights are
        largest, or that come first, where all samples begin at once.
        """
        if self.capacity_factor is None:
            return None
        tokens = experts.shape[0]
        capacity = math.ceil(tokens * self.top / self.experts * self.capacity_factor)
        if capacity >= tokens:
            return None
        weights = weights.detach()
        scores = torch.ones_like(weights) if self.by_position else weights
        table = scores.new_zeros(tokens, self.experts).scatter(1, experts, scores)
        by_time = table.unflatten(0, (samples, -1)).transpose(0, 1)
        kept = largest_of_each(by_time.flatten(0, 1), capacity)
        kept = kept.unflatten(0, (-1, samples)).transpose(0, 1).flatten(0, 1)
        return kept.gather(1, experts)

    def _auxiliary(self, logits: Tensor, experts: Tensor) -> Tensor | None:
        losses = []
        if self.balance:
            # Counts have no gradient, which goes through the probabilities alone.
            share = counts_of(experts.flatten(), self.experts) / experts.numel()
            probabilities = logits.softmax(-1).mean(0)
            losses.append(self.balance * self.experts * (share * probabilities).sum())
        if self.size:
            losses.append(self.size * logits.logsumexp(-1).square().mean())
        return sum(losses[1:], losses[0]) if losses else None


class Experts(nn.Module):
    """Gated feed-forward networks, of which each token is computed by some."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.num_experts is not None
        # here, since it takes a second; it defines the product that is not torch's own
        import transformers.integrations.moe  # noqa: F401

        experts = config.num_experts
        width = config.expert_ffn_size
        hidden = config.hidden_size
        self.experts = experts
        self.std = {
            "gate_up_proj": config.init_method_std,
            "down_proj": config.init_method_std / math.sqrt(2 * config.num_layers),
        }
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def draw(self, key: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of "gate_up_proj" or "down_proj"."""
        shape = self.get_parameter(key).shape
        return torch.empty(shape).normal_(0.0, self.std[key], generator=generator)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x: [t, h]. Return the weighted sums of what the experts of each token make of it."""
        top = routing.experts.shape[-1]
        ids = routing.experts.flatten()
        if routing.kept is not None:
            # behind the last expert: such a row is in no group of the products
            ids = ids.masked_fill(~routing.kept.flatten(), self.experts)
        by_expert, order = ids.sort()
        ends = counts_of(by_expert, self.experts).cumsum(0, dtype=torch.int32)
        rows = x[order // top]
        # Of rows in no group the products, and their gradients, may be any numbers.
        dropped = None if routing.kept is None else (by_expert == self.experts).unsqueeze(-1)
        if dropped is not None:
            rows = rows.masked_fill(dropped, 0.0)
        gate, up = grouped_product(rows, self.gate_up_proj, ends).chunk(2, -1)
        rows = grouped_product(F.silu(gate) * up, self.down_proj, ends)
        if dropped is not None:
            rows = rows.masked_fill(dropped, 0.0)
        rows = rows * routing.weights.flatten()[order].unsqueeze(-1)
        # Put back in the tokens' order, so that no device adds up in an order of its own.
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        own = rows[place].view(x.shape[0], top, -1)
        return own.sum(1).to(x.dtype)


class MixtureFeedForward(nn.Module):
    """A router and its experts, and perhaps one that computes every token: the shared expert, whose
    output is added, or a share of it that a gate finds.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        width = config.moe_shared_expert_intermediate_size
        self.shared_expert = None if width is None else LlamaFeedForward(config, width)
        gated = config.moe_shared_expert_gate
        self.shared_expert_gate = Matrices(config).into(config.hidden_size, 1) if gated else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x: [b, s, h]. Return the output, of the same shape, and the router's auxiliary loss."""
        rows = x.flatten(0, 1)
        routing = self.gate(rows, samples=x.shape[0])
        output = self.experts(rows, routing).view_as(x)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(x).sigmoid()
            output = output + shared
        return output, routing.auxiliary
