"""All results beside the paper's, written as Markdown from results/*.json alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from capsnet.experiments.catalogue import EXPERIMENTS, Experiment
from capsnet.experiments.costs import estimate_cost
from capsnet.experiments.outcome import quick_prefix
from capsnet.experiments.trained import show_length
from capsnet.models.weights import write_atomically
from capsnet.training.records import read_json

RESULTS, COSTS = "results", "costs"
_NOT_RUN = "not run yet"
_HEAD = ("", "paper", "ours", "trials", "length", "training")


def write_report(results: Path, docs: Path, readme: Path | None) -> list[Path]:
    """Writes docs/results.md, README's table and the costs in docs/reproduce.md.

    Args:
        results: folder of results, one JSON file for each experiment.
        docs: folder that gets results.md; pictures are linked where they are.
        readme: the file with <!-- results --> and <!-- /results -->; None leaves it out.

    Returns:
        The files written.
    """
    if not results.is_dir():
        raise ValueError(f"{results} must be a folder of results (capsnet reproduce writes them)")
    found = {name: _read_record(results / f"{name}.json") for name in EXPERIMENTS}
    # A miniature under a result's name would have been renamed by hand: it is none.
    found = {name: None if each and each["quick"] else each for name, each in found.items()}
    quick = quick_prefix(True)
    miniatures = {name: _read_record(results / f"{quick}{name}.json") for name in found}
    docs.mkdir(parents=True, exist_ok=True)
    target = docs / "results.md"
    lines = _results_page(found, miniatures, results=results, docs=docs)
    write_atomically(target, ("\n".join(lines) + "\n").encode())
    written = [target]
    if readme is not None:
        replace_block(readme, RESULTS, _readme_table(found))
        written.append(readme)
    guide = docs / "reproduce.md"
    if guide.exists():
        replace_block(guide, COSTS, list(_cost_table()))
        written.append(guide)
    return written


def _read_record(path: Path) -> dict[str, object] | None:
    """The result in a file, None if there is none; a ValueError names one that is damaged."""
    return read_json(path) if path.exists() else None


def replace_block(path: Path, name: str, lines: Sequence[str]) -> None:
    """Puts new lines between a file's markers <!-- NAME --> and <!-- /NAME -->."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} must hold {first} and {last}, between which the table goes")
    write_atomically(path, "\n".join([before + first, *lines, last + after]).encode())


def show_row(row: Mapping[str, object]) -> str:
    """Our number of a row, and the paper's, for people."""
    paper = show_number(row["paper"], row["paper_spread"], row["unit"])
    return show_ours(row) + (f" (paper: {paper})" if paper else "")


def show_ours(row: Mapping[str, object]) -> str:
    """Our number of a row: the mean, and the standard deviation of several trials."""
    if row["mean"] is None:
        return _NOT_RUN
    mean, spread = _number(row["mean"]), row["spread"]
    if row["unit"] != "%":
        return f"{mean:.3g}" + (f" ± {_number(spread):.2g}" if spread is not None else "")
    spread_text = f" ± {100 * _number(spread):.3f}" if spread is not None else ""
    return f"{100 * mean:.2f}{spread_text} %".replace("-", "−")


def show_number(value: object, spread: object = None, unit: object = "%") -> str:
    """A number of the paper, with as many digits as the paper gives.

    >>> show_number(0.0025, 0.00005), show_number(0.79), show_number(1e-5, unit="")
    ('0.25 ± 0.005 %', '79 %', '1e-05')
    """
    if value is None:
        return ""
    factor = 100 if unit == "%" else 1
    text = f"{factor * _number(value):.4g}"
    if spread is not None:
        text += f" ± {factor * _number(spread):.2g}"
    return (f"{text} %" if unit == "%" else text).replace("-", "−" if unit == "%" else "-")


