"""The phases: one prefill, one decode or chunk step on a filled cache, one training step. Text inputs only; a module of
another kind is run with the inputs its user gives."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from introspect.hooks import caches
from introspect.hooks.caches import Held
from introspect.hooks.session import Session
from introspect.records import RunShape

# Names under which model classes take and return their cache.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a run leaves beside the recorded ops: the cache before and after, and what was taken for granted."""

    before: tuple[Held, ...] = ()
    after: tuple[Held, ...] = ()
    assumptions: tuple[str, ...] = ()


def run_step(session: Session, model: nn.Module, run: RunShape) -> Step:
    """Run one inference step of a language model: `seq` new tokens on `context` cached ones."""
    accepted = _parameters(model)
    if run.context == 0:
        return _step(session, model, run, accepted, None, ())
    with session.unrecorded(), torch.no_grad():
        output = _forward(session, model, run, accepted, _warm_tokens(run), None)
        name, cache = _cache_of(output)
        if cache is None or name not in accepted:
            return _without_cache(session, model, run, accepted)
        missing = run.context - _warm_tokens(run)
        if missing and not caches.can_fill(cache):
            name, cache = _cache_of(_forward(session, model, run, accepted, run.context, None))
        elif missing:
            caches.fill(cache, missing)
    return _step(session, model, run, accepted, cache, tuple(caches.held_tensors(cache)), name)


def run_inputs(session: Session, model: nn.Module, inputs: dict[str, Any]) -> Step:
    """Run any module once with the given inputs (moved to meta with their values kept when the module is there)."""
    with torch.no_grad():
        output = model(**{name: _placed(session, value, model) for name, value in inputs.items()})
    _, cache = _cache_of(output)
    return Step(after=tuple(caches.held_tensors(cache)))


def _warm_tokens(run: RunShape) -> int:
    return min(run.context, caches.SHORT_PREFILL)


def _without_cache(session: Session, model: nn.Module, run: RunShape, accepted: set[str]) -> Step:
    session.recorder.paused = False
    whole = run.with_(seq=run.context + run.seq, context=0)
    note = f"the model keeps no cache: the step runs all {whole.seq} tokens again"
    step = _step(session, model, whole, accepted, None, ())
    return Step(before=step.before, after=step.after, assumptions=(note,))


def _step(
    session: Session,
    model: nn.Module,
    run: RunShape,
    accepted: set[str],
    cache: Any,
    before: tuple[Held, ...],
    name: str = "cache",
) -> Step:
    # The shapes before the step are read now: update() may change the tensors' owner, never these tensors.
    with torch.no_grad():
        output = _forward(session, model, run, accepted, run.seq, cache, name)
    _, after = _cache_of(output)
    after = cache if after is None else after
    notes = ()
    if run.logits == "last" and "logits_to_keep" not in accepted:
        notes = (f"{type(model).__name__} has no logits_to_keep: the head ran on every position",)
    return Step(before=before, after=tuple(caches.held_tensors(after)), assumptions=notes)


def _forward(
    session: Session, model: nn.Module, run: RunShape, accepted: set[str], tokens: int, cache: Any, name: str = "cache"
) -> Any:
    inputs: dict[str, Any] = {_ids_name(accepted): token_ids(session, model, run.batch, tokens)}
    if "use_cache" in accepted:
        inputs["use_cache"] = True
    if run.logits == "last" and "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    if cache is not None:
        inputs[name] = cache
    return model(**inputs)


def _ids_name(accepted: set[str]) -> str:
    return "input_ids" if "input_ids" in accepted or "decoder_input_ids" not in accepted else "decoder_input_ids"


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _cache_of(output: Any) -> tuple[str, Any]:
    """The cache in a model's output and the name it is passed under."""
    for name in CACHE_NAMES:
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return name, value
    return "cache", None


def token_ids(session: Session, model: nn.Module, batch: int, tokens: int) -> torch.Tensor:
    """Token ids [batch, tokens] on the model's device, with values: plain tokens, none of the config's special ones."""
    config = getattr(model, "config", None)
    vocabulary, special = _vocabulary(config)
    device = next(iter(model.parameters())).device

    def values() -> torch.Tensor:
        plain = torch.tensor([i for i in range(vocabulary) if i not in special][:4096] or [0])
        return plain[(torch.arange(batch * tokens) * 769 + 11) % len(plain)].view(batch, tokens)

    if device.type != "meta":
        return values().to(device)
    return session.shadow.give_later(torch.empty((batch, tokens), dtype=torch.int64, device="meta"), values)


def _vocabulary(config: Any) -> tuple[int, set[int]]:
    """Vocabulary size and the ids with a meaning of their own (padding, images, ...), wherever the config keeps them."""
    size, special = 0, set()
    pending = [config.to_dict()] if config is not None and hasattr(config, "to_dict") else []
    for fields in pending:
        for name, value in fields.items():
            if isinstance(value, dict):
                pending.append(value)
            elif name == "vocab_size" and isinstance(value, int):
                size = value if size == 0 else min(size, value)
            elif isinstance(value, int) and ("token_id" in name or "token_index" in name):
                special.add(value)
    return size or 256, special


def _placed(session: Session, value: Any, model: nn.Module) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not isinstance(value, torch.Tensor) or device.type != "meta" or value.device.type == "meta":
        return value
    return session.shadow.give(torch.empty_like(value, device="meta"), value)
