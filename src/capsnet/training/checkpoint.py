"""What a run goes on from when it is resumed, and the model that it has come to."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from capsnet.data import Split
from capsnet.machine import SUFFIX
from capsnet.models import Model, model_from_config
from capsnet.models.weights import (
    CHECKPOINTS,
    WEIGHTS,
    config_from_dict,
    copy_tensors,
    find_weights,
    load_weights,
    model_from_tensors,
    read_tensors,
    warn_of_namesake,
    write_tensors,
)
from capsnet.training.config import TrainConfig, differing_fields, from_dict, to_dict
from capsnet.training.optimiser import FusedAdam
from capsnet.training.records import (
    CONFIG,
    RESULT,
    RunLog,
    damaged_files,
    list_checkpoints,
    read_json,
    remove_checkpoints,
    write_json,
)

#: What an optimiser knows of a weight: Adam's count and moments, or Muon's momentum.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")
#: A newer and an older checkpoint: should the newer turn out damaged, little is lost.
NUM_KEPT = 2


class Earlier(NamedTuple):
    """Training that a run continues."""

    model: Model
    """What it came to."""
    record: dict[str, object]
    """What its record says, with the source and its SHA-256."""


@dataclass
class TrainState:
    """What a step of training changes: weights, moments, the weight average, counts."""

    model: Model
    optimiser: FusedAdam
    average: dict[str, Tensor] | None
    """Running average of the weights by name, if the run keeps one."""

    step: int = 0
    """Updates made so far; those before the run count in batches of its size."""

    seconds: float = 0.0
    """Time they took."""

    window: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums that the next line of the log averages: steps, three losses, errors."""

    window_began: float = 0.0
    """Seconds at the last line of the log."""

    commits: list[str] = field(default_factory=list)
    """Commits of this package that made the updates, in their order."""

    machines: list[object] = field(default_factory=list)
    """Hardware that this run's updates were made on, each once."""

    earlier: dict[str, object] | None = None
    """Record of the training that the run continues, if it does."""

    @property
    def first_step(self) -> int:
        """Where the run begins: updates made before it, counted in batches of its own size."""
        if self.earlier is None:
            return 0
        # Older records lack it: the batches were of one size.
        return cast(int, self.earlier.get("first_step", self.earlier["steps"]))

    def follow(self, earlier: Earlier) -> None:
        """Takes over weights and counts of the training that the run continues."""
        weights = earlier.model.state_dict()
        copy_tensors(self.model, weights)
        for name, value in (self.average or {}).items():
            value.copy_(weights[name])
        self.earlier = earlier.record
        self.step = self.first_step
        self.seconds = self.window_began = float(str(earlier.record["seconds"]))
        commits = earlier.record.get("commits") or [earlier.record.get("commit")]
        self.commits = [commit for commit in cast(list[str | None], commits) if commit is not None]

    def counts(self) -> dict[str, object]:
        """All but the tensors, for a checkpoint's record."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "window": self.window,
            "window_began": self.window_began,
            "commits": self.commits,
            "machines": self.machines,
            "earlier": self.earlier,
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint."""
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"{key}/{name}"] = value
        for name, value in (self.average or {}).items():
            tensors[f"average/{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], counts: Mapping[str, object]) -> None:
        """Copies stored tensors into the live ones, which keep their identity and layout."""
        for name, value in self.counts().items():
            setattr(self, name, counts.get(name, value))  # older checkpoints lack some
        copy_tensors(self.model, _strip(tensors, "model/"))
        for name, parameter in self.model.named_parameters():
            moments = self.optimiser.state[parameter]
            for key in _MOMENTS:  # none of a parameter that never had a gradient
                if (value := tensors.get(f"{key}/{name}")) is not None:
                    room = torch.empty_like(parameter) if value.ndim else torch.empty_like(value)
                    moments[key] = room.to(parameter.device).copy_(value)
        for name, value in (self.average or {}).items():
            value.copy_(tensors[f"average/{name}"])

    def close_window(
        self, rate: float, *, steps_per_epoch: int, batch_size: int
    ) -> dict[str, object]:
        """A line of the log about the steps since the last one."""
        count, total, classification, reconstruction, num_errors = self.window
        seconds = max(self.seconds - self.window_began, 1e-9)
        self.window, self.window_began = [0.0] * 5, self.seconds
        return {
            "step": self.step,
            "epoch": self.step / steps_per_epoch,
            "learning_rate": rate,
            "loss": total / count,
            "classification_loss": classification / count,
            "reconstruction_loss": reconstruction / count,
            "error_rate": num_errors / (count * batch_size),
            "seconds": round(self.seconds, 3),
            "images_per_second": round(count * batch_size / seconds, 1),
        }

    @torch.no_grad()
    def update_average(self, highest_decay: float) -> None:
        """Moves the weight average, faster in the beginning, when it has seen little."""
        if self.average is None:
            return
        num_seen = self.step - self.first_step
        decay = min(highest_decay, (1 + num_seen) / (10 + num_seen))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)

    def trained_model(self) -> Model:
        """The model, or a copy with the averaged weights."""
        if self.average is None:
            return self.model
        device = next(self.model.parameters()).device
        model = model_from_config(self.model.config).to(device)
        copy_tensors(model, self.average)
        return model


