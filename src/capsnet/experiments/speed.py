"""Speed of every case as a record, and the records as tables, also those of docs/speed.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # rows are JSON

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.experiments.benchmark import Measurement, measure, measure_in_turns, measure_peak
from capsnet.experiments.report import replace_block
from capsnet.experiments.workloads import Case, Implementation, Task
from capsnet.functional import convolve2d
from capsnet.training.records import describe_environment, read_json


def run_speed(
    cases: Sequence[Case],
    *,
    repeats: int,
    threads: int,
    batch: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Measures cases and returns the record that results/bench-speed.json holds.

    Args:
        cases: what to measure.
        repeats: turns of each implementation.
        threads: CPU threads of each process.
        batch: images of a batch in all cases, for a miniature.
        say: where to tell of the progress.
    """
    environment = describe_environment(threads)  # before files may change
    peak = measure_peak(repeats=repeats, threads=threads)
    rows = []
    for case in cases:
        say(f"measuring {case.name}")
        task = replace(case.task, batch=batch) if batch is not None else case.task
        done = measure(task, repeats=repeats, threads=threads)
        peak = max(peak, measure_peak(repeats=2, threads=threads))
        rows.append((case, task, done))
    return {
        "repeats": repeats,
        "quick": batch is not None,
        "peak_gflops": round(peak / 1e9, 1),
        "rows": [_row(case, task, done, peak) for case, task, done in rows],
        **environment,
    }


def _row(
    case: Case, task: Task, done: Mapping[Implementation, Measurement], peak: float
) -> dict[str, object]:
    ours, theirs = done["capsnet"], done["textbook"]
    row: dict[str, object] = {"name": case.name, "title": case.title, "batch": task.batch}
    for name, measured in done.items():
        row[name] = {
            "seconds": round(measured.median, 6),
            "all_seconds": [round(value, 6) for value in measured.seconds],
            "images_per_second": round(task.batch / measured.median, 1),
            "memory_mb": measured.memory_mb,
            # Arithmetic of the plain form for both: beyond 1 no plain form can go.
            "share_of_peak": round(theirs.flops / measured.median / peak, 3),
        }
    row["ratio"] = round(theirs.median / ours.median, 2)
    row["memory_ratio"] = round(ours.memory_mb / theirs.memory_mb, 2) if theirs.memory_mb else None
    row["target"] = case.target
    return row


PARTS = {
    "products of the primary convolution": Task("products"),
    "the rest of it: transforms": Task("convolution"),  # less the products
    "routing": Task("routing"),
    "first convolution": Task("first"),
    "step": Task("train"),
}


def measure_parts(*, repeats: int, threads: int) -> dict[str, float]:
    """Returns the seconds of each part of a training step on MNIST, and of the step."""
    seconds = measure_in_turns(PARTS, repeats=repeats, threads=threads)
    products, convolution, *_ = PARTS
    seconds[convolution] -= seconds[products]
    step = seconds.pop("step")
    seconds["decoder, losses, Adam and the rest"] = step - sum(seconds.values())
    seconds["step"] = step
    return {name: round(value, 6) for name, value in seconds.items()}


