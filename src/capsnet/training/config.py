"""The settings of a training run, and their form as plain dictionaries (JSON, TOML)."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, get_type_hints

from capsnet.checks import LARGEST_SIZE, make_checked
from capsnet.data import DataConfig
from capsnet.models import CapsNetConfig, CNNConfig, ModelConfig
from capsnet.models.weights import config_from_dict, config_to_dict

#: Fields that may change when a run goes on: they say where and how often, not what is computed.
CHANGEABLE = frozenset(
    {
        "threads",
        "device",
        "compile",
        "tensorboard",
        "checkpoint_minutes",
        "checkpoint_epochs",
        "data.data_dir",
    }
)


#: Settings of the data that only these datasets have a use for.
_USED_BY = {
    "shift": {"mnist", "fashion-mnist", "multimnist", "mnist-40", "affnist", "svhn", "folder"},
    "generation_seed": {"multimnist", "mnist-40", "affnist", "folder"},
    "image_size": {"folder"},
    "image_channels": {"folder"},
    "test_fraction": {"folder"},
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the outcome of a training run."""

    preset: str
    """The preset the run started from (`capsnet list`)."""

    data: DataConfig
    """What to train on."""

    model: ModelConfig
    """What to train; image shape and number of classes are taken from the data."""

    seed: int = 0
    """Seed of initial values, order, augmentation and dropout."""

    epochs: int | None = None
    """Passes over the training set; or give the number of steps."""

    steps: int | None = None
    """Updates to make, where epochs mean little (MultiMNIST has 60 million examples)."""

    batch_size: int = 128
    """Images in one update, over all processes together (the paper names 128 for CIFAR-10 only)."""

    optimiser: Literal["adam", "muon"] = "adam"
    """adam, as the paper; muon makes orthogonal steps for convolutions and capsule layers."""

    learning_rate: float = 1e-3
    """Highest learning rate (Adam's of TensorFlow by default, §4)."""

    schedule: Literal["cosine", "paper"] = "cosine"
    """cosine: linear warm-up, then to zero over the run; paper: ×0.96 every decay_steps,
    in presets with the authors' Adam, rate and number of steps, each unless another is given."""

    warmup_steps: int = 200
    """Steps of linear warm-up of the cosine schedule, at most a tenth of the run."""

    decay_steps: int = 2000
    """Period of the paper's decay; 10× larger for MultiMNIST (§6.2)."""

    continue_from: str | None = None
    """Finished run, weights file or shipped name to train on from; its steps count as made.

    Seed, data, network and loss stay its own; where the batch size does not, its steps are counted
    in batches of the new one. The cosine schedule begins anew. The record keeps what was done
    before under "earlier".
    """

    reconstruction_weight: float = 0.01
    """Weight of the summed squared error beside the margin loss summed over classes.

    Differs from the paper: §4.1 says 0.0005; the authors' code averages the margin loss over the
    classes and halves it, which makes it 0.001 for each class in these units: 0.01 for ten.
    """

    upper: float = 0.9
    """m⁺: a present class's capsule should be at least this long (Eq. 4)."""

    lower: float = 0.1
    """m⁻: an absent class's capsule should be at most this long (Eq. 4)."""

    absent_weight: float = 0.5
    """λ: weight of the absent classes (Eq. 4)."""

    average_decay: float = 0.0
    """Decay of the running weight average (0.999, say) that is evaluated and saved; 0: none."""

    evaluate_every: int = 0
    """Evaluate after every so many epochs, or steps if the run is given in steps.

    For the curve alone: nothing is chosen by it, the result is that of the end.
    """

    evaluate_on: tuple[str, ...] = ()
    """Further datasets whose test sets the finished model is evaluated on."""

    num_evaluated: int | None = None
    """Evaluate on so many examples, spread evenly over the set, instead of all."""

    log_every: int = 50
    """Steps between two lines of log.jsonl."""

    checkpoint_minutes: float = 5.0
    """Longest time between two checkpoints."""

    checkpoint_epochs: int = 1
    """Epochs between two checkpoints; 0: by time alone."""

    device: str = "cpu"
    """cpu, cuda, cuda:1, mps: only cpu has been tested."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the network under autocast; slower than float32 on most CPUs."""

    compile: bool = False
    """Compile the network by torch.compile: minutes of waiting, needs a C++ compiler."""

    threads: int | None = None
    """CPU threads of all processes together; default: what PyTorch chooses."""

    tensorboard: bool = False
    """Write scalars and reconstructions for TensorBoard (extra: tensorboard)."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "a run needs either epochs or steps, and not both; "
                f"got epochs={self.epochs}, steps={self.steps}"
            )
        for name in (
            "epochs", "steps", "batch_size", "decay_steps", "log_every", "num_evaluated", "threads",
        ):  # fmt: skip
            check_count(name, getattr(self, name))
        for name in ("evaluate_every", "warmup_steps", "checkpoint_epochs"):
            check_count(name, getattr(self, name), minimum=0)
        for name in ("learning_rate", "checkpoint_minutes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("reconstruction_weight", "absent_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.average_decay < 1:
            raise ValueError(f"average_decay must lie in [0, 1), got {self.average_decay}")
        if not self.upper > self.lower:
            raise ValueError(f"upper must exceed lower, got {self.upper} and {self.lower}")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if "folder" in self.evaluate_on:
            raise ValueError("evaluate_on takes no folder of images; capsnet evaluate does")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and less than 2^63, got {self.seed}")

    @property
    def run_name(self) -> str:
        """Name of the run's directory unless another is given."""
        return f"{self.preset}-seed{self.seed}"


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Number of updates that the run makes in all."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return config.epochs * steps_per_epoch


