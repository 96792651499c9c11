"""Routed experts that transformers keeps outside its experts interface: their forward is replaced for a run.

Each loops over the experts that a real router chose, or multiplies in a way that hides which rows belong to whom. The
replacement does the same mathematics with the grouped product of experts.py. Shapes: x [T, d], indices and weights
[T, k], R = T*k pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from introspect.hooks.experts import ExpertsObserver, grouped_linear

Forward = Callable[..., Any]  # (observer, module, parent, *the module's own arguments)


@contextmanager
def replaced_experts(model: nn.Module, observer: ExpertsObserver) -> Iterator[None]:
    """Replace the forward of each experts module of a class named below, on the instance; undone on exit."""
    replaced = []
    try:
        for parent in list(model.modules()):
            for module in parent.children():
                forward = REPLACEMENTS.get(_class_path(module))
                if forward is not None and "forward" not in vars(module):
                    module.forward = partial(forward, observer, module, parent)
                    replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward


def _class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _dbrx(observer: ExpertsObserver, module: Any, _: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Three flat matrices [E*f, d], cut into experts by views; the loop over busy experts asks for their indices."""
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (w.view(shape) for w in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    tokens = x.reshape(-1, module.hidden_size)
    routed = observer.routed(module, top_k_index, module.num_experts)
    rows = routed.rows_of(tokens)
    hidden = module.mlp.activation_fn(routed.multiply(rows, gate)) * routed.multiply(rows, up)
    out = routed.combined(routed.multiply(hidden, down, transposed=True), top_k_weights)
    return out.view(x.shape[0], -1, module.hidden_size)


def _step3p7(observer: ExpertsObserver, module: Any, _: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The interface's layout without its decorator: the gate clamps after the activation."""
    routed = observer.routed(module, top_k_index, module.num_experts)
    hidden = module._apply_gate(routed.multiply(routed.rows_of(x), module.gate_up_proj))
    return routed.combined(routed.multiply(hidden, module.down_proj), top_k_weights).to(x.dtype)


def _longcat_flash(observer: ExpertsObserver, module: Any, _: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The last experts are the identity: they take part in the routing and multiply nothing. The module loops over
    every busy expert, up to 768."""
    real = module.num_routed_experts
    routed = observer.routed(module, top_k_index, module.total_experts).first(real)
    rows = routed.rows_of(x)
    gate, up = routed.multiply(rows, module.gate_up_proj[:real]).chunk(2, dim=-1)
    multiplied = routed.multiply(module.act_fn(gate) * up, module.down_proj)
    out = torch.where((routed.expert_ids < real)[:, None], multiplied, rows)
    return routed.combined(out, top_k_weights).to(x.dtype)


def _llama4(_: ExpertsObserver, module: Any, parent: Any, x: Any) -> Any:
    """Every token goes through every expert, [E*T, d] in order of experts: written as bmm, which hides the top-k."""
    tokens = x.shape[0] // module.num_experts
    settings = ([tokens] * module.num_experts, True, tokens, parent.top_k)
    gate, up = grouped_linear(x, module.gate_up_proj, None, *settings).chunk(2, dim=-1)
    return grouped_linear(up * module.act_fn(gate), module.down_proj, None, *settings)


@dataclass(frozen=True, slots=True)
class _ExpertSizes:
    """What the gating below hands to the projections in place of a list of sizes."""

    rows: list[int]
    tokens: int
    top_k: int


def _jetmoe_gating(observer: ExpertsObserver, module: Any, _: Any, x: Any) -> Any:
    """Takes a list of sizes from the router's choice with `tolist`, for `split` in the projections."""
    logits = module.layer(x).float()
    top_k_logits, top_k_index = logits.topk(module.top_k, dim=1)
    gates = torch.softmax(top_k_logits, dim=1).type_as(x)
    routed = observer.routed(module, top_k_index, module.num_experts)
    tokens = routed.order.div(module.top_k, rounding_mode="trunc")
    sizes = _ExpertSizes(routed.rows, routed.tokens, routed.top_k)
    return routed.order, tokens, gates.flatten()[routed.order], sizes, logits


def _jetmoe_experts(_: ExpertsObserver, module: Any, __: Any, x: Any, sizes: _ExpertSizes) -> Any:
    """One F.linear for every expert."""
    return grouped_linear(x, module.weight, None, sizes.rows, False, sizes.tokens, sizes.top_k)


REPLACEMENTS: dict[str, Forward] = {
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": _dbrx,
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": _step3p7,
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": _longcat_flash,
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": _llama4,
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeTopKGating": _jetmoe_gating,
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": _jetmoe_experts,
}
"""By the path of the class. Doge's experts are rows of embeddings, looked up and multiplied as activations: no loop."""
