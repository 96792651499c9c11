"""Which matrix products an op performs: one rule per op, from the shapes of its operands.

A rule gets the op's input and output views (indices and shapes) and its arguments, and yields `Gemm` records of kind
"linear" for a product of two matrices and "einsum" for a batched one; `assemble.py` refines the kind by the operands'
roles. Add a rule with `@rule("aten.name.overload")`; a second rule for the same op is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from introspect.hooks.op_kinds import op_name
from introspect.hooks.recorder import RawOp
from introspect.records import AttentionCall, Gemm, GemmKind

Shape = tuple[int, ...]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """An op as a rule sees it: operand indices into the view table, their shapes, and the raw arguments."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    shapes: tuple[Shape, ...]  # of ins
    out_shape: Shape
    args: tuple[Any, ...]


Rule = Callable[[Call], Iterator[Gemm]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a cost rule for these ops, e.g. "aten.mm.default"."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"a cost rule for {name} exists already: {RULES[name].__name__}")
            RULES[name] = function
        return function

    return register


def products(raw: RawOp, views: list[Any]) -> tuple[Gemm, ...]:
    """The products of one recorded op; empty when it performs none (or no rule knows it)."""
    found = RULES.get(op_name(raw.func))
    if found is None:
        return ()
    shapes = tuple(views[i].shape for i in raw.ins)
    out_shape = views[raw.outs[0]].shape if raw.outs else ()
    return tuple(found(Call(raw.ins, raw.outs, shapes, out_shape, raw.args)))


def _product(call: Call, a: int, b: int, batch: int, m: int, k: int, n: int) -> Gemm:
    kind: GemmKind = "linear" if batch == 1 else "einsum"
    return Gemm(kind=kind, batch=batch, m=m, k=k, n=n, lhs=call.ins[a], rhs=call.ins[b], out=call.outs[0])


@rule("aten.mm.default")
def mm(call: Call) -> Iterator[Gemm]:
    """[m, k] x [k, n]."""
    (m, k), (_, n) = call.shapes
    yield _product(call, 0, 1, 1, m, k, n)


@rule("aten.addmm.default", "aten.addmm_.default")
def addmm(call: Call) -> Iterator[Gemm]:
    """bias + [m, k] x [k, n]."""
    (m, k), (_, n) = call.shapes[1:3]
    yield _product(call, 1, 2, 1, m, k, n)


@rule("aten._addmm_activation.default")
def addmm_activation(call: Call) -> Iterator[Gemm]:
    """An addmm with a fused activation."""
    yield from addmm(call)


@rule("aten.linear.default")
def linear(call: Call) -> Iterator[Gemm]:
    """[..., k] x [n, k]^T; only in inference mode does it arrive undecomposed."""
    *rows, k = call.shapes[0]
    yield _product(call, 0, 1, 1, prod(rows), k, call.shapes[1][0])


@rule("aten.bmm.default")
def bmm(call: Call) -> Iterator[Gemm]:
    """B independent [m, k] x [k, n]. One matrix expanded over the batch is one product of B*m rows."""
    yield from _batched(call, 0, 1)


@rule("aten.baddbmm.default", "aten.baddbmm_.default")
def baddbmm(call: Call) -> Iterator[Gemm]:
    """A bmm added to its first operand."""
    yield from _batched(call, 1, 2)


def _batched(call: Call, a: int, b: int) -> Iterator[Gemm]:
    (batch, m, k), (_, _, n) = call.shapes[a], call.shapes[b]
    right = call.args[b]
    if isinstance(right, torch.Tensor) and batch > 1 and right.stride(0) == 0:
        batch, m = 1, batch * m
    yield _product(call, a, b, batch, m, k, n)


@rule("aten.mv.default")
def mv(call: Call) -> Iterator[Gemm]:
    """[n, k] x [k]: one row times the transposed matrix."""
    n, k = call.shapes[0]
    yield _product(call, 1, 0, 1, 1, k, n)


@rule("aten.addmv.default", "aten.addmv_.default")
def addmv(call: Call) -> Iterator[Gemm]:
    """bias + [n, k] x [k]."""
    n, k = call.shapes[1]
    yield _product(call, 2, 1, 1, 1, k, n)


@rule("aten.dot.default", "aten.vdot.default")
def dot(call: Call) -> Iterator[Gemm]:
    """[k] x [k]."""
    yield _product(call, 0, 1, 1, 1, call.shapes[0][0], 1)


@rule("aten.linalg_solve_triangular.default")
def solve_triangular(call: Call) -> Iterator[Gemm]:
    """A triangular system [k, k] with n right-hand sides: k*k*n FLOPs, half of the square product's."""
    (*lead, k, _), (*_, n) = call.shapes[0], call.shapes[1]
    yield Gemm(
        kind="einsum", batch=prod(lead), m=k, k=-(-k // 2), n=n, lhs=call.ins[0], rhs=call.ins[1], out=call.outs[0]
    )


@rule("aten._trilinear.default")
def trilinear(call: Call) -> Iterator[Gemm]:
    """The product of a Bilinear and its gradients: three operands, each expanded over the dimensions it lacks, summed
    over `sumdim`: in the forward x1 [B, i], w [o, i, j], x2 [B, j], the outer product of a row times [i*j, o]."""
    expanded, summed = call.args[3:6], call.args[6]
    sizes = [_expanded(shape, places) for shape, places in zip(call.shapes, expanded, strict=True)]
    k = prod(max(size[place] for size in sizes) for place in summed)
    yield _product(call, 0, 1, 1, call.out_shape[0], k, prod(call.out_shape[1:]))


def _expanded(shape: Shape, places: list[int]) -> list[int]:
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes


@rule("aten._grouped_mm.default", "aten._scaled_grouped_mm.default")
def grouped_mm(call: Call) -> Iterator[Gemm]:
    """[R, k] x [E, k, n] by offsets. Without the offsets' values every row counts and every expert may have some."""
    if len(call.shapes[0]) == 2 and len(call.shapes[1]) == 3:
        (rows, k), (experts, _, n) = call.shapes[:2]
        busy = min(rows, experts)
        yield Gemm(
            kind="grouped", batch=busy, m=-(-rows // max(busy, 1)), k=k, n=n, rows=rows,
            lhs=call.ins[0], rhs=call.ins[1], out=call.outs[0],
        )  # fmt: skip


@rule("introspect.grouped_linear.default")
def grouped_linear(call: Call) -> Iterator[Gemm]:
    """Row block i of x times expert i's matrix; rows behind the last block are computed by nobody."""
    yield _grouped(call, call.args[0], call.args[1], call.args[3], call.args[4], call.ins[0], call.ins[1], call.outs[0])


@rule("introspect.grouped_linear_backward.default")
def grouped_linear_backward(call: Call) -> Iterator[Gemm]:
    """dX = dY W and dW = dY^T X for every block."""
    x, w, rows, transposed = call.args[1], call.args[2], call.args[4], call.args[5]
    forward = _grouped(call, x, w, rows, transposed, call.ins[1], call.ins[2], call.outs[0])
    yield replace(forward, direction="dx", k=forward.n, n=forward.k, lhs=call.ins[0])
    busy, n = forward.batch, forward.n
    yield Gemm(
        kind="grouped", batch=busy, m=n, k=forward.m, n=forward.k, rows=forward.rows, direction="dw",
        lhs=call.ins[0], rhs=call.ins[1], out=call.outs[1],
    )  # fmt: skip


def _grouped(call: Call, x: Any, w: Any, rows: Any, transposed: bool, lhs: int, rhs: int, out: int) -> Gemm:
    total, busy = sum(rows), sum(1 for count in rows if count)
    k, n = (w.shape[1], w.shape[2]) if transposed else (w.shape[2], w.shape[1])
    mean = -(-total // busy) if busy else 0
    return Gemm(kind="grouped", batch=busy, m=mean, k=k, n=n, rows=total, lhs=lhs, rhs=rhs, out=out)


@rule("introspect.attention.default")
def attention(call: Call) -> Iterator[Gemm]:
    """Q K^T and P V for each sequence and query head, dense."""
    batch, heads, length, width = call.shapes[0]
    keys, value_width = call.shapes[1][2], call.shapes[2][3]
    q, k, v, out = *call.ins[:3], call.outs[0]
    yield Gemm(kind="attention_qk", batch=batch * heads, m=length, k=width, n=keys, lhs=q, rhs=k, out=None)
    yield Gemm(kind="attention_pv", batch=batch * heads, m=length, k=keys, n=value_width, lhs=None, rhs=v, out=out)


@rule("introspect.attention_backward.default")
def attention_backward(call: Call) -> Iterator[Gemm]:
    """A flash kernel's backward: scores again, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q; 2.5 forwards."""
    batch, heads, length, width = call.shapes[1]
    keys, value_width = call.shapes[2][2], call.shapes[3][3]
    grad, q, k, v = call.ins[:4]
    rows: tuple[tuple[GemmKind, int, int, int, int | None, int, int | None], ...] = (
        ("attention_qk", length, width, keys, q, k, None),
        ("attention_pv", keys, length, value_width, None, grad, call.outs[2]),
        ("attention_pv", length, value_width, keys, grad, v, None),
        ("attention_qk", length, keys, width, None, k, call.outs[0]),
        ("attention_qk", keys, length, width, None, q, call.outs[1]),
    )
    for kind, m, inner, n, lhs, rhs, out in rows:
        yield Gemm(kind=kind, batch=batch * heads, m=m, k=inner, n=n, lhs=lhs, rhs=rhs, out=out, direction="dx")


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
)
def scaled_dot_product_attention(call: Call) -> Iterator[Gemm]:
    """torch's fused attention where it was called from C++ and our function mode could not step in."""
    yield from attention(call)


@rule("aten.convolution.default", "aten._convolution.default", "aten.convolution_overrideable.default")
def convolution(call: Call) -> Iterator[Gemm]:
    """An implicit GEMM per group: m output positions, k = input channels of the group x kernel, n output channels."""
    yield _convolution(call.shapes[0], call.shapes[1], call.out_shape, call.args[6], call.args[8], call.ins, call.outs)


def _convolution(x: Shape, w: Shape, out: Shape, transposed: bool, groups: int, ins: Any, outs: Any) -> Gemm:
    kernel = prod(w[2:])
    if transposed:  # w is [Cin, Cout/groups, ...]: every input position is multiplied into kernel x Cout outputs
        m, k, n = x[0] * prod(x[2:]), w[0] // groups, w[1] * kernel
    else:
        m, k, n = out[0] * prod(out[2:]), w[1] * kernel, w[0] // groups
    return Gemm(kind="conv", batch=groups, m=m, k=k, n=n, lhs=ins[0], rhs=ins[1], out=outs[0])


@rule("aten.convolution_backward.default")
def convolution_backward(call: Call) -> Iterator[Gemm]:
    """dX and dW, each as many FLOPs as the forward; only those that output_mask asks for."""
    grad, x, w = call.shapes[:3]
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    forward = _convolution(x, w, grad, transposed, groups, call.ins[1:3], call.outs)
    outs = iter(call.outs)
    if mask[0]:
        yield replace(
            forward, direction="dx", k=forward.n, n=forward.k, lhs=call.ins[0], rhs=call.ins[2], out=next(outs)
        )
    if mask[1]:
        yield replace(
            forward,
            direction="dw",
            m=forward.n,
            k=forward.m,
            n=forward.k,
            lhs=call.ins[0],
            rhs=call.ins[1],
            out=next(outs),
        )


def attention_call(raw: RawOp, views: list[Any]) -> AttentionCall | None:
    """The attention facts of an `introspect::attention` op, None for any other."""
    if op_name(raw.func) != "introspect.attention.default":
        return None
    q, k = views[raw.ins[0]].shape, views[raw.ins[1]].shape
    pairs, widest, causal = raw.args[8:11]
    masked = raw.args[3] is not None
    dense = q[0] * q[2] * k[2]
    return AttentionCall(
        q=raw.ins[0],
        k=raw.ins[1],
        v=raw.ins[2],
        out=raw.outs[0],
        query_heads=q[1],
        kv_heads=k[1],
        visible_pairs=pairs,
        causal=causal or (masked and pairs < dense),
        window=widest if widest < k[2] else None,
        softcap=raw.args[7] != 0.0,
        sinks=raw.args[5] is not None,
    )
