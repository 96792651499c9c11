"""Run a model once under observation and return the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from introspect.errors import IntrospectError, ModelRunError
from introspect.hooks.assemble import Graph, assembled
from introspect.hooks.build import quiet
from introspect.hooks.caches import Held
from introspect.hooks.dtypes import dtype_name
from introspect.hooks.inputs import given_run
from introspect.hooks.lora import adapted, is_linear
from introspect.hooks.recorder import ScanDetected
from introspect.hooks.rope import gather_rope
from introspect.hooks.run import run_step
from introspect.hooks.scans import SCAN_BUDGET, observe_scan
from introspect.hooks.session import Session, session
from introspect.hooks.shadow import raising_line
from introspect.hooks.step import Step
from introspect.records import CacheTensor, ModelIdentity, Op, Repeat, RunShape, Trace
from introspect.table import VERSION


def observe(
    model: nn.Module,
    identity: ModelIdentity,
    run: RunShape,
    inputs: dict[str, Any] | None = None,
    assumptions: tuple[str, ...] = (),
) -> Trace:
    """The record of one run of `model`.

    Raises ModelRunError when the model's own code fails.

    Args:
        model: a module on the meta device (a real CPU module works too: twins are run so).
        identity: what the record says about the model.
        run: which step to run; with `inputs` its batch and length are theirs.
        inputs: the module's own inputs by name (hooks/inputs.py) in place of token ids.
        assumptions: what building the model took for granted.
    """
    run = run if inputs is None else given_run(run, model, inputs)
    with adapted(model, run), quiet():
        return _record(model, identity, run, inputs, assumptions)


def _record(
    model: nn.Module,
    identity: ModelIdentity,
    run: RunShape,
    inputs: dict[str, Any] | None,
    assumptions: tuple[str, ...],
) -> Trace:
    if inputs is None and run.seq > SCAN_BUDGET // 10:  # shorter prompts cannot exceed the budget by much
        try:
            return _observe(model, identity, run, inputs, assumptions, SCAN_BUDGET)
        except ScanDetected as scan:
            scanned = observe_scan(model, run, scan.path)
            if scanned is not None:
                return _trace(
                    scanned.observed, model, identity, run, scanned.step, assumptions, scanned.graph, scanned.nodes
                )
    return _observe(model, identity, run, inputs, assumptions, None)


def _observe(
    model: nn.Module,
    identity: ModelIdentity,
    run: RunShape,
    inputs: dict[str, Any] | None,
    assumptions: tuple[str, ...],
    budget: int | None,
) -> Trace:
    with session(model, run, budget) as observed, _named_failure(identity, run):
        step = run_step(observed, model, run, inputs)
    graph = assembled(observed, model, step, run)
    return _trace(observed, model, identity, run, step, assumptions, graph, graph.ops)


@contextmanager
def _named_failure(identity: ModelIdentity, run: RunShape) -> Iterator[None]:
    """Whatever the model's own code raises becomes one error that says where; INTROSPECT_DEBUG=1 shows the rest."""
    try:
        yield
    except (IntrospectError, ScanDetected):
        raise
    except Exception as error:
        text = str(error).strip()
        problem = f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
        raise ModelRunError(identity.id, run.phase, problem, raising_line(error)) from error


def _trace(
    observed: Session,
    model: nn.Module,
    identity: ModelIdentity,
    run: RunShape,
    step: Step,
    assumptions: tuple[str, ...],
    graph: Graph,
    ops: tuple[Op | Repeat, ...],
) -> Trace:
    first = next(iter(model.parameters()), None)
    dtype = run.dtype if first is None else dtype_name(getattr(model, "dtype", None) or first.dtype)
    return Trace(
        model=identity,
        run=run.with_(dtype=dtype),
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "introspect": VERSION},
        modules={path: type(module).__name__ for path, module in model.named_modules()},
        linears=tuple(path for path, module in model.named_modules() if is_linear(module)),
        parameters=graph.parameters,
        tensors=graph.tensors,
        ops=ops,
        cache=_cache(observed, step),
        saved_bytes=step.saved_bytes,
        saved=step.saved,
        recomputed_bytes=step.recomputed_bytes,
        rope=gather_rope(model, run.context + run.seq),
        decisions=tuple(observed.shadow.decisions),
        assumptions=(*assumptions, *step.assumptions, *graph.assumptions, *_beyond_positions(model, run)),
        unclassified=graph.unclassified,
    )


def _beyond_positions(model: nn.Module, run: RunShape) -> Iterator[str]:
    """Positions past the config's: shapes hold, but a table of learned positions ends there, and training may have."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    promised = getattr(text, "max_position_embeddings", None)
    positions = run.context + run.seq
    if isinstance(promised, int) and positions > promised > 0:
        yield f"{positions:,} positions, as if the config did not end at {promised:,} (max_position_embeddings)"


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
                window=held.window,
            )
        )
    return tuple(found)
