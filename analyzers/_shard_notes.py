"""What `shard` says beside its tables: what stays whole and why, what is not counted, and which options did nothing."""

from __future__ import annotations

from introspect.analyzers._rank import Rank
from introspect.units import number_text


def rank_notes(rank: Rank, tp: int) -> list[str]:
    """How this rank was cut, where a reader might expect another cut."""
    notes = [f"whole on every rank, {reason}: {', '.join(sorted(which))}" for reason, which in rank.remarks.items()]
    forward = [t for t in rank.transfers if t.direction == "forward" and not t.tokens and "norm" in t.module]
    split = sorted({t.module for t in forward if rank.route == "megatron"})
    if split:
        folded = dict.fromkeys(rank.step.structure.layers.split(module)[0] for module in split)
        notes.append(
            f"normalised over all ranks' channels, with an all-reduce of a number a token: {', '.join(folded)} "
            "(an engine may gather the rows instead)"
        )
    notes += _repeated_heads(rank, tp)
    unread = [share for share in rank.shares if not share.parameter.touched]
    if unread and rank.route == "megatron":
        notes.append(f"{number_text(sum(s.bytes for s in unread), 'B')} of parameters that no op reads are held whole")
    return notes


def _repeated_heads(rank: Rank, tp: int) -> list[str]:
    """Attention and cache follow the model's code, also where it keeps each KV head several times."""
    notes = []
    for made, attended in sorted(rank.repeated):
        lean = max(1, made // tp)
        ranks = f", on {tp // made} ranks each" if tp > made else ""
        words = (
            f"the model's code repeats the {made} KV heads that its weights make to {attended} before it keeps them; "
            f"attention and cache are counted so. An engine that keeps {made} holds {lean} a rank{ranks}"
        )
        if rank.kv_heads and rank.kv_bytes_per_token and len(rank.repeated) == 1:
            words += f", {rank.kv_bytes_per_token * lean // rank.kv_heads:,} B a token"
        notes.append(words)
    return notes


def training_notes(rank: Rank, tp: int, ep: int, *, sequence_parallel: bool) -> list[str]:
    """How Megatron's backward runs, and what of it is not counted."""
    if rank.step.trace.run.phase != "train" or rank.route != "megatron" or tp == 1:
        return []
    notes = []
    structure = rank.step.structure
    heads = {structure.graph.ops[i].module for i in structure.heads}
    summed = heads & {t.module for t in rank.transfers if t.kind == "all_reduce" and t.direction == "forward"}
    if summed:
        notes.append(
            "cross-entropy over a cut vocabulary: all-reduces of each token's largest logit, sum and target after "
            f"{', '.join(sorted(summed))}"
        )
    if ep > 1 and not sequence_parallel:
        notes.append(
            "each rank sends the experts its slice of the tokens it shares, and the backward gathers the slices' "
            "gradients; Megatron-LM itself trains so under --sequence-parallel only, which gathers none"
        )
    shared = sum(share.replicated_bytes for share in rank.shares if not share.whole)
    if shared:
        notes.append(
            f"not counted: summing the gradients of KV heads that several ranks hold, {number_text(shared, 'B')}"
        )
    whole = sum(share.bytes for share in rank.shares if share.whole)
    if sequence_parallel:
        words = "summing the gradients of weights that every rank holds whole and uses on its own tokens"
        notes.append(f"not counted: {words}, at most {number_text(whole, 'B')}")
    return notes


def option_notes(
    rank: Rank, tp: int, pp: int, *, sequence_parallel: bool, microbatches: int, multiple: int
) -> list[str]:
    """Options that changed nothing, or that the route itself does not have."""
    notes = []
    if sequence_parallel and tp == 1:
        notes.append("--sequence-parallel changes nothing: one rank keeps all tokens (--tp 1)")
    elif sequence_parallel and rank.route == "transformers":
        notes.append("sequence parallelism is derived from the all-reduces: transformers does not run it")
    if microbatches > 1 and pp == 1:
        notes.append("--microbatches changes nothing: there is one pipeline stage (--pp 1)")
    if multiple > 1 and tp == 1:
        notes.append(f"--vocabulary-multiple {multiple} pads nothing: one rank holds the vocabulary whole (--tp 1)")
    elif multiple > 1 and rank.route == "transformers":
        notes.append(f"--vocabulary-multiple {multiple} pads nothing: transformers cuts the vocabulary as it is")
    return notes
