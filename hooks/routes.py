"""Second routes to the numbers of a record: torch's FLOP counter, fvcore, and a small twin that really runs.

The counters see the model as the library ships it, with its own attention and experts, on the meta device. Both are
silent about ops they have no formula for; those are named here. A module that comes with its inputs is counted on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from introspect.hooks.build import quiet
from introspect.hooks.encoder_decoder import reads_two, two_inputs
from introspect.hooks.inputs import each_tensor, run_on
from introspect.hooks.op_kinds import op_kind
from introspect.hooks.recorder import tensors_in
from introspect.hooks.step import accepted_inputs
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


# fvcore's names by the same kinds; `matmul` may be a product with a weight or not, which fvcore does not tell.
_FVCORE_KINDS = {"linear": ("linear", "addmm"), "conv": ("conv",), "matmul": ("matmul", "mm", "bmm", "einsum")}
_MOST_REAL_PARAMETERS = 50_000_000
_FVCORE_RECURRENT = frozenset(f"aten::{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "bilinear"))


def gather_routes(module: nn.Module, tokens: int, inputs: dict[str, Any] | None = None) -> RouteRecord:
    """Run every second route on a module on meta, the counters on `inputs` or else one sequence of `tokens` ids; one
    that fails says why and stops nothing."""
    given = _ids(module, tokens) if inputs is None else _on_meta(inputs, module)
    twin, problem = None, "a plain module has no config to be shrunk by"
    if isinstance(module, PreTrainedModel):
        try:
            with quiet():
                twin, problem = run_twin(type(module), module.config), ""
        except Exception as error:  # whatever stops the twin is the answer here
            problem = _words(error)
    return RouteRecord(
        counters=(_attempt("torch", _by_torch, module, given), _attempt("fvcore", _by_fvcore, module, given)),
        given=inputs is not None,
        twin=twin,
        twin_problem=problem,
    )


def _ids(module: nn.Module, tokens: int) -> dict[str, Any]:
    """One sequence of token ids, one for the decoder too where there are two parts."""
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    two = isinstance(module, PreTrainedModel) and reads_two(module, accepted_inputs(module))
    return {"use_cache": True, **(two_inputs(ids, ids, None) if two else {"input_ids": ids})}


def _on_meta(inputs: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The inputs on the module's device, without values."""
    if not any(tensor.is_meta for tensors in (module.parameters(), module.buffers()) for tensor in tensors):
        return inputs
    return each_tensor(inputs, lambda tensor: tensor.to("meta"))


def _attempt(counter: str, count: Any, module: nn.Module, given: dict[str, Any]) -> CounterRoute:
    try:
        flops, silent = count(module, given)
    except Exception as error:  # a counter that cannot run this model is a result, not a failure of ours
        return CounterRoute(counter=counter, flops={}, problem=_words(error))
    return CounterRoute(counter=counter, flops=flops, silent=silent)


def _by_torch(module: nn.Module, given: dict[str, Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    with _Silent() as silent, FlopCounterMode(display=False) as counter, torch.no_grad():
        run_on(module, given)
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


def _by_fvcore(module: nn.Module, given: dict[str, Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    try:
        return _fvcore_counts(module, given)
    except Exception:
        if sum(parameter.numel() for parameter in module.parameters()) > _MOST_REAL_PARAMETERS:
            raise
    # The tracer stumbles over some meta kernels (convolutions): what is small is run with zeros for its inputs.
    zeros = each_tensor(given, lambda tensor: torch.zeros_like(tensor, device="cpu"))
    return _fvcore_counts(module.to_empty(device="cpu"), zeros)


def _fvcore_counts(module: nn.Module, given: dict[str, Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    from fvcore.nn import FlopCountAnalysis

    leaves, form = tree_flatten(given)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    analysis = FlopCountAnalysis(_OfTensors(module, leaves, form), tuple(leaves[place] for place in places))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    counted, silent = analysis.by_operator(), set(analysis.unsupported_ops())
    found: dict[str, int] = {}
    for kind, names in _FVCORE_KINDS.items():
        if any(name in counted for name in names) and not (kind == "linear" and silent & _FVCORE_RECURRENT):
            found[kind] = int(2 * sum(counted[name] for name in names))
    return found, tuple(sorted(silent, key=lambda name: (name not in _FVCORE_RECURRENT, name)))


class _OfTensors(nn.Module):
    """A module as a function from tensors to tensors, as fvcore traces it. `leaves`, `form`: its flattened inputs."""

    def __init__(self, module: nn.Module, leaves: list[Any], form: TreeSpec) -> None:
        super().__init__()
        self.module = module
        self.leaves, self.form = leaves, form

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every tensor of the output."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        output = run_on(self.module, tree_unflatten(leaves, self.form))
        return tuple(tensors_in(output.values() if isinstance(output, Mapping) else (output,)))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
