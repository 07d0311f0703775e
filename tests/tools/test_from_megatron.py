"""merak-from-megatron: launch scripts are read without running them, and what they ask for is ours,
or told.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_merak.arguments import build_parser, read
from megatron_merak.cli.converted import converted
from megatron_merak.cli.from_megatron import main
from megatron_merak.cli.launch_script import find

SCRIPTS = Path(__file__).with_name("megatron")
SMALL = """--num-layers 32 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --lr 1e-3 --min-lr 0 --lr-decay-style linear --weight-decay 0 --adam-beta2 0.9"""


def converted_of(flags: str, ranks: int | None = None):
    return converted(shlex.split(f"{SMALL} {flags}"), ranks)


def launched(capsys, name: str) -> tuple[int, list[str], list[str]]:
    """The exit status for a script, its comments, and the words of the command."""
    status = main([str(SCRIPTS / name)])
    lines = capsys.readouterr().out.splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in lines
    command = [line for line in lines if line not in comments and not line.startswith("export ")]
    return status, comments, shlex.split(" ".join(line.removesuffix("\\") for line in command))


def listed(comments: list[str], title: str) -> list[str]:
    """The flags of a section of the report."""
    lines = comments[comments.index(f"# {title}:") + 1 :]
    end = next((at for at, line in enumerate(lines) if not line.startswith("#   ")), len(lines))
    return [line.removeprefix("#   ").split(":")[0] for line in lines[:end]]


def test_a_script_of_gpt_3(capsys):
    status, comments, words = launched(capsys, "gpt3.sh")
    at = words.index("pretrain") + 1
    launcher = "torchrun --nproc_per_node 8 --nnodes 16 --master_addr localhost --master_port 6000 -m megatron_merak"
    assert " ".join(words[: at - 1]) == launcher
    config = read(build_parser(), words[at:])[0]
    assert (config.model.num_layers, config.train.global_batch_size, config.optimizer.lr) == (
        96,
        1536,
        6e-5,
    )
    assert config.train.rampup_batch_size == ("16", "16", "5859375") and config.train.fp16
    assert config.parallel.pipeline_schedule == "interleaved"
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 3
    assert (
        config.checkpoint.save == "$1"
        and config.data.data_path == ("$5",)
        and config.logging.tensorboard_dir == "$2"
    )
    assert status == 0
    data = config.data
    assert (data.tokenizer, data.vocab_file, data.merge_file) == (
        "GPT2BPETokenizer",
        "$3",
        "$4",
    )
    assert "#   --attention-backend auto: torch chooses the attention kernel" in comments
    assert "# note: defaults of the script are used: HOST=localhost" in comments


def test_a_script_of_llama_3_in_fp8(capsys):
    status, comments, words = launched(capsys, "llama3_fp8.sh")
    assert words[:5] == ["torchrun", "--nproc-per-node=8", "-m", "megatron_merak", "pretrain"]
    config = read(build_parser(), words[5:])[0]
    assert (config.model.ffn_hidden_size, config.model.query_groups, config.model.rotary_base) == (
        14336,
        8,
        1000000,
    )
    assert (
        config.train.fp8_format == "hybrid"
        and config.train.bf16
        and config.data.mock_data
        and config.data.split == "99,1,0"
    )
    assert config.parallel.sharding == "optim" and config.parallel.grad_reduce_in_bf16
    assert (
        config.checkpoint.load == "checkpoints/llama3"
        and config.logging.tensorboard_dir == "logs/llama 3"
    )
    assert config.data.data_cache_path == "${PWD}/cache" and not config.train.fp16
    config.validate(8)
    assert status == 1
    assert listed(comments, "changes no numbers, and is lost") == [
        "--manual-gc",
        "--empty-unused-memory-level 1",
        "--profile",
        "--profile-step-start 4",
        "--profile-step-end 6",
        "--ckpt-format torch_dist",
    ]
    assert listed(comments, "CHANGES NUMBERS") == [
        "--attention-backend fused",
        "--apply-layernorm-1p",
        "--exit-duration-in-mins 235",
        "--fp8-amax-history-len 1024",
        "--fp8-amax-compute-algo max",
        "--fp8-param-gather",
    ]
    dropped = "#   --use-rotary-position-embeddings: --position-embedding-type rope says the same"
    assert dropped in comments and config.data.tiktoken_pattern == "v2"


def test_a_script_of_a_mixture(capsys):
    status, comments, words = launched(capsys, "mixtral.sh")
    assert status == 0
    config = read(build_parser(), words[words.index("pretrain") + 1 :])[0]
    config.validate(64)
    model = config.model
    assert (model.num_experts, model.moe_router_topk, model.expert_ffn_size) == (8, 2, 14336)
    assert model.moe_aux_loss_coeff == 1e-2
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size) == (1, 8)
    assert parallel.pipeline_model_parallel_size == 4
    assert listed(comments, "renamed") == ["pretrain_gpt.py -> -m megatron_merak pretrain"]


def test_a_script_that_can_be_honoured_ends_with_status_0(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text(
        f"FLAGS='{SMALL}'\nexec torchrun --nproc-per-node 2 pretrain_gpt.py $FLAGS --bf16 --use-mcore-models\n"
    )
    assert main([str(script)]) == 0
    said = capsys.readouterr().out
    assert (
        "\nexec torchrun --nproc-per-node 2 -m megatron_merak pretrain \\\n" in said
        and "CANNOT" not in said
    )


@pytest.mark.parametrize(
    "text", ["torchrun pretrain_bert.py --bf16", "", "echo torchrun pretrain_gpt.py"]
)
def test_a_script_without_the_program_ends_with_status_2(text, tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text(text)
    assert main([str(script)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "it has no command that starts pretrain_gpt.py" in said.err


def test_a_script_that_cannot_be_read_ends_with_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "none.sh")]) == 2
    assert (
        "none.sh: it cannot be read (No such file or directory). Name a shell script."
        in capsys.readouterr().err
    )


RUN = "torchrun pretrain_gpt.py"


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (f"X=2\nif [ $X = 1 ]; then A=--bf16; else A=--fp16; fi\n{RUN} $A", "--fp16"),
        (f"X=2\nif [[ $X == 1 ]] || [[ $X -gt 1 ]]\nthen\n A=--bf16\nfi\n{RUN} $A", "--bf16"),
        (
            f"X=2\nif [[ $X == 1 || -z $X ]]; then A=a; elif [[ $X != 3 && -n $X ]]; then A=b; else A=c; fi\n{RUN} $A",
            "b",
        ),
        (
            f"X=2\nif [[ $X == 1 ]]; then if [[ a == a ]]; then A=a; else A=b; fi; else A=c; fi\n{RUN} $A",
            "c",
        ),
        (f"A=a\nif [ 1 = 2 ]; then A=b; fi\nif ! [[ $A == b ]]; then {RUN} $A; fi", "a"),
        (f'A="{RUN} --bf16"\necho $A\neval $A', "--bf16"),
        (f'srun -N 2 bash -c "cd /x && {RUN} --bf16"', "--bf16"),
        (f"{RUN} --bf16\npython other.py --fp16 &", "--bf16"),
    ],
)
def test_the_command_that_starts_the_program_is_found(script, flags):
    assert " ".join(find(script).flags) == flags


def test_what_cannot_be_decided_is_told_with_what_it_decides():
    script = f"if [ $X = 1 ]; then A=1; fi\nfor i in $Y; do B=$i; done\n[ -f z ] && C=${{D:-d}}\n{RUN} $A $C"
    launch = find(script)
    assert launch.doubts == ("$C: line 3: -f z is not known here",)
    assert launch.needs == {"X": ("it decides $A (line 1: $X is not known here)",)}
    assert launch.notes == ("defaults of the script are used: D=d",)
    asks = find(f"if [ ! -d x ]; then mkdir x; fi\nif [ -z $X ]; then echo no; fi\n{RUN}")
    # they decide nothing
    assert (asks.doubts, asks.needs, asks.notes) == ((), {}, ())


def run_on(tmp_path, capsys, script: str, *words: str) -> tuple[int, list[str]]:
    """The exit status for a script, and what is printed."""
    (tmp_path / "train.sh").write_text(script)
    status = main([str(tmp_path / "train.sh"), *words])
    return status, capsys.readouterr().out.splitlines()


def test_values_are_asked_for_by_name_and_taken(tmp_path, capsys):
    script = (
        f'if [ -z "$X" ]; then S=1; else S=$X; fi\n[ $1 = long ] && T=--bf16\n{TRAIN} --seed $S $T'
    )
    status, lines = run_on(tmp_path, capsys, script)
    assert status == 1 and lines[lines.index("# NEEDS A VALUE:") + 1 :][:2] == [
        "#   X: it decides $S (line 1: $X is not known here). Give --set X=VALUE",
        "#   the script's arguments: it decides $T (line 2: $1 is not known here). "
        "Give them behind the script's name",
    ]
    status, lines = run_on(tmp_path, capsys, script, "long", "--set", "X=7")
    assert status == 0 and lines[-1].endswith("--seed 7 --bf16")
    status, lines = run_on(tmp_path, capsys, script, "short", "--set", "X")
    assert status == 0 and lines[-1].endswith("--seed 1 $T")


@pytest.mark.parametrize("word", ["", "=1", "2=3", "a b=1"])
def test_what_is_set_has_a_name(word, tmp_path, capsys):
    (tmp_path / "train.sh").write_text(TRAIN)
    assert main([str(tmp_path / "train.sh"), "--set", word]) == 2
    told = capsys.readouterr().err
    assert f"--set {word}: has no name of a variable. Write NAME=VALUE." in told


def test_where_only_logging_is_lost_the_status_is_0(tmp_path, capsys):
    lost = "--log-timers-to-tensorboard --log-params-norm --timing-log-level 2 --manual-gc"
    status, lines = run_on(tmp_path, capsys, f"{TRAIN} {lost} --data-impl mmap")
    assert status == 0 and "CHANGES NUMBERS" not in str(lines)
    at = lines.index("# changes no numbers, and is lost:")
    assert [line.split(":")[0] for line in lines[at + 1 :][:4]] == [
        "#   --log-timers-to-tensorboard",
        "#   --log-params-norm",
        "#   --timing-log-level 2",
        "#   --manual-gc",
    ]
    assert (
        "#   --data-impl mmap: it was Megatron-LM's, and data files are mapped into memory" in lines
    )
    status, lines = run_on(tmp_path, capsys, f"{TRAIN} {lost} --fp8-margin 1")
    assert status == 1 and "# CHANGES NUMBERS:" in lines


def test_digits_may_have_underscores_between_them(tmp_path, capsys):
    script = f"{TRAIN} --train-samples 220_000_000 --seed 1_2"
    status, lines = run_on(tmp_path, capsys, script)
    assert status == 0 and "--train-samples 220_000_000" in str(lines)
    status, lines = run_on(tmp_path, capsys, f"{TRAIN} --seed 1__2")
    assert status == 1 and "#   --seed 1__2: it is not a whole number" in str(lines)


TRAIN = f"torchrun --nproc-per-node 2 pretrain_gpt.py {' '.join(SMALL.split())}"
# Scripts that are followed to the end: the command gets the flags that the script gives, as bash
# runs both.
FOLLOWED = {
    "computed": f"S=$(($(nproc)*2))\nlet S=$S+1\n{TRAIN} --seed $S",
    "sparse": f"A=()\nA[8]=--bf16\n{TRAIN} ${{A[@]}}",
    "a function": f"run() {{ {TRAIN} --seed $1; }}\nrun 4",
    "a command": f"G=4\n{TRAIN} --seed $(expr $G \\* 2)",
    "a pattern for a letter": f"G=4\n{TRAIN} --save ${{G/?/x}}",
    "arithmetic": f"TP=2; M=4\nB=$((TP*M))\nlet K=TP+10/4\n{TRAIN} --global-batch-size $((B*2)) --seed $K",
    "operators": f"N=run-7b\n{TRAIN} --save ck/${{N%%-*}} --tensorboard-dir tb/${{N//-/_}} --seed ${{#N}}",
    "more operators": f"N=a.b.c\n{TRAIN} --save ${{N#*.}}/${{N##*.}}/${{N%.*}}/${{N:2:3}}/${{N^^}}/${{Z:+no}}",
    "arithmetic condition": f"U=0\nif (( U == 0 )); then P=--bf16; else P=--fp16; fi\n{TRAIN} $P",
    "a pattern": f"M=7b-chat\nif [[ $M == 7b* ]]; then P=--swiglu; else P=--disable-bias-linear; fi\n{TRAIN} $P",
    "a quoted pattern": f"M=7b\nif [[ $M == '7b*' ]]; then P=--swiglu; else P=--disable-bias-linear; fi\n{TRAIN} $P",
    "and, or": f"A=0\nP=--bf16\n[[ $A -eq 1 ]] && P=--fp16\n[ $A = 0 ] || P=--swiglu\n{TRAIN} $P",
    "elements": f"A=(--bf16)\nA[1]=--swiglu\nA[0]=--fp16\n{TRAIN} ${{A[@]}} --seed ${{#A[@]}}",
    "readonly": f"readonly X=5\nunset X 2>/dev/null || true\n{TRAIN} --clip-grad ${{X:-1.0}}",
    "unset": f"X=5\nunset X\n{TRAIN} --clip-grad ${{X:-1.0}} --seed 3$X",
    "arguments": f"set -- --bf16 --save 'a b'\n{TRAIN} \"$@\" --seed $#",
    "quotes": f"V=1\n{TRAIN} --save '$V' --tensorboard-dir \"\\$V/$V\"",
    "the environment": f'export SEED=7\n{TRAIN} --seed $SEED --save $HOME/x --tensorboard-dir "${{HOME}}/a b"',
    "a shell": f"export SEED=7\nO=out\nbash -c '{TRAIN} --seed $SEED --save \"$HOME/x y\"'",
    "a shell in double quotes": f'O=out\nbash -c "{TRAIN} --save $O/$(id -u) --tensorboard-dir \\$HOME/\\$((1+1))"',
    "eval": f'F="--save a --seed 4"\nCMD="{TRAIN} \\$F"\neval $CMD',
    "a condition that starts it": f"if {TRAIN} --seed 5; then echo done; fi",
}


def _run(script: str, folder: Path) -> list[list[str]]:
    """The words of each torchrun that bash starts for a script."""
    (folder / "bin").mkdir(exist_ok=True)
    tool = folder / "bin" / "torchrun"
    tool.write_text(
        f'#!/bin/bash\nprintf "%s\\0" "$@" >> {folder}/words\nprintf "\\n" >> {folder}/words\n'
    )
    tool.chmod(0o755)
    (folder / "words").unlink(missing_ok=True)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": "/home/me"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\0")[:-1] for line in (folder / "words").read_text().splitlines()]


def _flags(words: list[str]) -> list[str]:
    """Flags with their values, in order of their names."""
    at = next(
        place
        for place, word in enumerate(words)
        if word.endswith("pretrain_gpt.py") or word == "pretrain"
    )
    joined = shlex.join(words[at + 1 :])
    return [
        " ".join(words[:at]).partition(" -m ")[0].strip(),
        *sorted(re.split(r" (?=--)", joined)),
    ]


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_what_bash_makes_of_it(name, tmp_path, capsys):
    (tmp_path / "train.sh").write_text(FOLLOWED[name])
    assert main([str(tmp_path / "train.sh")]) == 0, capsys.readouterr().out
    ours, theirs = _run(capsys.readouterr().out, tmp_path), _run(FOLLOWED[name], tmp_path)
    assert len(ours) == len(theirs) == 1 and _flags(ours[0]) == _flags(theirs[0])


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            f"source common.sh\n{TRAIN}",
            "line 1: source common.sh is not read, and may set variables",
        ),
        (
            f"case $X in a) P=--bf16;; esac\n{TRAIN} $P",
            "X: it decides $P (line 1: $X is not known here). Give --set X=VALUE",
        ),
        (
            f"f() {{ echo 4; }}\n{TRAIN} --seed $(f)",
            "$(f): $(f) calls a function of the script",
        ),
        (f"{TRAIN} --seed 1\n{TRAIN} --seed 2", "line 1: this command starts pretrain_gpt.py too"),
        (
            f"grep -q x y && P=--bf16\n{TRAIN} $P",
            "$P: line 1: whether grep -q x y succeeds is not known here",
        ),
        (f"read X\n{TRAIN} --seed $X", "$X: what is read is not known here"),
    ],
)
def test_what_is_not_followed_is_told_and_ends_with_status_1(script, told, tmp_path, capsys):
    (tmp_path / "train.sh").write_text(script)
    assert main([str(tmp_path / "train.sh")]) == 1
    said = capsys.readouterr().out
    assert told in said


def test_a_word_of_another_command_starts_nothing():
    assert find(f"{TRAIN} --seed 1\nls pretrain_gpt.py\ncp pretrain_gpt.py x").flags[-1] == "1"


@pytest.mark.parametrize(
    ("flags", "now"),
    [
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", 4),
        ("--num-layers-per-virtual-pipeline-stage=2 --pipeline-model-parallel-size=4", 4),
    ],
)
def test_layers_of_virtual_stages_become_stages_of_ranks(flags, now):
    result = converted_of(flags)
    words = [str(each) for each in result.flags]
    assert (
        f"--num-virtual-stages-per-pipeline-rank {now}" in words
        and "--pipeline-schedule interleaved" in words
    )
    assert result.refused == [] and result.renamed[0][1].endswith(f" layers = {now}")


EXPERTS = "--num-experts 8 --swiglu --disable-bias-linear --expert-model-parallel-size 4"


@pytest.mark.parametrize(
    "flags", ["", "--sequence-parallel", "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_ranks_that_divide_experts_are_kept(flags):
    result = converted_of(f"{EXPERTS} {flags} --moe-grouped-gemm", ranks=8)
    assert result.refused == [] and result.renamed == []
    assert "--expert-model-parallel-size 4" in map(str, result.flags)


def test_other_numbers_of_ranks_that_divide_experts_are_told():
    fewer = EXPERTS.replace("size 4", "size 2")
    result = converted_of(f"{fewer} --tensor-model-parallel-size 4 --sequence-parallel", ranks=8)
    ((given, told),) = result.refused
    assert given == "--expert-model-parallel-size 2" and "over the 4 tensor-parallel ranks" in told


def test_layers_of_virtual_stages_that_do_not_divide_are_refused():
    result = converted_of(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5"
    )
    assert [before for before, _ in result.refused] == ["--num-layers-per-virtual-pipeline-stage 5"]
    one = converted_of(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 16"
    )
    assert one.refused == [] and one.dropped[0][1].startswith(
        "there is one stage per pipeline rank"
    )


def test_virtual_stages_ask_for_the_interleaved_schedule():
    result = converted_of(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2
    )
    assert "--pipeline-schedule interleaved" in map(str, result.flags) and result.refused == []


def test_defaults_of_megatron_that_change_numbers_are_written_out():
    bare = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3"
    result = converted(bare.split())
    words = [word for each in result.flags for word in (each.name, *each.values)]
    optimizer = read(build_parser(), words)[0].optimizer
    assert (optimizer.min_lr, optimizer.lr_decay_style) == (0.0, "linear")
    assert (optimizer.weight_decay, optimizer.adam_beta2) == (0.01, 0.999)
    assert [before for before, _ in result.added] == [
        "--min-lr 0.0",
        "--lr-decay-style linear",
        "--weight-decay 0.01",
        "--adam-beta2 0.999",
    ]


def test_a_second_name_of_a_setting_has_to_say_the_same():
    result = converted_of("--use-rotary-position-embeddings --position-embedding-type none")
    assert result.refused == [
        (
            "--use-rotary-position-embeddings",
            "--position-embedding-type none says otherwise. Use one of the two",
        )
    ]
    alone = converted_of("--use-rotary-position-embeddings --persistent-save-interval 5")
    assert alone.renamed == [
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--persistent-save-interval 5", "--save-interval 5"),
    ]


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        (
            "--tokenizer-type BertWordPieceCase",
            "--tokenizer-type BertWordPieceCase",
            "it is a choice of Megatron-LM that",
        ),
        ("--swiglu true", "--swiglu true", "it is a switch. Give it alone"),
        ("--clip-grad -1", "--clip-grad -1", "it is out of range. Use a value at least 0"),
        ("--clip-grad", "--clip-grad", "it needs one value. Give its value after it"),
        (
            "--my-own-flag 3",
            "--my-own-flag 3",
            "it is no flag of Megatron-LM or of merak-pretrain. ",
        ),
        ("--trust-remote-code", "--trust-remote-code", "there is no such setting"),
    ],
)
def test_what_cannot_be_honoured_is_told_with_what_follows(flags, before, after):
    ((name, told),) = converted_of(flags).refused
    assert name == before and told.startswith(after)


def test_what_the_settings_would_be_refused_for_on_so_many_ranks_is_told():
    assert converted_of("--tensor-model-parallel-size 4", 8).refused == []
    ((name, _),) = converted_of("--tensor-model-parallel-size 4", 6).refused
    assert name == "the number of ranks 6"


def test_variables_that_are_not_known_stay_and_numbers_in_them_are_not_guessed():
    small = " ".join(SMALL.split())
    launch = find(f"{RUN} {small} --global-batch-size $BATCH --optimizer ${{OPT}} --bf16 $MORE")
    result = converted(launch.flags, 4)
    assert [launch.marks.shown(str(each)) for each in result.flags[-4:]] == [
        "--global-batch-size $BATCH",
        "--optimizer ${OPT}",
        "--bf16",
        "$MORE",
    ]
    assert result.refused == []
    ((name, told),) = result.notes
    assert launch.marks.shown(name) == "$MORE"
    assert told == "it is not known here, and what it holds is not converted"


def test_a_command_that_is_an_argument_of_a_shell_stays_one(tmp_path, capsys):
    script = tmp_path / "train.sh"
    flags = " ".join(SMALL.split())
    script.write_text(
        f'LOG=`date +%F`\nCMD="cd \\"/a b\\" && python -u `pwd`/pretrain_gpt.py {flags} --save $(pwd) | tee x"\n'
        'srun --output=$HOME/$LOG.log sh -c "$CMD"\n'
    )
    assert main([str(script)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-3:] == [
        'LOG="`date +%F`"',
        'CMD_2="$(pwd)"',
        f"srun --output=$HOME/$LOG.log sh -c \"cd '/a b'; python -u -m megatron_merak pretrain {flags} --save $CMD_2\"",
    ]
