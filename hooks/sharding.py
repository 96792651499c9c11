"""One rank of a sharded run, executed: a fake process group, a device mesh and the model's own plan.

Nothing is divided by N here. transformers shards the module it would shard on real devices (`tp_plan`, `ep_plan`), the
fake group answers collectives without moving anything, and the usual observer writes down what one rank does. No real
group is touched: a process that already has one is refused, and the fake one is gone afterwards, also on error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

from introspect.errors import ShardingError
from introspect.hooks.build import BuiltModel, build
from introspect.hooks.observe import observe
from introspect.records import RunShape, Trace
from introspect.sources import Source

RANK = 0  # the rank that is observed; of an uneven split it holds the larger part


def observe_sharded(model: Source | nn.Module, run: RunShape) -> Trace:
    """The record of rank 0 of a run over `run.tp` and `run.ep` ranks.

    `tp` alone splits matrices, `ep` alone splits experts over ranks with their own batches (all-to-all); both must be
    equal, and then the ranks share a batch. Raises ShardingError when the model has no plan, the degrees do not fit it,
    or transformers refuses to run the shards.
    """
    if run.tp > 1 and run.ep > 1 and run.tp != run.ep:
        raise ShardingError("tp and ep", f"{run.tp} and {run.ep}", "equal degrees, or one of them 1")
    with fake_group(max(run.tp, run.ep), "tp" if run.tp > 1 else "ep") as mesh:
        with no_tie_weights():  # a tied parameter has one name, and the plan may shard the other
            built = build(model, run.dtype)
            notes = _apply(built, run, mesh)
        if isinstance(built.module, PreTrainedModel):
            built.module.tie_weights(recompute_mapping=False)
        try:
            trace = observe(built.module, built.identity, run, built.inputs, built.assumptions)
        except Exception as error:
            if run.tp > 1:
                problem = str(error).splitlines()[0]
                raise ShardingError(f"tp {run.tp}", problem, "a degree the model's own code can run") from error
            raise
    return replace(trace, model=replace(trace.model, notes=(*trace.model.notes, *notes)))


@contextmanager
def fake_group(ranks: int, name: str) -> Iterator[DeviceMesh]:
    """A process group of `ranks` ranks that exists in name only; yields a mesh of dimensions `name` and "one". Raises
    ShardingError when the process has a real group."""
    if dist.is_initialized():
        raise ShardingError("process group", "one is initialised already", "a process without torch.distributed set up")
    with ExitStack() as undo:
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=ranks)  # type: ignore[no-untyped-call]
        undo.callback(dist.destroy_process_group)
        yield init_device_mesh("cpu", (ranks, 1), mesh_dim_names=(name, "one"))


def _apply(built: BuiltModel, run: RunShape, mesh: DeviceMesh) -> tuple[str, ...]:
    """Shard the module by its own plan; returns what the record should say of it."""
    module = built.module
    if not isinstance(module, PreTrainedModel):
        raise ShardingError(type(module).__name__, "no transformers model", "a model with a tp_plan or ep_plan")
    notes: tuple[str, ...] = ()
    ranks = mesh[(mesh.mesh_dim_names or ())[0]]
    try:
        if run.tp > 1:
            plan = {k: v for k, v in module.tp_plan.items() if not (run.ep > 1 and _is_expert(k, module.ep_plan))}
            if not plan:
                raise ShardingError(type(module).__name__, "an empty tp_plan", "a model that ships one")
            apply_tensor_parallelism(module, ranks, module._expand_parallel_plan(plan))
            notes = (*notes, f"tp_plan of {type(module).__name__}: {', '.join(f'{k} {v}' for k, v in plan.items())}")
        if run.ep > 1:
            if not module.ep_plan:
                raise ShardingError(type(module).__name__, "an empty ep_plan", "a MoE model that ships one")
            shared = ranks if run.tp > 1 else mesh["one"]
            apply_expert_parallelism(
                module,
                ranks,
                shared,
                module._expand_parallel_plan(dict(module.ep_plan)),
                ep_implementation="auto" if run.tp > 1 else "all_to_all",
            )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ShardingError(f"tp {run.tp}, ep {run.ep}", str(error).splitlines()[0], "a degree that divides") from error
    return notes


def _is_expert(name: str, ep_plan: dict[str, Any]) -> bool:
    return any(name == key or name.startswith(key + ".") for key in ep_plan)

