"""Where an analyzer's records come from: a model that can be run at any shape, or one stored trace.

Both keep what they handed out, so that the caller can tell what an answer rests on. hooks/, and with it torch, is
imported when a model really has to run, never for a stored answer.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field, replace
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

from introspect import store
from introspect.errors import (
    FileAccessError,
    GivenInputsError,
    NoModuleError,
    OptionError,
    TraceFormatError,
    TraceShapeError,
)
from introspect.params import AccessParams
from introspect.progress import progress
from introspect.records import RunShape, Trace
from introspect.serialize import trace_from_json
from introspect.sources import Source, resolve

Inputs = Any
"""A module's own inputs: a mapping of forward's arguments, a tuple or list of positional ones, or one tensor."""

_TRACE_START = b'{"introspect_trace":'


@dataclass(frozen=True, slots=True)
class Stored:
    """`Traces` of one record: answers for its own run shape only."""

    trace: Trace
    access: AccessParams
    handed: list[Trace] = field(default_factory=list)

    def __call__(self, run: RunShape) -> Trace:
        """The record, if it is of this run. A dtype left open (None) is the record's own."""
        own = self.trace.run
        if run != own and replace(run, dtype=own.dtype if run.dtype is None else run.dtype) != own:
            raise TraceShapeError(*_differences(own, run))
        self.handed.append(self.trace)
        return self.trace

    def other(self, model: str) -> Stored | Live:
        """Records of another model, found the same way."""
        return open_model(model, self.access)

    def gather(self, function: str, **options: Any) -> Any:
        """Refused: a stored trace has no module to ask."""
        raise NoModuleError

    def own_run(self) -> dict[str, Any]:
        """The fields of the run that was recorded, no cached tokens left open: only decode is asked about any."""
        own = {name: getattr(self.trace.run, name) for name in RunShape.__slots__}
        return own if own["context"] or own["phase"] == "decode" else {**own, "context": None}


@dataclass(frozen=True, slots=True)
class Live:
    """`Traces` of a model that can be run: from the store where it was run before, else by running it now.

    `model` is a Source or an nn.Module; only a stable Source has a digest and so a place in the store. `spare`: what
    was built to look at a factory's inputs and has not been run.
    """

    model: Source | Any
    access: AccessParams
    inputs: Inputs | None = None
    handed: list[Trace] = field(default_factory=list)
    known: dict[RunShape, Trace] = field(default_factory=dict)
    spare: list[Any] = field(default_factory=list)

    def __call__(self, run: RunShape) -> Trace:
        """The record of this run. Raises what hooks/ raises when the model cannot be built or run."""
        if run not in self.known:
            self.known[run] = self._recall_or_observe(run)
        self.handed.append(self.known[run])
        return self.known[run]

    def other(self, model: str) -> Stored | Live:
        """Records of another model, found the same way."""
        return open_model(model, self.access)

    def gather(self, function: str, **options: Any) -> Any:
        """What `function` of hooks/, as "rope.gather_scaled_rope", makes of the module, built anew for it; one that
        has an argument `inputs` is told the module's own."""
        from introspect.hooks.build import build

        module, name = function.split(".")
        asked = getattr(importlib.import_module(f"introspect.hooks.{module}"), name)
        built = build(self.model, None, self.inputs)
        own = {"inputs": built.inputs} if "inputs" in signature(asked).parameters else {}
        return asked(built.module, **own, **options)

    def own_run(self) -> dict[str, Any]:
        """Batch and length of the step that the model's own inputs are; {} for a model that makes its own ids."""
        if self.inputs is None and not (isinstance(self.model, Source) and self.model.factory):
            return {}
        from introspect.hooks.build import build
        from introspect.hooks.inputs import step_shape

        built = build(self.model, None, self.inputs)
        self.spare.append(built)
        if built.inputs is None:
            return {}
        batch, seq = step_shape(built.module, built.inputs)
        return {"batch": batch, "seq": seq}

    def _recall_or_observe(self, run: RunShape) -> Trace:
        source = self.model
        if self.access.no_cache or self.inputs is not None or not isinstance(source, Source) or not source.stable:
            return self._observe(run)
        path = store.entry_path(source.digest, source.id, run)
        trace = store.load(path)
        if trace is None or not _is_of(trace, source, run):
            trace = self._observe(run)
            try:
                store.save(path, trace)
            except FileAccessError as error:
                _say(f"{error}; traces are not kept, every answer runs the model again (--no-cache silences this)")
        return trace

    def _observe(self, run: RunShape) -> Trace:
        name = self.model.id if isinstance(self.model, Source) else type(self.model).__name__
        with progress(f"tracing {name} ({run.phase})"):
            from introspect.hooks.build import build
            from introspect.hooks.inputs import given_run
            from introspect.hooks.observe import observe

            if run.tp > 1 or run.ep > 1:
                from introspect.hooks.sharding import observe_sharded

                return observe_sharded(self.model, run)
            unused = run.dtype is None and self.spare
            built = self.spare.pop() if unused else build(self.model, run.dtype, self.inputs)
            if built.inputs is not None and (own := given_run(run, built.module, built.inputs)) != run:
                raise GivenInputsError(built.identity.id, *_differences(own, run))
            return observe(built.module, built.identity, run, built.inputs, built.assumptions)


