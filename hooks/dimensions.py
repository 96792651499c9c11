"""What each dimension of a model follows from: change one integer of the config, build and run again, compare.

A short copy of the model (one layer of each kind) is built on meta and run on a few tokens. Every integer of the
resolved config is moved alone by the first step that builds; what cannot move there is moved in the raw file, where
fields that a class derives are absent (DeepSeek's head_dim holds its rotary width in place), and at last together with
the fields of equal value. A dimension is then fitted as a sum of products of the fields that move it, from all
combinations of moved and unmoved fields (or as a quotient of two), and must predict changes it was not fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import islice, permutations, product
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from introspect.errors import BuildError
from introspect.explain_record import Dimension, ExplainRecord, Term
from introspect.hooks.build import quiet
from introspect.hooks.config_fields import Fields, Path, fields_of, integers, read, scaled
from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, build_on_meta, few_layers
from introspect.records import RunShape

TOKENS = 4
MOST_FIELDS = 4  # fields of one dimension that are fitted: 2**4 builds
Place = tuple[str, str]  # representative module path and dimension
Sizes = dict[Place, int]
Move = tuple[Path, ...]  # paths that are moved together


def gather_dimensions(module: nn.Module, raw: Mapping[str, Any]) -> ExplainRecord:
    """Explain every dimension of a transformers model. `raw`: its config file. Raises BuildError for other modules."""
    if not isinstance(module, PreTrainedModel):
        raise BuildError(type(module).__name__, "no transformers model", "explain needs a config to change")
    with quiet():
        return _Search(type(module), module.config, dict(raw)).record()


class _Search:
    """Builds of changed configs, each made once, and which field moves what."""

    def __init__(self, model_class: type[PreTrainedModel], config: PreTrainedConfig, raw: Fields) -> None:
        self._model_class, self._config_class = model_class, type(config)
        whole = fields_of(config)
        self._resolved = few_layers(model_class, config)
        shortened = {key: value for key, value in self._resolved.items() if whole.get(key) != value}
        self._raw = {**raw, **{key: value for key, value in shortened.items() if key in raw}}
        self._seen: dict[tuple[bool, tuple[tuple[Path, int], ...]], Sizes | None] = {}
        self.base = self._look(False, {}) or {}
        self._moves: dict[Move, tuple[bool, tuple[int, ...]]] = {}  # whether in the raw file, and new values that build
        self._stuck: list[Path] = []

    def record(self) -> ExplainRecord:
        """Move every field, then explain every dimension."""
        for path in integers(self._resolved, 1):
            if "label2id" not in path:  # names of classes, in every transformers config
                self._try(path)
        moved = {move: self._moved_by(move) for move in self._moves}
        dimensions = [
            self._explain(place, [m for m, places in moved.items() if place in places]) for place in self.base
        ]
        structural = [move for move in self._moves if self._restructures(move)]
        still = [_name(m[0]) for m, places in moved.items() if not places and m not in structural]
        return ExplainRecord(
            dimensions=tuple(_distinct(dimensions)),
            still=tuple(dict.fromkeys(still)),
            structural=tuple(dict.fromkeys(_name(move[0]) for move in structural)),
            stuck=tuple(dict.fromkeys(_name(path) for path in self._stuck)),
            builds=len(self._seen),
        )

    def _look(self, in_raw: bool, changes: dict[Path, int]) -> Sizes | None:
        """The sizes of a changed model; None when it cannot be built and run."""
        key = (in_raw, tuple(sorted(changes.items())))
        if key not in self._seen:
            try:
                fields = scaled(self._raw if in_raw else self._resolved, changes)
                model = build_on_meta(self._model_class, read(self._config_class, fields))
                self._seen[key] = {**_matrix_sizes(model), **_call_sizes(model)}
            except Exception:  # a config or model class may refuse a change in any way
                self._seen[key] = None
        return self._seen[key]

    def _try(self, path: Path) -> None:
        """Find two changes of one field that build: alone, in the raw file, with fields of equal value."""
        in_file = integers(self._raw, 1)
        value = integers(self._resolved, 1)[path]
        equals = tuple(other for other, size in in_file.items() if size == value)
        tries: list[tuple[Move, bool]] = [((path,), False)]
        if path in in_file and self._look(True, {}) == self.base:
            tries += [((path,), True), *([(equals, True)] if len(equals) > 1 else [])]
        for move, in_raw in tries:
            building = (s for s in _steps(value) if self._look(in_raw, dict.fromkeys(move, s)) is not None)
            if found := tuple(islice(building, 2)):
                twice = dict.fromkeys(move, 2 * value)  # a quotient may not notice a small step
                doubled = (2 * value,) if self._look(in_raw, twice) is not None else ()
                self._moves[move] = (in_raw, tuple(dict.fromkeys((*found, *doubled))))
                return
        self._stuck.append(path)

    def _moved_by(self, move: Move) -> set[Place]:
        in_raw, news = self._moves[move]
        looks = [self._look(in_raw, dict.fromkeys(move, new)) or {} for new in news]
        return {place for place, size in self.base.items() if any(look.get(place, size) != size for look in looks)}

    def _restructures(self, move: Move) -> bool:
        """Whether a move adds or removes matrices or calls (counts of layers and experts, which layer is which)."""
        in_raw, news = self._moves[move]
        return (self._look(in_raw, dict.fromkeys(move, news[0])) or {}).keys() != self.base.keys()

    def _explain(self, place: Place, moves: list[Move]) -> Dimension:
        terms: tuple[Term, ...] | None = ((self.base[place], ()),)
        confirmed = False
        if moves:
            for candidate in self._candidates(place, moves):
                if self._predicts(place, moves, candidate):
                    terms, confirmed = candidate, True
                    break
            else:
                terms = None
        return Dimension(
            module=_pattern(place[0]),
            dimension=place[1],
            value=self.base[place],
            fields=tuple(sorted(_name(move[0]) for move in moves)),
            terms=terms,
            confirmed=confirmed,
        )

    def _candidates(self, place: Place, moves: list[Move]) -> Iterator[tuple[Term, ...]]:
        """Sums that give the size as it is: the fitted one, then quotients of two fields, alone and times a third."""
        if len(moves) > MOST_FIELDS:
            return
        fitted = self._fit(place, moves)
        if fitted is not None:
            yield fitted
        names = {_name(move[0]): self._value(move) for move in moves}
        for over, under in permutations(names, 2):
            quotient = f"{over} // {under}"
            for factors in ((quotient,), *((quotient, name) for name in names)):
                term: tuple[Term, ...] = ((1, tuple(sorted(factors))),)
                if _evaluate(term, names) == self.base[place]:
                    yield term

    def _fit(self, place: Place, moves: list[Move]) -> tuple[Term, ...] | None:
        """The multilinear form through all combinations of each field's value and its first change."""
        in_raw = any(self._moves[move][0] for move in moves)
        corners: dict[tuple[int, ...], Fraction] = {}
        for corner in product((0, 1), repeat=len(moves)):
            changes = {p: self._moves[m][1][0] for m, moved in zip(moves, corner, strict=True) if moved for p in m}
            sizes = self._look(in_raw, changes)
            if sizes is None or place not in sizes:
                return None
            corners[corner] = Fraction(sizes[place])
        points = [(self._value(move), self._moves[move][1][0]) for move in moves]
        return _terms(_coefficients(corners, points), [_name(move[0]) for move in moves])

    def _value(self, move: Move) -> int:
        return integers(self._resolved, 1)[move[0]]

    def _predicts(self, place: Place, moves: list[Move], terms: tuple[Term, ...]) -> bool:
        """Whether the terms give the size under changes they were not fitted to: of all fields at once, and of each
        alone to each of its changes. At least one must build."""
        in_raw = any(self._moves[move][0] for move in moves)
        own = {move: self._value(move) for move in moves}
        trials = [{move: self._moves[move][1][-1] for move in moves}]
        trials += [{**own, move: new} for move in moves for new in self._moves[move][1]]
        built = 0
        for trial in trials:
            sizes = self._look(in_raw, {p: new for move, new in trial.items() if new != own[move] for p in move})
            if sizes is None or place not in sizes:
                continue
            built += 1
            if sizes[place] != _evaluate(terms, {_name(move[0]): new for move, new in trial.items()}):
                return False
        return built > 0 and any(len(self._moves[move][1]) > 1 for move in moves)


