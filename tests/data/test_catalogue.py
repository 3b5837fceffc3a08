from dataclasses import replace
from pathlib import Path

import dataset_files
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from capsnet.data import Batch, DataConfig, Split, iterate_batches, list_datasets, load_split
from capsnet.data.augment import Brightness, Contrast, Crop, Flip, Shift
from capsnet.data.splits import ArraySplit
from capsnet.data.storage import load_mnist

RNG = np.random.default_rng(0)


def first_batch(split: Split) -> Batch:
    return next(iterate_batches(split, seed=0, epoch=0, batch_size=8))


def check_shapes(split: Split, length: int, shape: tuple[int, int, int]) -> None:
    """What every split keeps to, in training and in evaluation."""
    assert len(split) == length
    assert split.image_shape == shape
    for batch in (first_batch(split), split.test_batch(np.arange(3))):
        size = len(batch.images)
        assert batch.images.shape == (size, *shape)
        assert batch.labels.shape == (size, split.labels_per_image)
        assert batch.targets.shape == (size, split.labels_per_image, *shape)
        assert batch.images.dtype == batch.targets.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        assert 0 <= batch.targets.min() <= batch.targets.max() <= 1
        assert batch.labels.max() < split.num_classes


@pytest.mark.parametrize(
    ("name", "split", "length", "size"),
    [
        ("mnist", "train", 60_000, 28),
        ("mnist", "test", 10_000, 28),
        ("mnist-40", "train", 60_000, 40),
        ("mnist-40", "test", 10_000, 40),
        ("multimnist", "train", 60_000_000, 36),
        ("multimnist", "test", 10_000_000, 36),
        ("affnist", "train", 60_000, 40),
        ("affnist", "test", 320_000, 40),
    ],
)
def test_sets_of_digits_have_the_papers_sizes(
    name: str, split: str, length: int, size: int
) -> None:
    check_shapes(load_split(DataConfig(name), split), length, (1, size, size))  # type: ignore[arg-type]


def test_mnist_is_shifted_by_up_to_two_pixels_in_training_only() -> None:
    split = load_split(DataConfig("mnist", num_train=30), "train")
    digits = load_mnist("train")[0][:30, 0].astype(np.float32) / 255
    test = split.test_batch(np.arange(30))
    assert_close(test.images[:, 0], torch.from_numpy(digits))
    padded = np.pad(digits, ((0, 0), (2, 2), (2, 2)))
    seen = set()
    for epoch in range(20):
        for image in split.train_batch(np.arange(30), seed=0, epoch=epoch).images[:, 0].numpy():
            shifts = [
                (top, left)
                for top in range(5)
                for left in range(5)
                if (padded[:, top : top + 28, left : left + 28] == image).all(axis=(1, 2)).any()
            ]
            assert len(shifts) == 1
            seen.update(shifts)
    assert len(seen) == 25


def test_mnist_without_shift_is_mnist() -> None:
    split = load_split(DataConfig("mnist", shift=0), "train")
    batch = split.train_batch(np.arange(50), seed=0, epoch=0)
    digits = {digit.tobytes() for digit in load_mnist("train")[0]}
    for image in batch.images:
        assert (image * 255).round().byte().numpy().tobytes() in digits


def test_places_in_forty_by_forty_depend_on_the_index_alone() -> None:
    test = load_split(DataConfig("mnist-40"), "test")
    batch = test.test_batch(np.array([8, 3]))
    assert torch.equal(batch.images[1:], test.test_batch(np.array([3])).images)
    digits = load_mnist("test")[0]
    ink = torch.from_numpy(digits[[8, 3]]).sum((1, 2, 3)).float()
    assert_close(batch.images.sum((1, 2, 3)) * 255, ink)
    other = load_split(DataConfig("mnist-40", generation_seed=1), "test")
    assert not torch.equal(batch.images, other.test_batch(np.array([8, 3])).images)


def test_digits_in_forty_by_forty_are_trained_on_everywhere() -> None:
    moved, centred = (
        load_split(DataConfig("mnist-40", num_train=400, shift=shift), "train")
        for shift in (None, 0)
    )
    offsets = set()
    for epoch in range(5):  # 400 places alone would hardly be all 169
        pairs = [
            split.train_batch(np.arange(400), seed=0, epoch=epoch).images[:, 0].numpy()
            for split in (moved, centred)
        ]
        for image, original in zip(*pairs, strict=True):
            offsets.add(tuple((first_ink(image) - first_ink(original)).tolist()))
    assert offsets == {(down, right) for down in range(-6, 7) for right in range(-6, 7)}


def first_ink(image: np.ndarray) -> np.ndarray:
    """The first row and the first column that are not empty."""
    return np.array([image.any(axis=1).argmax(), image.any(axis=0).argmax()])


