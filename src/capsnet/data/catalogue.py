"""The datasets by name: how to ask for one, and how each is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, Shaped, UInt8

from capsnet.checks import unknown_name
from capsnet.data.augment import Brightness, Contrast, Crop, Flip, Shift, Widen
from capsnet.data.generated import AffnistSplit, MultiMNISTSplit
from capsnet.data.order import shuffle
from capsnet.data.readers import (
    CIFAR_TEST,
    CIFAR_TRAIN,
    read_affnist,
    read_cifar10,
    read_idx,
    read_norb_images,
    read_norb_labels,
    read_svhn,
)
from capsnet.data.splits import ArraySplit, Split
from capsnet.data.storage import find_data_dir, find_part, load_mnist, require_part

SplitName = Literal["train", "validation", "test"]
Examples = tuple[UInt8[np.ndarray, "N C h w"], Int64[np.ndarray, " N"]]

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR_OBJECTS = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
TOYS = ("four-legged animal", "human figure", "airplane", "truck", "car")
#: Datasets whose images a network sees standardised; of the others it sees intensities in [0, 1].
STANDARDISED = frozenset({"cifar10", "smallnorb", "svhn"})


@dataclass(frozen=True)
class DataConfig:
    """Which dataset, and how it is prepared; nothing here depends on a training run's seed."""

    name: str = "mnist"
    """The dataset; capsnet list shows all."""
    data_dir: Path | None = None
    """Folder of datasets, or of your own images; default: CAPSNET_DATA, or the user's cache."""
    shift: int | None = None
    """Most pixels an image is shifted; default: the paper's value (SVHN, own images: 0)."""
    num_train: int | None = None
    """Use only the first so many training images (MultiMNIST: digits); default: all."""
    held_out: int = 0
    """The last so many training images (MultiMNIST: digits) are the validation set instead."""
    generation_seed: int = 0
    """Decides what is made up: pairs, warps and places of digits, the test part of own images."""
    image_size: int | None = 32
    """Own images: rows and columns that they are resized to; preset folder: 28 to 48, by them."""
    image_channels: int | None = 3
    """Own images: 3 for colour, 1 for grey; preset folder: as they are."""
    test_fraction: float = 0.2
    """Own images without folders train and test: the part of each class for testing."""


def list_datasets() -> tuple[str, ...]:
    """The names that `DataConfig.name` can have.

    >>> list_datasets()
    ('mnist', 'fashion-mnist', 'multimnist', 'mnist-40', 'affnist', 'cifar10', 'smallnorb', 'svhn',
     'folder')
    """
    return tuple(_LOADERS)


def check_dataset(name: str) -> None:
    """Raises, with the names there are, unless there is a dataset of this name."""
    if name not in _LOADERS:
        raise unknown_name("dataset", name, _LOADERS)


def load_split(config: DataConfig, split: SplitName) -> Split:
    """A dataset's training, validation or test set, ready to make batches.

    >>> test = load_split(DataConfig("mnist"), "test")
    >>> len(test), test.image_shape, test.num_classes
    (10000, (1, 28, 28), 10)
    """
    check_dataset(config.name)
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split must be 'train', 'validation' or 'test', got {split!r}")
    if split == "validation" and config.held_out < 1:
        raise ValueError(
            f"held_out must be at least 1 to have a split 'validation', got {config.held_out}"
        )
    if config.shift is not None and not 0 <= config.shift <= 14:
        raise ValueError(f"shift must be between 0 and 14 pixels, got {config.shift}")
    return _LOADERS[config.name](config, split)


def _select(
    examples: tuple[Shaped[np.ndarray, "N ..."], Int64[np.ndarray, " N"]],
    config: DataConfig,
    split: SplitName,
) -> tuple[Shaped[np.ndarray, "n ..."], Int64[np.ndarray, " n"]]:
    """The part of the authors' training set, or all of their test set, that makes up the split."""
    images, labels = examples
    if split == "test":
        return images, labels
    if not 0 <= config.held_out < len(labels):
        raise ValueError(
            f"held_out must be at least 0 and less than the {len(labels)} training images of "
            f"{config.name}, got {config.held_out}"
        )
    boundary = len(labels) - config.held_out
    if split == "validation":
        return images[boundary:], labels[boundary:]
    num_train = boundary if config.num_train is None else config.num_train
    if not 1 <= num_train <= boundary:
        raise ValueError(f"num_train must be between 1 and {boundary}, got {num_train}")
    return images[:num_train], labels[:num_train]


def _check_examples(
    title: str,
    images: UInt8[np.ndarray, ...],
    labels: Shaped[np.ndarray, " N"],
    shape: tuple[int, ...],
) -> None:
    """Raises unless files that do not say so themselves fit each other and the dataset."""
    if len(images) != len(labels):
        raise ValueError(f"{title} has {len(images)} images but {len(labels)} labels")
    if images.shape[1:] != shape:
        raise ValueError(f"images of {title} must have shape {shape}, got {images.shape[1:]}")


def _shift_or(config: DataConfig, paper: int) -> int:
    return paper if config.shift is None else config.shift


def _load_mnist(config: DataConfig, split: SplitName) -> Split:
    images, labels = _select(load_mnist(split, config.data_dir), config, split)
    return ArraySplit(
        images,
        labels,
        name=config.name,
        split=split,
        class_names=DIGITS,
        steps=(Shift(_shift_or(config, 2)),),  # §5
        origin="MNIST",
    )