def open_model(model: Any, access: AccessParams, inputs: Inputs | None = None) -> Stored | Live:
    """The records of anything that may be called a model: a name, a path, a trace, a config object, an nn.Module.

    `inputs` go with a model that can be run. OptionError where a record has been made already.
    """
    if isinstance(model, Trace):
        return Stored(_without(inputs, model), access)
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        if is_trace_file(Path(name)):
            return Stored(_without(inputs, load_trace(name)), access)
        source = resolve(
            name,
            revision=access.revision,
            offline=access.offline,
            trust_remote_code=access.trust_remote_code,
        )
        return Live(source, access, inputs)
    if hasattr(model, "to_json_string") and hasattr(model, "model_type"):
        return Live(_config_source(model), access, inputs)
    if hasattr(model, "named_modules"):
        return Live(model, access, inputs)
    raise OptionError("model", type(model).__name__, "a name, a path, a transformers config, an nn.Module or a Trace")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that `save_trace` wrote. FileAccessError or TraceFormatError when that cannot be done."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileAccessError(os.fspath(path), "read", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise TraceFormatError(os.fspath(path), f"not UTF-8 ({error.reason} at byte {error.start})") from None
    return trace_from_json(text, os.fspath(path))


def _without(inputs: Inputs | None, trace: Trace) -> Trace:
    if inputs is not None:
        raise OptionError("inputs", type(inputs).__name__, "none beside a stored trace, whose step has been run")
    return trace


def is_trace_file(path: Path) -> bool:
    """Whether a file starts as `save_trace` starts one; everything else is a model to be found."""
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            return file.read(len(_TRACE_START)) == _TRACE_START
    except (OSError, ValueError):
        return False


def _is_of(trace: Trace, source: Source, run: RunShape) -> bool:
    """Whether a stored record is what its place says: a file can be copied over another."""
    same_run = replace(trace.run, dtype=None) == replace(run, dtype=None)
    return same_run and (trace.model.id, trace.model.config_sha256) == (source.id, source.config_sha256)


def _config_source(config: Any) -> Source:
    text = config.to_json_string(use_diff=False)
    digest = sha256(text.encode()).hexdigest()
    return Source(
        id=getattr(config, "name_or_path", "") or config.model_type,
        kind="object",
        text=f"{type(config).__name__} object",
        config=json.loads(text),
        config_sha256=digest,
        digest=digest,
    )


def _differences(own: RunShape, asked: RunShape) -> tuple[str, str]:
    names = [name for name in RunShape.__slots__ if getattr(own, name) != getattr(asked, name)]
    stored, wanted = (", ".join(f"{name} {getattr(run, name)}" for name in names) for run in (own, asked))
    return stored, wanted


def _say(text: str) -> None:
    """Talk, on stderr unless the application's logging is set up otherwise."""
    import logging  # late: 6 ms that only trouble needs

    logging.getLogger("introspect").warning(text)
