"""Train an unmodified HuggingFace Llama with tensor and pipeline parallelism, and use it with plain
transformers.

    python examples/finetune.py [--max-steps 200] [--directory runs/finetune]

makes a corpus of the source code of Python's standard library, starts itself on 4 ranks (2 tensor x
2 pipeline parallel), where ``MerakTrainer`` trains, evaluates and saves; then it opens the result
with ``from_pretrained``, compares the loss with the trainer's, and writes a few lines of Python.
Run again, it resumes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import megatron_merak as mm
from megatron_merak.data.indexed_dataset import IndexedDataset
from megatron_merak.errors import MerakError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stdlib_corpus

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200
VOCABULARY = 4096
LENGTH = 128
EVALUATED = 64
PROMPTS = ("def __init__(self,", "import os\nimport", "    for key, value in")


class Blocks(Dataset):
    """The corpus as one long text, cut into blocks of LENGTH tokens: the last EVALUATED ones, or
    all before them.
    """

    def __init__(self, prefix: Path, evaluation: bool):
        documents = IndexedDataset(prefix)
        tokens = torch.cat(
            [torch.from_numpy(documents[i].astype("int64")) for i in range(len(documents))]
        )
        blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
        self.blocks = blocks[-EVALUATED:] if evaluation else blocks[:-EVALUATED]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def train(directory: Path, max_steps: int) -> None:
    """One rank of the job: what a script for transformers.Trainer does."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "corpus" / "tokenizer.json"))
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with mm.init_empty_weights():  # nothing is allocated: every rank draws its own part
        model = AutoModelForCausalLM.from_config(config)
    args = mm.MerakArguments(
        output_dir=str(directory / "checkpoints"),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=8,
        max_steps=max_steps,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=1,
        use_cpu=not torch.cuda.is_available(),
    )
    corpus = directory / "corpus" / "stdlib_text_document"
    trainer = mm.MerakTrainer(
        model,
        args,
        train_dataset=Blocks(corpus, False),
        eval_dataset=Blocks(corpus, True),
        processing_class=tokenizer,
    )
    trainer.train(
        resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*/trainer_state.json"))
    )
    metrics = trainer.evaluate()
    trainer.save_model(str(directory / "model"))
    if trainer.is_world_process_zero():
        (directory / "eval.json").write_text(json.dumps(metrics))
    trainer.end()


@torch.no_grad()
def reload(directory: Path, entropy: float, steps: int) -> int:
    """Open the model with plain transformers; status 1 when its loss is not the trainer's, or it
    learned too little in as many steps as usual.
    """
    model = AutoModelForCausalLM.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    blocks = Blocks(directory / "corpus" / "stdlib_text_document", True).blocks
    losses = [model(input_ids=part, labels=part).loss.item() for part in blocks.split(8)]
    ours, theirs = (
        json.loads((directory / "eval.json").read_text())["eval_loss"],
        sum(losses) / len(losses),
    )
    print(
        f"\nevaluation loss {ours:.6f} in the trainer, {theirs:.6f} in plain transformers", end="; "
    )
    print(f"{entropy - theirs:.3f} below the unigram entropy of {entropy:.3f}\n")
    torch.manual_seed(0)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = tokenizer.decode(model.generate(ids, max_new_tokens=32, do_sample=True, top_k=10)[0])
        print("   ", text.replace("\n", "\n    "), "\n    ---")
    if abs(ours - theirs) >= 1e-4 * theirs:
        print("error: the two losses differ.", file=sys.stderr)
        return 1
    if theirs < entropy - 1:
        return 0
    print("It has learned less than a nat of context: raise --max-steps.", file=sys.stderr)
    return int(steps >= STEPS)


def main() -> int:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--max-steps", type=int, default=STEPS, help="optimizer steps")
    flags.add_argument(
        "--directory", type=Path, default=Path("runs/finetune"), help="where everything is written"
    )
    flags.add_argument("--rank-of-the-job", action="store_true", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.max_steps < 1:
        flags.error(f"--max-steps {options.max_steps}: it is below 1. Give at least 1.")
    try:
        if options.rank_of_the_job:
            train(options.directory, options.max_steps)
            return 0
        facts = stdlib_corpus.build(options.directory / "corpus", VOCABULARY, 8_000_000)
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*launcher, __file__, "--rank-of-the-job", *sys.argv[1:]], env=environment
    )
    return done.returncode or reload(
        options.directory, facts["unigram_entropy_nats"], options.max_steps
    )


if __name__ == "__main__":
    sys.exit(main())
