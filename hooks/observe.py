"""Run a model once under observation and return the record."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from introspect.hooks.assemble import Graph, assemble
from introspect.hooks.caches import Held
from introspect.hooks.dtypes import dtype_name
from introspect.hooks.rope import gather_rope
from introspect.hooks.run import Step, run_inputs, run_step
from introspect.hooks.session import Session, session
from introspect.records import CacheTensor, ModelIdentity, RunShape, Trace
from introspect.table import VERSION


def observe(
    model: nn.Module,
    identity: ModelIdentity,
    run: RunShape,
    inputs: dict[str, Any] | None = None,
    assumptions: tuple[str, ...] = (),
) -> Trace:
    """The record of one run of `model`.

    Args:
        model: a module on the meta device (a real CPU module works too: twins are run so).
        identity: what the record says about the model.
        run: which step to run; with `inputs` only its phase and dtype say anything.
        inputs: keyword inputs of a module that is no language model.
        assumptions: what building the model took for granted.
    """
    with session(model, run) as observed:
        step = run_inputs(observed, model, inputs) if inputs is not None else run_step(observed, model, run)
    return _trace(observed, model, identity, run, step, assumptions)


def _trace(
    observed: Session, model: nn.Module, identity: ModelIdentity, run: RunShape, step: Step, assumptions: tuple[str, ...]
) -> Trace:
    recorder = observed.recorder
    storages = {recorder.storage(held.tensor) for held in (*step.before, *step.after)}
    graph: Graph = assemble(recorder, model, storages, observed.attention.facts, run.batch)
    dtype = dtype_name(getattr(model, "dtype", None) or next(iter(model.parameters())).dtype)
    return Trace(
        model=identity,
        run=run.with_(dtype=dtype),
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "introspect": VERSION},
        modules={path: type(module).__name__ for path, module in model.named_modules()},
        parameters=graph.parameters,
        tensors=graph.tensors,
        ops=graph.ops,
        cache=_cache(observed, step),
        rope=gather_rope(model, run.context + run.seq),
        decisions=tuple(observed.shadow.decisions),
        assumptions=(*assumptions, *step.assumptions, *graph.assumptions),
        unclassified=graph.unclassified,
    )


def _cache(observed: Session, step: Step) -> tuple[CacheTensor, ...]:
    """Pair what each layer held before and after the step, by layer and name."""

    def key(held: Held) -> tuple[int, str]:
        return held.layer, held.name

    before, after = {key(h): h for h in step.before}, {key(h): h for h in step.after}
    found = []
    for place in dict.fromkeys((*after, *before)):
        old, new = before.get(place), after.get(place)
        held = new or old
        assert held is not None
        found.append(
            CacheTensor(
                layer=held.layer,
                layer_class=held.layer_class,
                name=held.name,
                dtype=dtype_name(held.tensor.dtype),
                shape_before=None if old is None else tuple(old.tensor.shape),
                shape_after=None if new is None else tuple(new.tensor.shape),
                storage=observed.recorder.storage(held.tensor),
            )
        )
    return tuple(found)
