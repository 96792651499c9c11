from __future__ import annotations

import pytest
import torch
from torch import nn

from introspect.hooks.modules import ModuleStack


class Nested(nn.Module):
    def __init__(self, seen) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.seen = seen

    def forward(self, x):
        for layer in self.inner:
            layer(x)
            self.seen()
        return x


def test_the_innermost_running_module_is_on_top():
    stack, paths = ModuleStack(), []
    model = Nested(lambda: paths.append(stack.top.path))
    model.inner[1].register_forward_hook(lambda *_: paths.append(stack.top.path))
    with stack.watching(model):
        model(torch.zeros(1))
        assert stack.top.path == ""

    assert paths == ["", "inner.1", ""]


def test_an_error_leaves_no_frame_and_no_hook():
    stack = ModuleStack()

    def fail():
        raise ZeroDivisionError

    model = nn.Sequential(Nested(fail))
    with pytest.raises(ZeroDivisionError), stack.watching(model):
        model(torch.zeros(1))

    assert stack.top.path == ""
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_hook_never_replaces_an_output():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(3, 2)
    expected = model(x)
    with ModuleStack().watching(model):
        assert torch.equal(model(x), expected)
