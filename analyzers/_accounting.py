"""The self-audit under every table: each parameter is in a product or counted outside, 2NT beside the total."""

from __future__ import annotations

from collections.abc import Iterable

from introspect.analyzers._products import Product
from introspect.records import Trace


def audit_notes(trace: Trace, executed: Iterable[Product]) -> tuple[str, ...]:
    """Whether products and other parameters make up all parameters, 2NT beside the FLOPs, and unclassified ops.

    N are all parameters (tied ones once), T the new tokens; in training 6NT, since the backward is twice the forward. A
    module that was not run on tokens (its products have other rows) has no 2NT.
    """
    executed = list(executed)
    sizes = {p.path: p.count for p in trace.parameters if not p.buffer and p.tied_to is None}
    multiplied = {path for product in executed for path, _ in product.weights}
    inside = sum(count for path, count in sizes.items() if path in multiplied)
    outside = sum(count for path, count in sizes.items() if path not in multiplied)
    unclassified = sum(op.count for op in trace.unclassified)
    return (
        f"parameters: {inside:,} in products + {outside:,} outside = {inside + outside:,}",
        *_estimate(trace, executed, inside + outside),
        f"ops without a cost rule: {unclassified}",
    )


def _estimate(trace: Trace, executed: list[Product], params: int) -> tuple[str, ...]:
    tokens = trace.run.tokens
    if not any(product.m == tokens for product in executed if product.weights):
        return ()
    factor = 6 if trace.run.phase == "train" else 2
    estimate = factor * params * tokens
    flops = sum(product.flops * product.times for product in executed)
    return (
        f"{factor}NT = {factor} x {params:,} x {tokens:,} tokens = {estimate:,} FLOPs, "
        f"{flops / estimate:.3f} of it executed",
    )
