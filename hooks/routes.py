"""Second routes to the numbers of a record: torch's FLOP counter, fvcore, and a small twin that really runs.

The counters see the model as the library ships it, with its own attention and experts, on the meta device. Both are
silent about ops they have no formula for; those are named here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from introspect.hooks.build import quiet
from introspect.hooks.op_kinds import op_kind
from introspect.hooks.twin import run_twin
from introspect.route_record import CounterRoute, RouteRecord

# torch's op packets by the kind of product they are in CounterRoute.
_TORCH_KINDS = {
    "aten.mm": "matrix",
    "aten.addmm": "matrix",
    "aten.bmm": "batched",
    "aten.baddbmm": "batched",
    "aten.convolution": "conv",
    "aten._convolution": "conv",
}


def gather_routes(module: nn.Module, tokens: int) -> RouteRecord:
    """Run every second route on a module on meta; one that fails says why and stops nothing."""
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    twin, problem = None, "no transformers model"
    if isinstance(module, PreTrainedModel):
        try:
            with quiet():
                twin, problem = run_twin(type(module), module.config), ""
        except Exception as error:  # whatever stops the twin is the answer here
            problem = _words(error)
    return RouteRecord(
        counters=(_attempt("torch", _by_torch, module, ids), _attempt("fvcore", _by_fvcore, module, ids)),
        twin=twin,
        twin_problem=problem,
    )


def _attempt(counter: str, count: Any, module: nn.Module, ids: torch.Tensor) -> CounterRoute:
    try:
        flops, silent = count(module, ids)
    except Exception as error:  # a counter that cannot run this model is a result, not a failure of ours
        return CounterRoute(counter=counter, tokens=ids.shape[1], flops={}, problem=_words(error))
    return CounterRoute(counter=counter, tokens=ids.shape[1], flops=flops, silent=silent)


def _by_torch(module: nn.Module, ids: torch.Tensor) -> tuple[dict[str, int], tuple[str, ...]]:
    with _Silent() as silent, FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=ids, use_cache=True)
    counted = counter.get_flop_counts().get("Global", {})
    flops: dict[str, int] = {}
    for packet, value in counted.items():
        kind = _TORCH_KINDS.get(str(packet), str(packet))
        flops[kind] = flops.get(kind, 0) + value
    return flops, tuple(sorted(silent.products - {str(packet) for packet in counted}))


class _Silent(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the ops that no kind explains: products for which a counter may or may not have a formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature has no annotations
        self.products: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the op and run it."""
        if op_kind(func) == "unclassified":
            self.products.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def _by_fvcore(module: nn.Module, ids: torch.Tensor) -> tuple[dict[str, int], tuple[str, ...]]:
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(_LogitsOnly(module), ids)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    multiply_adds = analysis.by_operator()
    return {"linear": int(2 * multiply_adds.get("linear", 0))}, tuple(sorted(analysis.unsupported_ops()))


class _LogitsOnly(nn.Module):
    """fvcore traces functions from tensors to tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits [B, S, V]."""
        logits: torch.Tensor = self.module(input_ids=ids, use_cache=True).logits
        return logits


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
