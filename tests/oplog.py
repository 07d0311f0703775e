"""Which operations ran, in their order: collectives among the arithmetic, forward and backward."""

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "addmm_", "add_rows_")


class OpLog(TorchDispatchMode):
    """While entered, ``names`` collects every collective ("allreduce_") and every matrix product
    ("mm", "addmm_").
    """

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" or name in PRODUCTS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> list[str]:
        return [name for name in self.names if name not in PRODUCTS]