def _steps(value: int) -> Iterator[int]:
    yield from (value + 1, value + 2, 2 * value, value + 4, value + 8, value + 16, value + 64)
    yield from (new for new in (value // 2, value - 1) if new > 0)


def _matrix_sizes(model: nn.Module) -> Sizes:
    """Sizes of every matrix. Of layers that are alike the first stands for all, as long as it is the same one."""
    found: Sizes = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() not in (2, 3):
                continue
            own = path if name == "weight" else f"{path}.{name}"
            *experts, first, second = weight.shape
            kn = _is_kn(module)
            sizes = {"k": first, "n": second} if kn else {"k": second, "n": first}
            if isinstance(module, nn.Embedding):
                sizes = {"rows": first, "n": second}
            if experts:
                sizes["experts"] = experts[0]
            found.update({(own, dimension): size for dimension, size in sizes.items()})
    return found


def _is_kn(module: nn.Module) -> bool:
    """Whether a module keeps its matrix as [k, n]; a Linear keeps [n, k]."""
    return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


def _call_sizes(model: nn.Module) -> Sizes:
    trace = observe(model, IDENTITY, RunShape(phase="prefill", seq=TOKENS))
    found: Sizes = {}
    for op, _ in trace.walk():
        if (call := op.attention) is not None:
            q, v = trace.tensors[call.q].shape, trace.tensors[call.v].shape
            sizes = {
                "query_heads": call.query_heads,
                "kv_heads": call.kv_heads,
                "qk_head_dim": q[-1],
                "v_head_dim": v[-1],
            }
            found.update({(op.module, name): size for name, size in sizes.items()})
        if op.experts is not None:
            found[op.module, "top_k"] = op.experts.top_k
    return found


def _coefficients(
    corners: dict[tuple[int, ...], Fraction], points: list[tuple[int, int]]
) -> dict[tuple[int, ...], Fraction]:
    """Coefficient of each product of fields (1 where one is in it): each field in turn becomes a slope and a start."""
    current = dict(corners)
    for axis, (low, high) in enumerate(points):
        turned: dict[tuple[int, ...], Fraction] = {}
        for corner in current:
            if corner[axis]:
                continue
            other = (*corner[:axis], 1, *corner[axis + 1 :])
            slope = (current[other] - current[corner]) / (high - low)
            turned[corner], turned[other] = current[corner] - slope * low, slope
        current = turned
    return current


def _terms(coefficients: dict[tuple[int, ...], Fraction], names: list[str]) -> tuple[Term, ...] | None:
    terms: list[Term] = []
    for inside, value in coefficients.items():
        if value.denominator != 1:
            return None
        if value:
            terms.append((int(value), tuple(sorted(n for n, chosen in zip(names, inside, strict=True) if chosen))))
    return tuple(sorted(terms, key=lambda term: (not term[1], term[1])))


def _evaluate(terms: tuple[Term, ...], values: dict[str, int]) -> int:
    total = 0
    for coefficient, names in terms:
        part = coefficient
        for name in names:
            over, _, under = name.partition(" // ")
            part *= values[over] // values[under] if under else values[name]
        total += part
    return total


def _name(path: Path) -> str:
    return str(path[-1])


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _distinct(dimensions: list[Dimension]) -> Iterator[Dimension]:
    """One of each: equal layers give equal dimensions."""
    return iter(dict.fromkeys(dimensions))
