"""One rank of a sharded run, executed: a fake process group, device meshes and the model's own plans.

Nothing is divided by N here. transformers shards the module it would shard on real devices (`tp_plan`, `ep_plan`), the
fake group answers collectives without moving anything, and the usual observer writes down what one rank does. No real
group is touched: a process that already has one is refused, and the fake one is gone afterwards, also on error.

Ranks: tensor parallelism takes `tp` neighbours that share a batch. Experts are split over `ep` ranks, a multiple of
`tp`: equal, they are the same ranks (transformers sums partial results with an all-reduce at inference); larger, ep/tp
groups with a batch each exchange tokens (all-to-all).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

from introspect.errors import ModelRunError, ShardingError
from introspect.hooks.build import build
from introspect.hooks.observe import observe
from introspect.records import RunShape, Trace
from introspect.sources import Source


def observe_sharded(model: Source | nn.Module, run: RunShape, rank: int = 0) -> Trace:
    """The record of one rank of a run over `run.tp` and `run.ep` ranks; of an uneven split rank 0 holds the most.

    `run.batch` is what the ranks of one tensor-parallel group share. Raises ShardingError when the model has no plan,
    the degrees do not fit it, or the model's code fails on the shards.
    """
    if run.ep > 1 and run.ep % run.tp:
        raise ShardingError(_degrees(run), f"{run.ep} is no multiple of {run.tp}", "--ep a multiple of --tp")
    with fake_group(max(run.tp, run.ep), rank):
        with no_tie_weights():  # a tied parameter has one name, and the plan may shard the other
            built = build(model, run.dtype)
            _untie(built.module)
            notes = shard(built.module, run, meshes(run.tp, run.ep))
        if isinstance(built.module, PreTrainedModel):
            built.module.tie_weights(recompute_mapping=False)
        try:
            trace = observe(built.module, built.identity, run, built.inputs, built.assumptions)
        except ModelRunError as error:
            problem = f"{error.problem} at {error.where}"
            raise ShardingError(_degrees(run), problem, "degrees the model's own code can run") from error
    alike = run.ep > run.tp and run.routing != "balanced"
    assumptions = ("the tokens of every rank choose the same experts",) if alike else ()
    identity = replace(trace.model, notes=(*trace.model.notes, *notes))
    return replace(trace, model=identity, assumptions=(*trace.assumptions, *assumptions))


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `ranks` ranks that exists in name only, seen from one of them. Raises ShardingError
    when the process has a real group."""
    if dist.is_initialized():
        raise ShardingError("process group", "one is initialised already", "a process without torch.distributed set up")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """This rank's groups: the ranks that share its batch, and those that hold the other experts."""

    tp: DeviceMesh
    ep: DeviceMesh


def meshes(tp: int, ep: int) -> Meshes:
    """Groups of `tp` neighbours and of `ep` neighbours over the default group, fake or real; every rank must ask.

    Each is a group of its own, named "tp" or "ep", so that a collective tells which one it belongs to."""
    return Meshes(tp=_mesh("tp", tp), ep=_mesh("ep", ep))


def _mesh(name: str, size: int) -> DeviceMesh:
    firsts = range(0, dist.get_world_size(), size)  # making a group takes part of every rank
    groups = [dist.new_group(list(range(first, first + size)), group_desc=name) for first in firsts]
    return DeviceMesh.from_group(groups[dist.get_rank() // size], "cpu", mesh_dim_names=(name,))


def shard(module: nn.Module, run: RunShape, groups: Meshes) -> tuple[str, ...]:
    """Shard a module by its own plans, in place; returns what the record should say of it. Raises ShardingError."""
    if not isinstance(module, PreTrainedModel):
        raise ShardingError(type(module).__name__, "no transformers model", "a model with a tp_plan or ep_plan")
    tp_plan, ep_plan = _plans(module, run)
    try:
        if run.tp > 1:
            apply_tensor_parallelism(module, groups.tp, module._expand_parallel_plan(tp_plan))
        if run.ep > 1:
            apply_expert_parallelism(module, groups.ep, groups.tp, module._expand_parallel_plan(ep_plan))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ShardingError(_degrees(run), _first_line(error), "degrees that divide the plan's dimensions") from error
    return tuple(
        f"{name} of {type(module).__name__}: {', '.join(f'{path} {style}' for path, style in plan.items())}"
        for name, plan in (("tp_plan", tp_plan), ("ep_plan", ep_plan))
        if plan
    )


def _untie(module: nn.Module) -> None:
    """Give every name of a shared parameter one of its own: a module that was handed in is tied already."""
    seen: set[int] = set()
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, nn.Parameter(torch.empty_like(parameter)))
        seen.add(id(parameter))


def _plans(module: PreTrainedModel, run: RunShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rules that apply: none for a degree of 1, and expert rules come before tensor rules for the same modules."""
    ep_plan = dict(module.ep_plan) if run.ep > 1 else {}
    tp_plan = {path: style for path, style in module.tp_plan.items() if run.tp > 1 and not _covers(ep_plan, path)}
    for name, degree, plan in (("tp_plan", run.tp, module.tp_plan), ("ep_plan", run.ep, module.ep_plan)):
        if degree > 1 and not plan:
            raise ShardingError(type(module).__name__, f"an empty {name}", "a model that ships one")
    return tp_plan, ep_plan


def _covers(plan: dict[str, Any], path: str) -> bool:
    return any(path == key or path.startswith(key + ".") for key in plan)


def _degrees(run: RunShape) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in (("tp", run.tp), ("ep", run.ep)) if degree > 1)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
