"""Collectives as the dispatcher shows them: kind, payload and group.

They arrive in two families, `c10d::` with a process group object and `_c10d_functional::` with a group's name; waiting
for one moves nothing. The group must still exist when this reads its size. A group is known by its description, which
sharding.py sets to "tp" or "ep".
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from introspect.hooks.recorder import RawOp, tensors_in
from introspect.records import Collective

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

KINDS: dict[str, Kind] = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
WAITS = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
"""Ops of the same families that move nothing."""
_INPUT_SECOND = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # ops that take their output first
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def collective(raw: RawOp) -> Collective | None:
    """The collective an op performs; None for one that moves nothing (waiting) or that nobody knows."""
    name = raw.func._schema.name.partition("::")[2]
    kind = KINDS.get(name)
    if kind is None:
        return None
    group = _group(raw.args)
    ranks = dist.get_world_size(group)
    tensors = tensors_in(raw.args)
    sent = tensors[1] if name in _INPUT_SECOND else tensors[0]
    payload = sent.numel() * sent.element_size()
    return Collective(
        kind=kind,
        payload_bytes=payload * ranks if kind == "all_gather" else payload,
        group=_description(group),
        ranks=ranks,
    )


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The group among an op's arguments; None is the default one."""
    for arg in args:
        if isinstance(arg, str) and arg not in _REDUCTIONS:
            return dist.distributed_c10d._resolve_process_group(GroupName(arg))
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    return None


def _description(group: dist.ProcessGroup | None) -> str:
    description = "" if group is None else group.group_desc
    return description if description in ("tp", "ep") else ""
