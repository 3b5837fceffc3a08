"""What an experiment comes to: rows of numbers beside the paper's, and the file that keeps them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from capsnet.experiments.trained import Trained
from capsnet.training.records import read_json

Draw = Callable[[Path], None]


@dataclass(frozen=True)
class Row:
    """One number of the paper and ours for it."""

    label: str
    """What was measured."""

    values: tuple[float, ...] = ()
    """Our number, one for each trial; none if it was not run yet."""

    paper: float | None = None
    """The paper's number; None where it gives none."""

    paper_spread: float | None = None
    """The standard deviation that the paper gives with it."""

    unit: Literal["%", ""] = "%"
    """%: a share that is shown as per cent; otherwise a plain number."""

    seeds: tuple[int, ...] = ()
    """Seeds of the runs behind the values."""

    images: int | None = None
    """Training images that each run saw, as often as it did."""

    epochs: float | None = None
    """Passes over the training set of each run."""

    seconds: float | None = None
    """Time of training of all runs together."""

    num_examples: int | None = None
    """Examples that the number was measured on."""

    headline: bool = False
    """Whether README's table shows it."""

    @property
    def mean(self) -> float | None:
        """Mean of the trials."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the trials (n - 1), of at least two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def to_dict(self) -> dict[str, object]:
        """Plain dictionary, as results/NAME.json holds it."""
        plain = asdict(self) | {"values": list(self.values), "seeds": list(self.seeds)}
        return plain | {"mean": self.mean, "spread": self.spread, "trials": len(self.values)}


def fill(
    row: Row, values: Sequence[float], runs: Sequence[Trained], *, num_examples: int | None = None
) -> Row:
    """A row of the paper with our values, and the seeds, length and time of the runs behind them.

    >>> fill(Row("MNIST", (), paper=0.0025), [0.003, 0.004], []).mean
    0.0035
    """
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return replace(
        row,
        values=tuple(values),
        seeds=tuple(run.seed for run in runs if run.seed is not None),
        images=runs[0].images if runs else None,
        epochs=runs[0].epochs if runs else None,
        seconds=sum(seconds) if seconds else None,
        num_examples=num_examples,
    )


@dataclass(frozen=True)
class Outcome:
    """Everything that an experiment found out."""

    rows: tuple[Row, ...]
    """The numbers."""

    pictures: Mapping[str, Draw]
    """What draws each picture; its name's ending after NAME, "" for the main one."""

    data: tuple[str, ...] = ()
    """Where the examples come from."""

    notes: tuple[str, ...] = ()
    """What a reader must know to judge the numbers, one sentence each."""

    details: Mapping[str, object] = field(default_factory=dict)
    """Further numbers, of JSON's types."""


def read_result(path: Path, *, keep: bool) -> dict[str, object] | None:
    """The result in a file; None if there is none, or it is damaged and is not to be kept."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        if keep:
            raise ValueError(f"{error}; --overwrite replaces it") from None
        return None


def quick_prefix(quick: bool) -> str:
    """What the files of a miniature begin with, so that they never pass for results."""
    return "quick-" if quick else ""
