"""Does the unmodified model train as it is? And its loss and gradients, which every parallel run is
measured against.

Run ``python -m tests.zoo.eager [PATTERN ...]`` for a survey of all types.
"""

import fnmatch
import multiprocessing
import resource
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from .heads import heads
from .specimen import Specimen, tiny

TIMEOUT, MEMORY = 60, 6 << 30  # of one type: seconds, bytes


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if hasattr(output, "get") else output[0]
    if loss is None:
        raise ValueError("the model gives no loss for this batch")
    return loss


def reference(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and the gradient of every parameter that has one, by name."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model(**batch))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def trains(specimen: Specimen) -> str:
    """Why the model does not train eagerly from this batch; empty when it does."""
    model = specimen.model()
    loss, gradients = reference(model, specimen.batch())
    if loss.dim() or not loss.isfinite():
        return f"its loss is {loss.tolist()}"
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if bad:
        return f"the gradient of {bad[0]} is not finite"
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    moved = [name for name in trainable if name in gradients and gradients[name].any()]
    if 2 * len(moved) < len(trainable):
        return f"only {len(moved)} of {len(trainable)} parameters have a gradient"
    return ""


def attempt(model_type: str) -> str:
    try:
        specimen = tiny(model_type)
    except LookupError as error:
        return f"FAIL {error}"
    return f"ok [{specimen.recipe}] {sum(p.numel() for p in specimen.model().parameters()):,} parameters"


def survey(*patterns: str) -> None:
    """One process per type, so that one that asks for all memory or all time ends alone."""
    count: Counter[str] = Counter()
    causal: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")
    for model_type, head in heads().items():
        if not any(fnmatch.fnmatch(model_type, pattern) for pattern in patterns):
            continue
        start = time.perf_counter()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=lambda t=model_type, pipe=theirs: (limit_memory(), pipe.send(attempt(t)))
        )
        process.start()
        theirs.close()
        try:
            text = ours.recv() if ours.poll(TIMEOUT) else f"FAIL not done after {TIMEOUT} s"
        except EOFError:
            text = "FAIL its process died"
        process.kill()
        process.join()
        good = text.startswith("ok")
        count[f"{head.mapping} {'ok' if good else 'fail'}"] += 1
        causal["train" if good else "do not"] += head.causal
        print(
            f"{head.mapping:26} {model_type:28} {time.perf_counter() - start:5.2f} s  {text}",
            flush=True,
        )
    print(dict(sorted(count.items())))
    print(f"causal language models: {dict(causal)}")


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    survey(*(sys.argv[1:] or ["*"]))
