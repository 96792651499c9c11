"""How each experiment of `numerics` reads: what is measured against what, and its panel of the figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from introspect.analyzers._numerics_theory import Line
from introspect.figures import Panel, Series
from introspect.numerics_record import SOFTMAX_WIDTH, VARIANCE_WIDTH, WEIGHT_UPDATE, Measurement

CAPTION = "Marks: measured (root mean square). Lines and bars: expected. Dashed: bound, or where noise ends."
_SMALLEST_DRAWN = 1e-8  # below every error measured here; shares of gradients go on to 1e-14


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """`at`: what the points are measured at ("" where they differ by format and method alone). `one_per`: what makes
    the ticks of a panel without `at`."""

    title: str
    at: str
    quantity: str
    log_x: Literal[2, 10] | None = None
    log_y: bool = False
    one_per: Literal["", "format", "method"] = ""
    bounds: bool = False


ABOUT: dict[str, About] = {
    "swallowed_update": About(
        title="Largest update that a weight of 1.0 swallows",
        at="",
        quantity="update",
        log_y=True,
        one_per="format",
    ),
    "update_drift": About(
        title=f"bf16 weight of 1.0, each step adds 2^{math.log2(WEIGHT_UPDATE):g}",
        at="steps",
        quantity="gain of the weight",
    ),
    "exp_overflow": About(
        title="Smallest x whose exp(x) is infinite",
        at="",
        quantity="x",
        one_per="format",
    ),
    "softmax_sum": About(
        title=f"Sum of a softmax over {SOFTMAX_WIDTH} equal logits (no mark: not a number)",
        at="logit",
        quantity="sum of the probabilities",
    ),
    "sum_error": About(
        title="Sum of k numbers of [0, 1)",
        at="terms k",
        quantity="relative error",
        log_x=2,
        log_y=True,
    ),
    "gemm_error": About(
        title="Product of standard normal matrices",
        at="inner dimension k",
        quantity="error / rms of the product",
        log_x=2,
        log_y=True,
    ),
    "loss_scale": About(
        title="Log-normal gradients after loss scaling",
        at="log2 of the loss scale",
        quantity="share of the gradients",
        log_y=True,
    ),
    "variance": About(
        title=f"fp32 variance of {VARIANCE_WIDTH} numbers",
        at="mean / standard deviation",
        quantity="relative error of the variance",
        log_x=10,
        log_y=True,
        bounds=True,
    ),
    "quantisation": About(
        title="Quantised activations with outlier features, by block that shares a scale",
        at="",
        quantity="error of ordinary values / their rms",
        log_y=True,
        one_per="method",
    ),
}


def panels_of(points: tuple[Measurement, ...], lines: tuple[Line, ...]) -> tuple[Panel, ...]:
    """One panel for each experiment among the points."""
    pairs = list(zip(points, lines, strict=True))
    panels = (_panel(about, [pair for pair in pairs if pair[0].experiment == name]) for name, about in ABOUT.items())
    return tuple(panel for panel in panels if panel.series)


def _panel(about: About, pairs: list[tuple[Measurement, Line]]) -> Panel:
    """A colour for each label; x is where the points were measured, or the number of a tick."""
    ticks = tuple(dict.fromkeys(getattr(point, about.one_per) for point, _ in pairs)) if about.one_per else ()
    colors: dict[str, int] = {}
    series = []
    for label in dict.fromkeys(_label(about, point) for point, _ in pairs):
        mine = [(point, line) for point, line in pairs if _label(about, point) == label]
        x = [ticks.index(getattr(point, about.one_per)) if ticks else point.at for point, _ in mine]
        color = colors.setdefault(label, len(colors))
        measured = _drawable(about, x, [point.measured for point, _ in mine])
        expected = _drawable(about, x, [line[0] for _, line in mine])
        name = label if measured else f"{label} (all 0)"
        series.append(Series(label=name, color=color, style="points", xy=measured))
        series.append(Series(label="", color=color, style="bars" if ticks else "line", xy=expected))
        if about.bounds:
            bound = _drawable(about, x, [line[1] for _, line in mine])
            series.append(Series(label="", color=color, style="dashed", xy=bound))
    return Panel(
        title=about.title,
        x_label=about.at,
        y_label=about.quantity,
        series=tuple(series),
        log_x=about.log_x,
        log_y=about.log_y,
        ticks=ticks,
    )


def _label(about: About, point: Measurement) -> str:
    """What tells the points of one panel apart, besides x and the ticks."""
    if about.one_per:
        return point.method if about.one_per == "format" else point.format
    return f"{point.format} {point.method}"


def _drawable(about: About, x: list[float | None], y: list[float | None]) -> tuple[tuple[float, float], ...]:
    """The points that have a place: no unknown ones, and on a logarithmic axis nothing that is (almost) zero."""
    lowest = _SMALLEST_DRAWN if about.log_y else -math.inf
    return tuple((a, b) for a, b in zip(x, y, strict=True) if a is not None and b is not None and b > lowest)
