"""Flags of Megatron-LM: every one that its parser has is a setting, or has exactly one answer that
is true here.
"""

import re
from pathlib import Path

import pytest

from megatron_merak.arguments import build_parser, flags, read, unknown_flags
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import ConfigError
from megatron_merak.megatron_flags import (
    FAMILIES,
    FORMER,
    NOT_YET,
    REFUSED,
    RENAMED,
    TAKEN,
    remedy,
    without_effect,
)

THEIRS = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8")
NAMES = [name for line in THEIRS.splitlines() if line.startswith("--") for name in line.split()]
BASES = {
    Config: "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split(),
    HFConfig: "--model m --seq-length 32 --micro-batch-size 1".split(),
}
OURS = {kind: {flag.name for flag in flags(kind)} for kind in BASES}
EITHER = OURS[Config] | OURS[HFConfig]
PARSERS = {kind: build_parser(config=kind) for kind in BASES}
scripts = pytest.mark.parametrize("kind", BASES, ids=["gpt", "hf"])


def config_of(*tokens, kind=Config):
    return read(PARSERS[kind], [*BASES[kind], *tokens], kind)[0]


def refusal(*tokens: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(*tokens)
    return caught.value


def answers(name: str) -> list[str]:
    """The tables that answer a flag; a family answers only what no table names."""
    tables = {"setting": EITHER, "taken": TAKEN, "renamed": RENAMED, "refused": REFUSED}
    exact = [table for table, names in tables.items() if name in names]
    return exact or [start for start in FAMILIES if name.startswith(start)]


def test_every_flag_of_megatron_has_exactly_one_answer():
    assert len(NAMES) == len(set(NAMES)) == 800
    assert {name: answers(name) for name in NAMES if len(answers(name)) != 1} == {}


def test_no_answer_is_of_a_flag_that_megatron_does_not_have():
    others = {*TAKEN, *RENAMED, *REFUSED} - set(NAMES) - FORMER.keys()
    # of other versions
    assert others == {
        "--verify-integrity",
        "--standalone-embedding-stage",
        "--activations-checkpoint-method",
        "--activations-checkpoint-num-layers",
        "--checkpoint-num-layers",
    }
    assert not FORMER.keys() & set(NAMES)
    for start in FAMILIES:
        assert any(answers(name) == [start] for name in NAMES) or start.startswith("--no-")
        assert not any(name.startswith(start) for name in EITHER), (
            f"{start} would answer for our own flags"
        )


def test_answers_name_flags_that_exist():
    told = [*NOT_YET.values(), *FAMILIES.values(), *RENAMED.values()]
    told += [taken.why for taken in TAKEN.values()] + [taken.beside for taken in TAKEN.values()]
    named = {word for text in told for word in re.findall(r"--[a-z][\w-]*", text)}
    assert named and named <= OURS[Config] | {"--config"}, named - OURS[Config]
    of_both = {
        word
        for text in (*NOT_YET.values(), *FAMILIES.values())
        for word in re.findall(r"--[a-z][\w-]*", text)
    }
    assert of_both <= OURS[HFConfig] | {"--config"}


def test_answers_are_sentences_without_a_full_stop():
    for text in (*NOT_YET.values(), *FAMILIES.values()):
        assert re.fullmatch(r"(Leave it out|Use|Give|Say|Start)\b.*[^. ]", text), text


def test_each_refused_flag_is_an_error_with_its_remedy():
    assert {
        "--overlap-moe-expert-parallel-comm",
        "--hybrid-context-parallel",
        "--use-megatron-fsdp",
    } <= NOT_YET.keys()
    errors = unknown_flags([*NOT_YET], [], Config)
    assert [error.value for error in errors] == [*NOT_YET]
    for error in errors:
        assert error.reason == "is a Megatron-LM flag that megatron_merak does not have yet"
        assert error.remedy == NOT_YET[error.value]
    assert str(refusal("--fp8-margin", "1")) == (
        "flag --fp8-margin: is a Megatron-LM flag that megatron_merak does not have yet. Leave it out: scales of fp8 "
        "are of the values of now, and keep no history."
    )


def test_a_family_answers_for_flags_that_are_in_no_table():
    assert (
        remedy("--mok-something-new") == FAMILIES["--mok-"] and "--mok-something-new" not in REFUSED
    )
    assert remedy("--frobnicate") is None and remedy("--num-layer") is None


@pytest.mark.parametrize("name", RENAMED)
def test_a_flag_with_another_name_is_refused_with_it(name):
    assert str(refusal(name)) == f"flag {name}: has another name here. Use {RENAMED[name]}."
    flag, *value = RENAMED[name].split()
    kind = next(each.kind for each in flags() if each.name == flag)
    given = value or {int: ["2"], float: ["0.5"], str: ["uniform"]}.get(kind, [])
    assert config_of(flag, *given)


@scripts
def test_flags_that_change_nothing_are_taken_with_a_notice(kind):
    assert not OURS[kind] & TAKEN.keys()
    tokens = "--lr 1e-3 --overlap-grad-reduce --timing-log-level 0 --transformer-impl=local --bf16".split()
    rest, notices = without_effect([*tokens, "--overlap-grad-reduce"])
    assert rest == ["--lr", "1e-3", "--bf16"]
    assert notices == (
        "--overlap-grad-reduce changes nothing: gradients are reduced during the backward unless "
        "--no-overlap-grad-reduce.",
        "--timing-log-level 0 changes nothing: there are no further timers.",
        "--transformer-impl local changes nothing: there is one implementation.",
    )
    base = config_of(kind=kind)
    for name, taken in TAKEN.items():
        for value in taken.values or ("",):
            if not taken.beside:
                assert config_of(name, *value.split(), kind=kind) == base, name


@pytest.mark.parametrize(
    "tokens",
    [
        ["--timing-log-level", "2"],
        ["--timing-log-level"],
        ["--overlap-grad-reduce=1"],
        ["--bf16"],
    ],
)
def test_other_values_are_not_taken(tokens):
    assert without_effect(tokens) == (tokens, ())


def test_a_flag_that_changes_nothing_beside_another_is_refused_without_it():
    strategy = ["--data-parallel-sharding-strategy", "optim_grads_params"]
    assert config_of("--use-megatron-fsdp", *strategy) == config_of(*strategy) != config_of()
    rest, (notice,) = without_effect([strategy[0] + "=optim", "--use-megatron-fsdp"])
    assert rest == [strategy[0] + "=optim"] and notice.startswith(
        "--use-megatron-fsdp changes nothing: "
    )
    assert without_effect(["--use-megatron-fsdp"]) == (["--use-megatron-fsdp"], ())
    assert "Use --data-parallel-sharding-strategy optim_grads_params" in str(
        refusal("--use-megatron-fsdp")
    )
    assert "Say which position embedding" in str(refusal("--no-position-embedding"))
    rope = ["--position-embedding-type", "rope"]
    assert config_of("--no-position-embedding", *rope) == config_of(*rope)
