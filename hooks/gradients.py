"""Which forward op a gradient op belongs to, and which operand's gradient each of its products computes.

No module hook fires in a backward pass, and a gradient product's shapes alone do not say whose it is. Autograd numbers
its nodes as the forward pass makes them and names the running one, which ties every backward op to one forward op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from introspect.records import Gemm, Op, Tensor

_FORMING = ("cast", "copy", "layout", "elementwise")  # kinds through which a weight stays a weight: float(), scaling


class Origins:
    """Forward ops by the number of the autograd node that each of them made."""

    def __init__(self) -> None:
        self._ops: dict[int, int] = {}

    def note(self, position: int) -> None:
        """The forward op at `position` is being dispatched: the newest node is its own (or an earlier op's)."""
        self._ops.setdefault(torch._C._autograd._get_sequence_nr() - 1, position)

    def current(self) -> int | None:
        """Position of the forward op whose node runs now; None between nodes and while a gradient is accumulated."""
        node = torch._C._current_autograd_node()
        return None if node is None else self._ops.get(node._sequence_nr())


def mark_gradients(ops: list[Op], sources: Sequence[int | None], tensors: tuple[Tensor, ...]) -> None:
    """Set kind and direction of the products of backward ops, in place.

    A product that reads the weight of its forward op computes dX, one that does not computes dW. Where the forward op
    multiplies two activations, both gradients are of activations: dX.

    Args:
        ops: the run's ops in order.
        sources: for each op the forward op it belongs to; None for all but gradient ops.
        tensors: the record's tensor table.
    """
    if not any(source is not None for source in sources):
        return
    weights = _weight_storages(ops, sources, tensors)
    for position, source in enumerate(sources):
        op = ops[position]
        if source is not None and op.gemms and ops[source].gemms:
            gemms = tuple(_as_gradient(gemm, ops[source].gemms[0], weights, tensors) for gemm in op.gemms)
            ops[position] = replace(op, gemms=gemms)


def _weight_storages(ops: list[Op], sources: Sequence[int | None], tensors: tuple[Tensor, ...]) -> set[int]:
    """Storages of parameters and of what is formed from parameters alone (a cast router weight)."""
    weights = {tensor.storage for tensor in tensors if tensor.role == "weight"}
    constants = {tensor.storage for tensor in tensors if tensor.role == "constant"}
    for op, source in zip(ops, sources, strict=True):
        if source is None and op.kind in _FORMING and op.inputs:
            read = {tensors[i].storage for i in op.inputs}
            if read & weights and read <= weights | constants:
                weights.update(tensors[i].storage for i in op.outputs)
    return weights


def _as_gradient(gemm: Gemm, forward: Gemm, weights: set[int], tensors: tuple[Tensor, ...]) -> Gemm:
    if gemm.direction != "forward":  # the op's own rule knows
        return gemm
    reads_weight = any(i is not None and tensors[i].storage in weights for i in (gemm.lhs, gemm.rhs))
    has_weight = any(i is not None and tensors[i].storage in weights for i in (forward.lhs, forward.rhs))
    kind = "linear" if forward.kind == "einsum" and forward.batch == 1 and has_weight else forward.kind
    return replace(gemm, kind=kind, direction="dx" if reads_weight or not has_weight else "dw")
