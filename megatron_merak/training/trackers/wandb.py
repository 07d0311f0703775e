"""A run of Weights & Biases. Its library reads the other settings, such as WANDB_MODE=offline and
WANDB_RUN_ID, from the environment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import LoggingConfig
from ...errors import ConfigError
from .tracker import Tracker


def check_wandb() -> None:
    """Raise ConfigError where a run could not be sent anywhere: there is no key, and it is not to be
    kept on this machine.
    """
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise ConfigError(
            "--report-to",
            "wandb",
            "there is no API key of Weights & Biases",
            "Call wandb login, set WANDB_API_KEY, or keep the run here by WANDB_MODE=offline",
        )


class Wandb(Tracker):
    """Values 'kind/name' by iteration.

    settings: of the run, by name.
    save:     directory of the run's checkpoints; None: there are none.
    """

    name = "Weights & Biases"

    def __init__(self, config: LoggingConfig, settings: Mapping[str, Any], save: str | None):
        import wandb

        beside = None if save is None else str(Path(save, "wandb"))
        directory = config.wandb_save_dir or beside
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            config=dict(settings),
        )

    def note(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=iteration)

    def close(self) -> None:
        self._run.finish()
