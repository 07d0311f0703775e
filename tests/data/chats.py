"""Conversations, and a tokenizer with a template for them, in both kinds that templates have."""

import json

from megatron_merak.data.train_tokenizer import train_byte_bpe

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ("what is a rank", "one process", "and a stage?", "a cut of the chain", "thanks")


def conversation(number):
    """A conversation of two to five messages, which begins with a system's in some."""
    turns = [
        {"role": "assistant" if turn % 2 else "user", "content": WORDS[(number + turn) % 5]}
        for turn in range(2 + number % 4)
    ]
    return [{"role": "system", "content": f"be number {number}"}, *turns] if number % 3 else turns


def tokenizer_directory(directory, template=PLAIN):
    """Write a tokenizer with these special tokens and a template."""
    directory.mkdir(parents=True, exist_ok=True)
    train_byte_bpe([*WORDS, "<|user|>x<|end|>"], 290, directory / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
