"""The phases: one prefill, one decode or chunk step on a filled cache, one training step. Text inputs only; a module of
another kind is run with the inputs its user gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from introspect.hooks import caches
from introspect.hooks.caches import Held
from introspect.hooks.encoder_decoder import assumption, encoder_tokens, reads_two, two_inputs
from introspect.hooks.inputs import placed, refuse_without_ids, run_on
from introspect.hooks.odd_models import (
    BORROWED,
    borrowed_inputs,
    forget_states,
    id_rows,
    own_cache,
    states_in_modules,
    step_ids,
)
from introspect.hooks.session import Session, is_meta
from introspect.hooks.step import Step, accepted_inputs, ids_name, token_ids
from introspect.hooks.training import train_step
from introspect.records import RunShape

# Names under which model classes take and return their cache.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")


def run_step(session: Session, model: nn.Module, run: RunShape, inputs: dict[str, Any] | None = None) -> Step:
    """Run one step of a language model, `seq` new tokens on `context` cached ones, or of any module on its `inputs`."""
    if run.phase == "train":
        return train_step(session, model, run, inputs)
    if inputs is not None:
        return _run_inputs(session, model, inputs)
    if (borrowed := borrowed_inputs(model, run)) is not None:
        note = BORROWED.format(run.context + run.seq)
        return replace(_run_inputs(session, model, borrowed), assumptions=(note,))
    try:
        return _run_tokens(session, model, run)
    finally:
        forget_states(model)


def _run_tokens(session: Session, model: nn.Module, run: RunShape) -> Step:
    accepted = accepted_inputs(model)
    refuse_without_ids(model, accepted)
    own, encoded = own_cache(model), None
    if run.context == 0:
        return _step(session, model, run, accepted, own, ())
    with session.unrecorded(), torch.no_grad():
        output = _forward(session, model, run, accepted, _warm_tokens(model, run), own)
        name, cache = cache_of(output) if own is None else ("cache", own)
        if cache is None or name not in accepted:
            return _without_cache(session, model, run, accepted)
        cache = _grown(session, model, run, accepted, cache)
        encoded = getattr(output, "encoder_last_hidden_state", None)
    return _step(session, model, run, accepted, cache, _held(model, cache), name, encoded)


def _grown(session: Session, model: nn.Module, run: RunShape, accepted: set[str], cache: Any) -> Any:
    """The cache of a short prefill brought to `context` tokens: filled, left alone where it is a state that does not
    grow, else that of a whole prefill."""
    warm = _warm_tokens(model, run)
    if warm == run.context:
        return cache
    if caches.can_fill(cache):
        caches.fill(cache, run.context - warm)
        return cache
    _, longer = cache_of(_forward(session, model, run, accepted, min(run.context, 2 * warm), None))
    if caches.shapes(longer) == caches.shapes(cache):
        return cache
    return cache_of(_forward(session, model, run, accepted, run.context, None))[1]


def cache_after(session: Session, model: nn.Module, run: RunShape) -> tuple[Held, ...] | None:
    """What the cache holds after `context + seq` tokens, by filling it; None when it cannot be filled."""
    accepted, own = accepted_inputs(model), own_cache(model)
    short = run.with_(seq=min(run.context + run.seq, caches.SHORT_PREFILL), context=0)
    with session.unrecorded(), torch.no_grad():
        output = _forward(session, model, short, accepted, short.seq, own)
        cache = cache_of(output)[1] if own is None else own
        if not caches.can_fill(cache):
            return None
        caches.fill(cache, run.context + run.seq - short.seq)
    held = _held(model, cache)
    forget_states(model)
    return held


def _run_inputs(session: Session, model: nn.Module, inputs: dict[str, Any]) -> Step:
    """Run any module once with the given inputs (moved to meta with their values kept when the module is there)."""
    with torch.no_grad():
        output = run_on(model, placed(session, inputs, model))
    _, cache = cache_of(output)
    return Step(after=tuple(caches.held_tensors(cache)))


def _warm_tokens(model: nn.Module, run: RunShape) -> int:
    """Tokens of the prefill before a step: a few on meta, where the rest is filled; all where values are real."""
    return min(run.context, caches.SHORT_PREFILL) if is_meta(model) else run.context


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
    encoded: torch.Tensor | None = None,
) -> Step:
    # The shapes before the step are read now: update() may change the tensors' owner, never these tensors.
    with torch.no_grad():
        output = _forward(session, model, run, accepted, step_ids(model, run), cache, name, encoded)
    _, after = cache_of(output)
    after = cache if after is None else after
    notes: tuple[str, ...] = ()
    if run.logits == "last" and "logits_to_keep" not in accepted:
        notes = (f"{type(model).__name__} has no logits_to_keep: the head ran on every position",)
    if reads_two(model, accepted):
        notes += (assumption(run, cached=encoded is not None),)
    return Step(before=before, after=_held(model, after), assumptions=notes)


def _held(model: nn.Module, cache: Any) -> tuple[Held, ...]:
    return (*caches.held_tensors(cache), *states_in_modules(model))


def _forward(
    session: Session,
    model: nn.Module,
    run: RunShape,
    accepted: set[str],
    tokens: int,
    cache: Any,
    name: str = "cache",
    encoded: torch.Tensor | None = None,
) -> Any:
    ids = token_ids(session, model, id_rows(model, run.batch), tokens)
    inputs: dict[str, Any] = {ids_name(accepted): ids}
    if reads_two(model, accepted):
        inputs = two_inputs(token_ids(session, model, run.batch, encoder_tokens(run)), ids, encoded)
    if "use_cache" in accepted:
        inputs["use_cache"] = True
    if run.logits == "last" and "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    if cache is not None:
        inputs[name] = cache
    return model(**inputs)


def cache_of(output: Any) -> tuple[str, Any]:
    """The cache in a model's output and the name it is passed under."""
    for name in CACHE_NAMES:
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return name, value
    return "cache", None