def save_checkpoint(run: Path, state: TrainState, record: Mapping[str, object]) -> None:
    """Writes a checkpoint, then removes all but the newest two."""
    older = list_checkpoints(run)
    path = _checkpoint_path(run, state.step)
    try:
        path.parent.mkdir(exist_ok=True)
        for stale in path.parent.glob(f".step-*{SUFFIX}"):  # of a kill in the middle of writing
            stale.unlink()
        write_tensors(path, state.tensors(), {**record, **state.counts()})
        for other in list_checkpoints(run)[NUM_KEPT:]:
            other.unlink(missing_ok=True)
    except OSError as error:
        before = f"{older[0]} is whole" if older else "there is none before it"
        raise OSError(
            f"the checkpoint of step {state.step:,} could not be written to {run} "
            f"({error.strerror}); {before}"
        ) from error


def _checkpoint_path(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:09d}.safetensors"


def restore_run(
    run: Path,
    state: TrainState,
    *,
    config: TrainConfig,
    split: Split,
    log: RunLog,
    say: Callable[[str], None],
    is_writer: bool = True,
) -> dict[str, object] | None:
    """Takes up a run where its newest whole checkpoint left it, or begins one.

    Args:
        run: the run's directory.
        state: what the checkpoint is copied into.
        config: the settings, which must be those that the run began with.
        split: the training set, which must have the classes and the size that it had.
        log: cut back to the time of the checkpoint.
        say: told of every file that is damaged or missing.
        is_writer: whether this process may mend files, as the first one may.

    Returns:
        The run's result if it is finished already.
    """
    if (run / RESULT).exists():
        result = read_json(run / RESULT)
        check_same_config(run, result["config"], config)
        complaints = damaged_files(run)
        if WEIGHTS in complaints:
            raise ValueError(f"{complaints[WEIGHTS]}; --overwrite trains anew")
        for complaint in complaints.values():
            say(complaint)
        if is_writer and not complaints:  # else the last one may be all that is left
            remove_checkpoints(run)
        return result
    found = newest_checkpoint(run, say)
    if found is None and (run / WEIGHTS).exists():
        raise ValueError(
            f"{run / RESULT} is missing, though the run was finished; its weights can be evaluated "
            "as they are, --overwrite begins anew"
        )
    try:
        stored: dict[str, object] | None = read_json(run / CONFIG)
    except (OSError, ValueError) as error:
        stored = None
        if found is not None or not isinstance(error, OSError):
            say(f"{run / CONFIG} is damaged or missing; written anew")
    began_with = found[1]["config"] if found is not None else stored
    if began_with is not None:
        check_same_config(run, began_with, config)
    if is_writer and stored != to_dict(config):
        write_json(run / CONFIG, to_dict(config))
    if found is None:
        kept = log.start() if is_writer else None
        if stored is not None:
            lines = f"; its log so far is kept as {kept.name}" if kept is not None else ""
            say(f"there is no checkpoint in {run}, so the run begins at step {state.step:,}{lines}")
        return None
    tensors, record = found
    check_same_data(run, record, split)
    state.restore(tensors, record)
    if is_writer:
        for path in list_checkpoints(run):
            if path > _checkpoint_path(run, state.step):  # damaged; a whole one may need its place
                path.unlink(missing_ok=True)
        position = record["log"]
        assert isinstance(position, dict)
        if (wrong := log.rewind(position)) is not None:
            say(wrong)
    return None


