"""Event files of TensorBoard."""

from collections.abc import Mapping

from .tracker import Tracker


class TensorBoard(Tracker):
    """Scalars 'kind/name'.

    directory: of the event files.
    """

    name = "TensorBoard"

    def __init__(self, directory: str):
        from torch.utils.tensorboard import SummaryWriter

        self.place = directory
        self._writer = SummaryWriter(directory)

    def note(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, iteration)

    def close(self) -> None:
        self._writer.close()
