"""Speed of every case as a record, and the records as tables, also those of docs/speed.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # rows are JSON

from capsnet.experiments.benchmark import (
    Case,
    Implementation,
    Measurement,
    Task,
    measure,
    measure_peak,
)
from capsnet.models.weights import write_atomically
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
    peak = measure_peak(repeats=repeats, threads=threads)
    rows = []
    for case in cases:
        say(f"measuring {case.name}")
        task = replace(case.task, batch=batch) if batch is not None else case.task
        done = measure(task, repeats=repeats, threads=threads)
        peak = max(peak, measure_peak(repeats=2, threads=threads))
        rows.append((case, task, done))
    environment = describe_environment()
    hardware = environment["hardware"]
    assert isinstance(hardware, dict)
    return {
        "repeats": repeats,
        "quick": batch is not None,
        "peak_gflops": round(peak / 1e9, 1),
        "rows": [_row(case, task, done, peak) for case, task, done in rows],
        **environment,
        "hardware": {**hardware, "threads": threads},
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
    """Renews the page's tables, between <!-- speed --> or <!-- growth --> and their ends."""
    if not page.exists():
        return []
    text = page.read_text()
    for name, table in (("speed", speed_table), ("growth", growth_table)):
        source = results / f"bench-{name}.json"
        if source.exists():
            record = read_json(source)
            block = "\n".join([_describe(record, source), "", *table(record)])
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            head, _, rest = text.partition(begin)
            _, found, tail = rest.partition(end)
            if found:
                text = f"{head}{begin}{block}\n{end}{tail}"
    write_atomically(page, text.encode())
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
