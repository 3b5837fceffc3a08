"""The datasets by name: how to ask for one, and how each is put together."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8

from capsnet.data.augment import Shift
from capsnet.data.multimnist import MultiMNISTSplit
from capsnet.data.sources import load_mnist
from capsnet.data.splits import ArraySplit, Split

SplitName = Literal["train", "validation", "test"]
Examples = tuple[UInt8[np.ndarray, "N C h w"], Int64[np.ndarray, " N"]]

DIGIT_NAMES = tuple("0123456789")


@dataclass(frozen=True)
class DataConfig:
    """Which dataset, and how it is prepared; nothing here depends on a training run's seed."""

    name: str = "mnist"
    """The dataset; `list_datasets()` names all."""
    data_dir: Path | None = None
    """Folder with the authors' files, or of a user's own images; None for CAPSNET_DATA or cache."""
    shift: int | None = None
    """Most pixels an image is shifted; None for the paper's value of the dataset."""
    num_train: int | None = None
    """Use only the first so many training images (MultiMNIST: digits); None for all."""
    num_test: int | None = None
    """Use only so many test examples, spread evenly over all; None for all."""
    held_out: int = 0
    """The last so many training images (MultiMNIST: digits) are the split `validation` instead."""
    generation_seed: int = 0
    """Decides what is made up: pairs of MultiMNIST, warps of affNIST, places of digits in 40×40."""


def list_datasets() -> tuple[str, ...]:
    """The names that `DataConfig.name` can have.

    >>> "mnist" in list_datasets()
    True
    """
    return tuple(_LOADERS)


def load_split(config: DataConfig, split: SplitName) -> Split:
    """A dataset's training, validation or test set, ready to make batches.

    >>> test = load_split(DataConfig("mnist"), "test")
    >>> len(test), test.image_shape, test.num_classes
    (10000, (1, 28, 28), 10)
    """
    if config.name not in _LOADERS:
        close = difflib.get_close_matches(config.name, _LOADERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown dataset {config.name!r}; {hint}(known: {', '.join(_LOADERS)})")
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be 'train', 'validation' or 'test', got {split!r}")
    if split == "validation" and config.held_out < 1:
        raise ValueError(
            f"held_out must be at least 1 to have a split 'validation', got {config.held_out}"
        )
    if config.shift is not None and not 0 <= config.shift <= 14:
        raise ValueError(f"shift must be between 0 and 14 pixels, got {config.shift}")
    return _LOADERS[config.name](config, split)


def select(examples: Examples, config: DataConfig, split: SplitName) -> Examples:
    """The part of the authors' training or test set that makes up the split."""
    images, labels = examples
    if split == "test":
        if config.num_test is None:
            return images, labels
        _check_count("num_test", config.num_test, len(labels))
        chosen = np.arange(config.num_test) * len(labels) // config.num_test
        return images[chosen], labels[chosen]
    if not 0 <= config.held_out < len(labels):
        raise ValueError(
            f"held_out must be at least 0 and less than the {len(labels)} training images of "
            f"{config.name}, got {config.held_out}"
        )
    boundary = len(labels) - config.held_out
    if split == "validation":
        return images[boundary:], labels[boundary:]
    if config.num_train is not None:
        _check_count("num_train", config.num_train, boundary)
        boundary = config.num_train
    return images[:boundary], labels[:boundary]


def _check_count(field: str, count: int, available: int) -> None:
    if not 1 <= count <= available:
        raise ValueError(f"{field} must be between 1 and {available}, got {count}")


def _paper_shift(config: DataConfig, value: int) -> int:
    return value if config.shift is None else config.shift


def _load_mnist(config: DataConfig, split: SplitName) -> Split:
    images, labels = select(load_mnist(split, config.data_dir), config, split)
    return ArraySplit(
        images,
        labels,
        name=config.name,
        split=split,
        class_names=DIGIT_NAMES,
        steps=(Shift(_paper_shift(config, 2)),),  # §5
        origin="MNIST",
    )


def _load_mnist_40(config: DataConfig, split: SplitName) -> Split:
    images, labels = select(load_mnist(split, config.data_dir), config, split)
    return ArraySplit(
        images,
        labels,
        name=config.name,
        split=split,
        class_names=DIGIT_NAMES,
        steps=(Shift(_paper_shift(config, 6), size=40),),  # §5.2: anywhere in the frame
        test_seed=config.generation_seed,
        origin="MNIST, placed at random in 40×40",
    )


def _load_multimnist(config: DataConfig, split: SplitName) -> Split:
    digits, labels = select(load_mnist(split, config.data_dir), config, split)
    return MultiMNISTSplit(
        digits,
        labels,
        split=split,
        class_names=DIGIT_NAMES,
        shift=_paper_shift(config, 4),
        seed=config.generation_seed,
        origin="MultiMNIST, made from MNIST",
    )


_LOADERS: dict[str, Callable[[DataConfig, SplitName], Split]] = {
    "mnist": _load_mnist,
    "multimnist": _load_multimnist,
    "mnist-40": _load_mnist_40,
}
