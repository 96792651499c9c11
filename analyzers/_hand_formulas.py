"""The usual hand formulas, computed from the config the way everyone does, to be held against the record.

This is the one place where a config is computed with: the point is to show where its figures mislead. Each rule makes
one wrong assumption and takes everything else from the record, so `hand` is what somebody would get who is right
elsewhere, and the error is 0 where the assumption holds or touches nothing of this model. Biases stay under every rule.
d hidden width, H query heads, G key/value heads, D head width, F FFN width, L cached tokens.

- mha: G = H, in the matrices of keys and values, and in the cache. q_by_kv_heads: queries of G heads.
- head_dim: D = d/H; a latent's rotary part is kept, and the latent itself has no heads.
- tied: no head of its own. untied: a head of its own where it is a table of the model.
- ffn_4d: F = 4d in each layer's dense FFN; experts keep their width. two_matrix_ffn: no FFN and no expert has a gate.
- kv_expanded: a latent is cached as keys and values of every head.
- all_layers_full: a window keeps every token, and a layer without attention caches what one with it does.
- all_experts: each token is multiplied by every expert. 2n_per_token: two FLOPs for each active parameter, embedding
  included. Both are held against what an engine executes for a token, whatever this implementation multiplies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from introspect.analyzers._cache import Part
from introspect.analyzers._hand_facts import FfnChain, HeadMatrix
from introspect.table import Table, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What each layer keeps; `layers` of the stack that holds it; `context` asked for, None for the defaults.

    The defaults: a token's width is compared on an empty cache, where every layer grows, and which layers grow is
    compared where every window is full.
    """

    parts: tuple[Part, ...]
    layers: int
    context: int | None

    @property
    def near(self) -> int:
        """Cached tokens where widths are compared."""
        return 0 if self.context is None else self.context

    @property
    def far(self) -> int:
        """Cached tokens where the layers that grow are compared."""
        full = max((part.window or 0 for part in self.parts), default=0)
        return full if self.context is None else self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the record says. FLOPs are an engine's, of the weights, for one token."""

    total: int
    active: int | None  # None: it could not be told how many experts a token uses
    head: int  # elements of the head's own matrix
    head_in_table: int  # of a head that is a looked-up table
    heads: tuple[HeadMatrix, ...]
    ffn: tuple[FfnChain, ...]
    flops_per_token: int
    flops_all_experts: int
    cache: CacheFacts


@dataclass(frozen=True, slots=True)
class Sizes:
    """The config's hidden width and query heads."""

    d: int
    heads: int


_NAMES: dict[str, tuple[str, ...]] = {
    "d": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
}


def read_sizes(config: dict[str, Any]) -> Sizes | None:
    """The sizes a hand formula needs; None when the config lacks width or heads under every usual name."""
    fields = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else config

    def find(names: tuple[str, ...]) -> int | None:
        found = (fields.get(name) for name in names)
        return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    d, heads = (find(_NAMES[name]) for name in ("d", "heads"))
    return Sizes(d, heads) if d and heads else None


# --- parameters -----------------------------------------------------------------------------------------------------


def _mha(s: Sizes, m: Measured) -> int:
    cached = [one for one in m.heads if one.role in ("key", "value")]
    return m.total + sum(one.sized(heads=one.query_heads) - one.sized() for one in cached)


def _q_by_kv_heads(s: Sizes, m: Measured) -> int:
    queries = [one for one in m.heads if one.role == "query"]
    return m.total + sum(one.sized(heads=one.key_heads) - one.sized() for one in queries)


