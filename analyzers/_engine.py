"""The products a serving engine runs for the same step, derived from what the model's code executed.

What changes: attention only over pairs that the mask lets through; the head on the last position of each sequence
(prefill); latent attention absorbed where that costs less (see _latent.py); only the experts a token is routed to;
where a top-k selects keys, attention over the selected ones. All else is as recorded.
"""

from __future__ import annotations

from dataclasses import replace

from introspect.analyzers._latent import LatentAttention, latent_attention
from introspect.analyzers._products import Product
from introspect.analyzers._structure import Structure
from introspect.units import DTYPE_BITS, product_flops


def engine_products(structure: Structure, executed: list[Product]) -> list[Product]:
    """The engine's products in the executed order; their `flops` are what an engine executes."""
    latents = {latent.attention: latent for latent in latent_attention(structure)}
    selected = {i: _selected_pairs(structure, i) for i, op in enumerate(structure.graph.ops) if op.attention}
    by_op: dict[int, list[Product]] = {}
    for product in executed:
        by_op.setdefault(product.op, []).append(product)
    replaced: dict[int, list[Product]] = {}
    for latent in latents.values():
        pairs = selected[latent.attention]
        expansion, attention = by_op[latent.expansion], by_op[latent.attention]
        tokens = structure.graph.trace.run.tokens
        expanded = sum(p.flops for p in expansion) + sum(_over_pairs(p, pairs).flops for p in attention)
        if latent.absorbed_flops(tokens, pairs) < expanded:
            replaced[latent.expansion] = _absorbed_expansion(latent, expansion[0], tokens)
            replaced[latent.attention] = _absorbed_attention(latent, attention, pairs)
    found: list[Product] = []
    for product in executed:
        if product.op < 0 or product.op not in replaced:
            found.append(_as_served(structure, product, selected))
        elif product is by_op[product.op][0]:
            found += replaced[product.op]
    return found


def _as_served(structure: Structure, product: Product, selected: dict[int, int]) -> Product:
    if product.attention is not None:
        return _over_pairs(product, selected[product.op]) if product.op in selected else _masked(product)
    if (
        product.op in structure.heads
        and product.direction == "forward"
        and structure.graph.trace.run.phase == "prefill"
    ):
        return _last_positions(structure, product)
    if product.experts is not None and product.experts.top_k:
        return _routed_only(product)
    return product


def _masked(product: Product) -> Product:
    return replace(product, flops=product.masked_flops)


def _over_pairs(product: Product, pairs: int) -> Product:
    """An attention product over `pairs` (query, key) pairs of one head."""
    call = product.attention
    assert call is not None
    flops = product.masked_flops if pairs == call.visible_pairs else product.masked_flops * pairs // call.visible_pairs
    return _narrowed(replace(product, flops=flops, masked_flops=flops), pairs)


def _narrowed(product: Product, pairs: int) -> Product:
    """With one query a sequence the visible pairs are the keys it reads: n of the scores, k of the values."""
    assert product.attention is not None
    sequences = product.batch // product.attention.query_heads
    if product.m > 1 or pairs % sequences:
        return product
    keys, scores = pairs // sequences, product.kind == "attention_qk"
    held = product.n if scores else product.k
    return replace(
        product,
        n=keys if scores else product.n,
        k=product.k if scores else keys,
        rhs_bytes=product.rhs_bytes * keys // held,
    )


def _last_positions(structure: Structure, product: Product) -> Product:
    """The head on one position a sequence. Encoders, whose attention is not causal, keep all."""
    run, calls = structure.graph.trace.run, [op.attention for op in structure.graph.ops if op.attention]
    if product.m != run.tokens or (calls and run.seq > 1 and not any(call.causal for call in calls)):
        return product
    flops = product_flops(product.batch, run.batch, product.k, product.n)
    return replace(
        product,
        m=run.batch,
        flops=flops,
        masked_flops=flops,
        lhs_bytes=product.lhs_bytes * run.batch // run.tokens,
        out_bytes=product.out_bytes * run.batch // run.tokens,
    )


