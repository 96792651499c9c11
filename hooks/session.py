"""One instrumented run: all that is hooked, registered or switched for it is put back afterwards, also on error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from introspect.collector import no_collection
from introspect.hooks import attention as attention_hooks
from introspect.hooks import experts as experts_hooks
from introspect.hooks.attention import AttentionObserver, attention_interface
from introspect.hooks.byte_patches import assumed_patches
from introspect.hooks.expert_modules import replaced_experts
from introspect.hooks.experts import ExpertsObserver, experts_interface, routed_dispatch
from introspect.hooks.functions import FunctionObserver
from introspect.hooks.modules import ModuleStack
from introspect.hooks.recorder import Recorder
from introspect.hooks.routers import draw_scores
from introspect.hooks.shadow import Shadow
from introspect.hooks.text_only import text_only
from introspect.records import RunShape

_ATTENTION, EXPERTS_CHOICE = "_attn_implementation_internal", "_experts_implementation_internal"


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of an instrumented run."""

    recorder: Recorder
    shadow: Shadow
    attention: AttentionObserver
    stack: ModuleStack

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Run without writing ops down; values are still followed."""
        paused, self.recorder.paused = self.recorder.paused, True
        try:
            yield
        finally:
            self.recorder.paused = paused


@contextmanager
def session(model: nn.Module, run: RunShape, budget: int | None = None) -> Iterator[Session]:
    """Hook `model` for one run. `budget`: see Recorder."""
    stack, shadow = ModuleStack(), Shadow()
    recorder = Recorder(stack, shadow, budget)
    shadow.module_path = lambda: stack.top.path
    attention = AttentionObserver(recorder, shadow)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.storage(tensor)
    with ExitStack() as undo:
        undo.enter_context(no_collection())
        undo.enter_context(_without_distribution_checks())
        additive = any(getattr(module, "_supports_sdpa", True) is False for module in model.modules())
        undo.enter_context(attention_interface(attention, additive=additive))
        experts = ExpertsObserver(shadow, run)
        undo.enter_context(experts_interface(experts))
        undo.enter_context(replaced_experts(model, experts))
        undo.enter_context(_implementations(model))
        undo.enter_context(routed_dispatch(model, shadow, run))
        draw_scores(model, shadow, run)
        undo.enter_context(text_only(model))
        undo.enter_context(assumed_patches(model, shadow))
        undo.enter_context(stack.watching(model))
        undo.enter_context(FunctionObserver(attention, shadow))
        undo.enter_context(recorder)
        yield Session(recorder, shadow, attention, stack)


@contextmanager
def _without_distribution_checks() -> Iterator[None]:
    """A torch distribution checks the values of its parameters, which meta tensors do not have."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


@contextmanager
def _implementations(model: nn.Module) -> Iterator[None]:
    """Point the configs of every (sub)model at our interfaces where it uses them; restore on exit."""
    saved: list[tuple[Any, dict[str, Any]]] = []
    try:
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is None or not hasattr(config, _ATTENTION) or any(c is config for c, _ in saved):
                continue
            saved.append((config, {name: getattr(config, name, None) for name in (_ATTENTION, EXPERTS_CHOICE)}))
            setattr(config, EXPERTS_CHOICE, experts_hooks.NAME)
        for module in model.modules():
            if getattr(module, "_supports_attention_backend", False) and hasattr(module, "config"):
                setattr(module.config, _ATTENTION, attention_hooks.NAME)
        yield
    finally:
        for config, values in saved:
            for name, value in values.items():
                setattr(config, name, value)


def is_meta(model: nn.Module) -> bool:
    """Whether the model's tensors live on the meta device."""
    first: torch.Tensor | None = next(iter(model.parameters()), None)
    return first is not None and first.device.type == "meta"
