from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from introspect.hooks.collectives import collective
from introspect.hooks.op_kinds import op_kind
from introspect.hooks.recorder import RawOp
from introspect.hooks.sharding import fake_group, meshes

CALLS = {
    "all_reduce": lambda x, g: dist.all_reduce(x, group=g),
    "all_reduce functional": lambda x, g: all_reduce(x, "sum", g),
    "all_gather": lambda x, g: dist.all_gather_into_tensor(x.new_empty(32, 4), x, group=g),
    "all_gather functional": lambda x, g: all_gather_tensor(x, 0, g),
    "reduce_scatter": lambda x, g: dist.reduce_scatter_tensor(x.new_empty(2, 4), x, group=g),
    "reduce_scatter functional": lambda x, g: reduce_scatter_tensor(x, "sum", 0, g),
    "all_to_all": lambda x, g: dist.all_to_all_single(x.new_empty(8, 4), x, group=g),
    "broadcast": lambda x, g: dist.broadcast(x, group=g, group_src=0),
}
BYTES = 8 * 4 * 2  # [8, 4] bf16


class Listener(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []
        self.kinds = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kinds.append(op_kind(func))
        if self.kinds[-1] == "collective":
            self.found.append(collective(RawOp(func, "", (), (), args, kwargs or {}, False)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("group", ["tp", "ep"])
def test_kind_payload_and_group(name, group):
    with fake_group(4):
        mesh = getattr(meshes(4, 4), group)
        with Listener() as heard:
            CALLS[name](torch.empty(8, 4, dtype=torch.bfloat16, device="meta"), mesh.get_group())

    (one,) = [found for found in heard.found if found is not None]
    kind = name.split()[0]
    assert (one.kind, one.group, one.ranks) == (kind, group, 4)
    # what is gathered counts whole: four parts
    assert one.payload_bytes == (4 * BYTES if kind == "all_gather" else BYTES)


def test_a_group_of_someone_else_has_no_name():
    with fake_group(4), Listener() as heard:
        dist.all_reduce(torch.empty(2, device="meta"))

    (one,) = heard.found
    assert (one.group, one.ranks) == ("", 4)


def test_an_unknown_communication_is_unclassified():
    with fake_group(2), Listener() as heard:
        dist.send(torch.empty(2, device="meta"), 1)

    assert "unclassified" in heard.kinds
