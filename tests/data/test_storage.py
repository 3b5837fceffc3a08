import hashlib
import os
import subprocess
import sys
import warnings
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from capsnet.data.storage import (
    MNIST_MD5,
    _load_mnist_file,
    find_data_dir,
    find_part,
    load_mnist,
    require_part,
)


def test_all_four_mnist_files_are_the_published_ones(data_dir: Path) -> None:
    load_mnist("train")
    load_mnist("test")
    for name, md5 in MNIST_MD5.items():
        assert hashlib.md5((data_dir / "mnist" / name).read_bytes()).hexdigest() == md5


@pytest.mark.parametrize(
    ("split", "first", "histogram"),
    [
        (
            "train",
            [5, 0, 4, 1, 9],
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        ),
        ("test", [7, 2, 1, 0, 4], [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
    ],
)
def test_mnist_has_its_known_labels(split: str, first: list[int], histogram: list[int]) -> None:
    digits, labels = load_mnist(split)
    assert digits.shape == (sum(histogram), 1, 28, 28)
    assert labels[:5].tolist() == first
    assert np.bincount(labels).tolist() == histogram


def test_mnist_is_mapped_not_read() -> None:
    digits, _ = load_mnist("test")
    assert isinstance(digits, np.memmap)
    assert not digits.flags.writeable


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5_000)
        file.write(b"damaged")


def cut(path: Path) -> None:
    os.truncate(path, 5_000)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [damage, cut, empty, Path.unlink])
def test_a_damaged_cache_is_unpacked_again(
    harm: object, tmp_path: Path, mnist_test: tuple[np.ndarray, np.ndarray]
) -> None:
    (tmp_path / "mnist").mkdir()
    load_mnist("test", tmp_path)
    harmed = {}
    for path in sorted((tmp_path / "mnist").iterdir()):
        harm(path)  # type: ignore[operator]
        harmed[path] = path.read_bytes() if path.exists() else b""
    with warnings.catch_warnings(record=True, action="always") as caught:
        digits, labels = load_mnist("test", tmp_path)
    assert_array_equal(digits, mnist_test[0])
    assert_array_equal(labels, mnist_test[1])
    # What was there may be all that the user has.
    kept = {path: content for path, content in harmed.items() if content}
    assert [str(each.message) for each in caught] == [
        f"{path} is not MNIST's: it is {path.name}.old-1 now" for path in kept
    ]
    for path, content in kept.items():
        assert path.with_name(f"{path.name}.old-1").read_bytes() == content


def test_mnist_needs_no_disk(
    tmp_path: Path, mnist_test: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder can be made here")
    monkeypatch.setenv("CAPSNET_DATA", str(blocked))
    digits, labels = load_mnist("test")
    assert_array_equal(digits, mnist_test[0])
    assert_array_equal(labels, mnist_test[1])


@pytest.mark.parametrize("name", [".", "mistyped"])
def test_a_given_folder_without_a_place_for_it_is_left_alone(name: str, tmp_path: Path) -> None:
    assert load_mnist("test", tmp_path / name)[1][:5].tolist() == [7, 2, 1, 0, 4]
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MNIST_MD5, "t10k-images-idx3-ubyte", "0" * 32)
    with pytest.raises(OSError, match="the package's own t10k-images-idx3-ubyte is damaged"):
        load_mnist("test", tmp_path)
    assert not (tmp_path / "mnist").exists()


def test_processes_that_start_at_once_do_not_collide(tmp_path: Path) -> None:
    code = "from capsnet.data.storage import load_mnist as load; print(*load('test')[1][:5])"
    there = {**os.environ, "CAPSNET_DATA": str(tmp_path)}
    children = [
        subprocess.Popen([sys.executable, "-c", code], env=there, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [child.communicate()[0].strip() for child in children] == ["7 2 1 0 4"] * 2
    names = sorted(path.name for path in (tmp_path / "mnist").iterdir())
    assert names == ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


@pytest.mark.parametrize("place", [10, 2000])
def test_a_packed_file_that_cannot_be_unpacked_is_named(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "t10k-labels-idx1-ubyte"
    packed = bytearray(files("capsnet.data").joinpath("files", f"{name}.xz").read_bytes())
    packed[place] ^= 1
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / f"{name}.xz").write_bytes(packed)
    monkeypatch.setattr("capsnet.data.storage.resources.files", lambda package: tmp_path)
    with pytest.raises(OSError, match=f"the package's own {name} is damaged; install"):
        _load_mnist_file(name, 1, tmp_path)


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"CAPSNET_DATA": "/given"}, "/given"),
        ("linux", {"XDG_CACHE_HOME": "/cache"}, "/cache/capsnet"),
        ("linux", {}, "/home/me/.cache/capsnet"),
        ("darwin", {"XDG_CACHE_HOME": "/cache"}, "/home/me/Library/Caches/capsnet"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/capsnet"),
    ],
)
def test_data_dir_follows_the_platform(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CAPSNET_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", platform)
    assert find_data_dir() == Path(expected)
    assert find_data_dir(Path("/mine")) == Path("/mine")


def test_a_home_that_nobody_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no home folder for ~nobody9/x; name the data"):
        find_data_dir(Path("~nobody9/x"))
    monkeypatch.setenv("CAPSNET_DATA", "~nobody9")
    with pytest.raises(ValueError, match="there is no home folder for ~nobody9; name the data"):
        find_data_dir()


def test_a_part_is_found_in_its_folder_or_beside(tmp_path: Path) -> None:
    assert find_part("svhn", "test", tmp_path) is None
    beside = tmp_path / "test_32x32.mat"
    beside.touch()
    assert find_part("svhn", "test", tmp_path) == beside
    (tmp_path / "svhn").mkdir()
    inside = tmp_path / "svhn" / "test_32x32.mat"
    inside.touch()
    assert find_part("svhn", "test", tmp_path) == inside
    beside.write_bytes(b"not empty")
    assert find_part("svhn", "test", tmp_path) == beside


def test_files_of_mnist_are_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    name = "t10k-images-idx3-ubyte"
    (tmp_path / name).write_bytes(b"digits")
    assert find_part("fashion-mnist", name, tmp_path) is None
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / name).write_bytes(b"clothes")
    assert find_part("fashion-mnist", name, tmp_path) == tmp_path / "fashion-mnist" / name


def test_a_missing_part_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        require_part("fashion-mnist", "t10k-images-idx3-ubyte", tmp_path)
    assert str(caught.value) == (
        f"fashion-mnist is not complete in {tmp_path / 'fashion-mnist'}: "
        f"run `capsnet data get fashion-mnist --data-dir {tmp_path}`, "
        "or put t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz there"
    )