def test_splits_of_the_training_set_do_not_overlap() -> None:
    config = DataConfig("mnist", held_out=5_000, num_train=100)
    train, validation = load_split(config, "train"), load_split(config, "validation")
    assert (len(train), len(validation)) == (100, 5_000)
    labels = load_mnist("train")[1]
    assert train.test_batch(np.arange(100)).labels[:, 0].tolist() == labels[:100].tolist()
    held_out = validation.test_batch(np.arange(5_000))
    assert held_out.labels[:, 0].tolist() == labels[55_000:].tolist()
    digits = torch.tensor(load_mnist("train")[0][55_000:])
    assert torch.equal((held_out.images * 255).round().byte(), digits)
    assert len(load_split(replace(config, num_train=None), "train")) == 55_000


def test_multimnist_of_held_out_digits_pairs_them_with_each_other() -> None:
    config = DataConfig("multimnist", held_out=300, num_train=40)
    assert len(load_split(config, "train")) == 40_000
    validation = load_split(config, "validation")
    assert len(validation) == 300_000
    digits = load_mnist("train")[0][-300:].reshape(300, -1).sum(axis=1)
    batch = validation.test_batch(np.arange(0, 300_000, 3_001))
    ink = (batch.targets.sum((2, 3, 4)) * 255).round()
    assert np.isin(ink.numpy().astype(int), digits).all()


def test_fashion_mnist_is_read_plain_or_gzipped(tmp_path: Path) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for prefix, count in (("train", 20), ("t10k", 11)):
        images = RNG.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        dataset_files.gzip_file(
            dataset_files.write_idx(folder / f"{prefix}-images-idx3-ubyte", images)
        )
        dataset_files.write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels)
    config = DataConfig("fashion-mnist", tmp_path)
    train = load_split(config, "train")
    check_shapes(train, 20, (1, 28, 28))
    assert isinstance(train, ArraySplit)
    assert train._steps == (Shift(2),)
    test = load_split(config, "test")
    check_shapes(test, 11, (1, 28, 28))
    assert test.class_names[9] == "ankle boot"
    dataset_files.write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(10, dtype=np.uint8))
    with pytest.raises(ValueError, match="Fashion-MNIST has 11 images but 10 labels"):
        load_split(config, "test")
    dataset_files.write_idx(folder / "t10k-images-idx3-ubyte", np.zeros((10, 20, 28), np.uint8))
    with pytest.raises(ValueError, match=r"must have shape \(28, 28\), got \(20, 28\)"):
        load_split(config, "test")


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("place", ["cifar10", "."])
def test_cifar10_is_cropped_to_24(python: bool, place: str, tmp_path: Path) -> None:
    dataset_files.write_cifar10(tmp_path / place, python=python, archive=False)
    config = DataConfig("cifar10", tmp_path)
    train = load_split(config, "train")
    check_shapes(train, 20, (3, 24, 24))
    assert isinstance(train, ArraySplit)
    assert train._steps == (Crop(24), Flip(), Brightness(63 / 255), Contrast(0.2, 1.8))
    test = load_split(replace(config, held_out=1), "test")
    images = np.random.default_rng(5).integers(0, 256, (4, 3, 32, 32)).astype(np.float32) / 255
    batch = test.test_batch(np.arange(4))
    centre = torch.from_numpy(images[:, :, 4:28, 4:28])
    assert_close(batch.targets[:, 0], centre)
    flat = centre.flatten(1)
    expected = (flat - flat.mean(1, keepdim=True)) / flat.std(1, correction=0, keepdim=True)
    assert_close(batch.images.flatten(1), expected, atol=1e-5, rtol=1e-5)


def test_cifar10_is_found_when_its_own_folder_is_given(tmp_path: Path) -> None:
    folder = dataset_files.write_cifar10(tmp_path, python=False, archive=False)
    assert len(load_split(DataConfig("cifar10", folder), "test")) == 4


def test_cifar10_comes_from_the_archive_when_a_batch_was_not_unpacked(tmp_path: Path) -> None:
    dataset_files.write_cifar10(tmp_path, python=False, archive=True)
    folder = dataset_files.write_cifar10(tmp_path, python=False, archive=False)
    (folder / "data_batch_3.bin").unlink()
    assert len(load_split(DataConfig("cifar10", tmp_path), "train")) == 20


