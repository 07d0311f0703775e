"""--config FILE: settings by name or section, refused by file, line and key; stored ones read back
equal.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.arguments import build_parser, expanded, flags, read
from megatron_merak.cli.plan import main as plan
from megatron_merak.cli.report_memory import main as report_memory
from megatron_merak.config import Config, HFConfig, RunConfig
from megatron_merak.config.file import text_of
from megatron_merak.errors import ConfigError
from megatron_merak.parameter_server.supervisor import servers_of

ROOT = Path(__file__).resolve().parent.parent
BASES = {
    Config: "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split(),
    HFConfig: "--model m --seq-length 32 --micro-batch-size 1".split(),
}
PARSERS = {kind: build_parser(config=kind) for kind in BASES}


def config_of(*tokens: str, kind: type[RunConfig] = Config) -> RunConfig:
    return read(PARSERS[kind], tokens, kind)[0]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Text -> the name of a file with it, in the current directory."""
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> str:
        Path("f.yaml").write_text(text, encoding="utf-8")
        return "f.yaml"

    return written


def legal(flag) -> object:
    """A value of the flag that is not its default and legal for every check of the value alone."""
    if "choices" in flag.metadata:
        other = next(choice for choice in flag.metadata["choices"] if choice != flag.default)
        return [other] if flag.kind is tuple else other
    number = (
        1.5e-05 + flag.metadata.get("least", 0) if flag.metadata.get("most", 1) < 2**32 else 1e10
    )
    return {
        bool: True,
        int: 7,
        float: number,
        str: "1e-5: 'x' # \"\n é ~",
        tuple: ["1e3", "null", "a b", "010"],
    }[flag.kind]


@pytest.mark.parametrize("kind", BASES, ids=["gpt", "hf"])
def test_a_stored_configuration_of_defaults_reads_back_equal(kind, file):
    config = config_of(*BASES[kind], kind=kind)
    assert config_of("--config", file(text_of(config.to_dict(), "a head")), kind=kind) == config


@pytest.mark.parametrize("kind", BASES, ids=["gpt", "hf"])
def test_every_flag_with_another_value_reads_back_from_a_stored_configuration(kind, file):
    base = config_of(*BASES[kind], kind=kind)
    values = base.to_dict()
    for flag in flags(kind):
        values[flag.section][flag.field] = legal(flag)
    config = kind.from_dict(values)
    read_back = config_of(f"--config={file(text_of(config.to_dict(), ''))}", kind=kind).to_dict()
    for flag in flags(kind):
        found = read_back[flag.section][flag.field]
        assert (
            found
            == config.to_dict()[flag.section][flag.field]
            != base.to_dict()[flag.section][flag.field]
        ), flag.name


@pytest.mark.parametrize(
    "text",
    [
        "num-layers: 2\nhidden_size: 64\nnum-attention-heads: 4\nseq-length: 32\nmicro-batch-size: 1\nlr: 1e-5\n"
        "bf16: true\nfp16: false\nrampup-batch-size: [1, 2, 3]\nsplit: 99,1,0\nload: 007\n"
        "tp-comm-overlap: none\nsave:\n",
        "model: {num-layers: 2, hidden-size: 64, num-attention-heads: 4, seq-length: 32}\n"
        "train:\n  micro-batch-size: 1\n  bf16: True\n  rampup-batch-size:\n  - 1\n  - '2'\n  - 3\n"
        "optimizer: {lr: .00001}\ndata: {split: '99,1,0'}\ncheckpoint: {load: '007'}\n"
        "parallel: {tp_comm_overlap: none}\nlogging: {}\n",
    ],
    ids=["flat", "sections"],
)
def test_settings_stand_alone_or_in_sections(text, file):
    expected = "--lr 1e-5 --bf16 --rampup-batch-size 1 2 3 --split 99,1,0 --load 007 --tp-comm-overlap none".split()
    assert config_of("--config", file(text)) == config_of(*BASES[Config], *expected)


def test_the_command_line_takes_precedence_wherever_it_stands(file):
    name = file("lr: 1e-3\nweight-decay: 0.3\ndata-path: [a, b]\n")
    for given in (
        ["--lr", "2", "--data-path", "c", "--config", name],
        ["--config", name, "--lr", "2", "--data-path", "c"],
    ):
        config = config_of(*BASES[Config], *given)
        assert (config.optimizer.lr, config.optimizer.weight_decay, config.data.data_path) == (
            2.0,
            0.3,
            ("c",),
        )


