"""Classification: a loss that weighs classes, and metrics, under any layout.

    python examples/classification.py
    torchrun --nproc-per-node 2 examples/classification.py --pipeline_model_parallel_size 2

A small Bert reads a line of Python's standard library byte by byte, without its indentation and its
``#``, and says what it is: code, a string over several lines (documentation, mostly) or a comment.
It is trained twice: by the model's own cross entropy, and by a focal loss that makes up for how
rare a class is, which finds more of the comments and takes more code for them. ``recall`` is the
mean over classes of how many of their lines are found. The last lines say what each came to, about

    ***** classification metrics *****
      cross_entropy_accuracy = 0.8186
      cross_entropy_recall   = 0.6342
      focal_accuracy         = 0.7488
      focal_recall           = 0.6553
"""

import io
import sysconfig
import tokenize
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser

from megatron_merak import MerakArguments, MerakTrainer

DEFAULTS = {
    "output_dir": "runs/classification",
    "max_steps": 160,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "logging_steps": 20,
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
}
KINDS = ["code", "text", "comment"]


def lines_of(modules: list[str], longest: int = 48) -> list[dict]:
    """Each line of some modules as bytes, and its kind: 0 pads, and each byte is 1 more
    than it is.
    """
    samples = []
    for module in modules:
        text = (Path(sysconfig.get_path("stdlib")) / module).read_text()
        kinds = [0] * (text.count("\n") + 2)  # from line 1
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            first, last = token.start[0], token.end[0]
            if token.type == tokenize.STRING and last > first:
                kinds[first : last + 1] = [1] * (last + 1 - first)
            elif token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                kinds[first] = 2
        for kind, line in zip(kinds[1:], text.splitlines(), strict=False):
            if shown := line.strip().lstrip("# ").encode()[:longest]:
                samples.append({"input_ids": [byte + 1 for byte in shown], "labels": kind})
    return samples


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([r["labels"] for r in rows]),
    }


class Focal(MerakTrainer):
    """As for transformers.Trainer, with another loss: what is sure counts less, what is
    rare more.
    """

    weights: tuple[float, ...] = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = F.cross_entropy(outputs.logits.float(), labels, reduction="none")
        weights = torch.tensor(self.weights, device=labels.device)[labels]
        loss = (weights * (1 - torch.exp(-each)) ** 2 * each).mean()
        return (loss, outputs) if return_outputs else loss


def score(prediction) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    recalls = [right[prediction.label_ids == kind].mean() for kind in range(len(KINDS))]
    return {"accuracy": float(right.mean()), "recall": float(sum(recalls) / len(KINDS))}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(KINDS)), label2id={kind: number for number, kind in enumerate(KINDS)}, pad_token_id=0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    data = {
        "train_dataset": lines_of(
            ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py"]
        ),
        "eval_dataset": lines_of(["textwrap.py", "shutil.py"]),
    }
    counts = torch.tensor([sample["labels"] for sample in data["train_dataset"]]).bincount()
    scores = {}
    for name, kind in (("cross_entropy", MerakTrainer), ("focal", Focal)):
        trainer = kind(bert(), args, data_collator=collate, compute_metrics=score, **data)
        # both losses are means of a micro-batch, a step's the mean of these
        trainer.model_accepts_loss_kwargs = False
        trainer.weights = tuple((counts.sum() / counts / len(counts)).tolist())
        trainer.train()
        metrics = trainer.evaluate()
        scores |= {f"{name}_{key}": metrics[f"eval_{key}"] for key in ("accuracy", "recall")}
    trainer.save_model()
    trainer.log_metrics("classification", scores)


if __name__ == "__main__":
    main()
