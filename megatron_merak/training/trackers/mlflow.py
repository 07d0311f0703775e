"""A run of MLflow. Its library reads where it goes, as MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME
and MLFLOW_RUN_ID, from the environment.
"""

from collections.abc import Mapping
from typing import Any

from .tracker import Tracker

_LONGEST = 6000  # characters of a parameter that MLflow takes
_AT_ONCE = 100  # parameters of one request


class MLflow(Tracker):
    """Metrics 'kind/name' by iteration.

    settings: of the run, by name.
    """

    name = "MLflow"

    def __init__(self, settings: Mapping[str, Any]):
        import mlflow

        self._library = mlflow
        _be_impatient()
        run = mlflow.start_run()
        self.place = f"MLflow run {run.info.run_name} at {mlflow.get_tracking_uri()}"
        # A run that is resumed has its parameters, which cannot be changed.
        given = {name: str(value)[:_LONGEST] for name, value in settings.items()}
        new = [item for item in given.items() if item[0] not in run.data.params]
        for first in range(0, len(new), _AT_ONCE):
            mlflow.log_params(dict(new[first : first + _AT_ONCE]))

    def note(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        metrics = {f"{kind}/{name}": float(value) for name, value in values.items()}
        # A thread of the library sends them: training does not wait for a server.
        self._library.log_metrics(metrics, step=iteration, synchronous=False)

    def close(self) -> None:
        self._library.flush_async_logging()
        self._library.end_run()


def _be_impatient() -> None:
    """Let the library give a server up after seconds, unless the user has said how long: its own
    defaults take minutes, in which a run would stand still without a word.
    """
    from mlflow import environment_variables

    for variable, value in (
        (environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES, 2),
        (environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT, 10),
    ):
        if not variable.is_set():
            variable.set(value)
