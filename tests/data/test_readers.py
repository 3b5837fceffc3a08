import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path

import dataset_files
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy.io import savemat
from scipy.sparse import csc_array

from capsnet.data.readers import (
    read_affnist,
    read_cifar10,
    read_idx,
    read_norb_images,
    read_norb_labels,
    read_pickled_dict,
    read_svhn,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 3, 4)).astype(np.uint8)


# IDX


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_reads_what_was_written(zipped: bool, tmp_path: Path) -> None:
    path = dataset_files.write_idx(tmp_path / "images", IMAGES)
    path = dataset_files.gzip_file(path) if zipped else path
    array = read_idx(path, 3)
    assert_array_equal(array, IMAGES)
    assert isinstance(array, np.memmap) is not zipped


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data[:-1], "is truncated: "),
        (lambda data: data[:10], "is truncated: "),
        (lambda data: b"", "is truncated: "),
        (lambda data: data + b"x", "is too long: "),
        (lambda data: b"\0\0\x09\3" + data[4:], "IDX magic number 00000803, got 00000903"),
        (lambda data: b"\3\x08\0\0" + data[4:], "has its bytes swapped"),
        (lambda data: b"\0\0\x08\1" + data[4:], "IDX magic number 00000803, got 00000801"),
        (lambda data: data[:4] + b"\xff" * 8 + data[12:], "is truncated: |header promises"),
        (lambda data: data[:4] + bytes(4) + data[8:], "is too long: "),
    ],
)
def test_idx_refuses_a_wrong_file(
    change: object, sentence: str, zipped: bool, tmp_path: Path
) -> None:
    path = dataset_files.write_idx(tmp_path / "images", IMAGES)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    path = dataset_files.gzip_file(path) if zipped else path
    with pytest.raises(ValueError, match=sentence) as caught:
        read_idx(path, 3)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("harm", ["cut", "damaged"])
def test_idx_refuses_a_broken_gzip(harm: str, tmp_path: Path) -> None:
    array = RNG.integers(0, 256, (50, 30, 40)).astype(np.uint8)
    path = dataset_files.gzip_file(dataset_files.write_idx(tmp_path / "images", array))
    data = bytearray(path.read_bytes())
    if harm == "damaged":
        data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data[:-5] if harm == "cut" else data))
    with pytest.raises(ValueError, match="is truncated or damaged"):
        read_idx(path, 3)


# CIFAR-10


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("python", [False, True], ids=["binary", "python"])
def test_cifar10_reads_both_versions_from_folder_and_archive(
    python: bool, archive: bool, tmp_path: Path
) -> None:
    path = dataset_files.write_cifar10(tmp_path, python=python, archive=archive)
    images, labels = read_cifar10(path, "train")
    expected = [np.random.default_rng(n).integers(0, 256, (4, 3, 32, 32)) for n in range(6)]
    assert_array_equal(images, np.concatenate(expected[:5]))
    assert labels.tolist() == [number % 10 for number in range(20)]
    images, labels = read_cifar10(path, "test")
    assert_array_equal(images, expected[5])
    assert labels.tolist() == [0, 1, 2, 3]


def test_cifar10_names_a_missing_batch(tmp_path: Path) -> None:
    folder = dataset_files.write_cifar10(tmp_path, python=False, archive=False)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match="lacks data_batch_3 of CIFAR-10"):
        read_cifar10(folder, "train")


@pytest.mark.parametrize(
    ("python", "content", "sentence"),
    [
        (False, b"", "must have a multiple of 3073 bytes, got 0"),
        (False, bytes(3072), "must have a multiple of 3073 bytes, got 3072"),
        (False, bytes([10]) + bytes(3072), "has a label of 10; those of CIFAR-10 are 0 to 9"),
        (True, b"", "is truncated or no CIFAR-10 batch"),
        (True, b"\x80\x02}q\x01.", "is truncated or no CIFAR-10 batch"),
        (True, b"nonsense", "is truncated or no CIFAR-10 batch"),
    ],
)
def test_cifar10_refuses_a_wrong_batch(
    python: bool, content: bytes, sentence: str, tmp_path: Path
) -> None:
    folder = dataset_files.write_cifar10(tmp_path, python=python, archive=False)
    (folder / ("test_batch" if python else "test_batch.bin")).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_cifar10(folder, "test")