def test_a_file_with_a_model_is_for_the_other_script(file):
    assert expanded(["show", "--config", file("model: m\nlr: 1\n"), "--bf16"]) == [
        "show",
        "--model=m",
        "--lr=1",
        "--bf16",
    ]
    assert expanded(["--config", file("model: {num-layers: 3}")]) == ["--num-layers=3"]
    assert config_of(
        "--seq-length",
        "8",
        "--micro-batch-size",
        "1",
        "--config",
        file("model: {model: m}"),
        kind=HFConfig,
    )
    assert expanded(["--lr", "1"]) == ["--lr", "1"]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}", "train:\n  # lr: 1\ndata:\n"])
def test_an_empty_file_says_nothing(text, file):
    assert config_of(*BASES[Config], "--config", file(text)) == config_of(*BASES[Config])


AT = "--config f.yaml, line"
OPTIMIZERS = " or ".join(
    each
    for flag in flags(Config)
    if flag.name == "--optimizer"
    for each in flag.metadata["choices"]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nnum_layer: 3\n", f"{AT} 2: num_layer: is not known. The nearest is --num-layers."),
        ("zzz: 3\n", f"{AT} 1: zzz: is not known. See --help for all flags."),
        ("tp: 3\n", f"{AT} 1: tp: is not known. Use --tensor-model-parallel-size."),
        (
            "dist-ckpt-workers: 2\n",
            f"{AT} 1: dist-ckpt-workers: is a Megatron-LM flag that megatron_merak does not have yet. Leave it "
            "out: with --async-save a thread of each rank writes what the rank has.",
        ),
        ("encoder-num-layers: 3\n", f"{AT} 1: encoder-num-layers: has another name here. Use --num-layers."),
        ("use-mcore-models: true\n", f"{AT} 1: use-mcore-models: changes nothing: there is one GPT model. "
         "Leave it out."),
        ("transformer-impl: local\n", f"{AT} 1: transformer-impl: changes nothing: there is one implementation. "
         "Leave it out."),
        ("model: m\n", f"{AT} 1: model: is a flag of pretrain_hf.py only. Leave it out."),
        ("lr: 1\nlr: 2\n", f"{AT} 2: lr: is also given in f.yaml, line 1. Give it once."),
        (
            "min-lr: 1\noptimizer:\n  min_lr: 2\n",
            f"{AT} 3: min_lr: is also given in f.yaml, line 1. Give it once.",
        ),
        ("train: {}\ntrain: {}\n", f"{AT} 2: train: is also given in f.yaml, line 1. Put its settings together."),
        ("optimiser:\n  lr: 1\n", f"{AT} 1: optimiser: is not the name of a section. The nearest is optimizer."),
        (
            "train:\n  lr: 1\n",
            f"{AT} 2: lr: is in the section train. Put it into optimizer, or outside of sections.",
        ),
        ("optimizer:\n  lr: {a: 1}\n", f"{AT} 2: lr: is a mapping. Give a value, a list, true or false."),
        ("bf16: 'true'\n", f"{AT} 1: bf16 true: is not true or false. Give true or false."),
        ("bf16: yes\n", f"{AT} 1: bf16 yes: is not true or false. Give true or false."),
        ("load: true\n", f"{AT} 1: load true: is not text. Put it in quotes."),
        ("load: [a]\n", f"{AT} 1: load ['a']: is not text. Put it in quotes."),
        ("data-path: a\n", f"{AT} 1: data-path a: is not a list. Write it like [a, b]."),
        ("data-path: [a, true]\n", f"{AT} 1: data-path: has an entry that is not text or a number. "
         "Write a list like [0.3, a, 0.7, b]."),
        ("data-path: [[a]]\n", f"{AT} 1: data-path: has an entry that is not text or a number. "
         "Write a list like [0.3, a, 0.7, b]."),
        ("data-path: [a, --lr]\n", f"{AT} 1: data-path --lr: looks like a flag. "
         "Use a value that does not begin with a dash."),
        ("lr: fast\n", f"{AT} 1: lr fast: is not a number. Write it like 0.1 or 1e-4."),
        ("lr: '1'\n", f"{AT} 1: lr 1: is not a number. Give a number, without quotes and leading zeros."),
        ("num-layers: 010\n", f"{AT} 1: num-layers 010: is not a whole number. Give a whole number, without quotes and "
         "leading zeros."),
        ("num-layers: 1__0\n", f"{AT} 1: num-layers 1__0: is not a whole number. Write it in digits, like 1024."),
        ("num-layers: 4.0\n", f"{AT} 1: num-layers 4.0: is not a whole number. Write it in digits, like 1024."),
        ("lr: -3\n", f"{AT} 1: lr -3.0: is out of range. Use a value above 0."),
        ("optimizer: adamw\n", f"{AT} 1: optimizer adamw: is not one of the choices. Use {OPTIMIZERS}."),
        ("hidden-dropout: null\n", f"{AT} 1: hidden-dropout: has no value. Give one, or leave it out."),
        ("load: !!python/name:os.system x\n", f"{AT} 1: load: has the tag tag:yaml.org,2002:python/name:os.system. "
         "Give a value without a tag."),
        ("load: !env HOME\n", f"{AT} 1: load: has the tag !env. Give a value without a tag."),
        ("load: !!python/object/apply:os.system [x]\n", f"{AT} 1: load: has the tag "
         "tag:yaml.org,2002:python/object/apply:os.system. Give a value without a tag."),
        ("1: 2\n", f"{AT} 1: 1: is not a name. Use the name of a flag, without the dashes."),
        ("- lr\n", "--config f.yaml: it is not a mapping. Write a setting per line, such as 'lr: 1e-4'."),
        ("lr\n", "--config f.yaml: it is not a mapping. Write a setting per line, such as 'lr: 1e-4'."),
        ("lr: 1\nlr: [\n", "--config f.yaml:3: it is not YAML (expected the node content, but found '<stream end>'). "
         "Write a setting per line, such as 'lr: 1e-4'."),
        ("load: *x\n", "--config f.yaml:1: it is not YAML (found undefined alias 'x'). "
         "Write a setting per line, such as 'lr: 1e-4'."),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused_by_line_and_key(text, message, file):
    with pytest.raises(ConfigError) as caught:
        config_of(*BASES[Config], "--config", file(text))
    assert str(caught.value) == message


def test_a_file_that_is_nested_too_deeply_is_refused(file):
    with pytest.raises(ConfigError, match="it is nested too deeply"):
        expanded(["--config", file(f"lr: {'[' * 5000}")])


def test_a_value_that_holds_itself_is_refused(file):
    with pytest.raises(ConfigError, match="has an entry that is not text"):
        config_of("--config", file("data-path: &x [*x]\n"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["--config", "none.yaml"],
            "--config none.yaml: it cannot be read (No such file or directory). Name a YAML file.",
        ),
        (["--config", "."], "--config .: it cannot be read (Is a directory). Name a YAML file."),
        (["--config"], "--config (no value): expected one argument. Give its value after it."),
        (
            ["--config", "--lr", "1"],
            "--config (no value): expected one argument. Give its value after it.",
        ),
        (
            ["--config=a.yaml", "--config", "b.yaml"],
            "--config a.yaml b.yaml: is given more than once. Put the settings into one file.",
        ),
    ],
)
def test_a_file_that_is_not_there_is_refused(tokens, message, file):
    with pytest.raises(ConfigError) as caught:
        config_of(*BASES[Config], *tokens)
    assert str(caught.value) == message


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "f.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="f.yaml: it cannot be read"):
        config_of("--config", str(tmp_path / "f.yaml"))