def fit_to_images(
    config: TrainConfig, image_shape: tuple[int, int, int], num_classes: int
) -> TrainConfig:
    """The settings with a model for such images, and with the form that was found for own ones."""
    channels, height, width = image_shape
    model = replace(
        config.model,
        image_channels=channels,
        image_height=height,
        image_width=width,
        num_classes=num_classes,
    )
    data = config.data
    if data.image_size is None or data.image_channels is None:
        data = replace(data, image_size=height, image_channels=channels)
    return replace(config, data=data, model=model)


def to_dict(config: TrainConfig) -> dict[str, object]:
    """Plain dictionary of a run's settings, as `config.json` holds it."""
    plain = json.loads(json.dumps(asdict(config), default=str))  # paths become text
    return {**plain, "model": config_to_dict(config.model)}


def from_dict(plain: Mapping[str, object]) -> TrainConfig:
    """A run's settings from `to_dict`."""
    values = dict(plain)
    data = make_checked(DataConfig, DataConfig, _table(values, "data"))
    model = config_from_dict(_table(values, "model"))
    return make_checked(partial(TrainConfig, data=data, model=model), TrainConfig, values)


def override(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """The settings with some of them changed; `data` and `model` are dictionaries themselves.

    Giving steps takes epochs back and the reverse. One number for a setting that a baseline has of
    each layer holds for all its layers.
    """
    values = dict(changes)
    chosen = _table(values, "data")
    data = make_checked(partial(replace, config.data), DataConfig, chosen)
    table = _fit_layers(config, _table(values, "model"))
    model = make_checked(partial(replace, config.model), type(config.model), table)
    if values.get("steps") is not None:
        values.setdefault("epochs", None)
    if values.get("epochs") is not None:
        values.setdefault("steps", None)
    made = make_checked(partial(replace, config, data=data, model=model), TrainConfig, values)
    for name in chosen:
        _check_used(name, made)
    return made


def differing_fields(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[object, object]]:
    """Fields that differ between two runs and decide the outcome, with both values."""
    before, after = decisive_fields(old), decisive_fields(new)
    return {
        name: (before.get(name), after.get(name))
        for name in before | after
        if before.get(name) != after.get(name)
    }


def decisive_fields(config: TrainConfig) -> dict[str, object]:
    """The fields of a run that decide its outcome."""
    values = _flatten(to_dict(config))
    return {name: value for name, value in values.items() if name not in CHANGEABLE}


def check_count(name: str, value: int | None, *, minimum: int = 1) -> None:
    """Raises a ValueError if there is a value and it is below the minimum or beyond all use."""
    if value is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if value is not None and value >= LARGEST_SIZE:
        raise ValueError(f"{name} must be less than {LARGEST_SIZE:,}, got {value}")


def _table(values: dict[str, object], name: str) -> dict[str, object]:
    """Takes the table of that name out of the values."""
    value = values.pop(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a table of settings, got {value!r}")
    return dict(value)


def _check_used(name: str, config: TrainConfig) -> None:
    """Raises a ValueError if a setting of the data would make no difference to the run."""
    used_by = _USED_BY.get(name, {config.data.name})
    is_default = getattr(config.data, name) == getattr(DataConfig(), name)
    if not is_default and used_by.isdisjoint((config.data.name, *config.evaluate_on)):
        raise ValueError(
            f"{name} is a setting of {', '.join(sorted(used_by))}, "
            f"but {config.preset} trains on {config.data.name}"
        )


def _fit_layers(config: TrainConfig, changes: Mapping[str, object]) -> dict[str, object]:
    """Changes of the model; one number becomes one for each layer where the model has several."""
    fitted = dict(changes)
    kind = config_to_dict(config.model)["kind"]
    if fitted.pop("kind", kind) != kind:
        raise ValueError(f"kind of {config.preset}'s model is {kind!r}, got {changes['kind']!r}")
    other = CNNConfig if isinstance(config.model, CapsNetConfig) else CapsNetConfig
    for name, value in changes.items():
        present = getattr(config.model, name, None)
        if isinstance(present, tuple) and isinstance(value, int):
            fitted[name] = (value,) * len(present)
        if present is None and name in get_type_hints(other):
            kinds = {CapsNetConfig: "CapsNet", CNNConfig: "CNN"}
            raise ValueError(
                f"{name} is a setting of a {kinds[other]}, "
                f"but {config.preset} trains a {kinds[type(config.model)]}"
            )
    return fitted


def _flatten(plain: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
