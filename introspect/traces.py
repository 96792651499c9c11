"""Where an analyzer's records come from: a model that can be run at any shape, or one stored trace.

Both keep what they handed out, so that the caller can tell what an answer rests on. hooks/, and with it torch, is
imported when a model really has to run, never for a stored answer.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from introspect import store
from introspect.errors import FileAccessError, OptionError, TraceFormatError, TraceShapeError
from introspect.params import AccessParams
from introspect.progress import progress
from introspect.records import RunShape, Trace
from introspect.serialize import trace_from_json
from introspect.sources import Source, resolve

Inputs = Mapping[str, Any]

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
        raise OptionError("MODEL", "a stored trace", "a model that can be built: this needs more than its record")


@dataclass(frozen=True, slots=True)
class Live:
    """`Traces` of a model that can be run: from the store where it was run before, else by running it now.

    `model` is a Source or an nn.Module; only a stable Source has a digest and so a place in the store.
    """

    model: Source | Any
    access: AccessParams
    inputs: Inputs | None = None
    handed: list[Trace] = field(default_factory=list)
    known: dict[RunShape, Trace] = field(default_factory=dict)

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
        """What `function` of hooks/, as "rope.gather_scaled_rope", makes of the module, built anew for it."""
        from introspect.hooks.build import build

        module, name = function.split(".")
        built = build(self.model, None, None if self.inputs is None else dict(self.inputs))
        return getattr(importlib.import_module(f"introspect.hooks.{module}"), name)(built.module, **options)

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
            from introspect.hooks.observe import observe

            if run.tp > 1 or run.ep > 1:
                from introspect.hooks.sharding import observe_sharded

                return observe_sharded(self.model, run)
            built = build(self.model, run.dtype, None if self.inputs is None else dict(self.inputs))
            return observe(built.module, built.identity, run, built.inputs, built.assumptions)


def open_model(model: Any, access: AccessParams, inputs: Inputs | None = None) -> Stored | Live:
    """The records of anything that may be called a model: a name, a path, a trace, a config object, an nn.Module."""
    if isinstance(model, Trace):
        return Stored(model, access)
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        if is_trace_file(Path(name)):
            return Stored(load_trace(name), access)
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