def show_seconds(seconds: float) -> str:
    """A time for people.

    >>> show_seconds(45.0), show_seconds(600.0), show_seconds(9000.0)
    ('45 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _results_page(
    found: Mapping[str, dict[str, object] | None],
    miniatures: Mapping[str, dict[str, object] | None],
    *,
    results: Path,
    docs: Path,
) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield (
        "Written by `capsnet report` from `results/*.json`; do not edit. Every number is that of "
        "the last step of training. ± is the standard deviation over trials, which differ in their "
        "seed alone. How to repeat one: [reproduce.md](reproduce.md)."
    )
    for name, record in found.items():
        yield from _section(EXPERIMENTS[name], record, docs)
    speed = sorted(results.glob("bench*.json"))
    if speed:
        yield from ("", "## Speed", "")
        yield f"Measured by `capsnet bench`: {', '.join(f'`results/{p.name}`' for p in speed)}."
    done = {name: record for name, record in miniatures.items() if record is not None}
    if done:
        yield from ("", "## Quick miniatures, not results", "")
        yield "Small networks, few steps: they show that the commands work, and nothing else."
        for name, record in done.items():
            yield from ("", f"### {name}, quick", "", *_table(_rows(record)))


def _section(
    experiment: Experiment, record: Mapping[str, object] | None, docs: Path
) -> Iterator[str]:
    yield from ("", f"## {experiment.title}", "", f"`capsnet reproduce {experiment.name}`", "")
    if record is None:
        yield from _table([row.to_dict() for row in experiment.expected])
        return
    yield from _table(_rows(record))
    notes = record["notes"]
    assert isinstance(notes, list)
    if notes:
        yield ""
    yield from (f"- {note}" for note in notes)
    yield from ("", _provenance(record))
    pictures = record["pictures"]
    assert isinstance(pictures, list)
    for picture in pictures:
        if not (docs / "images" / str(picture)).exists():
            continue  # drawn elsewhere, by --out
        yield from ("", f"![{experiment.title}](images/{picture})")


def _readme_table(found: Mapping[str, dict[str, object] | None]) -> list[str]:
    rows: list[Mapping[str, object]] = []
    for name, record in found.items():
        stored = {str(row["label"]): row for row in _rows(record)} if record else {}
        for expected in EXPERIMENTS[name].expected:
            if expected.headline:
                rows.append(stored.get(expected.label, expected.to_dict()))
    machines = dict.fromkeys(_machine(record) for record in found.values() if record)
    lines = list(_table(rows))
    if machines:
        lines += [
            "",
            f"Machine: {'; '.join(machines)}. Details: [docs/results.md](docs/results.md).",
        ]
    return lines


def _table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    yield f"| {' | '.join(_HEAD)} |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        steps, epochs, seconds = (
            None if row[name] is None else _number(row[name])
            for name in ("steps", "epochs", "seconds")
        )
        length = show_length(steps, epochs)
        is_run = row["mean"] is not None
        cells = (
            row["label"],
            show_number(row["paper"], row["paper_spread"], row["unit"]) or "–",
            show_ours(row),
            row["trials"] if is_run else "",
            length if is_run else "",
            show_seconds(seconds) if is_run and seconds else "",
        )
        yield f"| {' | '.join(str(cell) for cell in cells)} |"


def _cost_table() -> Iterator[str]:
    yield "| command | runs | steps in all | two cores | one GPU |"
    yield "|---|---|---|---|---|"
    for name, experiment in EXPERIMENTS.items():
        cost = estimate_cost(experiment)
        times = f"{show_seconds(cost.cpu_seconds)} | {show_seconds(cost.gpu_seconds)}"
        steps = f"{cost.num_runs} | {cost.num_steps:,}"
        yield f"| `capsnet reproduce {name}` | {steps} | {times} |"


def _provenance(record: Mapping[str, object]) -> str:
    """Machine, data and commit behind a result, in one paragraph."""
    runs, data = record["runs"], record["data"]
    assert isinstance(runs, list)
    assert isinstance(data, list)
    sources = ", ".join(f"`{run['source']}`" for run in runs)
    commits = dict.fromkeys(str(run["commit"])[:10] for run in runs if run.get("commit"))
    trained = f", trained at {', '.join(commits)}" if commits else ""
    measured = str(record["commit"] or "an unknown commit")[:10]
    return (
        f"Data: {'; '.join(data)}. Networks: {sources}{trained}. "
        f"Measured at {measured} in {show_seconds(_number(record['measuring_seconds']))} on "
        f"{_machine(record)}."
    )


def _machine(record: Mapping[str, object]) -> str:
    hardware = record["hardware"]
    assert isinstance(hardware, dict)
    gpu = f", {hardware['gpu']}" if hardware.get("gpu") else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores{gpu}"


def _rows(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    rows = record["rows"]
    assert isinstance(rows, list)
    return rows


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
