"""``MerakTrainer``, a drop-in replacement for ``transformers.Trainer``."""
