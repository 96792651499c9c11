"""Every dimension of a built model: of its matrices from their shapes, of its calls from a short run.

What a dimension is called follows from what the module is and what the run did with it, never from names: a leading
dimension is "experts" only where an experts call of the run had as many; else it is a "stack", of a convolution's
filter the last one a "kernel".
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY
from introspect.records import RunShape, Trace

TOKENS = 4
Place = tuple[str, str]  # module path and dimension
Sizes = dict[Place, int]


def sizes_of(model: nn.Module) -> Sizes:
    """The size at every place of the model. Raises whatever its run raises."""
    trace = observe(model, IDENTITY, RunShape(phase="prefill", seq=TOKENS))
    return {**_matrix_sizes(model, trace), **_call_sizes(trace)}


def _matrix_sizes(model: nn.Module, trace: Trace) -> Sizes:
    """Sizes of every matrix. Of layers that are alike the first stands for all, as long as it is the same one."""
    counts = {op.module: op.experts.experts for op, _ in trace.walk() if op.experts is not None}
    found: Sizes = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() in (2, 3):
                own = path if name == "weight" else f"{path}.{name}"
                sizes = _shape(module, tuple(weight.shape), counts.get(path))
                found.update({(own, dimension): size for dimension, size in sizes.items()})
    return found


def _shape(module: nn.Module, shape: tuple[int, ...], experts: int | None) -> dict[str, int]:
    """Names of one weight's dimensions."""
    if isinstance(module, _ConvNd) and len(shape) == 3:
        return {"k": shape[1], "n": shape[0], "kernel": shape[2]}
    if len(shape) == 2 and shape[0] == experts:
        return {"experts": shape[0], "n": shape[1]}  # a bias for each
    *stack, first, second = shape
    kn = isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))  # a Linear keeps [n, k]
    sizes = {"k": first, "n": second} if kn else {"k": second, "n": first}
    if isinstance(module, nn.Embedding):
        sizes = {"rows": first, "n": second}
    if stack:
        sizes["experts" if stack[0] == experts else "stack"] = stack[0]
    return sizes


def _call_sizes(trace: Trace) -> Sizes:
    found: Sizes = {}
    for op, _ in trace.walk():
        if (call := op.attention) is not None:
            q, v = trace.tensors[call.q].shape, trace.tensors[call.v].shape
            sizes = {
                "query_heads": call.query_heads,
                "kv_heads": call.kv_heads,
                "qk_head_dim": q[-1],
                "v_head_dim": v[-1],
            }
            found.update({(op.module, name): size for name, size in sizes.items()})
        if op.experts is not None:
            found[op.module, "top_k"] = op.experts.top_k
    return found
