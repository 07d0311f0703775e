"""Tokenizers of Megatron-LM's other names: the ids of megatron-core's and transformers' own."""

import base64
import json
import re

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron_merak.config.tokenizers import TOKENIZERS
from megatron_merak.data import sentencepiece_tokenizer, tiktoken_tokenizer
from megatron_merak.data.tokenizer import TokenizerDetails, build_tokenizer
from megatron_merak.errors import DataError

TEXTS = [
    "def f(x):\n    return x\n",
    "Some words, and   blanks  before words.\t\n\n",
    "naïve – 数字 \x00 don't 1234 it's_ 🦅<|endoftext|>x<s>y</s> <unk><SPECIAL_9>",
    "",
    " ",
]
CORPUS = [*TEXTS[:3], *(f"line {number} of what sentences are made from" for number in range(99))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """vocab.json, merges.txt, pieces.model and ranks.json."""
    import sentencepiece

    root = tmp_path_factory.mktemp("tokenizers")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, 320, special_tokens=["<|endoftext|>"])
    trained.save_model(str(root), None)
    (root / "text").write_text("\n".join(CORPUS[:2] + CORPUS[3:]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "text"), model_prefix=str(root / "pieces"), vocab_size=50, minloglevel=2
    )
    tokens = [bytes([byte]) for byte in range(256)] + [b"in", b"es", b"of", b" of", b"ne", b"li"]
    rows = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for rank, token in enumerate(tokens)
    ]
    (root / "ranks.json").write_text(json.dumps(rows))
    return root


def gpt2(root):
    paths = (root / name for name in ("vocab.json", "merges.txt"))
    details = TokenizerDetails(*map(str, paths))
    return build_tokenizer("GPT2BPETokenizer", None, None, details)


def test_gpt2_has_the_ids_of_transformers(files):
    from transformers import GPT2Tokenizer, GPT2TokenizerFast

    ours = gpt2(files)
    for theirs in (GPT2Tokenizer, GPT2TokenizerFast):
        peer = theirs(
            str(files / "vocab.json"), str(files / "merges.txt"), clean_up_tokenization_spaces=False
        )
        assert (ours.vocab_size, ours.eod) == (len(peer), peer.eos_token_id)
        ids = [peer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        assert ours.tokenize_batch(TEXTS) == ids == [ours.tokenize(text) for text in TEXTS]
        assert [ours.detokenize(each) for each in ids] == TEXTS
    assert max(map(len, ids)) < max(map(len, TEXTS))


@pytest.mark.parametrize(
    "kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_sentencepiece_has_the_ids_of_megatron_core(files, kind):
    from megatron.core.tokenizers import MegatronTokenizer

    model = str(files / "pieces.model")
    peer = MegatronTokenizer.from_pretrained(model, metadata_path={"library": "sentencepiece"})
    ours = build_tokenizer(kind, model, None)
    assert (ours.vocab_size, ours.eod, ours.pad) == (peer.vocab_size, peer.eos_id, None)
    ids = [peer.tokenize(text) for text in TEXTS]
    assert ours.tokenize_batch(TEXTS) == ids == [ours.tokenize(text) for text in TEXTS]
    assert [ours.detokenize(each) for each in ids] == [peer.detokenize(each) for each in ids]


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_has_the_ids_of_megatron_core(files, pattern):
    from megatron.core.tokenizers import MegatronTokenizer

    file = str(files / "ranks.json")
    peer = MegatronTokenizer.from_pretrained(
        file,
        metadata_path={"library": "tiktoken"},
        pattern=pattern,
        vocab_size=270,
        num_special_tokens=10,
    )
    details = TokenizerDetails(tiktoken_pattern=pattern, tiktoken_special_tokens=10)
    ours = build_tokenizer("TikTokenizer", file, 270, details)
    assert (ours.vocab_size, ours.eod, ours.pad) == (270, peer.eod, peer.pad)
    ids = [peer.tokenize(text) for text in TEXTS]
    assert ours.tokenize_batch(TEXTS) == ids == [ours.tokenize(text) for text in TEXTS]
    assert [ours.detokenize(each) for each in ids] == TEXTS
    assert build_tokenizer("TikTokenizer", file, None, details).vocab_size == 272


def test_patterns_cut_as_those_of_megatron_core():
    import regex
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as theirs

    text = "".join(TEXTS) + "Ünder_score's\r\n\r\n//x  9¾ \u00a0ǅx aB\u0301c.\n\n  \n/"
    for name, peer in (("v1", theirs._PATTERN_TIKTOKEN_V1), ("v2", theirs._PATTERN_TIKTOKEN_V2)):
        cut = regex.findall(tiktoken_tokenizer.PATTERNS[name], text)
        assert cut == regex.findall(peer, text) and "".join(cut) == text


@pytest.mark.parametrize(
    ("kind", "model", "size", "details", "told"),
    [
        ("SentencePieceTokenizer", "nowhere", None, {}, "--tokenizer-model .*: No such file"),
        ("Llama2Tokenizer", "vocab.json", None, {}, "cannot be read .* Give the .model file"),
        ("TikTokenizer", "pieces.model", None, {}, "cannot be read .*JSON list that Megatron-LM"),
        ("TikTokenizer", "vocab.json", None, {}, "--tokenizer-model .*: it cannot be read"),
        ("TikTokenizer", "ranks.json", 5000, {}, "--vocab-size 5000: 1000 special tokens and the"),
        ("TikTokenizer", "ranks.json", 1255, {}, "leave no place .* Use a value from 1256 to 1262"),
        (
            "TikTokenizer",
            "ranks.json",
            None,
            {"tiktoken_special_tokens": 6},
            "--tiktoken-num-special-tokens 6: .* Give at least 7",
        ),
        ("GPT2BPETokenizer", None, None, {"vocab_file": "vocab.json"}, "--merge-file .missing"),
        (
            "GPT2BPETokenizer",
            None,
            None,
            {"vocab_file": "ranks.json", "merge_file": "merges.txt"},
            r"--vocab-file .*: it cannot be read \(it is no table of tokens",
        ),
        (
            "GPT2BPETokenizer",
            None,
            None,
            {"vocab_file": "vocab.json", "merge_file": "text"},
            "--merge-file .*: it cannot be read",
        ),
        ("Bert", None, None, {}, "--tokenizer-type Bert: it is unknown. Use HuggingFaceTokenizer"),
    ],
)
def test_what_is_no_such_tokenizer_is_named(files, kind, model, size, details, told):
    named = {
        key: str(files / value) if key.endswith("file") else value for key, value in details.items()
    }
    with pytest.raises(DataError) as caught:
        build_tokenizer(kind, model and str(files / model), size, TokenizerDetails(**named))
    assert re.search(told, str(caught.value)), str(caught.value)


def test_a_library_that_is_missing_is_named_with_its_extra(files, monkeypatch):
    for module, kind, file in (
        (sentencepiece_tokenizer, "SentencePieceTokenizer", "pieces.model"),
        (tiktoken_tokenizer, "TikTokenizer", "ranks.json"),
    ):
        monkeypatch.setattr(module, "is_installed", lambda library: False)
        with pytest.raises(DataError, match=r"is not installed. Install it: .*\.\[tokenizers\]"):
            build_tokenizer(kind, str(files / file), None)


def test_every_kind_is_a_choice_of_both_commands():
    from megatron_merak.config import DataConfig

    for kind in TOKENIZERS:
        assert DataConfig(tokenizer_type=kind).tokenizer_type == kind
