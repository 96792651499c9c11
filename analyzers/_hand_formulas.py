"""The usual hand formulas, computed from the config the way everyone does, to be held against the record.

This is the one place where a config is computed with: the point is to show where its figures mislead. Each rule
replaces one part of the record by what the rule says, so `hand` is what somebody would get who is right elsewhere.
d hidden width, L layers, H query heads, G key/value heads, D head width, F FFN width, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from introspect.table import Table, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the record says: the parts of `params`, FLOPs of the weights a token, cache growth a token."""

    total: int
    active: int
    attention: int
    ffn: int
    embedding: int
    lm_head: int
    routed: int
    routed_active: int
    flops_per_token: int
    kv_bytes_per_token: int
    kv_element_bytes: int  # of the record's cache, so that a rule and not a dtype is tested


@dataclass(frozen=True, slots=True)
class Sizes:
    """The config's figures under their many names; None where it has none."""

    d: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    experts: int
    latent: tuple[int, int, int] | None  # widths of the position-free key, the rotary key and the value of a head


_NAMES: dict[str, tuple[str, ...]] = {
    "d": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head": ("head_dim", "kv_channels", "attention_head_dim"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
}
_EXPERT_FFN = ("moe_intermediate_size", "expert_ffn_hidden_size")


def read_sizes(config: dict[str, Any]) -> Sizes | None:
    """The sizes a hand formula needs; None when the config lacks width, layers or heads under every usual name."""
    fields = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else config

    def find(names: tuple[str, ...]) -> int | None:
        found = (fields.get(name) for name in names)
        return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    d, layers, heads = (find(_NAMES[name]) for name in ("d", "layers", "heads"))
    if not (d and layers and heads):
        return None
    experts = find(_NAMES["experts"]) or 0
    latent = [find((name,)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return Sizes(
        d=d,
        layers=layers,
        heads=heads,
        kv_heads=find(_NAMES["kv_heads"]) or heads,
        head=find(_NAMES["head"]) or d // heads,
        ffn=(find(_EXPERT_FFN) if experts else None) or find(_NAMES["ffn"]) or 4 * d,
        vocabulary=find(_NAMES["vocabulary"]) or 0,
        experts=experts,
        latent=(latent[0], latent[1], latent[2]) if latent[0] and latent[1] and latent[2] else None,
    )


def _attention(s: Sizes, q_heads: int, kv_heads: int, head: int) -> int:
    """Q and O of q_heads, K and V of kv_heads, in every layer."""
    return s.layers * 2 * s.d * head * (q_heads + kv_heads)


def _kv(s: Sizes, m: Measured, heads: int, head: int) -> int:
    return s.layers * 2 * heads * head * m.kv_element_bytes


def _expanded_kv(s: Sizes, m: Measured) -> int:
    if s.latent is None:
        return _kv(s, m, s.kv_heads, s.head)
    return s.layers * s.heads * sum(s.latent) * m.kv_element_bytes


def _matrices(s: Sizes, m: Measured) -> int:
    """2 or 3 matrices in an FFN, whichever comes nearer to the record."""
    one = s.layers * s.d * s.ffn * max(1, s.experts)
    return min((2, 3), key=lambda n: abs(n * one - m.ffn))


PARAMETERS, FLOPS, KV = "parameters", "flops_per_token", "kv_bytes_per_token"
Rule = tuple[str, str, Callable[[Sizes, Measured], int]]
RULES: tuple[Rule, ...] = (
    ("mha", PARAMETERS, lambda s, m: m.total - m.attention + _attention(s, s.heads, s.heads, s.head)),
    ("mha", KV, lambda s, m: _kv(s, m, s.heads, s.head)),
    ("q_by_kv_heads", PARAMETERS, lambda s, m: m.total - m.attention + _attention(s, s.kv_heads, s.kv_heads, s.head)),
    ("head_dim", PARAMETERS, lambda s, m: m.total - m.attention + _attention(s, s.heads, s.kv_heads, s.d // s.heads)),
    ("head_dim", KV, lambda s, m: _kv(s, m, s.kv_heads, s.d // s.heads)),
    ("tied", PARAMETERS, lambda s, m: m.total - m.lm_head),
    ("untied", PARAMETERS, lambda s, m: m.total + (0 if m.lm_head else s.vocabulary * s.d)),
    ("ffn_4d", PARAMETERS, lambda s, m: m.total - m.ffn + s.layers * _matrices(s, m) * s.d * 4 * s.d),
    ("two_matrix_ffn", PARAMETERS, lambda s, m: m.total - m.ffn + s.layers * 2 * s.d * s.ffn * max(1, s.experts)),
    ("kv_expanded", KV, lambda s, m: _expanded_kv(s, m)),
    ("all_layers_full", KV, lambda s, m: _kv(s, m, s.kv_heads, s.head)),
    ("all_experts", FLOPS, lambda s, m: m.flops_per_token + 2 * (m.routed - m.routed_active)),
    ("2n_per_token", FLOPS, lambda s, m: 2 * m.active),
)
UNITS = {"rule": "", "quantity": "", "hand": "", "record": "", "difference": "", "relative_error": "share"}


def hand_formulas(config: dict[str, Any], measured: Measured) -> Table:
    """One row for each rule and quantity; no rows when the config's figures cannot be read."""
    sizes = read_sizes(config)
    if sizes is None:
        return Table(units=UNITS, rows=())
    record = {PARAMETERS: measured.total, FLOPS: measured.flops_per_token, KV: measured.kv_bytes_per_token}
    return Table(
        units=UNITS,
        rows=tuple(_row(name, quantity, rule(sizes, measured), record[quantity]) for name, quantity, rule in RULES),
    )


def _row(rule: str, quantity: str, hand: int, record: int) -> dict[str, Value]:
    error = hand / record - 1 if record else None
    return {
        "rule": rule,
        "quantity": quantity,
        "hand": hand,
        "record": record,
        "difference": hand - record,
        "relative_error": error,
    }
