"""Pictures of numbers: ours beside the paper's, curves, and images with their predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from capsnet.experiments.figures import (
    BLUE,
    GREY,
    INK,
    NORMAL,
    RED,
    SMALL,
    Canvas,
    Caption,
    Image,
)

#: What is behind a text, so that no line goes through it.
_BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


def tidy(axes: Axes, *, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Gives a plot the style of all: thin lines, small type, no box."""
    axes.set_xlabel(xlabel, fontsize=NORMAL, color=INK)
    axes.set_ylabel(ylabel, fontsize=NORMAL, color=INK)
    axes.set_title(title, fontsize=NORMAL, color=INK, loc="left", fontweight="bold")
    axes.tick_params(which="both", labelsize=SMALL, colors=INK, width=0.6, length=3)
    axes.grid(visible=True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set(linewidth=0.6, color=INK, visible=name in ("left", "bottom"))


@dataclass(frozen=True)
class Dot:
    """A number of the paper and ours for it, in per cent."""

    label: str
    """What it is."""

    paper: float | None
    """The paper's."""

    paper_spread: float | None
    """Its standard deviation."""

    values: tuple[float, ...]
    """Ours, one for each trial."""


def plot_dots(axes: Axes, dots: Sequence[Dot], *, xlabel: str) -> None:
    """The paper's numbers as open circles, ours as filled ones over their trials."""
    for row, dot in enumerate(dots):
        if dot.paper is not None:
            axes.errorbar(
                dot.paper,
                row - 0.14,
                xerr=dot.paper_spread,
                fmt="o",
                ms=6,
                mfc="white",
                color=GREY,
                elinewidth=1,
                label="paper",
            )
            _note(axes, f"{dot.paper:.4g}", dot.paper, row - 0.14, color=GREY)
        if dot.values:
            mean = float(np.mean(dot.values))
            spread = float(np.std(dot.values, ddof=1)) if len(dot.values) > 1 else None
            axes.errorbar(
                mean, row + 0.14, xerr=spread, fmt="o", ms=6, color=BLUE, elinewidth=1, label="ours"
            )
            if np.isfinite(mean):
                _note(axes, f"{mean:.2f}", mean, row + 0.14, color=BLUE, below=True)
            axes.plot(dot.values, [row + 0.14] * len(dot.values), "|", ms=8, color=BLUE, alpha=0.6)
        else:
            axes.text(
                0.99, row + 0.14, "not run yet", fontsize=SMALL, color=GREY, va="center",
                ha="right", transform=axes.get_yaxis_transform(), bbox=_BLANK,
            )  # fmt: skip
    tidy(axes, xlabel=xlabel)
    axes.set_yticks(range(len(dots)), [dot.label for dot in dots], fontsize=SMALL)
    axes.set_ylim(len(dots) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)


def _note(axes: Axes, text: str, x: float, y: float, *, color: str, below: bool = False) -> None:
    """A number above or below its dot."""
    axes.annotate(
        text.replace("-", "−"),
        (x, y),
        (0, -4.5 if below else 4.5),
        textcoords="offset points",
        fontsize=6.5,
        color=color,
        ha="center",
        va="top" if below else "bottom",
        bbox=_BLANK,
    )


def add_legend(axes: Axes, *, above: bool = False) -> None:
    """A legend with each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if not unique:
        return
    legend = axes.legend(
        list(unique.values()),
        list(unique),
        fontsize=SMALL,
        frameon=not above,
        facecolor="white",
        edgecolor="none",
        framealpha=0.8,
        loc="lower right" if above else "best",
        ncols=len(unique) if above else 1,
        handlelength=1.2,
        columnspacing=1.2,
    )
    if above:
        legend.set_bbox_to_anchor((1.02, 0.97), transform=axes.transAxes)


def draw_comparison(
    caption: Caption, panels: Mapping[str, Sequence[Dot]], path: Path, *, xlabel: str
) -> None:
    """Panels of the paper's numbers beside ours (Table 1)."""
    label_width, panel = 2.75, 2.9
    height = 0.52 * max(len(dots) for dots in panels.values()) + 0.9
    canvas = Canvas(caption, width=label_width + len(panels) * (panel + 0.35), height=height)
    for number, (title, dots) in enumerate(panels.items()):
        left = label_width + number * (panel + 0.35)
        axes = canvas.axes(left, 0.28, panel, height - 0.85)
        plot_dots(axes, dots, xlabel=xlabel)
        axes.set_title(title, fontsize=NORMAL, loc="left", fontweight="bold")
        axes.set_xlim(left=0)
        if number:
            axes.set_yticklabels([])
        add_legend(axes, above=True)
    canvas.save(path)


def draw_samples_and_dots(
    caption: Caption, strips: Sequence[tuple[str, Image]], dots: Sequence[Dot], path: Path
) -> None:
    """Strips of examples above a comparison (§5.2)."""
    label_width, width, row = 1.75, 6.6, 0.66
    height = len(strips) * (row + 0.08) + 0.45 * len(dots) + 0.95
    canvas = Canvas(caption, width=width + 0.2, height=height)
    for number, (label, image) in enumerate(strips):
        top = number * (row + 0.08)
        canvas.text(0.12, top + row / 2, label, size=SMALL)
        image_width = min(row * image.shape[1] / image.shape[0], width - label_width)
        canvas.image(image, label_width, top, image_width, row)
    top = len(strips) * (row + 0.08) + 0.2
    axes = canvas.axes(label_width, top, width - label_width - 0.15, 0.45 * len(dots))
    plot_dots(axes, dots, xlabel="test images classified rightly, %")
    add_legend(axes, above=True)
    canvas.save(path)


@dataclass(frozen=True)
class Curve:
    """A line in a plot."""

    label: str
    """Its name in the legend."""

    xs: Sequence[float]
    """Along the horizontal axis."""

    ys: Sequence[float]
    """Along the vertical axis."""

    color: str
    """Its colour."""

    marker: str = ""
    """The sign at its points; none for long curves."""


def plot_curves(axes: Axes, curves: Sequence[Curve], *, log: bool = False) -> None:
    """Lines with a legend; a single point is marked, as it makes no line."""
    for curve in curves:
        marker = curve.marker or ("o" if len(curve.xs) == 1 else "")
        axes.plot(
            curve.xs, curve.ys, color=curve.color, marker=marker, ms=4, lw=1.3, label=curve.label
        )
    if log:
        axes.set_yscale("log")


def draw_curve_panels(
    caption: Caption,
    panels: Sequence[tuple[str, str, str, Sequence[Curve], bool]],
    path: Path,
    *,
    panel: float = 3.5,
) -> None:
    """Plots side by side, each with title, axis labels, curves and whether it is logarithmic."""
    gap, height = 0.75, 2.5
    top = 0.28 if any(title for title, *_ in panels) else 0.05
    canvas = Canvas(caption, width=len(panels) * (panel + gap) + 0.15, height=height + top + 0.5)
    for number, (title, xlabel, ylabel, curves, log) in enumerate(panels):
        axes = canvas.axes(gap + number * (panel + gap) - 0.05, top, panel, height)
        plot_curves(axes, curves, log=log)
        tidy(axes, xlabel=xlabel, ylabel=ylabel, title=title)
        if not curves:
            axes.text(
                0.5, 0.5, "no curve was kept by this run", transform=axes.transAxes,
                ha="center", fontsize=NORMAL, color=GREY,
            )  # fmt: skip
        elif len(curves) > 1:
            add_legend(axes, above=bool(title))
    canvas.save(path)


@dataclass(frozen=True)
class Tile:
    """A test image with what it was taken for."""

    image: Image
    """The image."""

    text: str
    """Label, and on a second line the prediction if it is another."""

    is_right: bool
    """Whether they agree."""


def draw_curves_and_tiles(
    caption: Caption, curves: Sequence[Curve], tiles: Sequence[Tile], path: Path, *, ylabel: str
) -> None:
    """Learning curves at the left, test images with their predictions at the right (§7)."""
    num_columns, size, gap = 6, 0.82, 0.08
    num_rows = max(1, -(-len(tiles) // num_columns))
    pitch = size + 0.38
    height = max(num_rows * pitch, 2.6)
    left = 4.5
    canvas = Canvas(caption, width=left + num_columns * (size + gap) + 0.15, height=height + 0.25)
    axes = canvas.axes(0.72, 0.1, 3.3, height - 0.5)
    plot_curves(axes, curves)
    tidy(axes, xlabel="epochs", ylabel=ylabel)
    axes.set_ylim(0, 1.08 * max((max(curve.ys) for curve in curves if len(curve.ys)), default=1))
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    add_legend(axes)
    for number, tile in enumerate(tiles):
        x = left + number % num_columns * (size + gap)
        y = number // num_columns * pitch
        canvas.image(tile.image, x, y, size, size)
        color = INK if tile.is_right else RED
        below = y + size + 0.04
        canvas.text(x + size / 2, below, tile.text, size=6.5, ha="center", va="top", color=color)
    canvas.save(path)


def draw_claims(caption: Caption, dots: Sequence[Dot], curves: Sequence[Curve], path: Path) -> None:
    """Changes of the test error at the left, widths of turned digits at the right."""
    height = 3.3
    canvas = Canvas(caption, width=9.6, height=height + 0.3)
    axes = canvas.axes(2.05, 0.3, 2.75, height - 0.75)
    plot_dots(axes, dots, xlabel="change of the test error, points")
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_xscale("symlog", linthresh=0.1)  # MultiMNIST's are far larger than MNIST's
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.2)
    axes.set_title("First against second", fontsize=NORMAL, loc="left", fontweight="bold")
    add_legend(axes, above=True)
    axes = canvas.axes(5.55, 0.3, 2.75, height - 0.75)
    plot_curves(axes, curves)
    tidy(
        axes,
        xlabel="turn of the dimension",
        ylabel="width, natural deviations",
        title="The dimension of each digit's width",
    )
    if curves:
        axes.legend(
            fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.2
        )
    canvas.save(path)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over about a fiftieth of the values, for a curve of training."""
    window = max(1, len(values) // 50)
    return [float(np.mean(values[max(0, i - window + 1) : i + 1])) for i in range(len(values))]
