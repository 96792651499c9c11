"""The options of a command, read off its `Params` dataclass, with the checks that the command line and Python share.

Integers may be written 8192, 1_000_000, 128k (k = 1024, as in context lengths), 15e12 or 15T (M, B, T decimal); what
does not come out whole is refused, never rounded.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from introspect.errors import OptionError, UnknownNameError

_MULTIPLES = {"k": 1024, "K": 1024, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_DIGITS = 30  # an exponent beyond any size a model has would only fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a `Params` class. `kind` is int, float, str or bool: of each item when `repeatable`."""

    name: str
    kind: type
    repeatable: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str
    short: str
    at_least: float | None
    above: float | None
    at_most: float | None
    positional: bool

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return self.name if self.positional else "--" + self.name.replace("_", "-")

    @property
    def expected(self) -> str:
        """What a value must be, for an error message."""
        if self.choices:
            return " or ".join(filter(None, [", ".join(self.choices[:-1]), self.choices[-1]]))
        bounds = [
            f"{words} {bound:,}"
            for words, bound in (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
            if bound is not None
        ]
        noun = {int: "an integer", float: "a number", bool: "true or false"}.get(self.kind, "text")
        return " ".join(filter(None, [noun, " and ".join(bounds)]))


def options_of(params: type) -> tuple[Option, ...]:
    """Every option of a `Params` class, in the order of its fields."""
    hints = get_type_hints(params)
    return tuple(_option(member.name, hints[member.name], member.default, member.metadata) for member in fields(params))


def _option(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Option:
    kind, repeatable, literals = _kind_of(hint)
    at_least, above = metadata.get("at_least"), metadata.get("above")
    if at_least is None and above is None:
        at_least = {int: 1, float: 0}.get(kind)
    return Option(
        name=name,
        kind=kind,
        repeatable=repeatable,
        default=default,
        help=metadata.get("help", ""),
        choices=tuple(metadata.get("choices") or literals),
        metavar=metadata.get("metavar", ""),
        short=metadata.get("short", ""),
        at_least=at_least,
        above=above,
        at_most=metadata.get("at_most"),
        positional=metadata.get("positional", False),
    )


def _kind_of(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """(type of one value, is it a tuple of them, the literals it is limited to)."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        kind, _, literals = _kind_of(get_args(hint)[0])
        return kind, True, literals
    if get_origin(hint) is Literal:
        return str, False, get_args(hint)
    if hint not in (int, float, str, bool):
        raise TypeError(f"an option cannot be a {hint}")
    return hint, False, ()


def parse(option: Option, text: str) -> int | float | str:
    """One value as the command line gives it. OptionError names the flag, the text and what is expected."""
    try:
        if option.kind is int:
            return _exact_integer(text)
        if option.kind is float:
            return float(text)
    except (ValueError, InvalidOperation):
        raise OptionError(option.flag, text, option.expected) from None
    return text


def _exact_integer(text: str) -> int:
    multiple = _MULTIPLES.get(text[-1:], 1)
    number = Decimal(text if multiple == 1 else text[:-1])
    if not number.is_finite() or number.adjusted() > _MOST_DIGITS:
        raise ValueError(text)
    number *= multiple
    if number != int(number):
        raise ValueError(text)
    return int(number)


def build(params: type, given: Mapping[str, Any], *, flags: bool = False) -> Any:
    """An instance of a `Params` class. OptionError for a value out of bounds, UnknownNameError for a strange name.

    `flags`: messages spell options as the command line does (`--kv-dtype`), else as Python does (`kv_dtype`).
    """
    options = {option.name: option for option in options_of(params)}
    for name in given:
        if name not in options:
            raise UnknownNameError("option", name, options)
    checked = {
        name: _checked(options[name], value, options[name].flag if flags else name) for name, value in given.items()
    }
    return params(**checked)


def _checked(option: Option, value: Any, label: str) -> Any:
    if value is None and option.default is None:
        return None
    if not option.repeatable:
        return _checked_one(option, value, label)
    items = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    return tuple(_checked_one(option, item, label) for item in items)


def _checked_one(option: Option, value: Any, label: str) -> Any:
    try:
        typed = _typed(option.kind, value)
    except (TypeError, ValueError):
        raise OptionError(label, value, option.expected) from None
    if option.choices and typed not in option.choices:
        near = get_close_matches(str(typed), option.choices, n=1)
        raise OptionError(label, value, option.expected + (f"; did you mean {near[0]}?" if near else ""))
    if option.kind in (int, float) and not _within(option, typed):
        raise OptionError(label, value, option.expected)
    return typed


def _typed(kind: type, value: Any) -> Any:
    if kind is bool or isinstance(value, bool):
        if kind is not bool or not isinstance(value, bool):
            raise TypeError
        return value
    if kind is int:
        return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    if kind is float:
        return float(value) if not isinstance(value, str) else _refuse()
    return os.fspath(value)


def _refuse() -> None:
    raise TypeError


def _within(option: Option, value: float) -> bool:
    return (
        math.isfinite(value)
        and (option.at_least is None or value >= option.at_least)
        and (option.above is None or value > option.above)
        and (option.at_most is None or value <= option.at_most)
    )
