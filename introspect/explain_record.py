"""Which config fields decide each dimension of a model, found by changing them and building again."""

from __future__ import annotations

import re
from dataclasses import dataclass

Term = tuple[int, tuple[str, ...]]  # coefficient and factors: fields, or a quotient "a * b // c"; none: a constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension of one matrix (or of one attention or experts call), in the model as it is.

    `dimension`: "k" and "n" of a matrix [k, n], "experts" of stacked experts, "stack" of other stacked ones, "kernel"
    of a convolution, "rows" of a table, "query_heads", "kv_heads", "qk_head_dim" and "v_head_dim" of an attention call,
    "top_k" of an experts call. `terms` sum up to it; None when the fields that move it do not make such a sum.
    `confirmed`: the sum predicted a held-out change.
    """

    module: str
    dimension: str
    value: int
    fields: tuple[str, ...]
    terms: tuple[Term, ...] | None
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRecord:
    """All dimensions; `structural`: integer fields that add or remove matrices or calls; `still`: those that move
    nothing; `stuck`: those no change of which could be built; `joint`: those that moved only together with others, of
    equal value or in proportion. "text_config.head_dim" is a field of a config inside the config.
    """

    dimensions: tuple[Dimension, ...]
    structural: tuple[str, ...]
    still: tuple[str, ...]
    stuck: tuple[str, ...]
    joint: dict[str, tuple[str, ...]]
    builds: int


def pattern(path: str) -> str:
    """A module path whose list positions are masked: "model.layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