def check_same_config(run: Path, stored: object, config: TrainConfig) -> None:
    """Raises a ValueError if a run began with settings that would have come to another end."""
    assert isinstance(stored, dict)
    differing = differing_fields(from_dict(stored), config)
    # Steps are given in the place of epochs, and these in theirs: what was given is named.
    for name, (old, new) in sorted(differing.items(), key=lambda item: item[1][1] is None):
        began = f"without {name}" if old is None else f"with {name} = {old}"
        raise ValueError(
            f"the run in {run} began {began}, got {new}; "
            "a run goes on with the settings that it began with"
        )


def has_same_files(record: Mapping[str, object], split: Split) -> bool:
    """Whether a run was trained on the very files of a split, by its record."""
    data = record.get("data")
    return isinstance(data, dict) and data.get("files") == split.files_digest


def check_same_data(run: str | Path, record: Mapping[str, object], split: Split) -> None:
    """Raises a ValueError if a run was trained on other data."""
    names, data = record["class_names"], record["data"]
    assert isinstance(names, list)
    assert isinstance(data, dict)
    for what, old, new in (
        ("classes", ", ".join(names), ", ".join(split.class_names)),
        ("number of training images", data["num_train"], len(split)),
    ):
        if old != new:
            raise ValueError(
                f"the data of {run} has changed ({what}: {old}, now {new}); "
                "a run goes on with the data that it began with"
            )
    if not has_same_files(record, split):
        raise ValueError(
            f"the data of {run} has changed (as many training images, but other ones); "
            "a run goes on with the data that it began with"
        )


def newest_checkpoint(
    run: Path, warn: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, object]] | None:
    """Tensors and record of the newest whole checkpoint; None if the run has none at all."""
    paths = list_checkpoints(run)
    for path in paths:
        try:
            return read_tensors(path)
        except ValueError as error:
            warn(str(error))
    if paths:
        raise ValueError(f"no checkpoint in {run / CHECKPOINTS} is whole; train with --overwrite")
    return None


def load(source: str | Path) -> Model:
    """Returns a trained network, ready for inference.

    `load_model_and_record` gives its record, too, where `class_names` says what its classes are.

    Args:
        source: The name of weights shipped with the package, the directory of a run, or a
            .safetensors file. A run that is not finished gives its newest network.
    """
    return load_model_and_record(source)[0]


def load_model_and_record(source: str | Path) -> tuple[Model, dict[str, object]]:
    """Returns the trained model and the record stored with it: config, steps, metrics.

    A run that is not finished gives the model of its newest checkpoint.
    """
    run, warn = Path(source), logging.getLogger("capsnet").warning
    try:
        found = None if (run / WEIGHTS).exists() else newest_checkpoint(run, warn)
    except ValueError:
        if not (run / WEIGHTS).exists():
            raise
        found = None  # the run has just been finished, which removes its checkpoints
    if found is None:
        if (run / RESULT).exists() and not (run / WEIGHTS).exists():
            raise ValueError(f"{run / WEIGHTS} is missing, though the run was finished")
        return load_weights(find_weights(source))
    warn_of_namesake(source)
    tensors, record = found
    warn(f"{run} is not finished; this is its network after step {record['step']:,}")
    config = record["model"]
    assert isinstance(config, dict)
    prefix = "average/" if any(name.startswith("average/") for name in tensors) else "model/"
    return model_from_tensors(config_from_dict(config), _strip(tensors, prefix)), record


def recorded_config(record: Mapping[str, object], source: str) -> TrainConfig | None:
    """The settings that a record has of its training, if any; a ValueError names the source."""
    stored = record.get("config")
    try:
        return from_dict(stored) if isinstance(stored, dict) else None
    except ValueError as error:
        raise ValueError(f"{source} has settings of another version: {error}") from None


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of one group by their names within it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
