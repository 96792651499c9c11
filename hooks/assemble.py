"""From raw entries to the record: roles of tensors, kinds of ops and products, parameters touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from introspect.hooks.collectives import collective
from introspect.hooks.derived_masks import resolve_masks
from introspect.hooks.dtypes import dtype_name
from introspect.hooks.eager_attention import mark_eager_attention
from introspect.hooks.gradients import mark_gradients
from introspect.hooks.masks import MaskFacts
from introspect.hooks.op_kinds import op_kind, op_name
from introspect.hooks.recorder import RawOp, Recorder, View
from introspect.hooks.routing import rows_per_expert
from introspect.hooks.rules import attention_call, products
from introspect.hooks.session import Session
from introspect.hooks.step import Step
from introspect.records import ExpertCall, Gemm, Op, Parameter, Role, RunShape, Tensor, Unclassified

_MOVES = ("layout", "factory")  # kinds that read no value of their operands


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The assembled part of a trace. `assumptions`: what no value could tell."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...]
    unclassified: tuple[Unclassified, ...]
    assumptions: tuple[str, ...]


def assembled(observed: Session, model: nn.Module, step: Step, run: RunShape) -> Graph:
    """The graph of a finished run."""
    held = (*step.before, *step.after)
    graph = assemble(
        observed.recorder,
        model,
        {observed.recorder.storage(h.tensor) for h in held},
        {observed.recorder.storage(h.tensor) for h in held if h.is_state},
        observed.attention.facts,
        run.batch,
    )
    return replace(graph, ops=tuple(_routed(graph.ops, run)))


def _routed(ops: Iterable[Op], run: RunShape) -> Iterator[Op]:
    """Add what the policy would give each expert where the code multiplies every expert by every token (Llama 4)."""
    blocks: dict[str, int] = {}
    for op in ops:
        call = op.experts
        if call is None or run.ep > 1 or not 0 < call.top_k < call.experts or set(call.rows) != {call.tokens}:
            yield op
            continue
        seed = run.seed + blocks.setdefault(op.module, len(blocks))
        rows = rows_per_expert(run.routing, call.tokens, call.top_k, call.experts, seed)
        yield replace(op, experts=replace(call, routed=tuple(rows)))


def assemble(
    recorder: Recorder,
    model: nn.Module,
    cache_storages: set[int],
    states: set[int],
    masks: Mapping[int, MaskFacts],
    batch: int,
) -> Graph:
    """Turn the recorder's entries into frozen ops over a tensor table.

    Args:
        recorder: a finished recording.
        model: the module that ran; its parameters and buffers give the weight and constant roles.
        cache_storages: storages that the cache object held before or after the step.
        states: those of them that hold a recurrent state, not keys and values.
        masks: what each attention mask lets through, by storage.
        batch: sequences of the run.
    """
    owners = _owners(recorder, model)
    tensors = tuple(_tensor(view, owners, cache_storages) for view in recorder.views)
    kinds: dict[torch._ops.OpOverload, str] = {}
    ops = [_op(raw, recorder, tensors, kinds, cache_storages) for raw in recorder.ops]
    sources = [raw.source for raw in recorder.ops]
    running = [op for op, source in zip(ops, sources, strict=True) if source is None]  # all but gradients
    assumptions = (*resolve_masks(running, tensors, masks), *mark_eager_attention(running, tensors, masks, batch))
    mark_scans(running, tensors, states)
    marked = iter(running)
    ops = [next(marked) if source is None else op for op, source in zip(ops, sources, strict=True)]
    mark_gradients(ops, sources, tensors)
    touched = {
        tensors[i].storage for op in ops if op.kind not in _MOVES for i in op.inputs if tensors[i].parameter is not None
    }
    return Graph(
        tensors=tensors,
        ops=tuple(ops),
        parameters=_parameters(recorder, model, touched),
        unclassified=_unclassified(ops),
        assumptions=assumptions,
    )


def _owners(recorder: Recorder, model: nn.Module) -> dict[int, tuple[str, Role]]:
    """First path and role of every parameter's and buffer's storage."""
    owners: dict[int, tuple[str, Role]] = {}
    named: tuple[tuple[Role, Iterable[tuple[str, torch.Tensor]]], ...] = (
        ("weight", model.named_parameters(remove_duplicate=False)),
        ("constant", model.named_buffers(remove_duplicate=False)),
    )
    for role, pairs in named:
        for path, tensor in pairs:
            owners.setdefault(recorder.storage(tensor), (path, role))
    for raw in recorder.ops:  # a weight that is cast or laid out anew for a product is still that weight
        sources = {recorder.views[i].storage for i in raw.ins}
        if len(sources) == 1 and (source := sources.pop()) in owners and op_kind(raw.func) in ("cast", "copy"):
            for i in raw.outs:
                owners.setdefault(recorder.views[i].storage, owners[source])
    return owners


def _tensor(view: View, owners: dict[int, tuple[str, Role]], cache_storages: set[int]) -> Tensor:
    path: str | None = None
    role: Role = "activation"
    if view.storage in owners:
        path, role = owners[view.storage]
    elif view.storage in cache_storages:
        role = "cache"
    elif not (view.dtype.is_floating_point or view.dtype.is_complex):
        role = "index"
    return Tensor(
        storage=view.storage,
        offset=view.offset,
        shape=view.shape,
        dtype=dtype_name(view.dtype),
        role=role,
        parameter=path,
        storage_bytes=view.storage_bytes,
    )


def _op(
    raw: RawOp,
    recorder: Recorder,
    tensors: tuple[Tensor, ...],
    kinds: dict[torch._ops.OpOverload, str],
    cache_storages: set[int],
) -> Op:
    gemms = tuple(_refine(g, tensors) for g in products(raw, recorder.views))
    name = op_name(raw.func)
    if gemms and _is_outer(gemms, tensors):
        gemms, kind = (), "outer"
    elif gemms:
        kind = "gemm"
    else:
        if raw.func not in kinds:
            kinds[raw.func] = op_kind(raw.func)
        kind = kinds[raw.func]
        if kind == "copy" and any(tensors[i].storage in cache_storages for i in raw.outs):
            kind = "cache_write"
    experts = None
    if name == "introspect.grouped_linear.default":
        _, w, _, rows, _, tokens, top_k = raw.args
        experts = ExpertCall(experts=w.shape[0], top_k=top_k, tokens=tokens, rows=tuple(rows))
    return Op(
        name=name,
        module=raw.module,
        kind=kind,
        inputs=raw.ins,
        outputs=raw.outs,
        gemms=gemms,
        attention=attention_call(raw, recorder.views),
        experts=experts,
        collective=collective(raw) if kind == "collective" else None,
        backward=raw.backward,
    )


def _is_outer(gemms: tuple[Gemm, ...], tensors: tuple[Tensor, ...]) -> bool:
    """k = 1 without a weight: an outer product sums nothing (rotary angles are computed so) and is no GEMM."""
    return all(
        g.k == 1 and g.kind in ("linear", "einsum") and not any(_is_weight(i, tensors) for i in (g.lhs, g.rhs))
        for g in gemms
    )


def mark_scans(ops: list[Op], tensors: tuple[Tensor, ...], states: set[int]) -> None:
    """Name the products of activations in a module that reads or writes a recurrent state: steps of a scan."""
    scanning = {op.module for op in ops for i in (*op.inputs, *op.outputs) if tensors[i].storage in states}
    for position, op in enumerate(ops):
        if op.module in scanning and any(_is_state_product(g, tensors) for g in op.gemms):
            gemms = tuple(replace(g, kind="scan") if _is_state_product(g, tensors) else g for g in op.gemms)
            ops[position] = replace(op, gemms=gemms)


def _is_state_product(gemm: Gemm, tensors: tuple[Tensor, ...]) -> bool:
    return gemm.kind == "einsum" and not any(_is_weight(i, tensors) for i in (gemm.lhs, gemm.rhs))


def _is_weight(index: int | None, tensors: tuple[Tensor, ...]) -> bool:
    return index is not None and tensors[index].role == "weight"


def _refine(gemm: Gemm, tensors: tuple[Tensor, ...]) -> Gemm:
    """Put the weight on the right (m counts rows of data), and call a product of two matrices without one "einsum"."""
    left, right = _is_weight(gemm.lhs, tensors), _is_weight(gemm.rhs, tensors)
    if gemm.kind in ("linear", "einsum") and left and not right:
        gemm = replace(gemm, m=gemm.n, n=gemm.m, lhs=gemm.rhs, rhs=gemm.lhs)
    if gemm.kind == "linear" and not (left or right):
        gemm = replace(gemm, kind="einsum")
    return gemm


def _parameters(recorder: Recorder, model: nn.Module, touched: set[int]) -> tuple[Parameter, ...]:
    first: dict[int, str] = {}
    found = []
    for buffer, pairs in (
        (False, model.named_parameters(remove_duplicate=False)),
        (True, model.named_buffers(remove_duplicate=False)),
    ):
        for path, tensor in pairs:
            storage = recorder.storage(tensor)
            tied_to = first.get(storage)
            first.setdefault(storage, path)
            found.append(
                Parameter(
                    path=path,
                    shape=recorder.views[recorder.view(tensor)].shape,
                    dtype=dtype_name(tensor.dtype),
                    global_shape=tuple(tensor.shape) if hasattr(tensor, "_local_tensor") else None,
                    touched=storage in touched,
                    buffer=buffer,
                    tied_to=tied_to,
                    frozen=not buffer and not tensor.requires_grad,
                )
            )
    return tuple(found)


def _unclassified(ops: list[Op]) -> tuple[Unclassified, ...]:
    counts = Counter((op.name, op.module) for op in ops if op.kind == "unclassified")
    return tuple(Unclassified(op=name, module=module, count=n) for (name, module), n in counts.items())
