"""Write down every dispatched op: which function, in which module, on which views of which storages.

The recorder adds no cost rule and draws no conclusion; `assemble.py` turns its raw entries into the frozen record.
Every tensor it saw is kept alive until the run ends, so a storage's address never names two storages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from introspect.hooks.gradients import Origins
from introspect.hooks.modules import ModuleStack
from introspect.hooks.shadow import Shadow

Stage = Literal["inference", "forward", "backward", "recompute"]


@dataclass(slots=True)
class View:
    """One distinct view of a storage: what `introspect.records.Tensor` is made from."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int


@dataclass(slots=True)
class RawOp:
    """One dispatched call. `args` keeps the call's own arguments for the cost rules; ins and outs index `views`.

    `source`: position in `Recorder.ops` of the forward op whose gradient this one computes; its module is that op's.
    """

    func: torch._ops.OpOverload
    module: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: bool
    source: int | None = None


class ScanDetected(Exception):
    """One module call ran more ops than any layer without a loop over tokens or chunks does."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path or 'the root module'} runs a loop over tokens or chunks")


# Ops that give a tensor another storage: copy.deepcopy of a cache layer is one way to them.
_CHANGES_STORAGE = frozenset(getattr(torch.ops.aten.set_, overload) for overload in torch.ops.aten.set_.overloads())


class Recorder(TorchDispatchMode):
    """Record ops while active. `budget` bounds the ops one module call may run itself (None: unbounded).

    `stage` is set by a training step: its forward, its backward, and a layer recomputed during the backward.
    """

    def __init__(self, stack: ModuleStack, shadow: Shadow, budget: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature has no annotations
        self.ops: list[RawOp] = []
        self.views: list[View] = []
        self.paused = False
        self.stage: Stage = "inference"
        self._origins = Origins()
        self._stack = stack
        self._shadow = shadow
        self._budget = budget
        self._view_of: dict[tuple[Any, ...], int] = {}
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # id -> (kept alive, view)
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # address -> (number, kept alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op (or answer it from shadow values) and append it to `ops`."""
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # a sharded tensor turns itself into ops on its local part, which come here again
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # on the way it asks for the shape of the whole result: nobody computes that
        out = self._shadow.run(func, args, kwargs)
        if self.paused or isinstance(out, FakeTensor):
            return out
        frame = self._stack.top
        if self._budget is not None and self.stage != "backward":
            frame.ops += 1
            if frame.ops > self._budget:
                raise ScanDetected(frame.path)
        ins = tuple([self.view(t) for t in tensors_in(args)] + [self.view(t) for t in tensors_in(kwargs.values())])
        if func in _CHANGES_STORAGE:
            self._seen.pop(id(out), None)
        outs = tuple(self.view(t) for t in tensors_in((out,)))
        self.ops.append(self._entry(func, frame.path, ins, outs, args, kwargs))
        return out

    def _entry(self, func: Any, path: str, ins: Any, outs: Any, args: Any, kwargs: Any) -> RawOp:
        if self.stage == "forward":
            self._origins.note(len(self.ops))
        if self.stage != "backward":
            return RawOp(func, path, ins, outs, args, kwargs, self.stage == "recompute")
        source = self._origins.current()
        path = self.ops[-1 if source is None else source].module  # sums of gradients run between nodes
        return RawOp(func, path, ins, outs, args, kwargs, True, source)

    def view(self, tensor: torch.Tensor) -> int:
        """Index of this tensor's view in `views`; equal views of one storage share an index. Of a sharded parameter it
        is this rank's part."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        known = self._seen.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        storage = tensor.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        shape = tuple(tensor.shape)
        offset = int(tensor.storage_offset())
        key = (number, offset, shape, tensor.stride(), tensor.dtype)
        index = self._view_of.get(key)
        if index is None:
            index = self._view_of[key] = len(self.views)
            self.views.append(View(number, offset, shape, tensor.dtype, storage.nbytes()))
        self._seen[id(tensor)] = (tensor, index)
        return index

    def storage(self, tensor: torch.Tensor) -> int:
        """Number of this tensor's storage, as in `View.storage`."""
        return self.views[self.view(tensor)].storage


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among `values`, looking into lists and tuples, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found
