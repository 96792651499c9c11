"""Prefill of models that scan tokens or chunks in Python, at any length, from three short runs.

A plain run of such a model takes minutes and a million ops at a long prompt (mamba at 2048 tokens: 45 s). The ops are
the same at every length, so three short runs are folded (fold.py), fitted to the length and verified (affine.py). What
does not grow in proportion is counted anew at the asked length: visible pairs from the mask functions, rows per expert
from the routing policy, the cache through its own `update`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from introspect.hooks.affine import Fit, Node, NotAffine
from introspect.hooks.assemble import Graph, assembled
from introspect.hooks.attention import Geometry
from introspect.hooks.fold import fold
from introspect.hooks.masks import MaskFacts
from introspect.hooks.routing import rows_per_expert
from introspect.hooks.run import cache_after, run_step
from introspect.hooks.session import Session, session
from introspect.hooks.step import Step
from introspect.records import Op, Repeat, RunShape, Tensor

# Ops one module call may dispatch itself before the run counts as a scan: layers without a loop stay below 150.
SCAN_BUDGET = 400
# Tokens by which the short runs grow: token scans, then the chunk sizes that chunk scans use.
UNITS = (4, 64, 128, 256)


@dataclass(slots=True)
class ShortRun:
    """One short run: its folded ops and what is needed to count anew at another length."""

    seq: int
    nodes: tuple[Node, ...]
    tensors: list[Tensor]
    graph: Graph
    masks: dict[int, Geometry]
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """A run at the asked length that was put together from short ones."""

    graph: Graph
    nodes: tuple[Node, ...]
    step: Step
    observed: Session


def observe_scan(model: nn.Module, run: RunShape, scanning: str) -> Scanned | None:
    """The run at `run.seq` tokens; None when no unit gives runs that are fitted exactly.

    Args:
        model: the model that scans.
        run: the asked run.
        scanning: path of the module whose own ops grew beyond the budget; its loop must grow with the length.
    """
    for unit in UNITS:
        lengths = tuple(run.seq % unit + n * unit for n in (3, 4, 6))
        if lengths[-1] >= run.seq:
            return None
        try:
            return _fitted(model, run, lengths, scanning)
        except NotAffine:
            continue
    return None


def _fitted(model: nn.Module, run: RunShape, lengths: tuple[int, ...], scanning: str) -> Scanned:
    runs: list[ShortRun] = []
    for seq in lengths:
        with session(model, run.with_(seq=seq)) as observed:
            step = run_step(observed, model, run.with_(seq=seq))
            graph = assembled(observed, model, step, run)
            tensors = list(graph.tensors)
            masks = dict(observed.attention.geometry)
            runs.append(ShortRun(seq, fold(graph.ops, tensors), tensors, graph, masks, step))
            if seq == lengths[-1]:
                return _at_target(model, run, runs, scanning, observed)
    raise AssertionError("three lengths are run")


def _at_target(model: nn.Module, run: RunShape, runs: list[ShortRun], scanning: str, observed: Session) -> Scanned:
    fit = Fit(
        lengths=(runs[0].seq, runs[1].seq, runs[2].seq),
        target=run.seq,
        tables=(runs[0].tensors, runs[1].tensors, runs[2].tensors),
    )
    if not _grows([r.nodes for r in runs], scanning):
        raise NotAffine(f"no loop of {scanning} grows with the length")
    nodes = fit.nodes([r.nodes for r in runs])
    facts = _masks_at_target(fit, runs, observed)
    nodes = tuple(_recount(node, fit, facts, run, {}) for node in nodes)
    last = runs[-1].graph
    graph = replace(last, tensors=tuple(fit.tensors), ops=())
    return Scanned(graph=graph, nodes=nodes, step=_step_at_target(fit, model, run, runs, observed), observed=observed)


def _step_at_target(fit: Fit, model: nn.Module, run: RunShape, runs: list[ShortRun], observed: Session) -> Step:
    last = runs[-1].step
    if run.phase == "train":
        saved, recomputed = [r.step.saved_bytes or 0 for r in runs], [r.step.recomputed_bytes for r in runs]
        counted = [size for size in recomputed if size is not None]
        return replace(
            last,
            saved_bytes=fit.number(saved),
            saved=(),
            recomputed_bytes=fit.number(counted) if len(counted) == len(runs) else None,
        )
    after = cache_after(observed, model, run)
    return replace(last, after=last.after if after is None else after)


def _grows(runs: list[tuple[Node, ...]], scanning: str) -> bool:
    """Whether a loop with ops of the scanning module ran more often in the longer runs."""
    counts = [
        sum(node.count for node in nodes if isinstance(node, Repeat) and _touches(node, scanning)) for nodes in runs
    ]
    return counts[0] < counts[1] < counts[2]


def _touches(node: Node, module: str) -> bool:
    if isinstance(node, Repeat):
        return any(_touches(inner, module) for inner in node.body)
    return node.module == module


def _masks_at_target(fit: Fit, runs: list[ShortRun], observed: Session) -> dict[int, MaskFacts]:
    """What each mask of the last run lets through at the asked length, by the mask's storage in the last run."""
    if len({len(r.masks) for r in runs}) != 1:
        raise NotAffine(f"{[len(r.masks) for r in runs]} masks")
    facts = {}
    for entries in zip(*(r.masks.items() for r in runs), strict=True):
        storage, (function, *_) = entries[-1]
        q_length, kv_length, q_offset, kv_offset = (fit.number([int(e[1][i]) for e in entries]) for i in (1, 2, 3, 4))
        facts[storage] = observed.attention.count(function, 0, q_length, kv_length, q_offset, kv_offset)
    return facts


def _recount(node: Node, fit: Fit, facts: dict[int, MaskFacts], run: RunShape, layers: dict[str, int]) -> Node:
    if isinstance(node, Repeat):
        return replace(node, body=tuple(_recount(inner, fit, facts, run, layers) for inner in node.body))
    if node.attention is not None:
        return replace(node, attention=_with_pairs(node, fit, facts))
    if node.experts is not None:
        return _with_rows(node, run, layers)
    return node


def _with_pairs(op: Op, fit: Fit, facts: dict[int, MaskFacts]) -> Any:
    call = op.attention
    assert call is not None
    q, k = fit.tensors[call.q], fit.tensors[call.k]
    batch, queries = q.shape[0], q.shape[2]
    keys = k.shape[2] if len(k.shape) == 4 else k.shape[-2]
    found = next((facts[fit.tensors[i].storage] for i in op.inputs if fit.tensors[i].storage in facts), None)
    if found is None:
        hidden = min(queries, keys) if call.causal else 1
        found = MaskFacts(pairs=queries * keys - hidden * (hidden - 1) // 2, widest=keys)
    return replace(call, visible_pairs=batch * found.pairs, window=found.widest if found.widest < keys else None)


def _with_rows(op: Op, run: RunShape, layers: dict[str, int]) -> Op:
    call = op.experts
    assert call is not None
    layer = layers.setdefault(op.module, len(layers))
    rows = rows_per_expert(run.routing, call.tokens, call.top_k, call.experts, run.seed + layer)
    busy, total = sum(1 for count in rows if count), sum(rows)
    gemms = tuple(replace(g, batch=busy, rows=total, m=-(-total // max(1, busy))) for g in op.gemms)
    return replace(op, experts=replace(call, rows=tuple(rows)), gemms=gemms)
