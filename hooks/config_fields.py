"""A config object as nested fields, its integers, and copies of it with some of them changed.

No field is known by name: integers are found wherever they stand, lists of integers count as one field.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from transformers import PreTrainedConfig

Fields = dict[str, Any]
Path = tuple[str, ...]  # keys from the outermost dict to the field

LENGTH = "[]"  # last key of a path that means the length of a list
PATTERN_REPEATS = 2  # a text that spells out layers uses each letter at least this often on average


def fields_of(config: PreTrainedConfig) -> Fields:
    """All fields of a config and of the configs inside it, those that its class derived included."""
    fields: Fields = config.to_dict()
    return fields


def read(config_class: type[PreTrainedConfig], fields: Fields) -> PreTrainedConfig:
    """The config object of these fields. Raises whatever the class raises for fields it refuses."""
    config: PreTrainedConfig = config_class.from_dict(copy.deepcopy(fields))
    return config


def integers(fields: Fields, smallest: int) -> dict[Path, int]:
    """Every integer of at least `smallest`; a list of such integers counts with its smallest, under one path."""
    return {path: value for path, value in _integers(fields, ()) if value >= smallest}


def _integers(value: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if _is_integer(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _integers(item, (*path, key))
    elif isinstance(value, (list, tuple)) and value and all(_is_integer(item) for item in value):
        yield path, min(value)


def dotted(path: Path) -> str:
    """A path as one name: "text_config.head_dim"."""
    return ".".join(path)


def scaled(fields: Fields, sizes: dict[Path, int]) -> Fields:
    """A copy in which each of these integers has the given value (each element of a list shrinks in proportion). A
    path that ends in LENGTH gives a list that many entries, by repeating it; a field that is absent is added."""
    changed = copy.deepcopy(fields)
    for (*above, last), size in sizes.items():
        if last == LENGTH:
            *above, last = above
            node = _node(changed, tuple(above))
            node[last] = (node[last] * size)[:size]
            continue
        node = _node(changed, tuple(above))
        old = node.get(last, size)
        node[last] = size if _is_integer(old) else type(old)(item * size // min(old) for item in old)
    return changed


def counted_by(fields: Fields, path: Path) -> tuple[Path, ...]:
    """Lengths of the lists (and texts that spell out layers) beside an integer that have as many entries."""
    node = _node(fields, path[:-1])
    length = node[path[-1]]
    if not _is_integer(length) or length < 2:
        return ()
    return tuple((*path[:-1], key, LENGTH) for key, value in node.items() if _has_entries(value, length))


def _has_entries(value: Any, length: int) -> bool:
    return isinstance(value, (str, list, tuple)) and len(value) == length and _shorter(value, length, 1) is not value


def elements(fields: Fields, path: Path) -> tuple[int, ...]:
    """The integers of one field: one, or those of a list."""
    value = _node(fields, path)
    return (value,) if _is_integer(value) else tuple(value)


def shortened(raw: Fields, whole: Fields, short: Fields) -> Fields:
    """The fields of a file with fewer layers: wherever `short` differs from `whole`, if the file has that field. An
    integer that only the file has, of a value that was cut beside it, is the same count under another name."""
    changed = copy.deepcopy(raw)
    for path, node in _dicts(raw, ()):
        before, after = (_at(fields, path) for fields in (whole, short))
        cut = {b: after.get(key) for key, b in before.items() if _is_integer(b) and after.get(key) != b}
        own = _node(changed, path)
        for key, value in node.items():
            if isinstance(value, dict) or before.get(key) == after.get(key):
                if key not in before and _is_integer(value) and value in cut:
                    own[key] = cut[value]
            elif key in after:
                own[key] = copy.deepcopy(after[key])
    return changed


def _at(fields: Fields, path: Path) -> Fields:
    """The dict at a path, an empty one where there is none."""
    node: Any = fields
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def differing(before: PreTrainedConfig, after: PreTrainedConfig) -> Iterator[tuple[str, str, str]]:
    """(field, value before, value after) of every field that differs."""
    old, new = (dict(_leaves(fields_of(config), ())) for config in (before, after))
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            yield ".".join(map(str, path)), repr(old.get(path)), repr(new.get(path))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def cuts(fields: Fields, length: int, keep: int) -> Iterator[Fields]:
    """Copies in which what counts `length` layers counts `keep`: one integer of that value at a time, then all of a
    config's together, then lists alone. Lists, patterns and keys of the same config that speak of layers follow."""
    for path, node in _dicts(fields, ()):
        counts = [key for key, value in node.items() if value == length and _is_integer(value)]
        choices: list[list[str]] = [[key] for key in counts]
        if len(counts) > 1:
            choices.append(counts)
        if any(_shorter(value, length, keep) is not value for value in node.values()):
            choices.append([])
        for chosen in choices:
            changed = copy.deepcopy(fields)
            cut = _node(changed, path)
            for key, value in cut.items():
                cut[key] = keep if key in chosen else _shorter(value, length, keep)
            yield changed


def _node(fields: Fields, path: Path) -> Any:
    node: Any = fields
    for key in path:
        node = node[key]
    return node


def _dicts(node: Fields, path: Path) -> Iterator[tuple[Path, Fields]]:
    yield path, node
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _dicts(value, (*path, key))


def _shorter(value: Any, length: int, keep: int) -> Any:
    """`value` cut to the first layers, where it has an entry, a letter, a number or a key for each; else as it is."""
    if isinstance(value, (list, tuple)):
        if len(value) == length:
            return value[:keep]
        if _are_layers(value, length):
            return type(value)(layer for layer in value if layer < keep)
    if isinstance(value, str) and len(value) == length >= PATTERN_REPEATS * len(set(value)):
        return value[:keep]
    if isinstance(value, dict) and value and all(str(key).isdigit() and int(key) < length for key in value):
        return {key: item for key, item in value.items() if int(key) < keep}
    return value


def _are_layers(value: list[Any] | tuple[Any, ...], length: int) -> bool:
    """Rising numbers below `length`: the indices of some layers."""
    numbers = all(_is_integer(item) for item in value)
    return bool(value) and numbers and value[-1] < length and all(a < b for a, b in pairwise(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
