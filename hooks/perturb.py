"""Change one integer of a model's config at a time, build and run again, and keep what each change does to its sizes.

A short copy of the model (one layer of each kind) stands for it. Every integer of the resolved config is moved alone by
the first steps that build; what cannot move so is moved with the lists that have an entry for each it counts
(layer_types), then in the raw file, where fields that a class derives are absent (DeepSeek's head_dim holds its rotary
width in place), and at last together with fields of equal value or in proportion with a multiple of it. A field that
only the file knows, since the class turns it into others (Gemma 4's global_head_dim becomes an entry for each layer),
is moved in the file and stands for those it becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from transformers import PreTrainedConfig, PreTrainedModel

from introspect.hooks.config_fields import (
    Fields,
    Path,
    counted_by,
    elements,
    fields_of,
    integers,
    read,
    scaled,
    shortened,
)
from introspect.hooks.model_sizes import Sizes, sizes_of
from introspect.hooks.shrink import build_on_meta, few_layers

Changes = dict[Path, int]


@dataclass(frozen=True, slots=True)
class Move:
    """One way of moving a field, in the raw file or the resolved config, and the values with which it builds.

    `paths`: the field itself, then what moves with it; `ratios`: what each of them is of the field, 1 for its equals.
    """

    paths: tuple[Path, ...]
    in_raw: bool
    value: int
    news: tuple[int, ...] = ()
    ratios: tuple[int, ...] = ()

    @property
    def path(self) -> Path:
        """The field."""
        return self.paths[0]

    def to(self, new: int) -> Changes:
        """The changes that give it this value."""
        ratios = self.ratios or (1,) * len(self.paths)
        return {path: new * ratio for path, ratio in zip(self.paths, ratios, strict=True)}


class Perturbed:
    """Builds of changed configs, each made once, and the moves that were found to build."""

    def __init__(self, model_class: type[PreTrainedModel], config: PreTrainedConfig, raw: Fields) -> None:
        self._model_class, self._config_class = model_class, type(config)
        whole = fields_of(config)
        short = few_layers(model_class, config)
        self._resolved = fields_of(read(type(config), short))  # keys of layers are written by their number
        self._raw = shortened(self._without_taken_out(raw, whole), whole, short)
        self._seen: dict[tuple[bool, tuple[tuple[Path, int], ...]], Sizes | None] = {}
        self.values = integers(self._resolved, 1)
        self.base = self.look(False, {}) or {}
        self._in_file = integers(self._raw, 1) if self.look(True, {}) == self.base else {}
        self.moves: list[Move] = []
        self.stuck: list[Path] = []
        self._find()

    def _without_taken_out(self, raw: Fields, whole: Fields) -> Fields:
        """The file without what the builder took out of the config: how weights are stored decides no dimension."""
        try:
            taken_out = fields_of(read(self._config_class, raw)).keys() - whole.keys()
        except Exception:  # a class may refuse a file as it is, which is then not changed either
            return raw
        return {key: value for key, value in raw.items() if key not in taken_out}

    @property
    def builds(self) -> int:
        """Models built so far."""
        return len(self._seen)

    def look(self, in_raw: bool, changes: Changes) -> Sizes | None:
        """The sizes of a changed model; None when it cannot be built and run."""
        key = (in_raw, tuple(sorted(changes.items())))
        if key not in self._seen:
            try:
                self._seen[key] = sizes_of(build_on_meta(self._model_class, self._read(in_raw, changes)))
            except Exception:  # a config or model class may refuse a change in any way
                self._seen[key] = None
        return self._seen[key]

    def entries(self, move: Move) -> tuple[int, ...]:
        """The integers of a field in the unchanged config: one, or those of a list."""
        return elements(self._raw if move.in_raw else self._resolved, move.path)

    def _read(self, in_raw: bool, changes: Changes) -> PreTrainedConfig:
        return read(self._config_class, scaled(self._raw if in_raw else self._resolved, changes))

    def _find(self) -> None:
        """Move every field; those that only the file knows first, since they stand for others."""
        only_file = {path: value for path, value in self._in_file.items() if path not in self.values}
        self.values |= only_file
        become: set[Path] = set()
        for path, value in only_file.items():
            if self._try([Move((path,), True, value)]):
                become |= self._becomes(self.moves[-1])
        for path in self.values:
            named = "label2id" in path  # names of classes, in every transformers config
            if path not in only_file and path not in become and not named and not self._is_bound(path):
                self.stuck += [] if self._try(self._ways(path)) else [path]

    def _becomes(self, move: Move) -> set[Path]:
        """Fields of the resolved config, absent in the file, that follow a field of the file."""
        before = integers(fields_of(self._read(True, {})), 1)
        after = integers(fields_of(self._read(True, move.to(move.news[0]))), 1)
        return {path for path, value in before.items() if path not in self._in_file and after.get(path) != value}

    def _is_bound(self, path: Path) -> bool:
        """Whether a field already moves with another and cannot move alone."""
        bound = any(path in move.paths[1:] for move in self.moves)
        return bound and not self._news(Move((path,), False, self.values[path]))

    def _ways(self, path: Path) -> Iterator[Move]:
        """The field alone, with its lists, in the file; then with fields of equal value, then in proportion with one
        that is a multiple (a width that must stay divided among heads)."""
        value = self.values[path]
        places = [(self._resolved, False), *([(self._raw, True)] if path in self._in_file else [])]
        for fields, in_raw in places:
            yield Move((path,), in_raw, value)
            if lists := counted_by(fields, path):
                yield Move((path, *lists), in_raw, value)
        for fields, in_raw in places:
            others = {other: size for other, size in integers(fields, 2).items() if other != path}
            beside = {other: size for other, size in others.items() if other[:-1] == path[:-1]}
            equals = [other for other, size in others.items() if size == value]
            yield from (Move((path, other), in_raw, value) for other in equals if other in beside)
            if len(equals) > 1:
                yield Move((path, *equals), in_raw, value)
            for other, size in beside.items():
                if size > value > 1 and size % value == 0:
                    yield Move((path, other), in_raw, value, ratios=(1, size // value))

    def _try(self, ways: Iterable[Move]) -> bool:
        """Keep the first way of moving a field that builds."""
        for way in ways:
            if news := self._news(way):
                self.moves.append(replace(way, news=news))
                return True
        return False

    def _news(self, way: Move) -> tuple[int, ...]:
        """Two new values that build, and the double, since a quotient may not notice a small step."""
        found = tuple(islice((new for new in _steps(way.value) if self._builds(way, new)), 2))
        doubled = (2 * way.value,) if found and self._builds(way, 2 * way.value) else ()
        return tuple(dict.fromkeys((*found, *doubled)))

    def _builds(self, way: Move, new: int) -> bool:
        return self.look(way.in_raw, way.to(new)) is not None


def _steps(value: int) -> Iterator[int]:
    yield from (value + 1, value + 2, 2 * value, value + 4, value + 8, value + 16, value + 64)
    yield from (new for new in (value // 2, value - 1) if new > 0)
