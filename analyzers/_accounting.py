"""The self-audit under every table: each parameter is in a product or counted outside, 2NT beside the total."""

from __future__ import annotations

from collections.abc import Iterable

from introspect.analyzers._products import Product
from introspect.records import Trace


def audit_notes(trace: Trace, executed: Iterable[Product]) -> tuple[str, ...]:
    """Whether products and other parameters make up all parameters, 2NT beside the FLOPs, and unclassified ops.

    N are all parameters (tied ones once), N(active) those of a token where experts are routed, T the new tokens; in
    training 6NT, since the backward is twice the forward.
    """
    executed = list(executed)
    sizes = {p.path: p.count for p in trace.parameters if not p.buffer and p.tied_to is None}
    multiplied = {path for product in executed for path, _ in product.weights}
    inside = sum(count for path, count in sizes.items() if path in multiplied)
    outside = sum(count for path, count in sizes.items() if path not in multiplied)
    unclassified = sum(op.count for op in trace.unclassified)
    return (
        f"parameters: {inside:,} in products + {outside:,} outside = {inside + outside:,}",
        *_estimate(trace, executed, inside + outside, "N"),
        *_active_estimate(trace, executed, sizes),
        f"ops without a cost rule: {unclassified}",
    )


def _active_estimate(trace: Trace, executed: list[Product], sizes: dict[str, int]) -> tuple[str, ...]:
    """The same with what one token uses, of each stack of E routed experts k/E; nothing where all is used."""
    shares = {
        path: (product.experts.top_k, product.experts.experts)
        for product in executed
        if product.experts is not None and product.experts.top_k
        for path, _ in product.weights
    }
    idle = sum(sizes.get(path, 0) * (experts - top_k) // experts for path, (top_k, experts) in shares.items())
    unread = sum(sizes.get(p.path, 0) for p in trace.parameters if not p.touched)
    return _estimate(trace, executed, sum(sizes.values()) - idle - unread, "N(active)") if idle else ()


def _estimate(trace: Trace, executed: list[Product], params: int, name: str) -> tuple[str, ...]:
    tokens = trace.run.tokens
    factor = 6 if trace.run.phase == "train" else 2
    estimate = factor * params * tokens
    if not estimate:  # no parameters
        return ()
    flops = sum(product.flops * product.times for product in executed)
    return (
        f"{factor}{name}T = {factor} x {params:,} x {tokens:,} tokens = {estimate:,} FLOPs, "
        f"{flops / estimate:.3f} of it executed",
    )