def _routed_only(product: Product) -> Product:
    """An implementation that multiplies every expert (Llama 4) computes more rows than tokens x top-k."""
    assert product.experts is not None
    executed, routed = sum(product.experts.rows), product.experts.tokens * product.experts.top_k
    if executed <= routed:
        return product
    own = product.experts.routed
    busy = min(product.batch, routed) if own is None else sum(1 for rows in own if rows)
    flops = product_flops(1, routed, product.k, product.n)
    return replace(
        product,
        batch=busy,
        m=-(-routed // busy),
        flops=flops,
        masked_flops=flops,
        lhs_bytes=product.lhs_bytes * routed // executed,
        rhs_bytes=product.rhs_bytes * busy // product.batch,
        out_bytes=product.out_bytes * routed // executed,
    )


def _absorbed_expansion(latent: LatentAttention, expansion: Product, tokens: int) -> list[Product]:
    """Its key half applied to the queries, its value half to the result: one product a head each."""
    ((path, _),) = expansion.weights[:1]
    halves = (("keys", latent.nope_width, latent.rank), ("values", latent.rank, latent.value_width))
    found = []
    for half, k, n in halves:
        flops = product_flops(latent.heads, tokens, k, n)
        found.append(
            replace(
                expansion,
                batch=latent.heads,
                m=tokens,
                k=k,
                n=n,
                flops=flops,
                masked_flops=flops,
                weights=((f"{path} ({half})", latent.heads * k * n),),
                lhs_bytes=_bytes(latent.heads * tokens * k, expansion.dtype),
                rhs_bytes=_bytes(latent.heads * k * n, expansion.dtype),
                out_bytes=_bytes(latent.heads * tokens * n, expansion.dtype),
                parallel="",
            )
        )
    return found


def _absorbed_attention(latent: LatentAttention, attention: list[Product], pairs: int) -> list[Product]:
    """Attention on the latent: all query heads share one key head of rank + rope and one value head of rank.

    The latent is read once for both products: the value product reads nothing anew."""
    scores, context = attention[0], attention[-1]
    call, batch, m, keys = scores.attention, scores.batch, scores.m, scores.n
    assert call is not None
    width, sequences = latent.rank + latent.rope_width, scores.batch // call.query_heads
    shared = replace(call, kv_heads=1)
    absorbed = [
        replace(
            scores,
            attention=shared,
            k=width,
            flops=2 * pairs * latent.heads * width,
            masked_flops=2 * pairs * latent.heads * width,
            lhs_bytes=_bytes(batch * m * width, scores.dtype),
            rhs_bytes=_bytes(sequences * keys * width, scores.dtype),
        ),
        replace(
            context,
            attention=shared,
            n=latent.rank,
            flops=2 * pairs * latent.heads * latent.rank,
            masked_flops=2 * pairs * latent.heads * latent.rank,
            rhs_bytes=0,
            out_bytes=_bytes(batch * m * latent.rank, scores.dtype),
        ),
    ]
    return [_narrowed(product, pairs) for product in absorbed]


def _bytes(elements: int, dtype: str) -> int:
    return elements * DTYPE_BITS[dtype] // 8


def _selected_pairs(structure: Structure, i: int) -> int:
    """Pairs of one head that attention op i needs: the visible ones, or at most k keys a query where a top-k over the
    keys in the same layer selects them."""
    op = structure.graph.ops[i]
    call = op.attention
    assert call is not None
    scores = op.gemms[0]
    width = _selection_width(structure, i, keys=scores.n)
    if width is None:
        return call.visible_pairs
    sequences = scores.batch // call.query_heads
    first = scores.n - scores.m + 1  # keys the first query sees under a causal mask
    if call.visible_pairs == sequences * scores.m * (first + scores.n) // 2:
        short = max(0, min(scores.m, width - first))  # queries that see fewer keys than are selected
        return sequences * (short * (2 * first + short - 1) // 2 + (scores.m - short) * width)
    return min(call.visible_pairs, sequences * scores.m * width)


def _selection_width(structure: Structure, i: int, keys: int) -> int | None:
    """k of the top-k over all `keys` that the layer of attention op i takes before it; None without one."""
    graph, layer = structure.graph, structure.layer_of(i)
    for j in range(i - 1, -1, -1):
        op = graph.ops[j]
        if structure.layer_of(j) != layer or op.attention is not None:
            return None
        if op.kind == "topk" and j not in structure.dispatch and graph.tensors[op.inputs[0]].shape[-1] == keys:
            return graph.tensors[op.outputs[0]].shape[-1]
    return None
