"""What each dimension of a model follows from: change one integer of the config, build and run again, compare.

perturb.py moves the fields, model_sizes.py reads the sizes. A dimension is then fitted (fitting.py) as an expression in
the fields that move it, from the combinations of moved and unmoved fields; it must give the size of the model as it is
and predict changes it was not fitted to. Where the moving fields alone give none, one field beside them may divide
(a width split among heads notices their number only where it does not divide).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from introspect.errors import BuildError
from introspect.explain_record import Dimension, ExplainRecord, Term, pattern
from introspect.hooks.build import quiet
from introspect.hooks.config_fields import LENGTH, Path, dotted
from introspect.hooks.fitting import Seen, fits, holds, names_in
from introspect.hooks.model_sizes import Place
from introspect.hooks.perturb import Changes, Move, Perturbed

MOST_FIELDS = 4  # fields of one dimension that are fitted: 2**4 builds
Trial = tuple[int | None, ...]  # the new value of each move, None where it is not made
Reading = dict[Path, tuple[str, int]]  # the name of each field and its value in the model as it is
Expression = tuple[tuple[Term, ...] | None, bool]  # and whether it predicted a held-out change


def gather_dimensions(module: nn.Module, raw: Mapping[str, Any]) -> ExplainRecord:
    """Explain every dimension of a transformers model. `raw`: its config file. Raises BuildError for other modules."""
    if not isinstance(module, PreTrainedModel):
        raise BuildError(type(module).__name__, "no transformers model", "explain needs a config to change")
    with quiet():
        return _Explainer(Perturbed(type(module), module.config, dict(raw))).record()


class _Explainer:
    """Which field moves what, and the expression at each place."""

    def __init__(self, perturbed: Perturbed) -> None:
        self._model = perturbed
        self._moved = {move: self._moved_by(move) for move in perturbed.moves}

    def record(self) -> ExplainRecord:
        """Every dimension explained, every field accounted for."""
        dimensions = [self._explain(place) for place in self._model.base]
        structural = [move for move in self._moved if self._restructures(move)]
        still = [move for move, places in self._moved.items() if not places and move not in structural]
        joint = {dotted(move.path): tuple(dotted(path) for path in _partners(move)) for move in self._moved}
        return ExplainRecord(
            dimensions=tuple(dict.fromkeys(dimensions)),  # equal layers give equal dimensions
            structural=tuple(dotted(move.path) for move in structural),
            still=tuple(dotted(move.path) for move in still),
            stuck=tuple(dotted(path) for path in self._model.stuck),
            joint={name: partners for name, partners in joint.items() if partners},
            builds=self._model.builds,
        )

    def _moved_by(self, move: Move) -> set[Place]:
        base = self._model.base
        looks = [self._model.look(move.in_raw, move.to(new)) or {} for new in move.news]
        return {place for place, size in base.items() if any(look.get(place, size) != size for look in looks)}

    def _restructures(self, move: Move) -> bool:
        """Whether a move adds or removes matrices or calls (counts of layers and experts, which layer is which)."""
        return (self._model.look(move.in_raw, move.to(move.news[0])) or {}).keys() != self._model.base.keys()

    def _explain(self, place: Place) -> Dimension:
        size = self._model.base[place]
        moves = [move for move, places in self._moved.items() if place in places]
        terms, confirmed = self._expression(place, moves) if moves else (((size, ()),), False)
        named = {part for _, factors in terms or () for factor in factors for part in names_in(factor)}
        return Dimension(
            module=pattern(place[0]),
            dimension=place[1],
            value=size,
            fields=tuple(sorted(named or {dotted(move.path) for move in moves})),
            terms=terms,
            confirmed=confirmed,
        )

    def _expression(self, place: Place, moves: list[Move]) -> Expression:
        """In the fields that move it; if there is none, with the one field beside them that divides, if only one will
        do. What moves only along with another field is told from that one by the other's own moves."""
        required = [move.path for move in moves if not _partners(move)]
        partners = {path for move in moves for path in _partners(move)}
        moves = moves + [move for move in self._moved if move.path in partners and move not in moves]
        if len(moves) > MOST_FIELDS:
            return None, False
        found = self._fitted(place, moves, required)
        if found[0] is None and len(moves) < MOST_FIELDS:
            divisors = self._divisors(moves)
            others = [self._fitted(place, [*moves, one], [*required, one.path]) for one in divisors]
            confirmed = {other for other in others if other[1]}
            return confirmed.pop() if len(confirmed) == 1 else found
        return found

    def _divisors(self, moves: list[Move]) -> Iterator[Move]:
        """Fields of the same config that divide one of the moved ones and move something else."""
        for other, places in self._moved.items():
            beside = [move for move in moves if move.path[:-1] == other.path[:-1] and move.value > other.value > 1]
            if places and other not in moves and any(move.value % other.value == 0 for move in beside):
                yield other

    def _fitted(self, place: Place, moves: list[Move], required: list[Path]) -> Expression:
        firsts: list[Trial] = [*product(*((None, move.news[0]) for move in moves))]
        lasts: list[Trial] = [tuple(move.news[-1] for move in moves)]
        for i, move in enumerate(moves):
            alone = [(*(None for _ in moves[:i]), new, *(None for _ in moves[i + 1 :])) for new in move.news[1:]]
            firsts, lasts = firsts + alone[:-1], lasts + alone[-1:]
        for reading in self._readings(moves):
            fitted, held = (self._seen(place, moves, trials, reading) for trials in (firsts, lasts))
            for terms in fits(fitted, [reading[path][0] for path in required]):
                if holds(terms, held):
                    return terms, any(one.size != self._model.base[place] for one in held)
        return None, False

    def _readings(self, moves: list[Move]) -> Iterator[Reading]:
        """Names and values of the fields. A list counts with its smallest entry, else with another one."""
        choices = []
        for move in moves:
            name, entries = dotted(move.path), self._model.entries(move)
            distinct = sorted(set(entries))
            choices.append([(name if len(distinct) == 1 else f"{name}[{entries.index(e)}]", e) for e in distinct])
        for chosen in product(*choices):
            yield {move.path: own for move, own in zip(moves, chosen, strict=True)}

    def _seen(self, place: Place, moves: list[Move], trials: Sequence[Trial], reading: Reading) -> list[Seen]:
        """What the trials that build show of one dimension."""
        in_raw = any(move.in_raw for move in moves)
        found = []
        for trial in trials:
            changes = _changes(moves, trial)
            sizes = self._model.look(in_raw, changes)
            if sizes is not None and place in sizes:
                values = {
                    name: value * changes[path] // self._model.values[path] if path in changes else value
                    for path, (name, value) in reading.items()
                }
                found.append(Seen(values, sizes[place]))
        return found


def _changes(moves: list[Move], trial: Trial) -> Changes:
    """The changes of several moves; a field that also moves alone keeps its own value when another takes it along."""
    changes: Changes = {}
    for move, new in sorted(zip(moves, trial, strict=True), key=lambda pair: -len(pair[0].paths)):
        changes |= {} if new is None else move.to(new)
    return changes


def _partners(move: Move) -> tuple[Path, ...]:
    """Other fields that move with a field; the lists it counts are none."""
    return tuple(path for path in move.paths[1:] if path[-1] != LENGTH)