def _load_fashion_mnist(config: DataConfig, split: SplitName) -> Split:
    prefix = "t10k" if split == "test" else "train"
    arrays = []
    for kind, num_dims in (("images-idx3", 3), ("labels-idx1", 1)):
        path = require_part(config.name, f"{prefix}-{kind}-ubyte", config.data_dir)
        arrays.append(read_idx(path, num_dims))
    images, labels = arrays
    _check_examples("Fashion-MNIST", images, labels, (28, 28))
    examples = _select((images[:, None], labels.astype(np.int64)), config, split)
    return ArraySplit(
        *examples,
        name=config.name,
        split=split,
        class_names=CLOTHES,
        steps=(Shift(_shift_or(config, 2)),),
        origin="Fashion-MNIST",
    )


def _load_mnist_40(config: DataConfig, split: SplitName) -> Split:
    images, labels = _select(load_mnist(split, config.data_dir), config, split)
    return ArraySplit(
        images,
        labels,
        name=config.name,
        split=split,
        class_names=DIGITS,
        steps=(Shift(_shift_or(config, 6), size=40),),  # §5.2: anywhere in the frame
        test_seed=config.generation_seed,
        origin="MNIST, placed at random in 40×40",
    )


def _load_multimnist(config: DataConfig, split: SplitName) -> Split:
    digits, labels = _select(load_mnist(split, config.data_dir), config, split)
    return MultiMNISTSplit(
        digits,
        labels,
        split=split,
        class_names=DIGITS,
        shift=_shift_or(config, 4),
        seed=config.generation_seed,
        origin="MultiMNIST, made from MNIST",
    )


def _load_affnist(config: DataConfig, split: SplitName) -> Split:
    if split != "test":  # §5.2: trained on translated digits only
        return _load_mnist_40(config, split)
    original = find_part(config.name, "test", config.data_dir)
    if original is None:
        digits, labels = load_mnist(split, config.data_dir)
        return AffnistSplit(
            digits, labels, split=split, class_names=DIGITS, seed=config.generation_seed
        )
    return ArraySplit(
        *read_affnist(original),
        name=config.name,
        split=split,
        class_names=DIGITS,
        origin="affNIST, its author's files",
    )


def _load_cifar10(config: DataConfig, split: SplitName) -> Split:
    batches = CIFAR_TEST if split == "test" else CIFAR_TRAIN
    files = [require_part(config.name, batch, config.data_dir) for batch in batches]
    # The folder of the batches, or the archive if any of them is only there.
    path = next((file for file in files if file.suffix == ".gz"), files[0].parent)
    return ArraySplit(
        *_select(read_cifar10(path, split), config, split),
        name=config.name,
        split=split,
        class_names=CIFAR_OBJECTS,
        steps=(Crop(24), Flip(), Brightness(), Contrast()),  # §7, and the authors' code
        standardised=config.name in STANDARDISED,
        origin="CIFAR-10",
    )


def _load_smallnorb(config: DataConfig, split: SplitName) -> Split:
    part = "test" if split == "test" else "train"
    images = read_norb_images(require_part(config.name, f"{part} dat", config.data_dir))
    labels = read_norb_labels(require_part(config.name, f"{part} cat", config.data_dir))
    _check_examples("smallNORB", images, labels, (2, 48, 48))
    return ArraySplit(
        *_select((images, labels), config, split),
        name=config.name,
        split=split,
        class_names=TOYS,
        steps=(Brightness(), Contrast(), Crop(32)),  # §7, and the authors' code
        standardised=config.name in STANDARDISED,
        origin="smallNORB",
    )


def _load_svhn(config: DataConfig, split: SplitName) -> Split:
    path = require_part(config.name, "test" if split == "test" else "train", config.data_dir)
    return ArraySplit(
        *_select(read_svhn(path), config, split),
        name=config.name,
        split=split,
        class_names=DIGITS,
        # The paper does not say how SVHN was prepared; this much is our choice.
        steps=(Widen(_shift_or(config, 0)), Crop(32)),
        standardised=config.name in STANDARDISED,
        origin="SVHN, cropped digits",
    )


def _load_folder(config: DataConfig, split: SplitName) -> Split:
    # Pillow is needed for nothing else.
    from capsnet.data.folder import find_form, list_folder, load_folder

    if config.data_dir is None:
        raise ValueError(
            "dataset 'folder' needs data_dir (--data-dir), a folder with one subfolder per class"
        )
    folder = find_data_dir(config.data_dir)
    contents = list_folder(folder, test_fraction=config.test_fraction, seed=config.generation_seed)
    size, num_channels = config.image_size, config.image_channels
    if size is None or num_channels is None:
        found_size, found_channels = find_form(contents)
        size = found_size if size is None else size
        num_channels = found_channels if num_channels is None else num_channels
    images = load_folder(folder, contents, size=size, num_channels=num_channels)
    chosen = np.flatnonzero(contents.in_test == (split == "test"))
    if split != "test":  # classes take turns at random, so that the first or last n have all
        order = np.arange(len(chosen))
        chosen = chosen[shuffle(order, len(chosen), seed=config.generation_seed, epoch=0)]
    chosen, labels = _select((chosen, contents.labels[chosen]), config, split)
    return ArraySplit(
        images[chosen],
        labels,
        name=config.name,
        split=split,
        class_names=contents.class_names,
        steps=(Shift(_shift_or(config, 0)),),
        origin=f"images in {folder}",
        files=tuple(contents.paths[number] for number in chosen),
    )


_LOADERS: dict[str, Callable[[DataConfig, SplitName], Split]] = {
    "mnist": _load_mnist,
    "fashion-mnist": _load_fashion_mnist,
    "multimnist": _load_multimnist,
    "mnist-40": _load_mnist_40,
    "affnist": _load_affnist,
    "cifar10": _load_cifar10,
    "smallnorb": _load_smallnorb,
    "svhn": _load_svhn,
    "folder": _load_folder,
}
