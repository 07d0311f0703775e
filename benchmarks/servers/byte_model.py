"""A GPT of bytes, small enough for hundreds of gradients in a minute, on the source of Python's
standard library.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEQUENCE = 64  # bytes of a sample
VALIDATED = 64  # samples of a validation
HIDDEN = 64
HEADS = 4
LAYERS = 2


class Layer(nn.Module):
    """Causal attention and a feed-forward part, with norms before them."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class ByteGPT(nn.Module):
    """Bytes int64 [b, s] -> logits [b, s, 256]."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.bytes(x) + self.places.weight[: x.shape[1]])
        return F.linear(self.norm(hidden), self.bytes.weight)


class Bytes:
    """A `Problem` (see learner.py): that model, whose parts of a batch are ``samples``
    sequences.

    weights: fp32 [n], of a fixed seed.
    """

    def __init__(self, samples: int, seed: int = 0):
        self.samples = samples
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = ByteGPT()
        self.weights = torch.cat(
            [parameter.detach().reshape(-1) for parameter in self.model.parameters()]
        )
        self._flat, self._gradient = self.weights.clone(), torch.zeros_like(self.weights)
        start = 0
        for parameter in self.model.parameters():
            own = slice(start, start + parameter.numel())
            parameter.data = self._flat[own].view_as(parameter)
            parameter.grad = self._gradient[own].view_as(parameter)
            start = own.stop
        train, valid = _text()
        self.train = train[
            torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        ]
        self.valid = valid[:: max(1, len(valid) // VALIDATED)][:VALIDATED]

    def gradient(self, weights: Tensor, part: int) -> Tensor:
        chosen = torch.arange(part * self.samples, (part + 1) * self.samples) % len(self.train)
        self._flat.copy_(weights)
        self._gradient.zero_()
        self._loss(self.train[chosen]).backward()
        return self._gradient.clone()

    @torch.no_grad()
    def loss(self, weights: Tensor) -> float:
        self._flat.copy_(weights)
        return self._loss(self.valid).item()

    def _loss(self, samples: Tensor) -> Tensor:
        """Nats per byte of samples uint8 [b, s + 1]."""
        samples = samples.long()
        return F.cross_entropy(self.model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


def _text() -> tuple[Tensor, Tensor]:
    """Samples uint8 [n, SEQUENCE + 1] to train on, and of every tenth file, to validate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = (
        [path for place, path in enumerate(files) if (place % 10 == 0) == valid]
        for valid in (False, True)
    )
    train, valid = (b"".join(path.read_bytes() for path in part) for part in parts)
    return tuple(_samples(text) for text in (train, valid))


def _samples(text: bytes) -> Tensor:
    flat = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return flat[: len(flat) // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1)
