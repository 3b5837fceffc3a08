"""Networks that experiments find trained, with what their records say."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from capsnet.machine import file_digest
from capsnet.models import Model
from capsnet.models.weights import (
    WEIGHTS,
    find_weights,
    list_weights,
    load_weights,
    read_tensors,
)
from capsnet.training import TrainConfig
from capsnet.training.checkpoint import recorded_config
from capsnet.training.config import from_dict
from capsnet.training.records import LOG, RESULT, read_json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A trained network, and what its record says about it."""

    source: str
    """Run directory, weights file or shipped name."""

    weights: Path
    """The file of weights."""

    digest: str
    """SHA-256 that tells these weights from others."""

    record: Mapping[str, object]
    """What the run wrote down, or the weights file holds."""

    @classmethod
    def from_result(cls, record: Mapping[str, object]) -> "Trained":
        """A network that a result names; its files need not be here."""
        source = str(record["source"])
        is_file = source.endswith(Path(WEIGHTS).suffix)
        weights = Path(source) if is_file else Path(source, WEIGHTS)
        if not weights.exists():
            weights = list_weights().get(source, weights)
        return cls(source, weights, str(record["sha256"]), record)

    @property
    def config(self) -> TrainConfig | None:
        """The settings of the run; None for weights without them."""
        return recorded_config(self.record, self.source)

    @property
    def seed(self) -> int | None:
        """The seed."""
        seed = self.record.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def steps(self) -> int | None:
        """Updates made; those before the last part count in batches of its size."""
        steps = self.record.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def images(self) -> int | None:
        """Training images seen, as often as each was."""
        config = self.config
        return None if config is None or self.steps is None else self.steps * config.batch_size

    @property
    def epochs(self) -> float | None:
        """Passes over the training set."""
        return self._number("epochs")

    @property
    def seconds(self) -> float | None:
        """Time of training."""
        return self._number("seconds")

    @property
    def metrics(self) -> dict[str, dict[str, object]]:
        """Evaluations by dataset."""
        metrics = self.record.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    def error_rate(self, dataset: str) -> float | None:
        """The recorded test error on a dataset."""
        metric = self.metrics.get(dataset)
        if metric is None or metric.get("split") != "test":
            return None
        return float(str(metric["error_rate"]))

    def num_evaluated(self, dataset: str) -> int | None:
        """How many examples the recorded test error is of."""
        count = self.metrics.get(dataset, {}).get("num_examples")
        return count if isinstance(count, int) else None

    @property
    def is_planned(self) -> bool:
        """Whether it is yet to be trained, so that it has no file."""
        return not self.digest

    @property
    def is_here(self) -> bool:
        """Whether its file is; a run that a result names may have been on another machine."""
        return self.weights.exists() and file_digest(self.weights) == self.digest

    def is_same_training(self, other: "Trained") -> bool:
        """Whether both are of one training: shipped weights are a run's in half precision."""
        if self.digest == other.digest:
            return True
        names = ("seed", "steps", "seconds", "commit", "config")
        ours, theirs = ([each.record.get(name) for name in names] for each in (self, other))
        tested = self.metrics.keys() & other.metrics.keys()
        return (
            None not in ours
            and ours == theirs
            and all(self.error_rate(name) == other.error_rate(name) for name in tested)
        )

    def load(self) -> Model:
        """The network, ready for inference."""
        model, _ = load_weights(self.weights)
        if not self.is_here:
            raise ValueError(
                f"{self.weights} is of another training than the {self.source} recorded"
            )
        return model

    def log(self) -> list[dict[str, object]]:
        """Lines of the run's log; none for weights without a run."""
        path = self.weights.with_name(LOG)
        if self.weights.name != WEIGHTS or not path.exists():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def describe(self) -> str:
        """The network in a few words, for a picture's subtitle."""
        length = show_length(self.epochs, self.images)
        return ", ".join(filter(None, (Path(self.source).name, length)))

    @property
    def parts(self) -> tuple[str, ...]:
        """Length, optimiser and rate of each part of a training that was continued."""
        records = list_parts(self.record)
        if len(records) < 2:
            return ()
        parts = []
        for record in records:
            earlier = record.get("earlier") or {"steps": 0}
            count = record["steps"] - earlier.get("first_step", earlier["steps"])
            config = from_dict(cast(dict[str, object], record["config"]))
            schedule = "" if config.schedule == "cosine" else f", {config.schedule} schedule"
            rate = f"{config.optimiser} at {config.learning_rate:g}{schedule}"
            parts.append(f"{count:,} steps of {config.batch_size} with {rate}")
        return tuple(parts)

    def describe_parts(self) -> str | None:
        """One sentence on training in parts; None where there was one."""
        if not self.parts:
            return None
        parts = ", then ".join(self.parts)
        return f"{self.source} was trained in parts: {parts}. Its curves show the last part."

    def to_dict(self, role: str) -> dict[str, object]:
        """What a result keeps about the network it was obtained with."""
        names = (
            "preset", "seed", "steps", "epochs", "seconds", "commit", "commits", "versions",
            "hardware", "machines", "data", "config",
        )  # fmt: skip
        return {
            "role": role,
            "source": self.source,
            "sha256": self.digest,
            **{name: self.record.get(name) for name in names},
            "metrics": {name: _shorten(metric) for name, metric in self.metrics.items()},
            **({"earlier": self.record["earlier"]} if self.record.get("earlier") else {}),
            **self._curves(),
        }

    def _curves(self) -> dict[str, object]:
        """Loss and test errors by step: as recorded elsewhere, or from the log."""
        if "losses" in self.record:
            return {name: self.record[name] for name in ("losses", "errors")}
        return _read_curves(self.log())

    def _number(self, name: str) -> float | None:
        value = self.record.get(name)
        return float(value) if isinstance(value, int | float) else None


