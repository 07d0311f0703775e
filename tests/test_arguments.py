"""The command line: frozen names, help for every flag, refusals by name, and equality with the
dataclasses.
"""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.arguments import (
    SCRIPTS,
    build_parser,
    deviation_report,
    deviations,
    field_texts,
    flags,
    parse,
    read,
    sections,
    shown,
)
from megatron_merak.config import (
    Config,
    HFConfig,
    HFModelConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megatron_merak.errors import ConfigError
from megatron_merak.megatron_flags import NOT_YET, RENAMED
from megatron_merak.other_flags import MEANT

ROOT = Path(__file__).resolve().parent.parent
(OPTIMIZERS,) = (
    row.metadata["choices"]
    for row in dataclasses.fields(OptimizerConfig)
    if row.name == "optimizer"
)
BASE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split()
BASE_CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32),
    train=TrainConfig(micro_batch_size=1),
)
HF_BASE = "--model m --seq-length 32 --micro-batch-size 1".split()
HF_CONFIG = HFConfig(
    model=HFModelConfig(model="m", seq_length=32), train=TrainConfig(micro_batch_size=1)
)
BASES = {Config: (BASE, BASE_CONFIG), HFConfig: (HF_BASE, HF_CONFIG)}
scripts = pytest.mark.parametrize("kind", BASES, ids=["gpt", "hf"])


def config_of(*tokens: str, kind: type[RunConfig] = Config) -> RunConfig:
    return read(build_parser(config=kind), [*BASES[kind][0], *tokens], kind)[0]


