"""Conversations as token ids, of which those of the assistant are targets.

A template writes a conversation as text. Where it marks what the assistant says (``{% generation %}``
of transformers), these tokens are the targets. Elsewhere they are what the text of a conversation up
to and with an answer has beyond the text that asks for that answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError

_MARK = "{% generation"


class Conversation(NamedTuple):
    """Token ids, int64[n], and which of them are targets, bool[n]."""

    ids: np.ndarray
    targets: np.ndarray

    def stored(self) -> np.ndarray:
        """Return one number for each token, int32[n]: see ``chat_dataset``."""
        return np.where(self.targets, self.ids, ~self.ids).astype(np.int32)


class ChatEncoder:
    """Encodes conversations by the template of a tokenizer of transformers.

    tokenizer: has ``apply_chat_template``.
    template:  in place of the tokenizer's own; None: that.
    path:      of the tokenizer, for errors.

    Raises DataError where there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None, path: object):
        text = template or getattr(tokenizer, "chat_template", None)
        if not text:
            remedy = "Name a file with one by --chat-template, or use the tokenizer of a chat model"
            raise DataError("--tokenizer-model", path, "it has no chat template", remedy)
        self._tokenizer = tokenizer
        self._template = template
        self._marks = _MARK in str(text).replace("{%-", "{%")

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Conversation:
        """Return a conversation in tokens. Raises ValueError with the reason for what is none.

        messages: each with "role" and "content", and what else the template reads.
        tools:    that the assistant may call, as the template takes them.
        """
        _check(messages)
        if self._marks:
            made = self._render(messages, tools, tokenize=True, return_assistant_tokens_mask=True)
            targets = np.array(made["assistant_masks"], dtype=bool)
            return Conversation(np.array(made["input_ids"], dtype=np.int64), targets)
        return self._by_text(messages, tools)

    def _by_text(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Conversation:
        """Find answers in the text, and their tokens by where these begin and end in it."""
        text = self._render(messages, tools)
        spans = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:place], tools, add_generation_prompt=True)
            answered = self._render(messages[: place + 1], tools)
            if not (text.startswith(answered) and answered.startswith(asked)):
                raise ValueError(
                    f"the template writes message {place + 1} otherwise where more follows, so that "
                    "the answer's tokens are not known: mark them with {% generation %} in it"
                )
            spans.append((len(asked), len(answered)))
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.array([start for start, _ in made["offset_mapping"]], dtype=np.int64)
        targets = np.zeros(len(starts), dtype=bool)
        for first, end in spans:
            targets |= (starts >= first) & (starts < end)
        return Conversation(np.array(made["input_ids"], dtype=np.int64), targets)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, **how: Any) -> Any:
        how = {"tokenize": False, **how}
        if how["tokenize"]:
            how["return_dict"] = True
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self._template, **how
            )
        except Exception as error:  # whatever the template raises
            text = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {text}") from error


def _check(messages: Any) -> None:
    """Raise ValueError unless these are messages, an answer among them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("it is no list of messages")
    for place, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {place} has no 'role'")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {place} has no 'content'")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message is of the assistant, so that there are no targets")
