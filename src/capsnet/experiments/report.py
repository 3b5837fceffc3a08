"""All results beside the paper's as Markdown, from results/*.json alone, and what they cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import relpath
from pathlib import Path
from typing import Any

from capsnet.experiments.catalogue import EXPERIMENTS, Experiment
from capsnet.experiments.outcome import quick_prefix
from capsnet.experiments.trained import list_parts, show_count, show_length
from capsnet.machine import write_atomically
from capsnet.models import CapsNetConfig, CNNConfig, ModelConfig
from capsnet.progress import show_seconds
from capsnet.training import TrainConfig, configure
from capsnet.training.config import total_steps
from capsnet.training.presets import PAPER_STEPS
from capsnet.training.records import read_json

RESULTS, COSTS = "results", "costs"
_NOT_RUN = "not run yet"
_HEAD = ("paper", "ours", "trials", "length", "training")
#: Training examples of the sets whose runs are given in epochs.
_NUM_TRAIN = {
    "mnist": 60_000,
    "mnist-40": 60_000,
    "fashion-mnist": 60_000,
    "cifar10": 50_000,
    "smallnorb": 24_300,
    "svhn": 73_257,
}
#: Multiplications of the direct form in a second of training: on two cores with AVX2 what the
#: steps of `capsnet bench` come to (the fast convolution makes fewer); the GPU's rate is a guess
#: at two fifths of ten teraflops.
_TWO_CORES_CAPSNET, _TWO_CORES_CNN, _ONE_GPU = 120e9, 250e9, 2e12


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


def _show_commit(commit: object) -> str:
    """A commit's first digits, with its + if the files differed from it."""
    return f"{str(commit)[:10]}{str(commit)[40:]}" if commit else "an unknown commit"


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
        "seed alone; the time is that of all trials; a + after a commit is a change that was not "
        "committed. How to repeat one: [reproduce.md](reproduce.md)."
    )
    for name, record in found.items():
        yield from _section(EXPERIMENTS[name], record, results, docs)
    yield from _shortfalls(_headlines(found))
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
    experiment: Experiment, record: Mapping[str, object] | None, results: Path, docs: Path
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
        # `reproduce --out` puts result and pictures into one folder.
        places = [folder / str(picture) for folder in (results, docs / "images")]
        for place in [each for each in places if each.exists()][:1]:
            yield from ("", f"![{experiment.title}]({Path(relpath(place, docs)).as_posix()})")


def _headlines(found: Mapping[str, dict[str, object] | None]) -> list[Mapping[str, object]]:
    """The rows that README shows, run or not."""
    rows: list[Mapping[str, object]] = []
    for name, record in found.items():
        expected = EXPERIMENTS[name].expected
        shown = _rows(record) if record else [row.to_dict() for row in expected]
        pairs = zip(expected, shown, strict=True)
        rows += [row for wanted, row in pairs if wanted.headline]
    return rows