def test_cifar10_refuses_nested_labels_at_once(tmp_path: Path) -> None:
    folder = dataset_files.write_cifar10(tmp_path, python=True, archive=False)
    whole = (folder / "test_batch").read_bytes()
    key = b"U\x06labels" if b"U\x06labels" in whole else b"X\x06\0\0\0labels"
    # A number, then pairs of the pair before: 2⁶⁰ numbers in all.
    nested = b"K\1" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(100, 160))
    # A second entry of that name, after all others: what a dict keeps.
    harmed = whole.removesuffix(b"u.") + key + nested + b"u."
    assert harmed != whole + key + nested + b"u."
    (folder / "test_batch").write_bytes(harmed)
    with pytest.raises(ValueError, match="its labels are no list of numbers"):
        read_cifar10(folder, "test")


@pytest.mark.parametrize("length", range(100, 13_000, 1500))
def test_cifar10_refuses_a_truncated_pickle(length: int, tmp_path: Path) -> None:
    folder = dataset_files.write_cifar10(tmp_path, python=True, archive=False)
    os.truncate(folder / "test_batch", length)
    with pytest.raises(ValueError, match="is truncated or no CIFAR-10 batch"):
        read_cifar10(folder, "test")


@pytest.mark.parametrize("name", ["cut", "no archive", "empty"])
def test_cifar10_refuses_a_broken_archive(name: str, tmp_path: Path) -> None:
    path = dataset_files.write_cifar10(tmp_path, python=False, archive=True)
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[: len(data) // 2], "no archive": b"text" * 200, "empty": b""}[name]
    )
    with pytest.raises(ValueError, match="is truncated or no tar archive"):
        read_cifar10(path, "train")


def test_cifar10_never_follows_a_link_out_of_the_archive(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(3073))
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    with pytest.raises(ValueError, match="lacks test_batch of CIFAR-10"):
        read_cifar10(path, "test")


class Mischief:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch mischief",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    content = {"labels": [1], "data": Mischief()}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match="is truncated or no CIFAR-10 batch"):
        read_cifar10(folder, "test")
    assert not (tmp_path / "mischief").exists()


def test_an_object_in_a_pickle_stays_a_description() -> None:
    content = read_pickled_dict(b"\x80\x02}U\x01acos\nsystem\nU\x02ls\x85Rs.")
    assert content == {"a": {"call": "os system", "arguments": ("ls",)}}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x80\x02]q\x01.", "does not hold one dict"),
        (b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00}.", "has the pickle opcode FRAME"),
    ],
)
def test_other_pickles_are_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_pickled_dict(data)


# SVHN


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_reads_images_upright_and_ten_as_zero(compressed: bool, tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (7, 3, 32, 32)).astype(np.uint8)
    labels = np.array([0, 1, 9, 4, 0, 5, 7])
    path = dataset_files.write_svhn(
        tmp_path / "test_32x32.mat", images, labels, compressed=compressed
    )
    read_images, read_labels = read_svhn(path)
    assert_array_equal(read_images, images)
    assert_array_equal(read_labels, labels)


@pytest.mark.parametrize("name", ["cut", "text", "empty"])
def test_svhn_refuses_a_broken_file(name: str, tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (7, 3, 32, 32)).astype(np.uint8)
    path = dataset_files.write_svhn(tmp_path / "test_32x32.mat", images, np.arange(7))
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "text": b"text" * 99, "empty": b""}[name])
    with pytest.raises(ValueError, match="is truncated or no MATLAB file"):
        read_svhn(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "lacks the variable y"),
        ({"X": np.zeros((32, 3, 32, 2), np.uint8), "y": [[1], [2]]}, "must hold X of bytes"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2]]}, "must hold X of bytes"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1]]}, "must hold y of 2 labels 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": [[0]]}, "must hold y of 1 labels 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": "3"}, "must hold y of 1 labels 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.nan}, "y of 1 labels 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": csc_array([[3]])}, "lacks the variable y"),
    ],
)
def test_svhn_refuses_other_contents(
    content: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    savemat(tmp_path / "test_32x32.mat", content)
    with pytest.raises(ValueError, match=sentence):
        read_svhn(tmp_path / "test_32x32.mat")


def test_a_missing_scipy_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ValueError, match=r"needs scipy: pip install '\.\[svhn\]'"):
        read_svhn(tmp_path / "test_32x32.mat")


# affNIST


