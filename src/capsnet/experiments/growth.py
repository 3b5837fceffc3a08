"""How time and memory grow with the size of the problem, measured and drawn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from capsnet.experiments.benchmark import measure, measure_tensors
from capsnet.experiments.figures import BLUE, GREY, SMALL, Canvas, Caption
from capsnet.experiments.plots import tidy
from capsnet.experiments.workloads import CASES, IMPLEMENTATIONS, Implementation, Task
from capsnet.training.records import describe_environment


@dataclass(frozen=True)
class Sweep:
    """A task at growing sizes."""

    name: str
    title: str
    task: Task
    field: str
    """What of the task grows."""
    sizes: tuple[int, ...]
    target: float | None = None
    """The largest exponent that the time of ours may have."""

    def tasks(self) -> list[Task]:
        """The task at every size."""
        return [replace(self.task, **{self.field: size}) for size in self.sizes]  # type: ignore[arg-type]


SWEEPS = (
    Sweep("batch", "images, routing", Task("routing"), "batch", (32, 64, 128, 256, 512), 1.1),
    Sweep(
        "capsules", "capsules below, routing", Task("routing"), "capsules",
        (576, 1152, 2304, 4608, 9216), 1.1,
    ),
    Sweep(
        "classes", "classes, routing", Task("routing", batch=64), "classes",
        (10, 20, 40, 80, 160), 1.1,
    ),
    Sweep("iterations", "iterations, routing", Task("routing"), "iterations", (1, 2, 3, 4, 6)),
    Sweep(
        "size", "rows of features, convolution", Task("convolution", batch=32), "size",
        (12, 16, 24, 32, 48),
    ),
    Sweep("step", "images, training step", Task("train"), "batch", (16, 32, 64, 128)),
)  # fmt: skip

QUICK_SWEEPS = (
    Sweep(
        "batch", "images, routing", Task("routing", capsules=36, classes=3), "batch", (2, 4), 1.1
    ),
)


def fit_exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Returns the p of the power law values ∝ sizes^p that fits best in the logarithm.

    >>> round(fit_exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


def run_growth(
    sweeps: Sequence[Sweep],
    *,
    repeats: int,
    threads: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Measures sweeps and returns the record that results/bench-growth.json holds."""
    environment = describe_environment(threads)  # before files may change
    rows = []
    for sweep in sweeps:
        row: dict[str, object] = {
            "name": sweep.name,
            "title": sweep.title,
            "sizes": list(sweep.sizes),
            "target": sweep.target,
        }
        say(f"measuring growth with {sweep.title}")
        points = [measure(task, repeats=repeats, threads=threads) for task in sweep.tasks()]
        for name in IMPLEMENTATIONS:
            seconds = [point[name].fastest for point in points]
            memory = [point[name].memory_mb for point in points]
            row[name] = {
                "seconds": [round(value, 6) for value in seconds],
                "memory_mb": memory,
                "exponent": round(fit_exponent(sweep.sizes, seconds), 3),
                "memory_exponent": _exponent_or_none(sweep.sizes, memory),
            }
        rows.append(row)
    return {
        "repeats": repeats,
        "quick": sweeps is QUICK_SWEEPS,
        "rows": rows,
        **environment,
    }


def measure_memory(*, threads: int) -> dict[str, dict[Implementation, float]]:
    """Returns what the tensors of each training step of the benchmark need, in megabytes."""
    steps = [case for case in CASES if case.task.kind == "train"]
    return {case.name: measure_tensors(case.task, threads=threads) for case in steps}


def _exponent_or_none(sizes: Sequence[int], memory: Sequence[float]) -> float | None:
    """None where some value is unknown or too small to be told from zero."""
    if all(math.isfinite(value) and value > 0 for value in memory):
        return round(fit_exponent(sizes, memory), 3)
    return None


def draw_growth(record: Mapping[str, object], path: Path) -> None:
    """Draws time above memory for every sweep, ours and plain PyTorch's."""
    rows = record["rows"]
    hardware = record["hardware"]
    assert isinstance(rows, list)
    assert isinstance(hardware, dict)
    caption = Caption(
        "Growth of time and memory",
        f"capsnet (blue) and plain PyTorch (grey), {hardware['threads']} threads, "
        f"{hardware['cpu']}; p is the exponent that fits ours",
        quick=bool(record["quick"]),
    )
    width, height, gap = 2.0, 1.6, 0.55
    canvas = Canvas(
        caption, width=len(rows) * (width + gap) + 0.35, height=2 * (height + gap) + 0.1
    )
    for column, row in enumerate(rows):
        left = 0.6 + column * (width + gap)
        for line, (key, exponent, label) in enumerate(
            (("seconds", "exponent", "seconds"), ("memory_mb", "memory_exponent", "MB"))
        ):
            axes = canvas.axes(left, 0.25 + line * (height + gap), width, height)
            _draw_sweep(axes, row, key=key)
            p = row["capsnet"][exponent]
            title = f"p = {p:.2f}" if p is not None else ""
            tidy(
                axes,
                xlabel=row["title"] if line else "",
                ylabel=label if column == 0 else "",
                title=title,
            )
            axes.set_xticks(row["sizes"], [str(size) for size in row["sizes"]], fontsize=SMALL)
            axes.xaxis.set_minor_locator(NullLocator())
    canvas.save(path)


def _draw_sweep(axes: Axes, row: Mapping[str, object], *, key: str) -> None:
    sizes = row["sizes"]
    assert isinstance(sizes, list)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, colour in (("textbook", GREY), ("capsnet", BLUE)):
        series = row[name]
        assert isinstance(series, dict)
        axes.plot(sizes, series[key], "o-", color=colour, markersize=3, linewidth=1.2)
