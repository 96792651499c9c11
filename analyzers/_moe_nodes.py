"""On how many nodes the experts of one token lie, when every set of experts that the router may choose is as likely.

A router may first keep some groups of neighbouring experts and choose within them (DeepSeek: 4 of 8 groups). Node and
group are both runs of neighbouring experts; one holds whole ones of the other, else groups count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from introspect.analyzers._structure import Structure
from introspect.graph import base_name
from introspect.records import ExpertCall


@dataclass(frozen=True, slots=True)
class Choice:
    """A token's choice: `top_k` of `experts` that lie in `groups` equal groups, of which `kept` may be chosen from."""

    experts: int
    top_k: int
    groups: int = 1
    kept: int = 1


def choice_of(structure: Structure, call: ExpertCall) -> Choice:
    """What the router's own ops say: a top-k over G groups after one within [G, E/G] experts."""
    graph, within = structure.graph, 0
    for i in sorted(structure.router):
        op = graph.ops[i]
        if base_name(op) != "topk":
            continue
        shape, kept = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape[-1]
        if within > 1 and shape[-1] == within:
            return Choice(call.experts, call.top_k, within, kept)
        if len(shape) >= 2 and shape[-2] * shape[-1] == call.experts:
            within = shape[-2]
    return Choice(call.experts, call.top_k)


def nodes_met(choice: Choice, nodes: int) -> float:
    """Expected nodes that hold at least one of a token's experts; `nodes` divides the experts."""
    groups, kept = choice.groups, choice.kept
    if groups % nodes and nodes % groups:
        groups, kept = 1, 1
    pool = choice.experts // groups * kept  # experts that may still be chosen
    inside, size = max(1, groups // nodes), min(choice.experts // groups, choice.experts // nodes)
    missed = 0.0
    for held in range(max(0, inside - groups + kept), min(inside, kept) + 1):  # groups of this node that were kept
        likely = comb(inside, held) * comb(groups - inside, kept - held) / comb(groups, kept)
        missed += likely * comb(pool - held * size, choice.top_k) / comb(pool, choice.top_k)
    return nodes * (1 - missed)
