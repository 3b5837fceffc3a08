"""Checkpoints of a run, and the model that a run has come to."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from capsnet.models import Model
from capsnet.models.weights import (
    WEIGHTS,
    config_from_dict,
    copy_tensors,
    find_weights,
    load_weights,
    model_from_tensors,
    read_tensors,
    write_tensors,
)
from capsnet.training.records import CHECKPOINTS

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

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for `write_tensors`."""
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"{key}/{name}"] = value
        for name, value in (self.average or {}).items():
            tensors[f"average/{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Copies stored tensors into the live ones, which keep their identity and layout."""
        self.step = step
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


def checkpoint_path(run: Path, step: int) -> Path:
    """File of the checkpoint after `step` updates."""
    return run / CHECKPOINTS / f"step-{step:09d}.safetensors"


def save_checkpoint(run: Path, state: TrainState, record: Mapping[str, object]) -> None:
    """Writes a checkpoint, then removes all but the newest two."""
    (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(run, state.step)
    write_tensors(path, state.tensors(), {"step": state.step, **record})
    for old in list_checkpoints(run)[NUM_KEPT:]:
        old.unlink(missing_ok=True)


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