def measure_rounding(batch: int = 128) -> dict[str, dict[str, float]]:
    """Returns errors of the primary convolution on MNIST, in float32, relative to float64.

    Root mean squares; features are positive, weights and gradients are not.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 256, 20, 20, generator=generator).relu_().requires_grad_()
    weight = 0.05 * torch.randn(256, 256, 9, 9, generator=generator)
    weight.requires_grad_()
    ahead = torch.randn(batch, 256, 6, 6, generator=generator)

    def differentiate(outputs: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(outputs, (images, weight), ahead.to(outputs.dtype))
        return [value.detach().double() for value in (outputs, *gradients)]

    truth = differentiate(F.conv2d(images.double(), weight.double(), stride=2))
    errors: dict[str, dict[str, float]] = {}
    for algorithm in ("direct", "frequency"):
        values = differentiate(convolve2d(images, weight, stride=2, algorithm=algorithm))
        names = ("values", "gradient of images", "gradient of weight")
        errors[algorithm] = {
            name: float(((value - true).square().mean() / true.square().mean()).sqrt())
            for name, value, true in zip(names, values, truth, strict=True)
        }
    return errors


def parts_table(record: Mapping[str, object]) -> list[str]:
    """Returns a Markdown table of where the time of a step goes."""
    parts = record["parts"]
    assert isinstance(parts, dict)
    rows = [
        [name, _show_seconds(value), f"{value / parts['step']:.0%}"]
        for name, value in parts.items()
    ]
    return _markdown(["part of a training step on MNIST", "time", "share"], rows)


def memory_table(record: Mapping[str, object]) -> list[str]:
    """Returns a Markdown table of the memory that the tensors of training steps need."""
    tensors = record["tensors_mb"]
    assert isinstance(tensors, dict)
    rows = [
        [
            name,
            f"{both['textbook']:,.0f}",
            f"{both['capsnet']:,.0f}",
            f"{both['capsnet'] / both['textbook']:.2f}",
        ]
        for name, both in tensors.items()
    ]
    return _markdown(["tensors of a training step", "plain MB", "capsnet MB", "ratio"], rows)


def rounding_table(record: Mapping[str, object]) -> list[str]:
    """Returns a Markdown table of rounding errors."""
    rounding = record["rounding"]
    assert isinstance(rounding, dict)
    rows = [
        [name, *(f"{value:.1e}" for value in errors.values())] for name, errors in rounding.items()
    ]
    return _markdown(["form", *rounding["direct"]], rows)


def speed_table(record: Mapping[str, object]) -> list[str]:
    """Returns a Markdown table of the cases."""
    rows = [
        [
            row["title"],
            _show_seconds(row["textbook"]["seconds"]),
            _show_seconds(row["capsnet"]["seconds"]),
            f"{row['ratio']:.1f} ×" + ("" if row["target"] is None else f" ({row['target']:g})"),
            f"{row['capsnet']['images_per_second']:,.0f}",
            f"{row['textbook']['memory_mb']:,.0f}",
            f"{row['capsnet']['memory_mb']:,.0f}",
            f"{row['textbook']['share_of_peak']:.0%}",
            f"{row['capsnet']['share_of_peak']:.0%}",
        ]
        for row in _rows(record)
    ]
    header = [
        "work", "plain", "capsnet", "faster (target)", "images/s", "plain MB", "capsnet MB",
        "plain of peak", "capsnet of peak",
    ]  # fmt: skip
    return _markdown(header, rows)


def growth_table(record: Mapping[str, object]) -> list[str]:
    """Returns a Markdown table of the exponents."""
    rows = [
        [
            row["title"],
            f"{row['sizes'][0]} – {row['sizes'][-1]}",
            _show_exponent(row["textbook"]["exponent"]),
            _show_exponent(row["capsnet"]["exponent"])
            + ("" if row["target"] is None else f" (at most {row['target']:g})"),
            _show_exponent(row["textbook"]["memory_exponent"]),
            _show_exponent(row["capsnet"]["memory_exponent"]),
        ]
        for row in _rows(record)
    ]
    header = ["what grows", "sizes", "time, plain", "time, capsnet", "memory, plain", "… capsnet"]
    return _markdown(header, rows)


def write_page(results: Path, page: Path) -> list[Path]:
    """Renews the page's tables, between <!-- speed --> and <!-- /speed --> and the like."""
    if not page.exists():
        return []
    for name, file, table in (
        ("speed", "speed", speed_table),
        ("parts", "speed", parts_table),
        ("rounding", "speed", rounding_table),
        ("tensors_mb", "growth", memory_table),
        ("growth", "growth", growth_table),
    ):
        source = results / f"bench-{file}.json"
        record = read_json(source) if source.exists() else {}
        if record.get("rows" if name in ("speed", "growth") else name):
            replace_block(page, name, [_describe(record, source), "", *table(record)])
    return [page]


def _describe(record: Mapping[str, object], source: Path) -> str:
    hardware, versions = record["hardware"], record["versions"]
    assert isinstance(hardware, dict)
    assert isinstance(versions, dict)
    peak = f" Peak: {record['peak_gflops']} GFLOP/s." if "peak_gflops" in record else ""
    return (
        f"From `results/{source.name}`: {hardware['cpu']}, {hardware['threads']} threads, "
        f"PyTorch {versions['torch']}, {record['repeats']} turns.{peak}"
    )


def _rows(record: Mapping[str, object]) -> list[dict[str, Any]]:
    rows = record["rows"]
    assert isinstance(rows, list)
    return rows


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _show_exponent(exponent: float | None) -> str:
    return "–" if exponent is None else f"{exponent:.2f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]
