"""``MerakTrainer``: what takes the place of ``transformers.Trainer``."""
