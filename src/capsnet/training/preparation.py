"""What a run needs before it can begin: its data, its device, and training that it continues."""

from pathlib import Path
from typing import NamedTuple, cast

import torch

from capsnet.data import DataConfig, Split, iterate_batches, load_split, num_steps
from capsnet.machine import file_digest
from capsnet.models.weights import find_weights, load_weights
from capsnet.training.checkpoint import Earlier, check_same_data, recorded_config
from capsnet.training.config import (
    TrainConfig,
    differing_fields,
    fit_to_images,
    total_steps,
)
from capsnet.training.evaluation import check_fit, check_origin
from capsnet.training.processes import Processes, find_device
from capsnet.training.records import check_tensorboard, has_begun

#: What a run that is continued and the one that continues it have in common.
_SHARED = {
    "seed", "data", "model",
    "reconstruction_weight", "upper", "lower", "absent_weight",
}  # fmt: skip
#: What a record keeps of the training that it continues, as far as that is known.
_KEPT = (
    "steps", "epochs", "seconds", "commit", "commits", "versions", "hardware", "machines", "config",
    "metrics", "earlier",
)  # fmt: skip


class Prepared(NamedTuple):
    """What a run needs before it can begin."""

    config: TrainConfig
    """The settings, with the model fitted to the data."""
    split: Split
    """The training set."""
    tests: list[Split]
    """The sets to evaluate on."""
    device: torch.device
    """Where to compute."""
    earlier: Earlier | None
    """Training that it continues, if it has not begun yet."""


def prepare(
    config: TrainConfig, processes: Processes, *, run: Path | None = None, resume: bool = False
) -> Prepared:
    """Finds all that a run needs.

    A missing file or a set that does not fit is noticed here, not after hours of training.
    """
    device = find_device(config.device, processes.local_rank)
    if config.tensorboard and processes.is_first:
        check_tensorboard()
    split = load_split(config.data, "train")
    config = fit_to_images(config, split.image_shape, split.num_classes)
    data = config.data
    # Refuses a batch that the set cannot fill or the processes cannot share out.
    iterate_batches(split, batch_size=config.batch_size, world_size=processes.world_size)
    tests = [load_split(data, "validation" if data.held_out else "test")]
    # One's own images lie in a folder that is no place for datasets.
    folder = None if data.name == "folder" else data.data_dir
    for name in config.evaluate_on:
        # Where digits lie is part of such a task, in training and test alike.
        is_same = name == data.name or {name, data.name} <= {"mnist-40", "affnist"}
        other = DataConfig(
            name,
            data_dir=folder,
            shift=data.shift if is_same else None,
            generation_seed=data.generation_seed,
        )
        tests.append(load_split(other, "test"))
        if (name, "test") in ((test.name, test.split) for test in tests[:-1]):
            raise ValueError(f"{name} would be evaluated twice; leave it out of evaluate_on")
    for test in tests:
        check_fit(config.model, test)
        check_origin(data.name, split.class_names, test)
    is_begun = resume and run is not None and has_begun(run)
    earlier = None if is_begun else _load_earlier(config, split, run=run)
    return Prepared(config, split, tests, device, earlier)


def _load_earlier(config: TrainConfig, split: Split, *, run: Path | None) -> Earlier | None:
    """The training that a run continues, if it does, once known to fit and to stay where it is."""
    source = config.continue_from
    if source is None:
        return None
    path = find_weights(source)
    if run is not None and path.resolve().parent == run.resolve():
        raise ValueError(f"{run} holds what the run continues; --out gives it another directory")
    model, record = load_weights(path)
    before = recorded_config(record, source)
    told = {**record, "config": before}
    for name in ("config", "steps", "seconds", "class_names", "data"):
        if told.get(name) is None:
            raise ValueError(f"{source} does not say its {name}, so no run can continue it")
    assert before is not None
    for name, (old, new) in differing_fields(before, config).items():
        if name.partition(".")[0] in _SHARED:
            raise ValueError(
                f"{source} was trained with {name} = {old}, got {new}; "
                "a run continues another with its seed, data, network and loss"
            )
    check_same_data(source, record, split)
    # Counted in this run's batches, none of which has an example that the epoch has had.
    per_epoch, per_epoch_before = (num_steps(split, c.batch_size) for c in (config, before))
    epoch, done = divmod(cast(int, record["steps"]), per_epoch_before)
    done = min(-(-done * before.batch_size // config.batch_size), per_epoch)
    first_step = epoch * per_epoch + done
    total = total_steps(config, per_epoch)
    if first_step >= total:
        raise ValueError(
            f"{source} has {first_step:,} steps of {config.batch_size} behind it, which count; "
            f"a run that continues it needs more in all, got {total:,}"
        )
    kept = {name: record[name] for name in _KEPT if record.get(name) is not None}
    source_record = {"source": source, "sha256": file_digest(path), "first_step": first_step}
    return Earlier(model, {**source_record, **kept})