Found = dict[str, list[Trained]]
"""Networks by the role that they play in an experiment."""


def open_source(source: str) -> Trained:
    """A trained network by run directory, weights file or shipped name."""
    path = find_weights(source)
    if (Path(source) / RESULT).exists():
        return open_run(Path(source))
    return open_weights(source, path)


def open_weights(source: str, path: Path) -> Trained:
    """A trained network by its file."""
    return Trained(source, path, file_digest(path), read_tensors(path)[1])


def finished_runs(folder: Path, say: Say) -> Iterator[Trained]:
    """All finished runs in a folder whose settings are known, in the order of their names."""
    for result in sorted(folder.glob(f"*/{RESULT}")):
        try:
            trained = open_run(result.parent)
            if trained.config is not None:
                yield trained
        except ValueError as error:
            say(f"left out: {error}")


def recorded_runs(result: Mapping[str, object] | None, say: Say) -> Found:
    """The networks that a result names, by role; their files need not be here."""
    found: Found = {}
    runs = result.get("runs") if result else None
    for run in runs if isinstance(runs, list) else []:
        trained = Trained.from_result(run)
        try:
            if trained.config is not None:
                found.setdefault(run["role"], []).append(trained)
        except ValueError as error:
            say(f"left out: {error}")
    return found


def open_run(run: Path) -> Trained:
    """The network of a finished run."""
    record = read_json(run / RESULT)
    files = record["files"]
    assert isinstance(files, dict)
    if not (run / WEIGHTS).exists():
        raise ValueError(f"{run / WEIGHTS} is missing")
    return Trained(str(run), run / WEIGHTS, str(files[WEIGHTS]), record)


def list_parts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The record of a training and those that it continued, the first of them first."""
    earlier = record.get("earlier")
    return [*list_parts(earlier), record] if isinstance(earlier, dict) else [record]


def _shorten(metric: Mapping[str, object]) -> dict[str, object]:
    """An evaluation without its lists of single examples."""
    return {name: value for name, value in metric.items() if not isinstance(value, list | dict)}


def _read_curves(log: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Loss and test errors by step."""
    tests = [line for line in log if line.get("evaluation", {}).get("split") == "test"]
    return {
        "losses": {str(line["step"]): line["loss"] for line in log if "loss" in line},
        "errors": {
            name: {
                str(line["step"]): line["evaluation"]["error_rate"]
                for line in tests
                if line["evaluation"]["dataset"] == name
            }
            for name in {line["evaluation"]["dataset"]: None for line in tests}
        },
    }


def show_length(epochs: float | None, images: int | float | None) -> str:
    """How long a run was, for people: in epochs from one on, else in images.

    >>> show_length(1.0, 59_904), show_length(1538.46, 76_923_000), show_length(0.003, 153_600)
    ('1 epoch', '1,538 epochs', '153,600 images')
    """
    if epochs is not None and epochs >= 1:
        number = f"{epochs:.3g}" if epochs < 1000 else f"{epochs:,.0f}"
        return f"{number} epoch{'' if epochs == 1 else 's'}"
    return "" if images is None else f"{show_count(images)} images"


def show_count(count: int | float) -> str:
    """A large number for people.

    >>> show_count(153_600), show_count(3_072_000)
    ('153,600', '3.07 million')
    """
    return f"{count:,.0f}" if count < 1_000_000 else f"{count / 1_000_000:.3g} million"