def test_smallnorb_is_halved_and_cropped_to_32(tmp_path: Path) -> None:
    for stem, count in (
        ("smallnorb-5x46789x9x18x6x2x96x96-training", 10),
        ("smallnorb-5x01235x9x18x6x2x96x96-testing", 8),
    ):
        pairs = RNG.integers(0, 256, (count, 2, 96, 96)).astype(np.uint8)
        dat = dataset_files.write_norb(tmp_path / f"{stem}-dat.mat", pairs)
        dataset_files.gzip_file(dat)
        categories = (np.arange(count) % 5).astype(np.int32)
        dataset_files.write_norb(tmp_path / f"{stem}-cat.mat", categories)
    config = DataConfig("smallnorb", tmp_path)
    train = load_split(config, "train")
    check_shapes(train, 10, (2, 32, 32))
    assert isinstance(train, ArraySplit)
    assert train._steps == (Brightness(63 / 255), Contrast(0.2, 1.8), Crop(32))
    test = load_split(config, "test")
    check_shapes(test, 8, (2, 32, 32))
    seen = test.test_batch(np.arange(8)).images.flatten(1)
    assert_close(seen.mean(1), torch.zeros(8), atol=1e-5, rtol=0)
    assert_close(seen.std(1, correction=0), torch.ones(8), atol=1e-4, rtol=0)
    dataset_files.write_norb(tmp_path / f"{stem}-cat.mat", np.zeros(7, dtype=np.int32))
    with pytest.raises(ValueError, match="smallNORB has 8 images but 7 labels"):
        load_split(config, "test")
    dataset_files.write_norb(tmp_path / f"{stem}-dat.mat", np.zeros((7, 2, 8, 8), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"must have shape \(2, 48, 48\), got \(2, 4, 4\)"):
        load_split(config, "test")


def test_svhn_is_standardised(tmp_path: Path) -> None:
    for name, count in (("train", 12), ("test", 9)):
        images = RNG.integers(0, 256, (count, 3, 32, 32)).astype(np.uint8)
        path = tmp_path / f"{name}_32x32.mat"
        dataset_files.write_svhn(path, images, np.arange(count) % 10)
    config = DataConfig("svhn", tmp_path)
    check_shapes(load_split(config, "train"), 12, (3, 32, 32))
    test = load_split(config, "test").test_batch(np.arange(9))
    assert_close(test.targets[:, 0] * 255, torch.from_numpy(images).float())
    assert_close(test.images.mean((1, 2, 3)), torch.zeros(9), atol=1e-5, rtol=0)
    for shift, is_moved in ((0, False), (2, True)):
        train = load_split(DataConfig("svhn", tmp_path, shift=shift), "train")
        batch = train.train_batch(np.arange(12), seed=0, epoch=0)
        top, below = batch.targets[..., 0, :], batch.targets[..., 1, :]
        assert bool((top == below).all(-1).any()) == is_moved  # the border, repeated


def test_the_original_affnist_comes_before_a_regenerated_one(tmp_path: Path) -> None:
    config = DataConfig("affnist", tmp_path)
    assert load_split(config, "test").origin == "affNIST-style, regenerated from MNIST"
    images = RNG.integers(0, 256, (9, 1, 40, 40)).astype(np.uint8)
    (tmp_path / "affnist").mkdir()
    data = dataset_files.pack_affnist(images, np.arange(9, dtype=np.uint8))
    (tmp_path / "affnist" / "test.mat").write_bytes(data)
    original = load_split(config, "test")
    assert original.origin == "affNIST, its author's files"
    check_shapes(original, 9, (1, 40, 40))
    assert_close(original.test_batch(np.arange(9)).images * 255, torch.from_numpy(images).float())


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "smallnorb", "svhn"])
def test_a_dataset_that_is_not_there_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    option = f" --data-dir {tmp_path}"
    with pytest.raises(FileNotFoundError, match=f"run `capsnet data get {name}{option}`, or put"):
        load_split(DataConfig(name, tmp_path), "train")


@pytest.mark.parametrize(
    ("options", "split", "sentence"),
    [
        (
            {"name": "minst"},
            "train",
            r"unknown dataset 'minst'; did you mean 'mnist'\? \(known: mn",
        ),
        ({"name": "xyz"}, "train", r"unknown dataset 'xyz' \(known: mnist, fashion-mnist, "),
        ({}, "validation", "held_out must be at least 1 to have a split 'validation', got 0"),
        ({"held_out": 60_000}, "train", "less than the 60000 training images of mnist, got 60000"),
        ({"held_out": -1}, "train", "held_out must be at least 0"),
        ({"num_train": 0}, "train", "num_train must be between 1 and 60000, got 0"),
        ({"num_train": 9, "held_out": 59_995}, "train", "num_train must be between 1 and 5, got 9"),
        ({"shift": -1}, "train", "shift must be between 0 and 14 pixels, got -1"),
        ({"shift": 15}, "train", "shift must be between 0 and 14 pixels, got 15"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], split: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_split(DataConfig(**options), split)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_annotation_checks")
def test_an_unknown_split_is_named() -> None:
    with pytest.raises(
        ValueError, match="split must be 'train', 'validation' or 'test', got 'dev'"
    ):
        load_split(DataConfig(), "dev")  # type: ignore[arg-type]


def test_every_dataset_has_a_name() -> None:
    assert len(set(list_datasets())) == 9
