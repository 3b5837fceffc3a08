"""Where datasets are kept: the data folder, the forms in which files lie there, and MNIST."""

from __future__ import annotations

import hashlib
import lzma
import os
import shlex
import sys
import warnings
from importlib import resources
from itertools import count
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from capsnet.data.readers import CIFAR_TEST, CIFAR_TRAIN, read_idx
from capsnet.machine import file_digest, write_atomically

MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_NORB_TRAIN = "smallnorb-5x46789x9x18x6x2x96x96-training"
_NORB_TEST = "smallnorb-5x01235x9x18x6x2x96x96-testing"

# What each dataset is read from: one or more parts, each in any one of some forms.
FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "fashion-mnist": {name: (name, f"{name}.gz") for name in MNIST_MD5},
    "affnist": {"test": ("test.mat", "test.mat.zip")},
    "cifar10": {
        batch: (
            *(f"cifar-10-batches-bin/{batch}.bin", f"cifar-10-batches-py/{batch}"),
            *("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
            *(f"{batch}.bin", batch),
        )
        for batch in (*CIFAR_TRAIN, *CIFAR_TEST)
    },
    "smallnorb": {
        f"{split} {kind}": (f"{stem}-{kind}.mat", f"{stem}-{kind}.mat.gz")
        for split, stem in (("train", _NORB_TRAIN), ("test", _NORB_TEST))
        for kind in ("dat", "cat")
    },
    "svhn": {"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
}


def find_data_dir(data_dir: Path | None = None) -> Path:
    """The folder that holds datasets: the given one, or CAPSNET_DATA, or the platform's cache."""
    chosen = data_dir or os.environ.get("CAPSNET_DATA")
    try:
        return Path(chosen).expanduser() if chosen else _find_cache()
    except RuntimeError:
        raise ValueError(
            f"there is no home folder for {chosen or '~'}; name the data folder in full "
            "by --data-dir or CAPSNET_DATA"
        ) from None


def is_gone(folder: Path) -> bool:
    """Whether a folder is not there; one in a home that nobody has is a mistake of its own."""
    try:
        return not find_data_dir(folder).is_dir()
    except ValueError:
        return False


def _find_cache() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "capsnet"


def find_part(name: str, part: str, data_dir: Path | None) -> Path | None:
    """A part of a dataset in the first form that there is, in DATA/NAME or in DATA itself.

    An empty file, as a copy that failed leaves it, is taken only if there is no other. The files
    of Fashion-MNIST have the names of MNIST's, so only those in DATA/fashion-mnist are taken.
    """
    root = find_data_dir(data_dir)
    folders = (root / name,) if name == "fashion-mnist" else (root / name, root)
    paths = (folder / form for folder in folders for form in FORMS[name][part])
    found = [path for path in paths if path.is_file()]
    return max(found, key=lambda path: path.stat().st_size > 0, default=None)


def require_part(name: str, part: str, data_dir: Path | None) -> Path:
    """Like `find_part`; when nothing is there, the error says what to put where."""
    path = find_part(name, part, data_dir)
    if path is None:
        folder = find_data_dir(data_dir) / name
        option = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
        raise FileNotFoundError(
            f"{name} is not complete in {folder}: run `capsnet data get {name}{option}`, "
            f"or put {' or '.join(FORMS[name][part])} there"
        )
    return path


def load_mnist(
    split: str, data_dir: Path | None = None
) -> tuple[UInt8[np.ndarray, "N 1 28 28"], Int64[np.ndarray, " N"]]:
    """MNIST's digits and labels, from the package itself (§5).

    The IDX files are unpacked once into the data folder and memory-mapped from there; a folder that
    is given must have a subfolder mnist for it, or they live in memory. Their published MD5 is
    checked every time; another file in its place is renamed, with a warning.

    >>> digits, labels = load_mnist("test")
    >>> digits.shape, labels[:5]
    ((10000, 1, 28, 28), array([7, 2, 1, 0, 4]))
    """
    prefix = "t10k" if split == "test" else "train"
    images = _load_mnist_file(f"{prefix}-images-idx3-ubyte", 3, data_dir)
    labels = _load_mnist_file(f"{prefix}-labels-idx1-ubyte", 1, data_dir)
    return images[:, None], labels.astype(np.int64)


def _set_aside(path: Path) -> None:
    """Keeps what is to be replaced, damaged or the user's own, as NAME.old-1 or the next."""
    olds = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
    old = next(old for old in olds if not old.exists())
    os.link(path, old)  # a rename would leave other processes without a file for a moment
    warnings.warn(f"{path} is not MNIST's: it is {old.name} now", stacklevel=2)


def _is_mnist(path: Path) -> bool:
    return path.is_file() and file_digest(path, "md5") == MNIST_MD5[path.name]


def _load_mnist_file(name: str, num_dims: int, data_dir: Path | None) -> UInt8[np.ndarray, ...]:
    path = find_data_dir(data_dir) / "mnist" / name
    if not _is_mnist(path):
        packed = resources.files("capsnet.data").joinpath("files", f"{name}.xz").read_bytes()
        try:
            data = lzma.decompress(packed)
        except lzma.LZMAError:
            data = b""
        if hashlib.md5(data, usedforsecurity=False).hexdigest() != MNIST_MD5[name]:
            raise OSError(f"the package's own {name} is damaged; install capsnet again")
        try:
            if data_dir is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"there is no {path.parent}")  # it may hold other images
            if path.is_file() and path.stat().st_size > 0 and not _is_mnist(path):
                _set_aside(path)
            write_atomically(path, data)
        except OSError:  # nor a read-only or full disk: the data then lives in memory
            header = 4 + 4 * num_dims
            shape = np.frombuffer(data[4:header], dtype=">u4").astype(int)
            return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
    return read_idx(path, num_dims)
