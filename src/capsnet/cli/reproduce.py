"""The commands reproduce and report."""

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from capsnet.cli import Flag
from capsnet.experiments.catalogue import EXPERIMENTS
from capsnet.experiments.catalogue import reproduce as reproduce_experiment
from capsnet.experiments.report import show_row, write_report
from capsnet.experiments.runs import Options
from capsnet.training import TrainingStopped

Many = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
Digits = Annotated[tuple[int, ...], Parameter(negative=(), show_default=False)]


def reproduce(
    name: Annotated[str | None, Parameter(help=f"One of {', '.join(EXPERIMENTS)}.")] = None,
    *,
    runs: Path = Path("runs"),
    out: Path | None = None,
    weights: Many = (),
    train: bool = True,
    trials: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    quick: Flag = False,
    data_dir: Path | None = None,
    threads: int | None = None,
    device: str = "cpu",
    num_examples: int | None = None,
    digits: Digits = (),
    overwrite: Flag = False,
    json: Flag = False,
) -> int:
    """Reproduce a table or figure of the paper; without a name, list them.

    Takes finished runs, trains what is missing, goes on where it stopped, and does nothing when
    the result is up to date. Writes results/NAME.json and docs/images/NAME.png.

    Args:
        name: The table, figure or claim; the help lists them as they are registered.
        runs: Folder of runs, searched for finished ones; new ones are trained there.
        out: Folder for result and pictures together.
        weights: Run directory, weights file or shipped name to use instead of searching; an
            experiment with several networks takes one for each.
        train: Train what is missing.
        trials: Runs of each network, with different seeds; default: as many as the paper reports.
        epochs: Length of the runs that are given in epochs; default: the preset's.
        steps: Length of the runs that are given in steps; default: the preset's.
        quick: A miniature of a minute or two, labelled as such: small networks, few steps.
        data_dir: Folder of datasets.
        threads: CPU threads.
        device: Where to train what is missing: cpu, cuda or mps; measuring is done on the CPU.
        num_examples: Examples to measure on; default: the experiment's own choice.
        digits: fig4: show all dimensions of these digits.
        overwrite: Measure and draw again what is up to date.
        json: Print the result as JSON.
    """
    if name is None:
        titles = {each.name: each.title for each in EXPERIMENTS.values()}
        lines = (f"{each:<14} {title}" for each, title in titles.items())
        print(dumps(titles, indent=2) if json else "\n".join(lines))
        return 0
    options = Options(
        runs=runs,
        out=out,
        weights=weights,
        train=train,
        trials=trials,
        epochs=epochs,
        steps=steps,
        quick=quick,
        data_dir=data_dir,
        threads=threads,
        device=device,
        num_examples=num_examples,
        digits=digits,
        overwrite=overwrite,
    )
    try:
        done = reproduce_experiment(name, options, say=lambda text: print(text, file=sys.stderr))
    except TrainingStopped as stopped:
        command = shlex.join(["capsnet", *sys.argv[1:]])
        print(f"{stopped}\ngo on with: {command}", file=sys.stderr if json else sys.stdout)
        return 128 + stopped.signal_number
    if json:
        print(dumps(done.record, indent=2))
        return 0
    rows = done.record["rows"]
    assert isinstance(rows, list)
    for row in rows:
        print(f"  {row['label']}: {show_row(row)}")
    label = "quick miniature, not a result; " if quick else ""
    state = "written" if done.is_new else "up to date"
    print(f"{label}{state}: {', '.join(map(str, (done.result, *done.pictures)))}")
    return 0


def report(
    *, results: Path = Path("results"), docs: Path = Path("docs"), readme: Path | None = None
) -> int:
    """Put all results beside the paper's: docs/results.md and README's table.

    Args:
        results: Folder of results.
        docs: Folder that gets results.md; its images are linked.
        readme: File whose block between <!-- results --> and <!-- /results --> is renewed;
            default: README.md if it is there.
    """
    target = readme if readme is not None else Path("README.md")
    written = write_report(results, docs, target if readme is not None or target.exists() else None)
    print(f"written: {', '.join(map(str, written))}")
    return 0
