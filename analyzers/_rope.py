"""Rotary frequencies as wavelengths: how many tokens a pair of dimensions needs for one turn.

Pair i of D/2 turns by frequency f_i radians a token, so its wavelength is 2*pi/f_i tokens; unscaled, f_i = base^(-2i/D)
(RoFormer, arXiv:2104.09864). A pair whose wavelength exceeds the training length never completed a turn in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from introspect.errors import OptionError
from introspect.records import Rope
from introspect.table import Table, Value

SCALINGS = ("linear", "ntk", "yarn", "llama3")
"""What `--rope NAME:FACTOR` knows, as hooks/rope.py asks transformers for it."""

UNITS = {
    "pair": "",
    "layers": "",
    "module": "",
    "layer_type": "",
    "scaling": "",
    "base": "",
    "unscaled_wavelength_tokens": "tokens",
    "wavelength_tokens": "tokens",
    "turns_in_training_length": "turns",
    "attention_factor": "",
}


def check_scalings(scalings: Iterable[str]) -> None:
    """Raise OptionError for a what-if that is not NAME:FACTOR with a factor of at least 1."""
    for scaling in scalings:
        name, _, factor = scaling.partition(":")
        try:
            valid = name in SCALINGS and 1 <= float(factor) < math.inf
        except ValueError:
            valid = False
        if not valid:
            raise OptionError(
                "--rope", scaling, f"NAME:FACTOR with a name of {', '.join(SCALINGS)} and a factor from 1"
            )


def rope_table(ropes: Iterable[Rope], layers_of: Callable[[Rope], str]) -> Table:
    """A row for each pair of dimensions of each set of frequencies."""
    return Table(units=UNITS, rows=tuple(row for rope in ropes for row in _rows(rope, layers_of(rope))))


def _rows(rope: Rope, layers: str) -> list[dict[str, Value]]:
    return [
        {
            "pair": pair,
            "layers": layers,
            "module": rope.module,
            "layer_type": rope.layer_type or "",
            "scaling": rope.rope_type,
            "base": rope.base,
            "unscaled_wavelength_tokens": wavelength(unscaled),
            "wavelength_tokens": wavelength(frequency),
            "turns_in_training_length": _turns(rope, frequency),
            "attention_factor": rope.attention_factor,
        }
        for pair, (frequency, unscaled) in enumerate(zip(rope.inv_freq, rope.unscaled_inv_freq, strict=False))
    ]


def wavelength(frequency: float) -> float | None:
    """Tokens for one turn; None for a pair that is not rotated."""
    return 2 * math.pi / frequency if frequency else None


def _turns(rope: Rope, frequency: float) -> float | None:
    return None if rope.training_length is None else rope.training_length * frequency / (2 * math.pi)


def incomplete_pairs(rope: Rope) -> int | None:
    """Rotated pairs that never complete a turn inside the training length; None where that length is unknown."""
    if rope.training_length is None:
        return None
    return sum(0 < rope.training_length * frequency < 2 * math.pi for frequency in rope.inv_freq)
