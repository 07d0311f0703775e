"""The steps of benchmarks/gpu_session.py, the most valuable first. Imports nothing that has to be
installed.
"""

from dataclasses import dataclass

FIRST = (1,)
SECOND = (2,)
BOTH = (1, 2)
TEXT = "text.bin"  # in a kit: what the small models are trained on, and what a CPU computed
EXPECTED = "expected.json"
PATIENCE = "20"  # seconds that a kernel in a test waits for its peer


@dataclass(frozen=True)
class Step:
    """A process of a session.

    about:    what it measures or proves, in a few words.
    parts:    the calls of the session that run it.
    estimate: seconds that it takes on an H100; with less left it is not started.
    limit:    seconds after which it is ended.
    command:  arguments of Python. {into}: its result, a JSON object whose "figure" is printed.
              {kit}: the kit, or nothing.
    spins:    its kernels wait for other kernels.
    """

    name: str
    about: str
    parts: tuple[int, ...]
    estimate: int
    limit: int
    command: tuple[str, ...]
    spins: bool = False

    @property
    def file(self) -> str:
        """The name of its files, without an ending."""
        return self.name.replace(" ", "_").replace(".", "-")


def _check(what: str) -> tuple[str, ...]:
    return ("benchmarks/gpu_check.py", what, "--into", "{into}")


def _equal(what: str) -> tuple[str, ...]:
    return ("benchmarks/gpu_equal.py", what, "--kit", "{kit}", "--into", "{into}")


def _row(name: str, about: str, estimate: int, limit: int, parts: tuple[int, ...] = FIRST) -> Step:
    """A row of gpu_rows.py: model, contestant, micro-batches."""
    command = ("benchmarks/gpu_worker.py", name, "--into", "{into}")
    return Step(name, about, parts=parts, estimate=estimate, limit=limit, command=command)


def _tests(
    name: str, about: str, estimate: int, limit: int, *what: str, parts=SECOND, spins: bool = False
) -> Step:
    """Tests of tests/gpu; one that is skipped fails."""
    how = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-skip",
        "--patience",
        PATIENCE,
        "--durations",
        "3",
    )
    return Step(
        name,
        about,
        parts=parts,
        estimate=estimate,
        limit=limit,
        command=(*how, *what),
        spins=spins,
    )


_ALL_REDUCE = "tests/gpu/test_all_reduce_gpu.py"
_MAILBOX = "tests/gpu/test_mailbox_gpu.py"
_TRAINING = "tests/gpu/test_training_gpu.py"

STEPS = (
    # 40 s: what is here, and does every kernel compute what it should?
    Step(
        "start",
        "card, versions, clocks, extensions",
        parts=BOTH,
        estimate=8,
        limit=45,
        command=_check("start"),
    ),
    Step(
        "rates",
        "rates of a copy, of products and of attention",
        parts=FIRST,
        estimate=14,
        limit=60,
        command=_check("rates"),
    ),
    Step(
        "kernels",
        "every kernel once against its result on the CPU",
        parts=FIRST,
        estimate=14,
        limit=60,
        command=_check("kernels"),
    ),
    # 60 s: a training step computes what it computes on the CPU
    Step(
        "gpt",
        "training of the GPT of flags equals the CPU's, fp32 and bf16",
        parts=FIRST,
        estimate=22,
        limit=60,
        command=_equal("gpt"),
    ),
    Step(
        "captured",
        "captured Llama equals eager on the GPU, fp32 and bf16",
        parts=FIRST,
        estimate=25,
        limit=70,
        command=_equal("captured"),
    ),
    # 150 s: speed of the entry scripts
    _row("1.7b gpt 8", "1.7B, GPT of flags", 25, 70),
    _row("1.7b captured 8", "1.7B, HuggingFace model", 35, 90),
    _row("7b gpt 8", "Llama-2-7B, or 12 layers of it, GPT of flags", 45, 110),
    _row("7b-12 captured 8", "12 layers of Llama-2-7B, HuggingFace model", 45, 110),
    # 150 to 240 s: one script, three trainers
    _row("qwen hf 4", "Qwen2.5-1.5B, HF Trainer", 25, 70),
    _row("qwen trainer 4", "Qwen2.5-1.5B, MerakTrainer", 30, 80),
    _row("8b-lora hf 4", "Llama-3-8B LoRA, HF Trainer", 35, 80),
    _row("8b-lora trainer 4", "Llama-3-8B LoRA, MerakTrainer", 40, 90),
    _row("qwen hf-compile 4", "Qwen2.5-1.5B, HF Trainer compiled", 60, 110),
    _row("8b-lora hf-compile 4", "Llama-3-8B LoRA, HF Trainer compiled", 60, 110),
    # 60 s: two ranks on one card
    _tests(
        "two ranks, memory",
        "peer memory all-reduce and mailboxes of two processes",
        25,
        60,
        f"{_ALL_REDUCE}::test_processes_exchange_handles",
        f"{_MAILBOX}::test_messages_both_ways",
        parts=FIRST,
        spins=True,
    ),
    _tests(
        "two ranks, training",
        "a pipeline of two ranks equals one, over CUDA IPC",
        30,
        80,
        f"{_TRAINING}::test_equals_one_process_over_peer_memory",
        parts=FIRST,
        spins=True,
    ),
    # the second call
    Step(
        "operations",
        "every operation beside PyTorch, eager and compiled",
        parts=SECOND,
        estimate=45,
        limit=100,
        command=("benchmarks/gpu_ops.py", "--into", "{into}"),
    ),
    _row("1.7b gpt 1", "1.7B, 1 micro-batch", estimate=20, limit=60, parts=SECOND),
    _row("1.7b gpt 16", "1.7B, 16 micro-batches", estimate=25, limit=70, parts=SECOND),
    Step(
        "profile",
        "rates of all shapes, for the planner",
        parts=SECOND,
        estimate=20,
        limit=60,
        command=_check("profile"),
    ),
    _tests(
        "tests of reductions",
        "softmax, losses, flat buffers",
        12,
        60,
        "tests/gpu/test_reductions_gpu.py",
    ),
    _tests(
        "tests of captured", "six families against eager", 20, 70, "tests/gpu/test_captured_gpu.py"
    ),
    _tests("tests of all-reduce", "virtual ranks", 12, 60, _ALL_REDUCE, spins=True),
    _tests(
        "tests of pointwise",
        "norms, activations, rotary",
        12,
        60,
        "tests/gpu/test_pointwise_gpu.py",
    ),
)
