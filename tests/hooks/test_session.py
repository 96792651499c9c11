from __future__ import annotations

import gc

import pytest
import torch
from support.tiny import build, record
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from introspect.hooks.session import session
from introspect.records import RunShape

INTERFACES = (AttentionInterface, AttentionMaskInterface, ExpertsInterface)


def surroundings(model):
    return {
        "registries": [dict(interface._global_mapping) for interface in INTERFACES],
        "implementations": [
            (config._attn_implementation, config._experts_implementation)
            for config in (module.config for module in model.modules() if hasattr(module, "config"))
        ],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "modes": (len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())),
        "gc": gc.isenabled(),
    }


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GptOss"])
def test_everything_is_put_back_after_a_run(name):
    model = build(name, **({"head_dim": 16} if name == "GptOss" else {}))
    before = surroundings(model)

    record(model)

    assert surroundings(model) == before


def test_everything_is_put_back_after_an_error():
    model = build("Llama")
    before = surroundings(model)

    with pytest.raises(AssertionError, match="another state"), session(model, RunShape()):
        assert surroundings(model) == before, "another state while the run is on"

    assert surroundings(model) == before


def test_an_error_inside_the_forward_leaves_nothing_behind():
    model = build("Llama")
    before = surroundings(model)

    with pytest.raises(TypeError), session(model, RunShape()):
        model(torch.zeros((1, 4), dtype=torch.int64, device="meta"))(1)

    assert surroundings(model) == before


def test_unrecorded_ops_are_not_written_down():
    model = build("Llama")
    with session(model, RunShape()) as observed:
        with observed.unrecorded():
            torch.ones(3, device="meta") * 2
        assert observed.recorder.ops == []
        torch.ones(3, device="meta") * 2
        assert [str(op.func) for op in observed.recorder.ops] == [
            "aten.ones.default",
            "aten.detach.default",
            "aten.mul.Tensor",
        ]