@pytest.mark.parametrize("zipped", [False, True])
def test_affnist_reads_images_upright(zipped: bool, tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (6, 1, 40, 40)).astype(np.uint8)
    labels = np.arange(6, dtype=np.uint8)
    path = tmp_path / "test.mat"
    path.write_bytes(dataset_files.pack_affnist(images, labels))
    if zipped:
        with zipfile.ZipFile(tmp_path / "test.mat.zip", "w") as archive:
            archive.write(path, "test.mat")
        path = tmp_path / "test.mat.zip"
    read_images, read_labels = read_affnist(path)
    assert_array_equal(read_images, images)
    assert_array_equal(read_labels, labels)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            {"image": np.zeros((1600, 2), np.uint8)},
            "must hold affNISTdata with image and label_int",
        ),
        ({"image": np.zeros((1599, 2), np.uint8), "label_int": [[1, 2]]}, r"bytes \(1600, N\)"),
        ({"image": np.zeros((1600, 2), np.uint8), "label_int": [[1]]}, "2 images but 1 labels"),
        ({"image": np.zeros((1600, 1), np.uint8), "label_int": [[77]]}, "label_int of labels 0 to"),
        ({"image": np.zeros((1600, 1), np.uint8), "label_int": "7"}, "label_int of labels 0 to 9"),
    ],
)
def test_affnist_refuses_other_contents(
    record: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    savemat(tmp_path / "test.mat", {"affNISTdata": record})
    with pytest.raises(ValueError, match=sentence):
        read_affnist(tmp_path / "test.mat")


def test_affnist_refuses_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "test.mat.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(ValueError, match=r"must hold one \.mat file, got 0"):
        read_affnist(tmp_path / "test.mat.zip")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_affnist_refuses_a_damaged_zip(compression: int, tmp_path: Path) -> None:
    path = tmp_path / "test.mat.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("test.mat", RNG.bytes(500))
    data = bytearray(path.read_bytes())
    data[100] ^= 255
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"test\.mat\.zip is truncated or damaged"):
        read_affnist(path)


# smallNORB


@pytest.mark.parametrize("zipped", [False, True])
def test_norb_reads_halved_pairs_and_categories(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsnet.data.readers._BLOCK", 3)  # seven images in blocks of three
    pairs = RNG.integers(0, 256, (7, 2, 6, 4)).astype(np.uint8)
    categories = np.array([0, 1, 2, 3, 4, 0, 1], dtype=np.int32)
    dat, cat = (
        dataset_files.write_norb(tmp_path / "dat.mat", pairs),
        dataset_files.write_norb(tmp_path / "cat.mat", categories),
    )
    if zipped:
        dat, cat = dataset_files.gzip_file(dat), dataset_files.gzip_file(cat)
    images = read_norb_images(dat)
    assert images.shape == (7, 2, 3, 2)
    for pair, image in zip(pairs.astype(int), images, strict=True):
        for channel in range(2):
            for row in range(3):
                for column in range(2):
                    four = pair[channel, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    assert image[channel, row, column] == (four.sum() + 2) // 4
    assert_array_equal(read_norb_labels(cat), categories)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data[:-1], "is truncated"),
        (lambda data: data[:10], "is truncated"),
        (lambda data: data + b"x", "is too long"),
        (lambda data: data[3::-1] + data[4:], "has its bytes swapped"),
        (lambda data: b"\x54" + data[1:], "magic number 1e3d4c55, got 1e3d4c54"),
        (lambda data: data[:4] + b"\x03" + data[5:], "must have 4 dimensions, got 3"),
        (lambda data: data[:12] + b"\x01" + data[13:], "must hold stereo pairs of even size"),
        (lambda data: data[:8] + b"\xff\xff\xff\x7f" + data[12:], "header promises|is truncated"),
        (lambda data: data[:16] + b"\xfe\xff\xff\x7f" * 2 + data[24:], "header promises"),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "header promises"),
        (lambda data: data[:8] + bytes(4) + data[12:], "is too long"),
        (lambda data: data[:16] + bytes(4) + data[20:], "is too long"),
    ],
)
def test_norb_refuses_a_wrong_file(change: object, sentence: str, tmp_path: Path) -> None:
    path = dataset_files.write_norb(tmp_path / "dat.mat", np.zeros((3, 2, 4, 6), dtype=np.uint8))
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        read_norb_images(path)


def test_norb_refuses_unknown_categories(tmp_path: Path) -> None:
    path = dataset_files.write_norb(tmp_path / "cat.mat", np.array([0, 5], dtype=np.int32))
    with pytest.raises(ValueError, match="has categories outside 0 to 4"):
        read_norb_labels(path)


def test_norb_refuses_a_broken_gzip(tmp_path: Path) -> None:
    pairs = np.zeros((3, 2, 4, 6), dtype=np.uint8)
    path = dataset_files.gzip_file(dataset_files.write_norb(tmp_path / "dat.mat", pairs))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is truncated or damaged"):
        read_norb_images(path)
