"""Routed experts as grouped products whose rows per expert follow the run's routing policy.

torch's own `_grouped_mm` refuses fp32 on meta and unaligned strides on the CPU, and a router's choice has no value on
meta. So transformers' experts interface is answered here by the same steps (sort by expert, grouped up projection,
gate, grouped down projection, weighted sum) around one op, `introspect::grouped_linear`, that carries the rows.

Shapes: x [R, k] sorted by expert, w [E, n, k] (or [E, k, n] when transposed), rows of each expert -> [R, n].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from introspect.hooks.routing import Dispatch, rows_per_expert
from introspect.hooks.shadow import Shadow
from introspect.records import RunShape

NAME = "introspect"

_library = torch.library.Library("introspect", "FRAGMENT")
_library.define(
    "grouped_linear(Tensor x, Tensor w, Tensor? bias, int[] rows, bool transposed, int tokens, int top_k) -> Tensor"
)
_library.define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor w, Tensor? bias, int[] rows, bool transposed, int tokens, "
    "int top_k) -> (Tensor, Tensor, Tensor?)"
)


def _shape_only(x: Any, w: Any, bias: Any, rows: Any, transposed: bool, tokens: int, top_k: int) -> Any:
    return x.new_empty((x.shape[0], w.shape[2] if transposed else w.shape[1]))


def _compute(x: Any, w: Any, bias: Any, rows: Sequence[int], transposed: bool, tokens: int, top_k: int) -> Any:
    out = x.new_zeros((x.shape[0], w.shape[2] if transposed else w.shape[1]))
    for expert, part in _groups(rows):
        weight = w[expert] if transposed else w[expert].T
        out[part] = x[part] @ weight if bias is None else x[part] @ weight + bias[expert]
    return out


def _backward_shape(grad: Any, x: Any, w: Any, bias: Any, *_: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(w), None if bias is None else torch.empty_like(bias)


def _backward_compute(
    grad: Any, x: Any, w: Any, bias: Any, rows: Sequence[int], transposed: bool, tokens: int, top_k: int
) -> Any:
    d_x, d_w = torch.zeros_like(x), torch.zeros_like(w)
    d_bias = None if bias is None else torch.zeros_like(bias)
    for expert, part in _groups(rows):
        d_x[part] = grad[part] @ (w[expert].T if transposed else w[expert])
        d_w[expert] = x[part].T @ grad[part] if transposed else grad[part].T @ x[part]
        if d_bias is not None:
            d_bias[expert] = grad[part].sum(0)
    return d_x, d_w, d_bias


def _groups(rows: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(rows):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, bias, *ctx.settings = inputs
    ctx.save_for_backward(x, w, bias)


def _backward(ctx: Any, grad: Any) -> Any:
    x, w, bias = ctx.saved_tensors
    d_x, d_w, d_bias = torch.ops.introspect.grouped_linear_backward(grad, x, w, bias, *ctx.settings)
    return d_x, d_w, d_bias, None, None, None, None


_library.impl("grouped_linear", _shape_only, "Meta")
_library.impl("grouped_linear", _compute, "CPU")
_library.impl("grouped_linear_backward", _backward_shape, "Meta")
_library.impl("grouped_linear_backward", _backward_compute, "CPU")
torch.library.register_autograd("introspect::grouped_linear", _backward, setup_context=_setup, lib=_library)


@dataclass(frozen=True, slots=True)
class Routed:
    """(token, expert) pairs sorted by expert: R = tokens x top_k rows, `rows` of them for each expert in turn."""

    expert_ids: torch.Tensor  # [R], rising
    order: torch.Tensor  # [R], the pair's place in the router's choice [T, k]
    rows: list[int]
    tokens: int
    top_k: int

    def rows_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The token of each pair: [T, d] -> [R, d]."""
        return hidden_states[self.order // self.top_k]

    def multiply(self, x: torch.Tensor, w: Any, bias: Any = None, transposed: bool = False) -> torch.Tensor:
        """Each pair's row times its expert's matrix: [R, k] -> [R, n]."""
        return grouped_linear(x, w, bias, self.rows, transposed, self.tokens, self.top_k)

    def first(self, experts: int) -> Routed:
        """The same pairs with only the first experts multiplying; rows behind theirs are computed by nobody."""
        return replace(self, rows=self.rows[:experts])

    def combined(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's pairs: [R, d] and [T, k] -> [T, d]."""
        x = x * weights.reshape(-1)[self.order].unsqueeze(-1)
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.order.shape[0], device=self.order.device)
        total: torch.Tensor = x[inverse].view(self.tokens, self.top_k, -1).sum(dim=1)
        return total


class ExpertsObserver:
    """Answers transformers' experts interface under a routing policy."""

    def __init__(self, shadow: Shadow, run: RunShape) -> None:
        self._shadow = shadow
        self._run = run
        self._layers: dict[int, int] = {}  # experts module -> how many came before: each layer draws its own routing

    def experts(self, module: nn.Module, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        """Stand in for an experts function: hidden [T, d], indices and weights [T, k] -> [T, d]."""
        m: Any = module
        routed = self.routed(module, top_k_index, m.num_experts)
        first = m.gate_up_proj if m.has_gate else m.up_proj
        first_bias = (m.gate_up_proj_bias if m.has_gate else m.up_proj_bias) if m.has_bias else None
        x = routed.multiply(routed.rows_of(hidden_states), first, first_bias, m.is_transposed)
        x = m._apply_gate(x) if m.has_gate else m.act_fn(x)
        x = routed.multiply(x, m.down_proj, m.down_proj_bias if m.has_bias else None, m.is_transposed)
        if m.has_post_expert_norm:
            x = m.post_expert_norm(x)
        return routed.combined(x, top_k_weights).to(hidden_states.dtype)

    def routed(self, module: nn.Module, top_k_index: Any, experts: int) -> Routed:
        """The tokens' choice [T, k] among `experts` experts, sorted by expert."""
        tokens, top_k = top_k_index.shape[0], top_k_index.shape[-1]
        expert_ids, order = torch.sort(top_k_index.reshape(-1))
        return Routed(expert_ids, order, self.rows(module, top_k_index, experts), tokens, top_k)

    def rows(self, module: nn.Module, top_k_index: Any, experts: int) -> list[int]:
        """Rows of each expert: from the choice's values where it has any (hash routing, scores drawn under a random
        policy, a real CPU run; ids behind the last expert are sentinels and computed by nobody), else from the routing
        policy."""
        layer = self._layers.setdefault(id(module), len(self._layers))
        value = self._shadow.value(top_k_index)
        if value is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                return torch.bincount(value[value < experts], minlength=experts).tolist()
        tokens, top_k = top_k_index.shape
        return rows_per_expert(self._run.routing, tokens, top_k, experts, self._run.seed + layer)


def grouped_linear(
    x: torch.Tensor, w: Any, bias: Any, rows: list[int], transposed: bool, tokens: int, top_k: int
) -> torch.Tensor:
    """Call the op: row block i of x times expert i's matrix."""
    out: torch.Tensor = torch.ops.introspect.grouped_linear(x.to(w.dtype), w, bias, rows, transposed, tokens, top_k)
    return out


@contextmanager
def routed_dispatch(model: nn.Module, shadow: Shadow, run: RunShape) -> Iterator[None]:
    """Under expert parallelism the dispatch reads the router's choice before any expert runs, and how many rows the
    other ranks send: give it the policy's. Only modules whose experts are split over ranks are wrapped; undone on exit.
    """
    wrapped: list[Any] = [
        m for m in model.modules() if getattr(m, "_is_expert_parallel", False) and "forward" in vars(m)
    ]
    originals = [m.forward for m in wrapped]
    for layer, (module, forward) in enumerate(zip(wrapped, originals, strict=True)):
        dispatch = Dispatch(policy=run.routing, experts=module.num_experts * run.ep, tp=run.tp, ep=run.ep)
        module.forward = _with_choice(forward, shadow, dispatch, run.seed + layer)
    try:
        yield
    finally:
        shadow.received = None
        for module, forward in zip(wrapped, originals, strict=True):
            module.forward = forward


def _with_choice(forward: Any, shadow: Shadow, dispatch: Dispatch, seed: int) -> Any:
    def routed(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        tokens, top_k = top_k_index.shape
        rank = dist.get_rank()
        if not shadow.knows(top_k_index):
            group = rank // dispatch.tp
            shadow.give_later(top_k_index, lambda: dispatch.choice(tokens, top_k, group, seed))
        shadow.received = lambda: dispatch.received(shadow.value(top_k_index), tokens, top_k, rank)
        return forward(hidden_states, top_k_index, top_k_weights)

    return routed


@contextmanager
def experts_interface(observer: ExpertsObserver) -> Iterator[None]:
    """Register the observer with transformers, class-wide, and undo it on exit."""
    ExpertsInterface.register(NAME, observer.experts)
    try:
        yield
    finally:
        ExpertsInterface._global_mapping.pop(NAME, None)
