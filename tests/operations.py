"""The tensor operations that code executes, and those that a CUDA graph cannot capture."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Reading values on the host, copying tensors made from Python numbers to the device, and shapes
# that depend on values.
UNCAPTURABLE = {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal"}


class RecordOperations(TorchDispatchMode):
    """The names of all tensor operations inside the block."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
