"""The command bench."""

import os
import sys
from collections.abc import Mapping
from json import dumps
from pathlib import Path

from capsnet.checks import unknown_name
from capsnet.cli import Flag
from capsnet.experiments.growth import (
    QUICK_SWEEPS,
    SWEEPS,
    draw_growth,
    measure_memory,
    run_growth,
)
from capsnet.experiments.outcome import quick_prefix
from capsnet.experiments.speed import (
    growth_table,
    measure_parts,
    measure_rounding,
    run_speed,
    speed_table,
    write_page,
)
from capsnet.experiments.workloads import CASES, Case
from capsnet.training.config import check_count
from capsnet.training.records import write_json

#: What may stand among the cases for the second part alone.
GROWTH = "growth"
_QUICK_CASES = ("mnist", "routing")


def bench(
    *cases: str,
    growth: bool = True,
    repeats: int = 7,
    threads: int | None = None,
    out: Path = Path("results"),
    docs: Path = Path("docs"),
    quick: Flag = False,
    json: Flag = False,
) -> int:
    """Measure speed and memory against plain PyTorch, and how both grow.

    Both stand ready in processes of their own and take turns. Writes results/bench-speed.json,
    results/bench-growth.json, a picture, and the tables of docs/speed.md if that page is there;
    for cases by name only results/bench-NAME.json.

    Args:
        cases: mnist, multimnist, svhn, cnn-mnist, cnn-multimnist, conv20, conv28, routing,
            evaluate256, evaluate1 or growth; all if none is named.
        growth: Measure how time and memory grow.
        repeats: Turns of each.
        threads: CPU threads; default: one for each core.
        out: Folder for the results.
        docs: Folder of the page and its images.
        quick: A miniature of a minute, labelled as such.
        json: Print the results as JSON.
    """
    check_count("repeats", repeats)
    check_count("threads", threads)
    num_threads = threads or os.cpu_count() or 1
    names = tuple(name for name in cases if name != GROWTH)
    chosen = _find_cases(names or (_QUICK_CASES if quick else ()))

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    prefix = quick_prefix(quick)
    records: dict[str, Mapping[str, object]] = {}
    written = []
    if names or not cases:
        batch = 4 if quick else None
        speed = run_speed(chosen, repeats=repeats, threads=num_threads, batch=batch, say=say)
        if not quick and not cases:
            say("measuring parts of a step and rounding")
            speed["parts"] = measure_parts(repeats=repeats, threads=num_threads)
            speed["rounding"] = measure_rounding()
        written.append(_write(out / f"{prefix}bench-{'-'.join(names) or 'speed'}.json", speed))
        records["speed"] = speed
    if GROWTH in cases or (growth and not cases):
        sweeps = QUICK_SWEEPS if quick else SWEEPS
        grown = run_growth(sweeps, repeats=min(repeats, 3), threads=num_threads, say=say)
        if not quick:
            say("measuring memory of tensors")
            grown["tensors_mb"] = measure_memory(threads=num_threads)
        written.append(_write(out / f"{prefix}bench-growth.json", grown))
        picture = (out if quick else docs / "images") / f"{prefix}bench-growth.png"
        draw_growth(grown, picture)
        written.append(picture)
        records[GROWTH] = grown
    if not quick and not names:
        written += write_page(out, docs / "speed.md")
    if json:
        print(dumps(records, indent=2))
        return 0
    tables = {"speed": speed_table, GROWTH: growth_table}
    print("\n\n".join("\n".join(tables[name](record)) for name, record in records.items()))
    label = "quick miniature, not a result; " if quick else ""
    print(f"{label}written: {', '.join(map(str, written))}")
    return 0


def _find_cases(names: tuple[str, ...]) -> tuple[Case, ...]:
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise unknown_name("case", name, known)
    return tuple(known[name] for name in names) or CASES


def _write(path: Path, record: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return path
