"""The files of examples/multi_node that ``merak-launch --emit`` writes, and the pages that show them.

python -m tests.several_hosts        writes both
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from megatron_merak.cli.launch import main
from tests.pages import DOCS, ROOT

FOLDER = ROOT / "examples" / "multi_node"
PAGE = DOCS / "several_hosts.md"
RUN = """pretrain-hf --model /shared/model --data-path /shared/corpus_text_document --seq-length 4096
    --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --lr 3e-4 --bf16
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2
    --save /shared/run --load /shared/run --save-interval 500"""
HOSTS = "--nodes 4 --gpus-per-node 8 --shared-dir /shared"
IMAGE = "--image registry.example/megatron-merak:0.1.0"
# file -> options of merak-launch
WRITTEN = {
    "job.slurm": f"--emit slurm {HOSTS} --time 24:00:00",
    "k8s.yaml": f"--emit k8s {HOSTS} {IMAGE}",
    "kubeflow.yaml": f"--emit kubeflow {HOSTS} {IMAGE}",
    "skypilot.yaml": f"--emit skypilot {HOSTS} {IMAGE}",
    "ray_job.py": f"--emit ray {HOSTS}",
    "node.sh": f"--emit shell {HOSTS}",
}
SHOWN = re.compile(r"(<!-- example: (\S+) -->\n\n```\w*\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def emitted(words: str) -> str:
    """What merak-launch prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(words)) == 0
    return out.getvalue()


def example(name: str) -> str:
    """What a file of the folder has to be."""
    return emitted(f"{WRITTEN[name]} -- {RUN}")


def page() -> str:
    """The page with the files of the folder as they are."""

    def shown(match: re.Match) -> str:
        return match[1] + (FOLDER / match[2]).read_text(encoding="utf-8") + match[4]

    return SHOWN.sub(shown, PAGE.read_text(encoding="utf-8"))


def write() -> None:
    for name in WRITTEN:
        (FOLDER / name).write_text(example(name), encoding="utf-8")
        Path(FOLDER / name).chmod(0o755 if name == "node.sh" else 0o644)
    if PAGE.exists():
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
