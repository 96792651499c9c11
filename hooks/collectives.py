"""Collectives as the dispatcher shows them: kind, payload and group.

They arrive in two families, `c10d::` with a process group object and `_c10d_functional::` with a group's name; waiting
for one moves nothing. The group must still exist when this reads its size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from introspect.hooks.recorder import RawOp, tensors_in
from introspect.records import Collective

_KINDS: dict[str, Any] = {
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
_INPUT_SECOND = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")  # ops that take their output first


def collective(raw: RawOp) -> Collective | None:
    """The collective an op performs; None for bookkeeping such as waiting. Raises KeyError for one nobody knows."""
    name = raw.func._schema.name.partition("::")[2]
    if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
        return None
    kind = _KINDS[name]
    group = _group(raw.args)
    ranks = dist.get_world_size(group)
    tensors = tensors_in(raw.args)
    sent = tensors[1] if name in _INPUT_SECOND else tensors[0]
    payload = sent.numel() * sent.element_size()
    return Collective(
        kind=kind,
        payload_bytes=payload * ranks if kind == "all_gather" else payload,
        group=_mesh_name(group),
        ranks=ranks,
    )


def _group(args: tuple[Any, ...]) -> Any:
    for arg in args:
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
            return torch.distributed.distributed_c10d._resolve_process_group(arg)
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    raise KeyError("process group")


def _mesh_name(group: Any) -> str:
    """The mesh dimension a group belongs to, as sharding.py names its meshes ("tp", "ep"); "" for any other."""
    description = str(getattr(group, "group_desc", ""))
    return next((name for name in ("tp", "ep") if name in description), "")
