"""Figures as values, and the only place that draws: analyzers describe panels, `save_figures` writes svg or png.

matplotlib (the `plot` extra) is imported only when a file is really drawn. Colours are Okabe and Ito's, which every
common colour blindness tells apart; each also has its own marker, so that grey paper is enough.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from introspect.atomic import write_atomically
from introspect.errors import MissingPackageError, OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_COLUMNS = 2
_LONG_TICK = 12  # characters from which tick labels are slanted
_PANEL_INCHES = (7.2, 3.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Marks or a line of one panel. Series of one `color` (0-6) belong together; an empty label has no legend entry.

    "bars" are short level strokes, a line for axes whose x is no quantity.
    """

    label: str
    color: int
    xy: tuple[tuple[float, float], ...]
    style: Literal["points", "bars", "line", "dashed"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. Labels carry the units. `log_x`: base of a logarithmic x axis, None for a linear one.
    `ticks`: names of x = 0, 1, 2 ... where x is no quantity."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: Literal[2, 10] | None = None
    log_y: bool = False
    ticks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What `--plot` draws for one result. The caption says how to read the marks, and what was assumed."""

    panels: tuple[Panel, ...]
    caption: str = ""


def check_plot_path(path: str) -> None:
    """Raise what would stop the drawing before anything is computed: OptionError for a name that ends in neither .svg
    nor .png, MissingPackageError without matplotlib."""
    if Path(path).suffix.lower() not in (".svg", ".png"):
        raise OptionError("--plot", path, "a file name ending in .svg or .png")
    if find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "--plot", "plot")


def save_figures(figures: Sequence[Figure], path: str) -> None:
    """Draw the panels of all figures into one svg or png file, written whole or not at all.

    `path` has passed `check_plot_path`. FileAccessError when the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    suffix = Path(path).suffix.lower()[1:]
    panels = [panel for figure in figures for panel in figure.panels]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    # A fixed salt and no date: the same figure is the same file.
    with matplotlib.rc_context({"svg.hashsalt": "introspect", "font.size": 9}):
        size = (columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1])
        canvas = Canvas(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.12))
        axes = canvas.subplots(rows, columns, squeeze=False).flatten()
        for panel, ax in zip(panels, axes, strict=False):
            _draw(panel, ax)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        canvas.supxlabel("\n".join(dict.fromkeys(figure.caption for figure in figures)), fontsize=9)
        buffer = io.BytesIO()
        metadata: dict[str, Any] = {"Date": None} if suffix == "svg" else {}
        canvas.savefig(buffer, format=suffix, dpi=120, metadata=metadata)
    write_atomically(Path(path), buffer.getvalue())


def _draw(panel: Panel, ax: Axes) -> None:
    for series in panel.series:
        marker, size, line = {
            "points": (_MARKERS[series.color], 5.5, "none"),
            "bars": ("_", 20, "none"),
            "line": ("", 0, "-"),
            "dashed": ("", 0, "--"),
        }[series.style]
        ax.plot(
            [x for x, _ in series.xy],
            [y for _, y in series.xy],
            color=_COLORS[series.color],
            marker=marker,
            markersize=size,
            linestyle=line,
            linewidth=1.2,
            label=series.label or None,
        )
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    if panel.log_x:
        ax.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        ax.set_yscale("log")
    if panel.ticks:
        ax.set_xticks(range(len(panel.ticks)), panel.ticks)
        if any(len(tick) > _LONG_TICK for tick in panel.ticks):
            for label in ax.get_xticklabels():
                label.set(rotation=20, ha="right")
        ax.set_xlim(-0.5, len(panel.ticks) - 0.5)
    ax.grid(visible=True, which="major", linewidth=0.4, alpha=0.6)
    if any(series.label for series in panel.series):
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))  # beside the axes: it can hide nothing
