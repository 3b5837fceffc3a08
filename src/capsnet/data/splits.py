"""Batches, and the parts of a dataset that they come from."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from capsnet.data.augment import Step, as_intensities, standardise
from capsnet.data.order import Draws, shuffle


class Batch(NamedTuple):
    """Images with their labels and with what their reconstructions are compared with."""

    images: Float32[Tensor, "B C H W"]
    """What the model sees: intensities in [0, 1], or standardised ones."""
    labels: Int64[Tensor, "B N"]
    """The N classes in each image: one, or the two of MultiMNIST."""
    targets: Float32[Tensor, "B N C H W"]
    """What the reconstruction of each label should be: intensities in [0, 1]."""


class Split(ABC):
    """A training, validation or test set, addressed by index, that makes whole batches at once."""

    name: str
    """The dataset's name, as in `DataConfig.name`."""
    split: str
    """`train`, `validation` or `test`."""
    class_names: tuple[str, ...]
    """What each class is called; a label is an index into these."""
    image_shape: tuple[int, int, int]
    """(C, H, W) of an image in a batch."""
    labels_per_image: int = 1
    """How many classes an image shows."""
    origin: str
    """Where the examples come from, in one line."""
    files: tuple[Path, ...] | None = None
    """The file of each example, where every one has its own."""

    @property
    def files_digest(self) -> str | None:
        """A digest of which files it is made of, by class and name; None without such files."""
        if self.files is None:
            return None
        names = sorted(f"{path.parent.name}/{path.name}" for path in self.files)
        return hashlib.blake2b(os.fsencode("\0".join(names)), digest_size=16).hexdigest()

    def describe(self) -> dict[str, object]:
        """What the record of a training says of its images."""
        return {"train": self.origin, "num_train": len(self), "files": self.files_digest}

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @abstractmethod
    def __len__(self) -> int:
        """How many examples there are."""

    @abstractmethod
    def make_batch(self, indices: Int64[np.ndarray, " B"], draws: Draws | None) -> Batch:
        """The examples with these indices, augmented by the draws, or unaugmented without any."""

    def train_batch(self, positions: Int64[np.ndarray, " B"], *, seed: int, epoch: int) -> Batch:
        """The augmented examples at these positions of the epoch's random order.

        A function of (seed, epoch, position) alone.
        """
        indices = shuffle(positions, len(self), seed=seed, epoch=epoch)
        return self.make_batch(indices, Draws(seed, epoch, positions))

    def test_batch(self, indices: Int64[np.ndarray, " B"]) -> Batch:
        """The examples with these indices, as they are at test time."""
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise ValueError(
                f"indices of {self.name} must be in [0, {len(self)}), "
                f"got {indices.min()} to {indices.max()}"
            )
        return self.make_batch(indices, None)


class ArraySplit(Split):
    """A split whose images are held as bytes, in memory or mapped from a file."""

    def __init__(
        self,
        images: UInt8[np.ndarray, "N C h w"],
        labels: Int64[np.ndarray, " N"],
        *,
        name: str,
        split: str,
        class_names: tuple[str, ...],
        steps: tuple[Step, ...] = (),
        standardised: bool = False,
        test_seed: int | None = None,
        origin: str,
        files: tuple[Path, ...] | None = None,
    ) -> None:
        """Holds the images.

        Args:
            images: (N, C, h, w) bytes.
            labels: (N,) classes.
            name: the dataset's name.
            split: `train`, `validation` or `test`.
            class_names: what each class is called.
            steps: the augmentations, in order.
            standardised: whether the model sees standardised images (targets never are).
            test_seed: None for the steps' test-time counterparts; a seed when the test images, too,
                are random, each a function of its index.
            origin: where the images come from.
            files: the file of each, where every one has its own.
        """
        if not images.size:
            raise ValueError(f"{name} must have images to be a {split} set, got none")
        if not 0 <= labels.min() <= labels.max() < len(class_names):
            raise ValueError(
                f"labels of {name} ({split}) must be 0 to {len(class_names) - 1}, "
                f"got {labels.min()} to {labels.max()}"
            )
        self.name, self.split, self.class_names, self.origin = name, split, class_names, origin
        self.files = files
        self._images, self._labels = images, labels
        self._steps, self._standardised, self._test_seed = steps, standardised, test_seed
        probe = self.make_batch(np.zeros(1, dtype=np.int64), None)
        self.image_shape = (probe.images.shape[1], probe.images.shape[2], probe.images.shape[3])

    def __len__(self) -> int:
        return len(self._labels)

    def make_batch(self, indices: Int64[np.ndarray, " B"], draws: Draws | None) -> Batch:
        """The images with these indices, passed through the steps."""
        if draws is None and self._test_seed is not None:
            draws = Draws(self._test_seed, f"{self.name} {self.split}", indices)
        images = self._images[indices]
        for step in self._steps:
            images = step(images, draws)
        intensities = as_intensities(images)
        seen = standardise(intensities) if self._standardised else intensities
        # Brightness and contrast can leave [0, 1], where a reconstruction cannot follow.
        wanted = np.clip(intensities, 0, 1) if self._standardised else intensities
        return Batch(
            torch.from_numpy(seen),
            torch.from_numpy(self._labels[indices])[:, None],
            torch.from_numpy(wanted)[:, None],
        )


def num_steps(split: Split, batch_size: int, *, train: bool = True) -> int:
    """How many batches an epoch has: training drops an incomplete last one, evaluation keeps it."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if train and batch_size > len(split):
        raise ValueError(
            f"batch_size must be at most the {len(split)} training examples of {split.name}, "
            f"got {batch_size}; --batch-size {len(split)} or less would do"
        )
    return len(split) // batch_size if train else -(-len(split) // batch_size)


def iterate_batches(
    split: Split,
    *,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    train: bool = True,
) -> Iterator[Batch]:
    """The batches of one epoch, from any step on, whole or this process's share of each.

    Args:
        split: the examples.
        batch_size: examples in a batch, over all processes together.
        seed: decides order and augmentation in training; evaluation has neither.
        epoch: which pass over the split this is.
        start_step: the first batch wanted.
        rank: this process, in [0, world_size).
        world_size: how many processes share each batch, each taking a contiguous part of it.
        train: shuffled and augmented, or in order as at test time.

    Returns:
        An iterator over batches. In evaluation a process without any share of the last batch
        skips it.
    """
    steps = num_steps(split, batch_size, train=train)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    if train and batch_size % world_size:
        raise ValueError(
            f"batch_size must be a multiple of the {world_size} processes, got {batch_size}"
        )
    if start_step < 0:
        raise ValueError(f"start_step must be at least 0, got {start_step}")
    return _batches(
        split, range(start_step, steps), batch_size, seed, epoch, rank, world_size, train
    )


def _batches(
    split: Split,
    steps: range,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    world_size: int,
    train: bool,
) -> Iterator[Batch]:
    for step in steps:
        start, stop = step * batch_size, min((step + 1) * batch_size, len(split))
        size = stop - start
        share = np.arange(
            start + size * rank // world_size, start + size * (rank + 1) // world_size
        )
        if share.size == 0:
            continue
        yield (
            split.train_batch(share, seed=seed, epoch=epoch) if train else split.test_batch(share)
        )
