"""Traces as JSON text and back, exactly.

Generic over the dataclasses of `records`: a record is written as the list of its field values in order, trailing values
that equal their defaults left out, and strings as positions in one table, so that a name repeated by ten thousand ops
is stored once (tensors are a table already: ops name them by index). The document carries the field names of every
record class, so a file written for another layout is refused and not read into the wrong fields, and a digest of its
own text, so a file that was cut or edited is refused and not believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from hashlib import sha256
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from introspect.collector import no_collection
from introspect.errors import TraceFormatError
from introspect.records import SCHEMA_VERSION, Trace

Convert = Callable[[Any], Any]


def trace_to_json(trace: Trace) -> str:
    """One JSON document on one line, about 60 bytes an op."""
    codecs = _Codecs()
    body = codecs.of(Trace).encode(trace)
    document = {"fields": _layout(), "strings": list(codecs.positions), "trace": body}
    text = json.dumps(document, separators=(",", ":"))[1:]
    return _head(text) + text


def trace_from_json(text: str, source: str) -> Trace:
    """The trace that `trace_to_json` wrote; `source` names the file in the TraceFormatError for anything else."""
    with no_collection():
        try:
            document = json.loads(text)
        except ValueError as error:
            raise TraceFormatError(source, f"not JSON ({error})") from None
        if not isinstance(document, dict) or "introspect_trace" not in document:
            raise TraceFormatError(source, 'JSON without the "introspect_trace" entry')
        version = document["introspect_trace"]
        if version != SCHEMA_VERSION or document.get("fields") != _layout():
            raise TraceFormatError(source, f"schema {version!r}, this introspect reads {SCHEMA_VERSION}")
        head = len(_head(""))
        if not text.startswith(_head(text[head:].rstrip())):  # a file ends in a line break
            raise TraceFormatError(source, "its text does not match its sha256, it was cut or edited")
        trace: Trace = _Codecs(document["strings"]).of(Trace).decode(document["trace"])
    return trace


def _head(rest: str) -> str:
    """The fixed-width start of a document, which holds the digest of all that follows it."""
    return f'{{"introspect_trace":{SCHEMA_VERSION},"sha256":"{sha256(rest.encode()).hexdigest()}",'


@cache
def _layout() -> dict[str, list[str]]:
    """The field names of every record class a trace can hold."""
    found: dict[str, list[str]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = [member.name for member in fields(kind)]
            for hint in _hints(kind).values():
                visit(hint)
        for part in get_args(kind):
            visit(part)

    visit(Trace)
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True, slots=True)
class _Codec:
    """The two directions of one type: record value to JSON value and back."""

    encode: Convert
    decode: Convert


def _same(value: Any) -> Any:
    return value


_PLAIN = _Codec(_same, _same)


@dataclass(slots=True)
class _Codecs:
    """The codecs of one document, which share its string table."""

    strings: list[str | None] = field(default_factory=list)
    positions: dict[str | None, int] = field(default_factory=dict)
    made: dict[type, _Codec] = field(default_factory=dict)

    def of(self, kind: Any) -> _Codec:
        """The codec of a field type; a TypeError for a type that no record uses yet."""
        origin, parts = get_origin(kind), get_args(kind)
        if kind in (int, float, bool, Any):
            return _PLAIN
        if _is_text(kind):
            return _Codec(self._position, self.strings.__getitem__)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._record(kind)
        if origin is tuple and parts[1:] == (...,):
            return _sequence(self.of(parts[0]))
        if origin is dict and parts[0] is str:
            return _mapping(self.of(parts[1]))
        if origin in (Union, UnionType):
            return self._union(tuple(part for part in parts if part is not NoneType))
        raise TypeError(f"no JSON form for {kind}")

    def _position(self, text: str | None) -> int:
        return self.positions.setdefault(text, len(self.positions))

    def _record(self, kind: type) -> _Codec:
        if kind not in self.made:
            # In place before its fields are looked at: a record may hold records of its own kind.
            self.made[kind] = _Codec(
                lambda value: self.made[kind].encode(value), lambda row: self.made[kind].decode(row)
            )
            hints = _hints(kind)
            codecs = {member.name: self.of(hints[member.name]) for member in fields(kind)}
            self.made[kind] = _record(kind, codecs)
        return self.made[kind]

    def _union(self, kinds: tuple[Any, ...]) -> _Codec:
        """Optional values as themselves or null; several record classes as [position of the class, row]."""
        codecs = [self.of(kind) for kind in kinds]
        if len(codecs) == 1:
            codec = codecs[0]
            if codec is _PLAIN:
                return _PLAIN
            return _Codec(
                lambda value: None if value is None else codec.encode(value),
                lambda value: None if value is None else codec.decode(value),
            )
        positions = {kind: position for position, kind in enumerate(kinds)}
        return _Codec(
            lambda value: [positions[type(value)], codecs[positions[type(value)]].encode(value)],
            lambda pair: codecs[pair[0]].decode(pair[1]),
        )


def _is_text(kind: Any) -> bool:
    """A string, a literal of strings, or either of them or None (the string table holds None too)."""
    if get_origin(kind) in (Union, UnionType):
        return all(part is NoneType or _is_text(part) for part in get_args(kind))
    return kind is str or (get_origin(kind) is Literal and all(isinstance(value, str) for value in get_args(kind)))


def _sequence(item: _Codec) -> _Codec:
    if item is _PLAIN:
        return _Codec(list, tuple)
    return _Codec(
        lambda values: [item.encode(value) for value in values], lambda values: tuple(map(item.decode, values))
    )


def _mapping(item: _Codec) -> _Codec:
    if item is _PLAIN:
        return _PLAIN
    return _Codec(
        lambda values: {key: item.encode(value) for key, value in values.items()},
        lambda values: {key: item.decode(value) for key, value in values.items()},
    )


def _record(kind: type, codecs: dict[str, _Codec]) -> _Codec:
    names = tuple(codecs)
    defaults = tuple(_default(member) for member in fields(kind))
    encoders = tuple(codec.encode for codec in codecs.values())
    # Through the slots' own descriptors: half the time of the constructor, which matters ten thousand times over.
    steps = tuple((getattr(kind, name).__set__, codec.decode) for name, codec in codecs.items())
    new = object.__new__

    def encode(value: Any) -> list[Any]:
        values = [getattr(value, name) for name in names]
        end = len(values)
        while end and values[end - 1] == defaults[end - 1]:
            end -= 1
        return [convert(value) for convert, value in zip(encoders, values[:end], strict=False)]

    def decode(row: list[Any]) -> Any:
        record: Any = new(kind)
        for (put, convert), value in zip(steps, row, strict=False):
            put(record, convert(value))
        for (put, _), value in zip(steps[len(row) :], defaults[len(row) :], strict=True):
            put(record, value)
        return record

    return _Codec(encode, decode)


def _default(member: Field[Any]) -> Any:
    return member.default if member.default_factory is MISSING else member.default_factory()
