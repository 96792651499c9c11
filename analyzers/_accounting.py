"""The self-audit under every table: each parameter is in a product or counted outside, 2NT beside the total."""

from __future__ import annotations

from collections.abc import Iterable

from introspect.analyzers._products import Product
from introspect.records import Trace


def audit_notes(trace: Trace, executed: Iterable[Product]) -> tuple[str, ...]:
    """Whether products and other parameters make up all parameters, 2NT beside the FLOPs, and unclassified ops.

    N are all parameters (tied ones once), T the new tokens; in training 6NT, since the backward is twice the forward.
    """
    executed = list(executed)
    sizes = {p.path: p.count for p in trace.parameters if not p.buffer and p.tied_to is None}
    multiplied = {path for product in executed for path, _ in product.weights}
    inside = sum(count for path, count in sizes.items() if path in multiplied)
    outside = sum(count for path, count in sizes.items() if path not in multiplied)
    total = inside + outside
    flops = sum(product.flops * product.times for product in executed)
    factor = 6 if trace.run.phase == "train" else 2
    estimate = factor * total * trace.run.tokens
    ratio = f", {flops / estimate:.3f} of it executed" if estimate else ""
    unclassified = sum(op.count for op in trace.unclassified)
    return (
        f"parameters: {inside:,} in products + {outside:,} outside = {total:,}",
        f"{factor}NT = {factor} x {total:,} x {trace.run.tokens:,} tokens = {estimate:,} FLOPs{ratio}",
        f"ops without a cost rule: {unclassified}",
    )
