"""What the units of the GPT of flags need only while they run, by formulas."""

from dataclasses import dataclass

from megatron_merak.config import ModelConfig
from megatron_merak.planner.attention import SHORT

_PRODUCT_ROWS = 2048  # of a 16-bit weight gradient that a CPU computes before it adds them
_QUERIES = 128  # of a head whose scores a CPU has at a time

RunningBytes = tuple[int, int, int]


def stream_bytes(model: ModelConfig, bytes_per_value: int) -> int:
    """Return the bytes of a value of the residual stream."""
    return 4 if model.fp32_residual_connection else bytes_per_value


def widths(model: ModelConfig, tp: int) -> tuple[int, int, int, int]:
    """Return a rank's widths of queries, keys (= values), the MLP's first output and the MLP's
    second input.
    """
    ffn = model.ffn_size // tp
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.query_groups * model.head_dim // tp
    return queries, keys, (2 * ffn if model.swiglu else ffn), ffn


@dataclass(frozen=True)
class Running:
    """The ``Unit.running_bytes`` of one tensor-parallel rank: never less than those that are measured
    of the graph.

    fused: as on GPUs, where attention is one kernel that keeps no scores, and a 16-bit product is
           added to an fp32 gradient as it is computed.
    parts: into how many the sequence is divided; 1 without sequence parallelism.
    """

    model: ModelConfig
    tokens: int
    bytes_per_value: int
    tp: int
    fused: bool
    parts: int

    @property
    def _activation(self) -> int:
        return self.tokens * self.model.hidden_size * self.bytes_per_value

    @property
    def _state(self) -> int:
        """Bytes of a hidden state that every rank has all of."""
        return self.tokens * self.model.hidden_size * stream_bytes(self.model, self.bytes_per_value)

    @property
    def _messages(self) -> int:
        """Bytes of what is in flight between ranks, and of gradients that wait for its launch."""
        if self.tp == 1:
            return 0
        return (3 if self.parts == 1 else 5) * self._activation

    def _product(self, rows: int, columns: int) -> int:
        if self.fused or self.bytes_per_value == 4:
            return 0
        return min(rows, _PRODUCT_ROWS) * columns * self.bytes_per_value

    def embedding(self) -> RunningBytes:
        """Token and position embeddings, their sum, and masks of both."""
        positions = self.model.seq_length * self.model.hidden_size * self.bytes_per_value
        most = 3 * max(self._state, self._activation) + self._activation // 2 + positions
        most += 16 * self.tokens
        return most, most, most

    def head(self, vocabulary: int) -> RunningBytes:
        """The gradient of the input and the input times the factors of rows, in fp32, and what a loss
        in chunks has of logits. Rows have some numbers of their own.
        """
        model = self.model
        chunk = min(model.cross_entropy_chunk_size, self.tokens)
        logits = chunk * vocabulary * self.bytes_per_value
        rows = 8 * 4 * self.tokens * (1 + self.tp)
        factors = 0 if self.bytes_per_value == 4 else 4 * self.tokens * model.hidden_size
        own = 2 * self._activation + factors + logits + rows
        forward = logits + rows + (2 * self._activation if self.tp > 1 or chunk else 0)
        backward = own + (self._messages if self.parts > 1 else 0)
        backward += self._product(vocabulary, model.hidden_size)
        deferred = own + (self._messages if self.tp > 1 else 0)
        return forward, backward, max(backward if chunk else 0, deferred)

    def layer(self, recomputes: bool) -> RunningBytes:
        """Of a backward: in the feed-forward network the gradients of its two inner values; in attention
        those of all heads, with copies of these and scores where it is no kernel of its own, in
        place of what the feed-forward network kept.

        recomputes: whether the second matrix of the feed-forward network does not keep its input.
        """
        model = self.model
        queries, keys, first, second = widths(model, self.tp)
        each = self.tokens * self.bytes_per_value
        inner = second if recomputes else 0
        scored = model.attention_dropout and not self.fused
        scores = self.tokens * model.num_attention_heads // self.tp * model.seq_length
        vectors = 4 * (4 * model.hidden_size + first) + 16 * self.tokens
        drops = 1 if model.hidden_dropout else 0
        mlp = (1 + drops) * self._state + each * (first + 2 * inner) + vectors
        kept = each * (first + second - inner) + self._activation // self.parts
        if self.fused:
            shared = 2 * queries if keys < queries else 0
            heads = self._state + each * (2 * queries + 2 * keys + shared)
            heads += 4 * self.tokens * queries
        else:
            heads = self._state + each * (5 * queries + 4 * keys)
            if not scored and model.seq_length <= SHORT:
                rows = min(_QUERIES, model.seq_length)
                heads += 3 * self.bytes_per_value * scores * rows // model.seq_length
        # scores, their softmax and copies of every head, in fp32
        dropping = 8 * scores + 16 * self.tokens * queries if scored else 0
        widened = self._state - self._activation
        mlp += dropping + widened
        columns = model.hidden_size
        beside = self._messages + self._product(max(first, queries + 2 * keys), columns)
        forward = 2 * self._state + each * inner + dropping
        if self.tp > 1:
            forward += 2 * self._activation
        backward = max(mlp, heads + vectors - kept) + beside
        held = each * (first + second) + 2 * self._activation + 2 * self._state
        return forward, backward, backward + held