def test_yaml_is_imported_only_where_a_file_is_named(file):
    program = "import sys; from megatron_merak.arguments import build_parser, read; read(build_parser(), {}); {}"
    seen = "print(sorted({'yaml', 'torch'} & set(sys.modules)))"
    lines = {"[]": BASES[Config], "['yaml']": [*BASES[Config], "--config", file("lr: 1")]}
    for expected, given in lines.items():
        command = [sys.executable, "-c", program.format(given, seen)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        assert done.stdout.strip() == expected, done.stderr


def test_help_tells_of_the_file(capsys):
    with pytest.raises(SystemExit):
        PARSERS[Config].parse_args(["--help"])
    assert "--config FILE" in capsys.readouterr().out


def test_commands_that_look_at_a_run_take_its_file(file, capsys):
    flags = f"{' '.join(BASES[Config])} --vocab-size 100 --global-batch-size 4 --pipeline-model-parallel-size 2".split()
    name = file(text_of(config_of(*flags).to_dict(), ""))
    for command in (lambda given: plan(["show", *given]), report_memory):
        said = []
        for given in (flags, ["--config", name]):
            command([*given, "--world-size", "2"])
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] and "2 ranks" in said[0]
    assert servers_of(expanded(["--config", file("num-parameter-servers: 3\n")])) == 3
