"""The roofline as a picture: every op at its intensity, under the roofs of the GPUs."""

from __future__ import annotations

from collections import defaultdict

from introspect.analyzers._roofline import Machine, Work
from introspect.figures import Figure, Panel, Series
from introspect.records import Trace

KINDS = {
    "linear": ("products with weights", 1),
    "grouped": ("routed experts", 2),
    "attention": ("attention", 3),
}
OTHER = ("other products", 4)


def roofline_figure(trace: Trace, works: tuple[Work, ...], machines: tuple[Machine, ...]) -> Figure | None:
    """One panel a GPU; None when no GPU has a rate for the run's dtype."""
    dtype = trace.run.dtype or "bf16"
    panels = tuple(_panel(works, machine, dtype) for machine in machines if machine.gpu.peak(dtype))
    if not panels:
        return None
    run = trace.run
    size = f"batch {run.batch}, context {run.context}" if run.phase == "decode" else f"batch {run.batch}, seq {run.seq}"
    return Figure(
        panels=panels,
        caption=f"{trace.model.id}, {run.phase}, {size}. A point is an op of one layer, at the rate its bound allows.",
    )


def _panel(works: tuple[Work, ...], machine: Machine, dtype: str) -> Panel:
    peak = (machine.gpu.peak(dtype) or 0) * machine.mfu
    bandwidth = machine.gpu.bandwidth_bytes_per_second * machine.mbu
    points: defaultdict[tuple[str, int], set[tuple[float, float]]] = defaultdict(set)
    for work in works:
        seconds = work.seconds(machine)
        if work.flops and work.bytes and seconds:
            points[KINDS.get(work.kind, OTHER)].add((work.flops / work.bytes, work.flops / seconds))
    intensities = [x for found in points.values() for x, _ in found] or [1.0]
    low, ridge, high = min(*intensities, 1.0) / 2, peak / bandwidth, max(*intensities, 4 * peak / bandwidth)
    roof = Series(
        label=f"{machine.gpu.name}: {bandwidth / 1e12:g} TB/s, {peak / 1e12:g} TFLOP/s {dtype}",
        color=0,
        xy=((low, low * bandwidth), (ridge, peak), (high, peak)),
    )
    mark = Series(
        label=f"ridge {ridge:.0f} FLOP/B", color=6, xy=((ridge, low * bandwidth), (ridge, peak)), style="dashed"
    )
    marks = tuple(
        Series(label=label, color=color, xy=tuple(sorted(found)), style="points")
        for (label, color), found in sorted(points.items(), key=lambda item: item[0][1])
    )
    return Panel(
        title=f"Roofline on {machine.gpu.name}",
        x_label="arithmetic intensity (FLOP per byte)",
        y_label="attainable rate (FLOP/s)",
        series=(roof, mark, *marks),
        log_x=10,
        log_y=True,
    )