def _head_dim(s: Sizes, m: Measured) -> int:
    return m.total + sum(one.sized(width=s.d // s.heads) - one.sized() for one in m.heads)


def _ffn_4d(s: Sizes, m: Measured) -> int:
    widest: dict[str, FfnChain] = {}  # a layer may hold narrower chains that are no FFN (per-layer embeddings)
    for chain in m.ffn:
        if chain.dense and (chain.layer not in widest or chain.width > widest[chain.layer].width):
            widest[chain.layer] = chain
    sizes = ((chain.up_params + chain.down_params, chain) for chain in widest.values())
    return m.total + sum(params * 4 * chain.model // chain.width - params for params, chain in sizes)


def _two_matrix_ffn(s: Sizes, m: Measured) -> int:
    gated = (chain for chain in m.ffn if chain.inner > chain.width)
    return m.total - sum(chain.up_params * (chain.inner - chain.width) // chain.inner for chain in gated)


# --- the cache ------------------------------------------------------------------------------------------------------


def _growth(parts: Iterable[Part], context: int, row_bits: Callable[[Part], int]) -> int:
    """Bytes that one more token takes in the layers that grow, with rows of another size."""
    grown = (row_bits(part) for part in parts if part.rows(context + 1) > part.rows(context))
    return sum(-(-bits // 8) for bits in grown)


def _recorded_row(part: Part) -> int:
    return part.row_bits


def _mha_row(part: Part) -> int:
    if not (part.query_heads and part.kv_heads) or part.kind == "MLA":
        return part.row_bits
    return part.row_bits * part.query_heads // part.kv_heads


def _narrow_row(part: Part, width: int) -> int:
    if not (part.k_dim and part.v_dim) or part.kind == "MLA":
        return part.row_bits
    return part.row_bits * 2 * width // (part.k_dim + part.v_dim)


def _expanded_row(part: Part) -> int:
    if part.kind != "MLA" or not part.row_bits:
        return part.row_bits
    elements = (part.query_heads or 0) * ((part.k_dim or 0) + (part.v_dim or 0))
    return part.row_bits * elements // part.row_elements


def _all_full(cache: CacheFacts) -> int:
    """Every row that attention caches or shares, and the commonest of them in each layer without attention."""
    attending = [part for part in cache.parts if part.query_heads and part.kind != "cross"]
    rows = Counter(part.row_bits for part in attending if part.row_bits)
    missing = max(0, cache.layers - len({part.layer for part in attending}))
    bits = (*(part.row_bits for part in cache.parts), *missing * [bits for bits, _ in rows.most_common(1)])
    return sum(-(-one // 8) for one in bits)


# --- the table ------------------------------------------------------------------------------------------------------

PARAMETERS, FLOPS, KV = "parameters", "flops_per_token", "kv_bytes_per_token"
Rule = tuple[str, str, Callable[[Sizes, Measured], int | None]]
RULES: tuple[Rule, ...] = (
    ("mha", PARAMETERS, _mha),
    ("mha", KV, lambda s, m: _growth(m.cache.parts, m.cache.near, _mha_row)),
    ("q_by_kv_heads", PARAMETERS, _q_by_kv_heads),
    ("head_dim", PARAMETERS, _head_dim),
    ("head_dim", KV, lambda s, m: _growth(m.cache.parts, m.cache.near, lambda p: _narrow_row(p, s.d // s.heads))),
    ("tied", PARAMETERS, lambda s, m: m.total - m.head),
    ("untied", PARAMETERS, lambda s, m: m.total + m.head_in_table),
    ("ffn_4d", PARAMETERS, _ffn_4d),
    ("two_matrix_ffn", PARAMETERS, _two_matrix_ffn),
    ("kv_expanded", KV, lambda s, m: _growth(m.cache.parts, m.cache.near, _expanded_row)),
    ("all_layers_full", KV, lambda s, m: _all_full(m.cache)),
    ("all_experts", FLOPS, lambda s, m: m.flops_all_experts),
    ("2n_per_token", FLOPS, lambda s, m: None if m.active is None else 2 * m.active),
)
UNITS = {
    "rule": "",
    "quantity": "",
    "hand": "",
    "record": "",
    "difference": "",
    "relative_error": "share",
    "context": "tokens",
}


def hand_formulas(config: dict[str, Any], measured: Measured) -> Table:
    """One row for each rule and quantity; none when the config's figures cannot be read, none of a cache without one.

    `context`: tokens that are cached when the cache grows by `record`.
    """
    sizes = read_sizes(config)
    if sizes is None:
        return Table(units=UNITS, rows=())
    grows = any(part.row_bits for part in measured.cache.parts)
    return Table(
        units=UNITS,
        rows=tuple(
            _row(name, quantity, rule(sizes, measured), measured)
            for name, quantity, rule in RULES
            if quantity != KV or grows
        ),
    )


def _row(rule: str, quantity: str, hand: int | None, measured: Measured) -> dict[str, Value]:
    cache, context = measured.cache, None
    if quantity == KV:
        context = cache.far if rule == "all_layers_full" else cache.near
        record = _growth(cache.parts, context, _recorded_row)
    else:
        record = measured.total if quantity == PARAMETERS else measured.flops_per_token
    return {
        "rule": rule,
        "quantity": quantity,
        "hand": hand,
        "record": record,
        "difference": None if hand is None else hand - record,
        "relative_error": _error(hand, record),
        "context": context,
    }


def _error(hand: int | None, record: int) -> float | None:
    """None where it is unknown or has no bound: a cache that no longer grows."""
    if hand is None or (record == 0 and hand):
        return None
    return hand / record - 1 if record else 0.0
