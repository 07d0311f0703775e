"""Megatron-LM's way to tokenize JSON lines, from megatron-core's own parts."""

import argparse
import json
import multiprocessing
from typing import Any

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

CHUNK = 32  # documents that a worker gets at a time


class Encoder:
    """Each process has its own tokenizer."""

    tokenizer: Any = None

    def __init__(self, model: str, append_eod: bool):
        self.model = model
        self.append_eod = append_eod

    def start(self) -> None:
        Encoder.tokenizer = tokenizer(self.model)

    def encode(self, line: str) -> tuple[list[int], list[int]]:
        ids = Encoder.tokenizer.tokenize(json.loads(line)["text"])
        if ids and self.append_eod:
            ids.append(Encoder.tokenizer.eod)
        return ids, [len(ids)] if ids else []


def tokenizer(model: str) -> Any:
    # as that tool builds it: include_special_tokens is off, transformers picks the fast one
    return MegatronTokenizer.from_pretrained(
        model, metadata_path={"library": "huggingface"}, use_fast=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input")
    parser.add_argument("--output-prefix")
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--append-eod", action="store_true")
    options = parser.parse_args()
    encoder = Encoder(options.tokenizer_model, options.append_eod)
    dtype = DType.optimal_dtype(tokenizer(options.tokenizer_model).vocab_size)
    prefix = f"{options.output_prefix}_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with (
        open(options.input, encoding="utf-8") as lines,
        multiprocessing.Pool(options.workers, initializer=encoder.start) as pool,
    ):
        for ids, lengths in pool.imap(encoder.encode, lines, CHUNK):
            builder.add_document(ids, lengths)
        pool.close()
        pool.join()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main()
