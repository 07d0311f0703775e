"""Models that decide by values of the batch: captured for the example's case, with guards that tell
other cases.
"""

import pytest
import torch
from torch import nn

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import capture
from tests.graph.test_capture import captured_gradients
from tests.graph.tiny import gradients, randomise, run


class Deciding(nn.Module):
    """Branches, selects, repeats and slices by a mask of the batch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("scales", torch.tensor([0.5, 2.0, 3.0]))

    def forward(self, x, mask, labels):
        hidden = self.up(x)
        if mask.all():
            hidden = hidden.tanh()
        longest = mask.sum(1).max()
        hidden, mask = self.down(hidden)[:, :longest], mask[:, :longest]
        labels[labels == 0] = -1  # in place, and before the labels are selected
        rows, _ = torch.where(mask)
        chosen = (
            hidden[mask] * torch.masked_select(labels[:, :longest], mask)[:, None] + hidden[rows, 0]
        )
        for count in mask.sum(1).tolist():
            chosen = chosen * (1 + count)
        repeated = torch.repeat_interleave(x[:, 0], mask.sum(1), dim=0)
        return {"loss": (chosen * repeated).sum() * self.scales.max().item()}


MASKS = (
    [[1, 1, 0], [1, 0, 0]],
    [[1, 1, 1], [1, 1, 1]],
    [[1, 0, 0], [1, 1, 0]],
    [[1, 1, 1], [0, 0, 1]],
)


def deciding_batch(mask, seed=0):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "mask": torch.tensor(mask).bool(), "labels": torch.arange(6).view(2, 3)}


def copied(batch):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def check(captured, model, batch):
    loss, expected = gradients(model, copied(batch))
    found_loss, found = captured_gradients(captured, model, copied(batch))
    assert torch.equal(loss, found_loss) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_each_case_is_exact_and_every_other_one_is_told():
    model, batches = (
        randomise(Deciding()),
        [deciding_batch(mask, seed) for seed, mask in enumerate(MASKS)],
    )
    for i, example in enumerate(batches):
        before = copied(example)
        captured = capture(model, example)
        assert all(torch.equal(example[name], before[name]) for name in example), (
            "the example is not written to"
        )
        other = deciding_batch(MASKS[i], seed=9)
        assert not captured.guards.broken(example) and not captured.guards.broken(other)
        check(captured, model, example)
        check(captured, model, other)
        told = [captured.guards.broken(batch) for j, batch in enumerate(batches) if j != i]
        assert all("test_values.py" in line for line in told)
    first = capture(model, batches[0]).guards
    assert "if mask.all()" in first.broken(batches[1]) and "tolist()" in first.broken(batches[2])


class Windowed(nn.Module):
    """Borders of windows without repetitions, and a tensor made of numbers of the batch, as in
    Qwen2.5-VL.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x, borders):
        hidden = self.layer(x)
        lengths = torch.unique_consecutive(borders).diff()
        longest = torch.tensor([borders[0].max(), lengths.max()], dtype=torch.float32)
        parts = [part.mean(0).square().sum() for part in hidden.split(lengths.tolist())]
        return {"loss": sum(parts) * longest.sum()}


def test_repeated_borders_and_tensors_of_numbers():
    model = randomise(Windowed())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    batches = [
        {"x": x, "borders": torch.tensor(each)}
        for each in ([0, 2, 2, 5], [0, 0, 2, 5], [0, 1, 1, 5])
    ]
    captured = capture(model, batches[0])
    for same in batches[:2]:
        assert not captured.guards.broken(same)
        check(captured, model, same)
    assert captured.guards.broken(batches[2])


def test_a_model_that_does_not_ask_has_no_guards():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("on", torch.tensor(True))

        def forward(self, x):
            return ((x * self.weight) if self.on else x).sum()

    captured = capture(Fixed(), {"x": torch.randn(2, 3)})
    assert captured.guards is None and "values" in captured.how
    assert (
        capture(
            nn.Sequential(nn.Linear(3, 1), nn.Flatten(0, 0)), {"input": torch.randn(1, 3)}
        ).guards
        is None
    )


class ByWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum() if (self.weight * x).sum() > 0 else self.weight.sum()


class ByChance(ByWeight):
    def forward(self, x):
        return (x * self.weight).sum() if torch.rand(()) > 0.5 else self.weight.sum()


class ByWeightWritten(ByWeight):
    def forward(self, x):
        table = torch.zeros(3)
        view = table[1:]
        table += self.weight.detach()
        return (x * self.weight).sum() if view.sum() > 0 else self.weight.sum()


@pytest.mark.parametrize("kind", [ByWeight, ByChance, ByWeightWritten])
def test_values_of_parameters_and_chance_are_refused(kind):
    with pytest.raises(TraceError, match="decides by the values"):
        capture(kind(), {"x": torch.randn(2, 3)})


def test_the_shape_of_what_depends_on_parameters_is_known():
    class Shaped(ByWeight):
        def forward(self, x, mask):
            hidden = x * self.weight
            own = torch.ones_like(hidden).bool() & mask[:, None].expand_as(hidden)
            return hidden[own].sum() * (2 if own.all() else 1)

    model = randomise(Shaped())
    some, every = (
        {"x": torch.randn(2, 3), "mask": torch.tensor(mask)}
        for mask in ([True, False], [True, True])
    )
    for batch, other in ((some, every), (every, some)):
        captured = capture(model, batch)
        assert captured.guards.broken(other) and not captured.guards.broken(batch)
        loss, expected = gradients(model_of(model), batch)
        found, grads = captured_gradients(captured, model, batch)
        assert torch.equal(loss, found) and torch.equal(grads["weight"], expected["inner.weight"])


def model_of(inner):
    """With its loss under that name."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            return {"loss": self.inner(**batch)}

    return Named()


def longformer():
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attention_window=[4, 4], max_position_embeddings=40, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return LongformerForMaskedLM(config).train()


def longformer_batch(seen_by_all, seed=0):
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(seed))
    attention = torch.zeros(2, 16, dtype=torch.long)
    attention[:, :seen_by_all] = 1
    return {"input_ids": ids, "labels": ids.clone(), "global_attention_mask": attention}


@pytest.mark.long
def test_longformer_with_and_without_global_attention():
    model = randomise(longformer())
    local, some, more = (longformer_batch(count) for count in (0, 1, 2))
    for batch, others in ((local, (some,)), (some, (local, more))):
        captured = capture(model, batch)
        check(captured, model, batch)
        check(captured, model, {**batch, "input_ids": batch["input_ids"].flip(0)})
        assert all("longformer" in captured.guards.broken(other) for other in others)


def test_what_is_captured_without_values_is_as_before():
    from tests.graph.tiny import tiny

    real, empty, batch = tiny("llama")
    captured = capture(empty(), batch)
    assert captured.guards is None and "values" not in captured.how
    model = randomise(real())
    assert torch.equal(run(captured, dict(model.named_parameters()), batch)[0], model(**batch).loss)
