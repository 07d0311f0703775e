"""From datasets to micro-batches, and from outputs to predictions."""
