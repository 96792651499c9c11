"""Wavelengths of the rotary pairs, and what a token costs against the context, as pictures."""

from __future__ import annotations

from collections import defaultdict

from introspect.analyzers._rope import wavelength
from introspect.analyzers._step import Step
from introspect.figures import Figure, Panel, Series
from introspect.records import Rope

SHORTEST = 256
"""Context at which the cost curves start."""


def context_figure(step: Step, scaled: tuple[Rope, ...], lengths: tuple[int, ...]) -> Figure:
    """FLOPs of a decoded token and cache bytes of a sequence up to the longest length, and a panel of wavelengths."""
    contexts = _contexts(max(lengths))
    keys = [sum(part.flops_per_key * (part.keys_read(c) + 1) for part in step.parts) for c in contexts]
    weights = step.weight_flops()
    flops = Panel(
        title="FLOPs of one decoded token",
        x_label="context (tokens)",
        y_label="FLOP per token",
        series=(
            Series(label="products with weights", color=0, xy=((contexts[0], weights), (contexts[-1], weights))),
            Series(label="attention", color=1, xy=tuple(zip(contexts, keys, strict=True))),
        ),
        log_x=2,
        log_y=True,
    )
    held = Panel(
        title="Cache of one sequence",
        x_label="context (tokens)",
        y_label="bytes",
        series=(
            Series(
                label="cache, all layers",
                color=2,
                xy=tuple((c, sum(part.bytes_at(c) for part in step.parts)) for c in contexts),
            ),
        ),
        log_x=2,
        log_y=True,
    )
    panels = (_wavelengths(step.trace.rope, scaled), flops, held) if step.trace.rope else (flops, held)
    return Figure(panels=panels, caption=step.trace.model.id)


def _contexts(longest: int) -> list[int]:
    powers = [SHORTEST * 2**power for power in range(longest.bit_length()) if SHORTEST * 2**power < longest]
    return [*powers, longest] if powers else [1, longest]


def _wavelengths(ropes: tuple[Rope, ...], scaled: tuple[Rope, ...]) -> Panel:
    first = ropes[0]
    series = []
    if not any(rope.inv_freq == rope.unscaled_inv_freq for rope in ropes):
        series.append(_series(f"unscaled, base {first.base:g}", 6, first.unscaled_inv_freq, dashed=True))
    for color, (label, frequencies) in enumerate((*_labelled(ropes), *_labelled(scaled))):
        series.append(_series(label, color % 6, frequencies))
    if first.training_length is not None:
        last = len(first.inv_freq) - 1
        length = first.training_length
        line = ((0.0, float(length)), (float(last), float(length)))
        series.append(Series(label=f"training length {length:,}", color=5, xy=line, style="dashed"))
    return Panel(
        title="Rotary wavelengths",
        x_label="pair of dimensions",
        y_label="tokens for one turn",
        series=tuple(series),
        log_y=True,
    )


def _labelled(ropes: tuple[Rope, ...]) -> list[tuple[str, tuple[float, ...]]]:
    """Each set of frequencies once (models may keep a rotary module in every layer), named by scaling and base, and by
    layer types where not all share it."""
    types: defaultdict[tuple[str, float, tuple[float, ...]], set[str]] = defaultdict(set)
    for rope in ropes:
        types[rope.rope_type, rope.base, rope.inv_freq].add(rope.layer_type or "")
    every = set().union(*types.values())
    return [
        (f"{scaling}, base {base:g}" + ("" if own == every else f" ({', '.join(sorted(own))})"), frequencies)
        for (scaling, base, frequencies), own in types.items()
    ]


def _series(label: str, color: int, frequencies: tuple[float, ...], *, dashed: bool = False) -> Series:
    points = tuple((float(pair), tokens) for pair, f in enumerate(frequencies) if (tokens := wavelength(f)))
    return Series(label=label, color=color, xy=points, style="dashed" if dashed else "line")
