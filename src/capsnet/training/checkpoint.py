"""Checkpoints of a run, and the model that a run has come to."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from capsnet.models import Model
from capsnet.models.weights import (
    CHECKPOINTS,
    WEIGHTS,
    config_from_dict,
    copy_tensors,
    find_weights,
    load_weights,
    model_from_tensors,
    read_tensors,
    write_tensors,
)
from capsnet.training.config import TrainConfig, differing_fields, from_dict, to_dict
from capsnet.training.records import (
    CONFIG,
    RESULT,
    RunLog,
    read_json,
    write_json,
)

#: A newer and an older checkpoint: should the newer turn out damaged, little is lost.
NUM_KEPT = 2


@dataclass
class TrainState:
    """What a step of training changes: weights, Adam's moments, the weight average, counts."""

    model: Model
    optimiser: torch.optim.Adam
    average: dict[str, Tensor] | None
    """Running average of the weights by name, if the run keeps one."""

    step: int = 0
    """Updates made so far."""

    seconds: float = 0.0
    """Time they took."""

    window: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Sums that the next line of the log averages: steps, three losses, errors."""

    window_began: float = 0.0
    """Seconds at the last line of the log."""

    def counts(self) -> dict[str, object]:
        """All but the tensors, for a checkpoint's record."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "window": self.window,
            "window_began": self.window_began,
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
        for name in ("step", "seconds", "window", "window_began"):
            setattr(self, name, counts[name])
        copy_tensors(self.model, _strip(tensors, "model/"))
        for name, parameter in self.model.named_parameters():
            if f"step/{name}" not in tensors:
                continue  # Adam has no moments of a parameter that never had a gradient.
            moments = self.optimiser.state[parameter]
            fused = self.optimiser.defaults["fused"]
            moments["step"] = tensors[f"step/{name}"].to(parameter.device if fused else "cpu")
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = torch.empty_like(parameter).copy_(tensors[f"{key}/{name}"])
        for name, value in (self.average or {}).items():
            value.copy_(tensors[f"average/{name}"])


def save_checkpoint(run: Path, state: TrainState, record: Mapping[str, object]) -> None:
    """Writes a checkpoint, then removes all but the newest two."""
    older = list_checkpoints(run)
    path = run / CHECKPOINTS / f"step-{state.step:09d}.safetensors"
    try:
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, state.tensors(), {**record, **state.counts()})
        for old in list_checkpoints(run)[NUM_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        kept = f"{older[0]} is whole" if older else "there is none before it"
        raise OSError(
            f"the checkpoint of step {state.step:,} could not be written to {run} "
            f"({error.strerror}); {kept}"
        ) from error


def restore_run(
    run: Path,
    state: TrainState,
    *,
    config: TrainConfig,
    log: RunLog,
    say: Callable[[str], None],
    is_writer: bool = True,
) -> dict[str, object] | None:
    """Takes up a run where its newest whole checkpoint left it, or begins one.

    Args:
        run: the run's directory.
        state: what the checkpoint is copied into.
        config: the settings, which must be those that the run began with.
        log: cut back to the time of the checkpoint.
        say: told of every file that is damaged.
        is_writer: whether this process may mend files, as the first one may.

    Returns:
        The run's result if it is finished already.
    """
    if (run / RESULT).exists():
        result = read_json(run / RESULT)
        _check_same_config(run, result["config"], config)
        if is_writer:
            remove_checkpoints(run)
        return result
    found = newest_checkpoint(run, say)
    try:
        stored: dict[str, object] | None = read_json(run / CONFIG)
    except (OSError, ValueError) as error:
        stored = None
        if found is not None or not isinstance(error, OSError):
            say(f"{run / CONFIG} is damaged or missing; written anew")
    began_with = found[1]["config"] if found is not None else stored
    if began_with is not None:
        _check_same_config(run, began_with, config)
    if is_writer and stored != to_dict(config):
        write_json(run / CONFIG, to_dict(config))
    if found is None:
        if is_writer:
            log.start()
        return None
    tensors, record = found
    state.restore(tensors, record)
    position = record["log"]
    assert isinstance(position, dict)
    complaint = log.rewind(position) if is_writer else None
    if complaint is not None:
        say(complaint)
    return None


def _check_same_config(run: Path, stored: object, config: TrainConfig) -> None:
    assert isinstance(stored, dict)
    for name, (old, new) in differing_fields(from_dict(stored), config).items():
        raise ValueError(
            f"the run in {run} began with {name} = {old}, got {new}; "
            "a run goes on with the settings that it began with"
        )


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    return sorted((run / CHECKPOINTS).glob("step-*.safetensors"), reverse=True)


def remove_checkpoints(run: Path) -> None:
    """Removes the checkpoints of a run, as a finished one does not need them."""
    with suppress(FileNotFoundError):
        shutil.rmtree(run / CHECKPOINTS)


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
        raise ValueError(f"no checkpoint in {run / CHECKPOINTS} is whole; start anew: --overwrite")
    return None


def load_model(source: str | Path) -> Model:
    """Returns the trained model of a run, finished or not, a weights file or a shipped name."""
    return load_model_and_record(source)[0]


def load_model_and_record(source: str | Path) -> tuple[Model, dict[str, object]]:
    """Returns the trained model and the record stored with it: config, steps, metrics.

    A run that is not finished gives the model of its newest checkpoint.
    """
    run = Path(source)
    checkpoints = list_checkpoints(run)
    if (run / WEIGHTS).exists() or not checkpoints:
        return load_weights(find_weights(source))
    tensors, record = read_tensors(checkpoints[0])
    config = record["model"]
    assert isinstance(config, dict)
    prefix = "average/" if any(name.startswith("average/") for name in tensors) else "model/"
    return model_from_tensors(config_from_dict(config), _strip(tensors, prefix)), record


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of one group by their names within it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
