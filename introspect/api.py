"""The Python interface, and the one path that the command line takes too.

    trace = introspect.trace("meta-llama/Meta-Llama-3-8B", phase="decode", context=8192)
    result = introspect.analyze("kv", "meta-llama/Meta-Llama-3-8B", context=8192)

Importing this module imports no torch; running a model does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from introspect.atomic import write_atomically
from introspect.commands import Command, load_command
from introspect.errors import OptionError, UnknownNameError
from introspect.figures import check_plot_path, save_figures
from introspect.options import build
from introspect.params import AccessParams, RunParams
from introspect.records import Trace
from introspect.serialize import trace_to_json
from introspect.table import Result
from introspect.traces import Inputs, Live, Stored, load_trace, open_model

__all__ = ["Answer", "analyze", "answer", "load_trace", "save_trace", "trace"]


def trace(
    model: Any,
    inputs: Inputs | None = None,
    *,
    phase: str = "prefill",
    batch: int | None = None,
    seq: int | None = None,
    context: int | None = None,
    dtype: str | None = None,
    logits: str = "all",
    routing: str = "balanced",
    seed: int = 0,
    offline: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
) -> Trace:
    """Run a model on the meta device and return the record of what it did.

    `model`: whatever MODEL may be on the command line, a transformers config object, or an nn.Module. `inputs`: what
    the module's forward is given, a dict of its arguments, a tuple or list of positional ones, or one tensor; without
    them it is given token ids. `batch` sequences (default 1) of `seq` new tokens (2048; 1 in decode) on top of
    `context` cached ones (2048 in decode, else 0); with `inputs` these are theirs. `dtype`: as "bf16", default the
    config's. `cache`: use and fill the store of traces. Raises a child of IntrospectError.
    """
    asked = {"phase": phase, "batch": batch, "seq": seq, "context": context, "dtype": dtype}
    run = {name: value for name, value in asked.items() if value is not None}
    run |= {"logits": logits, "routing": routing, "seed": seed}
    build(RunParams, run)  # a wrong option is told before the model is looked for
    access = build(
        AccessParams,
        {"offline": offline, "revision": revision, "trust_remote_code": trust_remote_code, "no_cache": not cache},
    )
    opened = open_model(model, access, inputs)
    own = opened.own_run() if isinstance(opened, Live) else {}
    return opened(build(RunParams, own | run).run_shape())


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON, whole or not at all; any command takes the file as its MODEL."""
    write_atomically(Path(path), trace_to_json(trace) + "\n")


def analyze(
    command: str, model: Any = None, inputs: Inputs | None = None, **options: Any
) -> Result | tuple[Result, ...]:
    """The answer of one command. Options with underscores for dashes, a repeatable one as a tuple or a single value.

    `model` and its `inputs` as for `trace()`, or a stored Trace or the path of a saved one; a list of them, without
    inputs, where the command takes several. A command of many models returns one result for each. Raises a child of
    IntrospectError.
    """
    found = load_command(command)
    models: tuple[Any, ...] = () if model is None else (model,)
    if "model" in {member.name for member in fields(found.params)}:  # a command that finds its model itself
        models, options = (), options | {"model": model}
    elif isinstance(model, Sequence) and not isinstance(model, str):
        models = tuple(model)
    results = answer(found, models, options, inputs=inputs).results
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found. `doubts`: what `--strict` refuses, all that a record had to assume or does not know."""

    results: tuple[Result, ...]
    doubts: tuple[str, ...]


def answer(
    command: Command,
    models: Sequence[Any],
    options: Mapping[str, Any],
    *,
    inputs: Inputs | None = None,
    flags: bool = False,
) -> Answer:
    """Run one command. `options` by field name; `flags` says how error messages spell them (see options.build).
    `inputs` go with the one model there is."""
    _check_count(command, models)
    if inputs is not None and len(models) != 1:
        raise OptionError("inputs", type(inputs).__name__, f"one model that they are for, not {len(models)}")
    access_names = {member.name for member in fields(AccessParams)} if command.models != "none" else set()
    params_names = {member.name for member in fields(command.params)}
    for name in options:
        if name not in access_names | params_names:
            raise UnknownNameError(f"option of {command.name}", name, access_names | params_names)
    access = build(AccessParams, {name: value for name, value in options.items() if name in access_names}, flags=flags)
    opened = [open_model(model, access, inputs) for model in models]
    given = {name: value for name, value in options.items() if name in params_names}
    given = _own_run(opened, params_names) | given
    params = build(command.params, given, flags=flags)
    plot = getattr(params, "plot", None)
    if plot:
        check_plot_path(plot)
    found = command.analyze(*_arguments(command, params, opened))
    results = tuple(_with_model_notes(one, opened) for one in (found if isinstance(found, tuple) else (found,)))
    if plot:
        save_figures([result.figure for result in results if result.figure], plot)
    return Answer(results=results, doubts=tuple(_doubts(opened, results)))


def _check_count(command: Command, models: Sequence[Any]) -> None:
    wanted = {"none": (0, 0), "one": (1, 1), "two": (2, 2), "many": (1, None)}[command.models]
    if len(models) < wanted[0] or (wanted[1] is not None and len(models) > wanted[1]):
        amount = {"none": "no model", "one": "one model", "two": "two models", "many": "one or more models"}
        raise OptionError("MODEL", len(models), f"{amount[command.models]} for {command.name}")


def _arguments(command: Command, params: Any, opened: Sequence[Stored | Live]) -> list[Any]:
    """What `analyze` takes after the parameters: the traces of one model, a tuple of several models', a measurement."""
    arguments: list[Any] = [params]
    if command.models == "one":
        arguments.append(opened[0])
    elif command.models != "none":
        arguments.append(tuple(opened))
    if command.gather:
        arguments.append(importlib.import_module(f"introspect.hooks.{command.gather}").gather(*arguments))
    return arguments


def _own_run(opened: Sequence[Stored | Live], names: set[str]) -> dict[str, Any]:
    """The run that a stored trace, or a model's own inputs, are, as options: only what was asked for otherwise can
    disagree with it."""
    run = next((own for one in opened if (own := one.own_run())), {})
    return {name: value for name, value in run.items() if name in names and value is not None}


def _with_model_notes(result: Result, opened: Sequence[Stored | Live]) -> Result:
    """A result that also says what was decided while its model was built (another class, a quantiser left out)."""
    model = result.model or {}
    traces = [trace for one in opened for trace in one.handed if trace.model.id == model.get("id")]
    notes = [*result.notes, *(note for trace in traces for note in trace.model.notes)]
    return replace(result, notes=tuple(dict.fromkeys(notes)))


def _doubts(opened: Sequence[Stored | Live], results: Sequence[Result]) -> list[str]:
    """Unclassified ops, decisions nothing could tell, and what records assumed where an answer lists it.

    What the question assumes (a GPU's figures, routing, utilisation) is listed too, but is no doubt about the record.
    """
    listed = {text for result in results for text in result.assumptions}
    traces = {id(trace): trace for one in opened for trace in one.handed}.values()
    found = [f"unclassified op {op.op} in {op.module} ({op.count})" for trace in traces for op in trace.unclassified]
    found += [
        f"assumed {decision.question} = {decision.answer} at {decision.where}"
        for trace in traces
        for decision in trace.decisions
        if decision.answered == "assumed"
    ]
    found += [f"assumption: {text}" for trace in traces for text in trace.assumptions if text in listed]
    return list(dict.fromkeys(found))
