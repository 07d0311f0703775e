"""merak-launch --emit: the command is checked before anything is written, and mistakes are one line."""

import pytest

from megatron_merak.cli.launch import main
from megatron_merak.job_files.schedulers import SCHEDULERS
from tests.several_hosts import RUN

SOME = "--nodes 4 --gpus-per-node 8"
HF = RUN.replace("\n", " ")
SLURM = f"--emit slurm {SOME}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"--emit slrum {SOME} -- {HF}", "--emit slrum: is no scheduler for which files are written. The n"),
        (f"--emit xyz {SOME} -- {HF}", f"Use one of {', '.join(SCHEDULERS)}."),
        (f"--emit slurm --nodes 4 -- {HF}", "--gpus-per-node (missing): one of the two says how many ranks a host"),
        (f"{SLURM} --nproc-per-node 2 -- {HF}", "--gpus-per-node and --nproc-per-node: "),
        (f"--emit slurm --nodes 0 --gpus-per-node 8 -- {HF}", "--nodes 0: it is below 1. Use at least 1."),
        (f"{SLURM}", "command (missing): ranks have nothing to run."),
        (f"--emit k8s {SOME} -- {HF}", "--image (missing): Kubernetes starts containers."),
        (f"--emit ray {SOME} --image x -- {HF}", "--image x: Ray has no use for it. Leave it out."),
        (f"{SLURM} --gpu A100 -- {HF}", "--gpu A100: Slurm has no use for it."),
        (f"{SLURM} --time 24h -- {HF}", "--time 24h: it is no time."),
        (f"{SLURM} --time 0:05:00 -- {HF}", "--time 0:05:00: ranks have notice 600 s before it."),
        (f"{SLURM} --shared-dir run -- {HF}", "--shared-dir run: hosts share an absolute path."),
        (f"--emit k8s {SOME} --image x --job-name A_b -- {HF}", "--job-name A_b: Kubernetes takes names of lower"),
        (f"{SLURM} -- pretrain-fh --lr 1", "command pretrain-fh: it is none that ranks run. The nearest"),
        (f"{SLURM} -- {HF} --num-parameter-servers 1", "--emit slurm: the ranks of a job with param"),
        (f"--emit slurm --nodes 3 --gpus-per-node 7 -- {HF}", "the number of ranks 21: is not a multiple"),
        (f"{SLURM} -- {HF} --lrr 1", "flag --lrr: is not known. The nearest is --lr."),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(words, told, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert capsys.readouterr() == ("", "")
    assert len(end.value.code.splitlines()) == 1 and told in end.value.code


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{SOME} -- {HF}", ""),
        ("--nodes 8 --gpus-per-node 4 -- " + HF, "size 8 does not divide the 4 ranks of a host"),
        (f"{SOME} -- {HF.replace('--load', '--save-hf')}", "without --save and --load of one directory"),
        (f"{SOME} --restarts 0 -- {HF.replace('--load', '--save-hf')}", ""),
        (f"{SOME} --shared-dir /disk -- {HF}", "--save /shared/run is not in --shared-dir /disk"),
        (f"{SOME} -- {HF} --plan /shared/p.json", "so the command was not checked"),
        (f"{SOME} -- /shared/train.py", "/shared/train.py is not on this machine: it has to be on every host"),
    ],
)  # fmt: skip
def test_what_a_job_lacks_is_said_and_the_file_is_written(words, told, capsys):
    assert main(f"--emit slurm {words}".split()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/usr/bin/env bash\n") and told in err
    assert len(err.splitlines()) == bool(told)


def test_a_script_s_own_flags_are_its_own(capsys, tmp_path):
    """--emit behind a script is the script's."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(f"--nproc-per-node 0 {script} --emit x".split()) == 1
    assert "--nproc-per-node 0: it is below 1" in capsys.readouterr().err


def test_the_first_word_need_not_be_the_flag(capsys):
    assert main(f"{SOME} --emit=slurm -- {HF}".split()) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n")


def test_a_command_may_have_its_whole_name(capsys):
    texts = []
    for name in ("", "merak-"):
        assert main(f"--emit slurm {SOME} -- {name}{HF}".split()) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main("--nproc-per-node 1 merak-pretrain --lrr 1".split()) == 1
    assert "flag --lrr: is not known" in capsys.readouterr().err