def refusal(*tokens: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_of(*tokens)
    return caught.value


@pytest.mark.parametrize("kind, file", [(Config, "flags.txt"), (HFConfig, "flags_hf.txt")])
def test_the_command_line_is_frozen(kind, file):
    """A flag that appears or disappears must be added to or removed from the file on purpose."""
    found = [flag.name for flag in flags(kind)]
    frozen = (ROOT / "tests" / file).read_text().split()
    assert [name for name in found if name not in frozen] == [], f"new: add it to {file}"
    assert [name for name in frozen if name not in found] == [], f"gone: remove it from {file}"
    assert frozen == sorted(found)


def test_something_reads_each_setting():
    """One that does nothing says so in its help. Names are looked for, not their owners."""
    rows = {
        row.name: row.metadata.get("plan")
        for kind in SCRIPTS
        for _, section in sections(kind)
        for row in dataclasses.fields(section)
    }
    package = ROOT / "megatron_merak"
    texts = {path.relative_to(package): path.read_text("utf-8") for path in package.rglob("*.py")}
    reads = {
        word for text in texts.values() for word in re.findall(r"""(?:\.|["'])(\w+)\b""", text)
    }
    unread = {name for name, where in rows.items() if where is None and name not in reads}
    says = {
        flag.name.removeprefix("--").replace("-", "_")
        for kind in SCRIPTS
        for flag in flags(kind)
        if flag.text.startswith("Accepted without effect")
    }
    assert unread == says
    of_plans = {
        word
        for path, text in texts.items()
        if path.parts[0] != "config" and path != Path("plan/frozen.py")
        for word in re.findall(r"\.(\w+)\b", text)
    }
    paths = {name: where.path.rpartition(".")[2] for name, where in rows.items() if where}
    assert {name for name, path in paths.items() if path not in of_plans} == set()


@scripts
def test_flag_names_are_unique(kind):
    assert len({flag.name for flag in flags(kind)}) == len(flags(kind))


@scripts
def test_every_flag_has_a_help_sentence_and_a_shown_default(kind):
    printed = "".join(build_parser(config=kind).format_help().split())
    for flag in flags(kind):
        assert flag.text.endswith(".") and len(flag.text) > 10
        default = "[required]" if flag.required else f"[{shown(flag.default)}"
        assert "".join(f"{flag.text}{default}".split()) in printed


def test_help_names_megatrons_default_where_it_differs(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Decay of Adam's second moment. [0.95; Megatron-LM: 0.999]" in printed
    assert "Decay of Adam's first moment. [0.9]" in printed
    for name, cls in sections():
        assert f"{name}:" in printed and " ".join(cls.__doc__.split()) in printed


def test_fields_without_text_are_seen_to_lack_it():
    assert set(field_texts(TrainConfig)) == set(TrainConfig.__dataclass_fields__)


@scripts
def test_nothing_given_but_the_required_flags_is_all_defaults(kind):
    config = config_of(kind=kind)
    assert config == BASES[kind][1] and type(config) is kind
    assert kind.from_dict(config.to_dict()) == config


def test_each_type_of_value():
    config = config_of(
        "--lr",
        "1e-4",
        "--hidden-dropout=0",
        "--swiglu",
        "--data-path",
        "0.3",
        "a b",
        "0.7",
        "c",
        "--split",
        "98,1,1",
        "--no-load-optim",
        "--load",
        "here",
        "--recompute-granularity",
        "full",
    )
    assert config.optimizer == OptimizerConfig(lr=1e-4) and config.model.hidden_dropout == 0.0
    assert config.model.swiglu and not config.model.qk_layernorm
    assert config.data.data_path == ("0.3", "a b", "0.7", "c") and config.data.split == "98,1,1"
    assert config.checkpoint.no_load_optim and config.checkpoint.load == "here"
    assert config.parallel.recompute_granularity == "full"


def typed(flag) -> list[str]:
    """The flag as a user would type a value that is legal for every check of the value alone."""
    if flag.kind is bool:
        return [flag.name]
    if "choices" in flag.metadata:
        return [flag.name, flag.metadata["choices"][-1]]
    number = "2.5" if flag.metadata.get("least") == 1 else "0.5"
    return [flag.name, *{int: ["7"], float: [number], str: ["text"], tuple: ["1", "p"]}[flag.kind]]


EVERY_FLAG = [(kind, flag) for kind in BASES for flag in flags(kind)]


@pytest.mark.parametrize(
    "kind, flag", EVERY_FLAG, ids=[f"{kind.__name__}-{flag.field}" for kind, flag in EVERY_FLAG]
)
def test_every_flag_reaches_its_field_and_no_other(kind, flag):
    text = typed(flag)
    expected = {
        bool: lambda: True,
        int: lambda: 7,
        float: lambda: float(text[-1]),
        str: lambda: text[-1],
        tuple: lambda: text[1:],
    }[flag.kind]()
    base = BASES[kind][1].to_dict()
    base[flag.section][flag.field] = expected
    assert config_of(*text, kind=kind).to_dict() == base


def test_a_flag_of_the_other_script_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        config_of("--num-layers", "3", kind=HFConfig)
    assert str(caught.value) == (
        "flag --num-layers: is a flag of pretrain_gpt.py only. Leave it out: --model decides it."
    )
    assert str(refusal("--trust-remote-code")) == (
        "flag --trust-remote-code: is a flag of pretrain_hf.py only. Leave it out."
    )


def test_the_flags_that_the_scripts_share_mean_the_same():
    gpt = {flag.name: flag for flag in flags(Config)}
    hf = {flag.name: flag for flag in flags(HFConfig)}
    differing = [name for name in gpt if name in hf and gpt[name] != hf[name]]
    assert differing == ["--make-vocab-size-divisible-by", "--vocab-size"]
    assert [flag.name for flag in flags() if flag.name not in hf and flag.section != "model"] == []


@pytest.mark.parametrize(
    "tokens, message",
    [
        (["--lr", "1e-4x"], "--lr 1e-4x: is not a number. Write it like 0.1 or 1e-4."),
        (["--lr", "nan"], "--lr nan: is not a number. Write it like 0.1 or 1e-4."),
        (["--lr", "1e999"], "--lr inf: is not a finite number. Give a finite number."),
        (["--lr", "-3"], "--lr -3.0: is out of range. Use a value above 0."),
        (
            ["--num-layers", "1e1"],
            "--num-layers 1e1: is not a whole number. Write it in digits, like 1024.",
        ),
        (
            ["--num-layers", "1__0"],
            "--num-layers 1__0: is not a whole number. Write it in digits, like 1024.",
        ),
        (
            ["--num-layers", "9" * 5000],
            f"--num-layers {'9' * 5000}: is not a whole number. Write it in digits, like 1024.",
        ),
        (
            ["--hidden-size", "-3"],
            "--hidden-size -3: is out of range. Use a value at least 1 and at most 1048576.",
        ),
        (
            ["--optimizer", "muon"],
            "--optimizer muon: is a choice of Megatron-LM that megatron_merak does not have yet. "
            f"Use {' or '.join(OPTIMIZERS)}.",
        ),
        (["--swiglu=true"], "--swiglu with a value: is a switch. Give it alone."),
        (
            ["--swiglu", "true"],
            "argument true: belongs to no flag. Leave it out; switches take no value.",
        ),
        (["--lr"], "--lr (no value): expected one argument. Give its value after it."),
        (
            ["--data-path"],
            "--data-path (no value): expected at least one argument. Give its value after it.",
        ),
        (["--num-layer", "3"], "flag --num-layer: is not known. The nearest is --num-layers."),
        (["--num_layers=3"], "flag --num_layers: is not known. The nearest is --num-layers."),
        (
            ["--micro-batchsize", "3"],
            "flag --micro-batchsize: is not known. The nearest is --micro-batch-size.",
        ),
        (["--frobnicate"], "flag --frobnicate: is not known. See --help for all flags."),
        (["-x"], "flag -x: is not known. See --help for all flags."),
        (
            ["--fp16-lm-cross-entropy"],
            "flag --fp16-lm-cross-entropy: is a Megatron-LM flag that megatron_merak does not have yet. "
            "Leave it out: losses are computed in fp32.",
        ),
    ],
)
def test_refused_command_lines(tokens, message):
    assert str(refusal(*tokens)) == message


def test_names_of_other_programs_lead_to_flags_that_exist():
    known = {flag.name for script in SCRIPTS for flag in flags(script)}
    for name, remedy in MEANT.items():
        assert {word.strip(",:") for word in remedy.split() if word.startswith("--")} <= known, (
            remedy
        )
        assert name not in known and name not in NOT_YET and name not in RENAMED
    error = refusal("--tp", "2")
    assert str(error) == "flag --tp: is not known. Use --tensor-model-parallel-size."
    assert str(refusal("--zzz", "2")) == "flag --zzz: is not known. See --help for all flags."


def test_missing_required_flags_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        read(build_parser(), ["--num-layers", "2", "--seq-length", "8"])
    assert str(caught.value) == (
        "--hidden-size, --num-attention-heads, --micro-batch-size (missing): needs a value. "
        "Give it on the command line."
    )


def test_parse_tells_every_unknown_flag_on_stderr_and_exits_with_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        parse([*BASE, "--fp4-format", "--seq-len", "9", "--dist-ckpt-workers"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "flag --fp4-format: is a Megatron-LM flag that megatron_merak does not have yet. Leave it out: "
        "--fp8-format and --fp8-recipe say how products are computed, and weights stay in the type of the model.",
        "flag --seq-len: is not known. Use --seq-length.",
        "flag --dist-ckpt-workers: is a Megatron-LM flag that megatron_merak does not have yet. Leave it out: "
        "with --async-save a thread of each rank writes what the rank has.",
    ]


def test_a_tool_may_add_flags_of_its_own():
    parser = build_parser("A tool.")
    parser.add_argument("--world-size", type=int, default=8)
    config, own = read(parser, [*BASE, "--world-size", "16"])
    assert config == BASE_CONFIG and vars(own) == {"world_size": 16}
    with pytest.raises(ConfigError, match="The nearest is --world-size"):
        read(parser, [*BASE, "--worldsize", "16"])


def test_deviations_from_megatron():
    assert deviations() == [
        ("--tp-comm-overlap", "weight-gradient", False),
        ("--distributed-backend", "auto", "nccl"),
        ("--no-overlap-grad-reduce", False, True),
        ("--fp8-recipe", "tensorwise", "delayed"),
        ("--check-weight-hash-across-dp-replicas-interval", 100, 0),
        ("--rerun-mode", "disabled", "validate_results"),
        ("--min-lr", None, 0.0),
        ("--lr-decay-style", "cosine", "linear"),
        ("--weight-decay", 0.1, 0.01),
        ("--adam-beta2", 0.95, 0.999),
        ("--split", "969, 30, 1", None),
        ("--num-workers", 0, 2),
    ]


def test_only_the_deviations_in_effect_are_reported():
    report = deviation_report(config_of("--adam-beta2", "0.999", "--weight-decay", "0.3"))
    assert "--adam-beta2" not in report and "--weight-decay" not in report
    assert (
        "  --lr-decay-style cosine (Megatron-LM: linear). Shape of the learning rate after warm-up."
        in report
    )
    silent = [
        "--tp-comm-overlap",
        "none",
        "--distributed-backend",
        "gloo",
        "--no-overlap-grad-reduce",
        "--min-lr",
        "0",
        "--lr-decay-style",
        "linear",
        "--weight-decay",
        "0.01",
        "--adam-beta2",
        "0.999",
        "--split",
        "1",
        "--check-weight-hash-across-dp-replicas-interval",
        "0",
        "--num-workers",
        "2",
        "--rerun-mode",
        "validate_results",
    ]
    assert deviation_report(config_of(*silent)) == ""
    assert "--fp8-recipe" in deviation_report(config_of(*silent, "--fp8-format", "hybrid"))


def test_the_flag_list_in_the_documentation_is_up_to_date():
    spec = importlib.util.spec_from_file_location("flags_tool", ROOT / "tools" / "flags.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.DOCUMENT.read_text(encoding="utf-8") == tool.render(), "run: python tools/flags.py"


def test_the_command_line_is_read_without_torch_or_numpy():
    program = (
        "import sys, megatron_merak.arguments; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