def _shortfalls(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Which numbers are worse than the paper's, how much shorter their training was, what lacks."""
    worse = [row for row in rows if _is_worse(row)]
    missing = [str(row["label"]) for row in rows if row["mean"] is None]
    if not (worse or missing):
        return
    yield from ("", "## Short of the paper, and why", "")
    yield (
        f"The authors' code makes {PAPER_STEPS:,} updates of 128 images, which are "
        f"{show_count(PAPER_STEPS * 128)} or 640 epochs of MNIST, and twice that on "
        "CIFAR-10; ours are as many as the machines and times named above allowed. What was "
        "tried, what helped and what may be missing is in the [log](log.md): on MNIST twice as "
        "many brought no better digits."
    )
    yield ""
    for row in worse:
        paper = show_number(row["paper"], row["paper_spread"], row["unit"])
        length = f", after {length}" if (length := _length(row)) else ""
        yield f"- {row['label']}: {show_ours(row)} instead of {paper}{length}"
    if missing:
        yield f"- {_NOT_RUN.capitalize()}: {'; '.join(missing)}"


def _is_worse(row: Mapping[str, object]) -> bool:
    if row["mean"] is None or row["paper"] is None:
        return False
    gain = _number(row["mean"]) - _number(row["paper"])
    return gain < 0 if str(row["label"]).endswith("right") else gain > 0


def _readme_table(found: Mapping[str, dict[str, object] | None]) -> list[str]:
    runs = [run for record in found.values() if record for run in _runs(record)]
    lines = list(_table(_headlines(found), "test error, unless it says otherwise"))
    if runs:
        lines += ["", f"Trained on {_machines(runs)}. Details: [docs/results.md](docs/results.md)."]
    return lines


def _table(rows: Sequence[Mapping[str, object]], what: str = "") -> Iterator[str]:
    yield f"| {' | '.join((what, *_HEAD))} |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        is_run = row["mean"] is not None
        cells = (
            row["label"],
            show_number(row["paper"], row["paper_spread"], row["unit"]) or "–",
            show_ours(row),
            row["trials"] if is_run else "",
            _length(row) if is_run else "",
            show_seconds(_number(row["seconds"])) if is_run and row["seconds"] else "",
        )
        yield f"| {' | '.join(str(cell) for cell in cells)} |"


def _length(row: Mapping[str, object]) -> str:
    epochs, images = (  # older results do not say how many images
        None if row.get(name) is None else _number(row[name]) for name in ("epochs", "images")
    )
    return show_length(epochs, images)


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
    runs, data = _runs(record), record["data"]
    assert isinstance(data, list)
    sources = ", ".join(f"`{run['source']}`" for run in runs)
    commits = dict.fromkeys(
        _show_commit(commit)
        for run in runs
        for commit in run.get("commits") or [run.get("commit")]
        if commit
    )
    trained = f", trained at {', '.join(commits)} on {_machines(runs)}" if commits else ""
    measured = _show_commit(record["commit"])
    return (
        f"Data: {'; '.join(data)}. Networks: {sources}{trained}. "
        f"Measured at {measured} in {show_seconds(_number(record['measuring_seconds']))} on "
        f"{_machines([record])}."
    )


def _runs(record: Mapping[str, object]) -> list[Mapping[str, Any]]:
    runs = record["runs"]
    assert isinstance(runs, list)
    return runs


def _machines(records: Sequence[Mapping[str, Any]]) -> str:
    """The machines that records name, each once."""
    parts = [part for record in records for part in list_parts(record)]
    # Of older records only the last one is known.
    machines = [each for part in parts for each in part.get("machines") or [part.get("hardware")]]
    return "; ".join(dict.fromkeys(map(_machine, machines)))


def _machine(hardware: Mapping[str, object] | None) -> str:
    if hardware is None:
        return "unknown"
    gpu = f", {hardware['gpu']}" if hardware.get("gpu") else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores{gpu}"


def _rows(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    rows = record["rows"]
    assert isinstance(rows, list)
    return rows


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


# What it costs, estimated from the multiplications of the networks


@dataclass(frozen=True)
class Cost:
    """An estimate."""

    num_runs: int
    """Networks trained."""

    num_steps: int
    """Updates of all of them."""

    cpu_seconds: float
    """On two cores."""

    gpu_seconds: float
    """On one GPU."""


def estimate_cost(experiment: Experiment) -> Cost:
    """What an experiment costs from nothing, with the presets' lengths and the paper's trials.

    >>> from capsnet.experiments.catalogue import find_experiment
    >>> estimate_cost(find_experiment("fig3")).num_runs
    1
    """
    num_runs, num_steps, cpu, gpu = 0, 0, 0.0, 0.0
    for need in experiment.needs:
        config = configure(need.preset, need.changes)
        steps = need.trials * _count_steps(config)
        # Backward is two products for each one forward.
        products = 3 * steps * config.batch_size * count_products(config.model)
        is_capsnet = isinstance(config.model, CapsNetConfig)
        num_runs += need.trials
        num_steps += steps
        cpu += products / (_TWO_CORES_CAPSNET if is_capsnet else _TWO_CORES_CNN)
        gpu += products / _ONE_GPU
    return Cost(num_runs, num_steps, cpu, gpu)


def count_products(config: ModelConfig) -> int:
    """Multiplications of one image's forward pass, in the direct form.

    >>> count_products(CapsNetConfig(decoder=False))  # 8,294,400 + 191,102,976 + 8,847,360
    208244736
    """
    if isinstance(config, CNNConfig):
        return _count_cnn(config)
    rows, columns = config.conv_grid
    conv = config.image_channels * config.conv_kernel**2 * config.conv_channels * rows * columns
    primary = (
        config.conv_channels * config.primary_kernel**2 * config.num_primary * config.primary_dim
    )
    # Each iteration sums votes and compares them with the outputs.
    votes = config.num_primary * config.num_classes * config.primary_dim * config.output_dim
    decoder = 0
    if config.decoder:
        pixels = config.image_channels * config.image_height * config.image_width
        sizes = (config.num_classes * config.output_dim, 512, 1024, pixels)
        decoder = sum(below * above for below, above in pairwise(sizes))
    return conv + primary + 2 * config.num_iterations * votes + decoder


def _count_cnn(config: CNNConfig) -> int:
    height, width = config.image_height, config.image_width
    channels, products = config.image_channels, 0
    for above, kernel in zip(config.conv_channels, config.conv_kernels, strict=True):
        products += channels * kernel**2 * above * height * width
        channels, height, width = above, height // config.pool, width // config.pool
    sizes = (channels * height * width, *config.hidden_sizes, config.num_classes)
    return products + sum(below * above for below, above in pairwise(sizes))


def _count_steps(config: TrainConfig) -> int:
    return total_steps(config, _NUM_TRAIN.get(config.data.name, 0) // config.batch_size)
