"""Facts about a tokenized corpus."""

import numpy as np

from .indexed_dataset import IndexedDataset


def token_counts(dataset: IndexedDataset) -> np.ndarray:
    """int64[largest id + 1]: how often each token id occurs."""
    counts = np.zeros(0, dtype=np.int64)
    for index in range(len(dataset)):
        more = np.bincount(dataset[index], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Entropy of the distribution of single tokens, in nats: the loss of the best model that
    ignores context.
    """
    counts = token_counts(dataset)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
