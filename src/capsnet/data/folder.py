"""A user's own images: a folder with one subfolder per class."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from capsnet.data.storage import find_data_dir
from capsnet.machine import write_atomically
from capsnet.progress import choose_reporter

#: What is opened: plain pictures, no document formats that run other programs.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
_IGNORED = {"thumbs.db", "desktop.ini"}  # what file managers leave behind, besides dot files
_GREY = {"1", "L", "LA", "La", "I", "F"}  # of Pillow's modes; a palette has colours
_DIGEST_SIZE = 32
_NUM_NAMED = 5  # files that an error names besides the first
_PREPARATION = 2  # to be counted up when `fit_image` makes other bytes of a file: old caches end

# The images of the last folder whose cache could not be written, under the cache's name.
_uncached: dict[str, UInt8[np.ndarray, "N C H W"]] = {}


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder and how they are divided."""

    class_names: tuple[str, ...]
    """The subfolders' names in alphabetical order."""
    paths: tuple[Path, ...]
    """All image files, by split if there are folders for it, class and name."""
    labels: Int64[np.ndarray, " N"]
    """The class of each."""
    in_test: Int64[np.ndarray, " N"]
    """1 for an image of the test set, 0 for one of the training set."""


def list_folder(folder: Path, *, test_fraction: float, seed: int) -> ImageFolder:
    """What images a folder holds, and which of them are for testing.

    Args:
        folder: has one subfolder per class, or `train` and `test` that have.
        test_fraction: without `train` and `test`, this part of each class is for testing.
        seed: decides which.
    """
    if not folder.is_dir():
        raise ValueError(f"a folder of images must exist, got {folder}")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    subfolders = _list_subfolders(folder)
    names = {subfolder.name for subfolder in subfolders}
    if not names & {"train", "test"}:
        files = _list_classes(folder, subfolders)
        in_test = [
            number
            for name, paths in files.items()
            for number in _choose_test(folder / name, paths, test_fraction, seed)
        ]
        return _gather([files], in_test)
    if names != {"train", "test"}:
        raise ValueError(
            f"{folder} must hold either the folders train and test or one folder per class, "
            f"got {', '.join(sorted(names))}"
        )
    parts = [_list_classes(part, _list_subfolders(part)) for part in subfolders[::-1]]
    if odd := sorted(set(parts[0]) ^ set(parts[1])):
        raise ValueError(f"train and test of {folder} must have the same classes; {odd[0]} differs")
    return _gather(
        parts, [part for part in (0, 1) for paths in parts[part].values() for _ in paths]
    )


def find_form(contents: ImageFolder) -> tuple[int, int]:
    """Rows and columns for a folder's images, and 1 channel if all are grey, 3 otherwise.

    The size is the commonest longer side, but no less and no more than the network is made for.
    """
    sides: Counter[int] = Counter()
    is_grey = True
    for path in contents.paths:
        try:
            with _open_image(path) as image:  # its header alone
                sides[max(image.size)] += 1
                is_grey &= image.mode.partition(";")[0] in _GREY
        except ValueError:
            # Not this one alone: reading them all makes one error of all that is wrong.
            room = np.empty((len(contents.paths), 1, 8, 8), dtype=np.uint8)
            _read_images(contents.paths, room)
            raise
    commonest = max(sides, key=lambda side: (sides[side], side))
    return min(max(commonest, 28), 48), 1 if is_grey else 3


def load_folder(
    folder: Path, contents: ImageFolder, *, size: int, num_channels: int
) -> UInt8[np.ndarray, "N C H W"]:
    """All images of a folder, resized; read once, then mapped from a cache.

    Each is scaled to fit into a square and centred on black, so that nothing is cut or distorted.
    The cache is made anew when a file is added, removed or changed.

    Args:
        folder: where the images are.
        contents: what `list_folder` found there.
        size: rows and columns of the result.
        num_channels: 3 for colour, 1 for grey.
    """
    if not 8 <= size <= 512:
        raise ValueError(f"image_size must be between 8 and 512, got {size}")
    if num_channels not in (1, 3):
        raise ValueError(f"image_channels must be 3 for colour or 1 for grey, got {num_channels}")
    shape = (len(contents.paths), num_channels, size, size)
    place = f"{folder.resolve()}/{size}x{num_channels}"
    # By names within the folder, which may itself be named in several ways.
    files = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in contents.paths
    ]
    listing = json.dumps([_PREPARATION, files])
    # One cache for each folder and form; its name's second half is what it was made from.
    cache = find_data_dir() / "folders" / f"{_digest(place)}-{_digest(listing)}.bytes"
    cached = _open_cache(cache, shape)
    if cached is not None:
        return cached
    if cache.name in _uncached:
        return _uncached[cache.name]
    images = np.empty(shape, dtype=np.uint8)
    _read_images(contents.paths, images)
    try:
        _write_cache(cache, images)
    except OSError:  # a read-only or full disk: the images then live in memory
        _uncached.clear()
        _uncached[cache.name] = images
    return images


def _read_images(paths: tuple[Path, ...], images: UInt8[np.ndarray, "N C H W"]) -> None:
    """Fills `images`, and tells how far it is if that takes long."""
    count, num_channels, size, _ = images.shape
    mistakes = _Mistakes()
    with closing(choose_reporter("read")) as reporter:
        for number, path in enumerate(paths):
            reporter.evaluated(number, count)
            with mistakes.noted(path):
                images[number] = _read_image(path, size, num_channels)
        reporter.evaluated(count, count)
    mistakes.refuse()


class _Mistakes:
    """Files that cannot be read: all are looked at before one error names them."""

    def __init__(self) -> None:
        self.first = ""
        self.others: list[Path] = []

    @contextmanager
    def noted(self, path: Path) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if self.first:
                self.others.append(path)
            self.first = self.first or str(error)

    def refuse(self) -> None:
        """Raises a ValueError if there were any."""
        if not self.first:
            return
        named = ", ".join(str(path) for path in self.others[:_NUM_NAMED])
        more = f", … ({len(self.others) + 1} in all)" if len(self.others) > _NUM_NAMED else ""
        verb = "is" if len(self.others) == 1 else "are"
        raise ValueError(f"{self.first}; nor {verb} {named}{more}" if named else self.first)


def _list_subfolders(folder: Path) -> list[Path]:
    entries = _visible(folder)
    for entry in entries:
        if not entry.is_dir():
            raise ValueError(f"{folder} must hold only folders, got the file {entry.name}")
        try:
            str(entry).encode()
        except UnicodeEncodeError:  # no record of a run could name the class
            raise ValueError(f"names of folders must be UTF-8, got {entry}") from None
    return entries


def _visible(folder: Path) -> list[Path]:
    return sorted(
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(".") and entry.name.lower() not in _IGNORED
    )


def _list_classes(folder: Path, subfolders: list[Path]) -> dict[str, list[Path]]:
    if len(subfolders) < 2:
        found = subfolders[0].name if subfolders else "none"
        raise ValueError(
            f"{folder} must hold a folder for each of two classes or more, got {found}"
        )
    classes = {subfolder.name: _visible(subfolder) for subfolder in subfolders}
    for name, paths in classes.items():
        if not paths:
            raise ValueError(f"every class must have images, but {folder / name} is empty")
        for path in paths:
            if path.is_dir():
                raise ValueError(f"a class folder must hold only images, got the folder {path}")
            if not path.is_file():
                raise ValueError(f"{path} is no file, or a link to nowhere")
    return classes


def _choose_test(folder: Path, paths: list[Path], fraction: float, seed: int) -> list[int]:
    """1 for test and 0 for training, for each image of a class; at least one of either.

    The order of the names' digests decides: one image more or less moves at most one other.
    """
    if len(paths) < 2:
        raise ValueError(
            f"a class needs two images or more to be divided into training and test, "
            f"but {folder} has {len(paths)}"
        )
    num_test = min(max(round(len(paths) * fraction), 1), len(paths) - 1)
    by_digest = sorted(paths, key=lambda path: _digest(f"{seed}/{path.name}"))
    for_test = set(by_digest[:num_test])
    return [int(path in for_test) for path in paths]


def _gather(parts: list[dict[str, list[Path]]], in_test: list[int]) -> ImageFolder:
    labels = [label for part in parts for label, paths in enumerate(part.values()) for _ in paths]
    return ImageFolder(
        class_names=tuple(parts[0]),
        paths=tuple(path for part in parts for paths in part.values() for path in paths),
        labels=np.array(labels, dtype=np.int64),
        in_test=np.array(in_test, dtype=np.int64),
    )


def _read_image(path: Path, size: int, num_channels: int) -> UInt8[np.ndarray, "C H W"]:
    with _open_image(path) as image:
        return fit_image(turn_upright(image), (num_channels, size, size))


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    """Opens a file; a ValueError says what is wrong with it, also when it is decoded."""
    try:
        # A large photograph or odd metadata is no matter; far too many pixels are an error.
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except UnidentifiedImageError:
        why = f"damaged, or none of {', '.join(FORMATS)}"
        raise ValueError(f"{path} is no image that can be read: {why}") from None
    except Exception as error:  # Pillow's decoders raise a dozen kinds, down to struct.error
        raise ValueError(f"{path} is no image that can be read: {error}") from error


def turn_upright(image: Image.Image) -> Image.Image:
    """Decodes an image and turns it as its metadata says; garbage there is no matter."""
    image.load()
    try:
        ImageOps.exif_transpose(image, in_place=True)  # a copy would not know its format
    except MemoryError:
        raise
    except Exception:  # Pillow raises what it likes, once all that can be turned is
        pass
    return image


def fit_image(image: Image.Image, shape: tuple[int, int, int]) -> UInt8[np.ndarray, "C H W"]:
    """Returns a picture scaled into (C, H, W), centred on black; nothing is cut or distorted."""
    channels, height, width = shape
    if image.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would clip, not scale
        image = as_bytes(image)
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image.alpha_composite(transparent)
    scaled = ImageOps.pad(image.convert("RGB" if channels == 3 else "L"), (width, height))
    pixels = np.asarray(scaled, dtype=np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)


def as_bytes(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits or more in 8: white is 65535, or 1 or 255 if values stay within."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
    is_deep_pgm = (image.mode, image.format) == ("I", "PPM")  # 16 bits in Pillow's mode of 32
    if image.mode.startswith("I;16") or is_deep_pgm or values.max() > 255:
        white = 65535
    else:
        white = 1 if image.mode == "F" and values.max() <= 1 else 255
    return Image.fromarray((values.clip(0, white) * (255 / white)).round().astype(np.uint8))


def _digest(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=8).hexdigest()


def _digest_images(images: UInt8[np.ndarray, "N C H W"]) -> bytes:
    return hashlib.blake2b(images.data, digest_size=_DIGEST_SIZE).digest()


def _open_cache(cache: Path, shape: tuple[int, ...]) -> UInt8[np.ndarray, "N C H W"] | None:
    """The images in a cache file, which ends in a digest of them; None unless it is whole."""
    count = math.prod(shape)
    try:
        content = np.memmap(cache, dtype=np.uint8, mode="r")
    except (OSError, ValueError):  # not there, or empty
        return None
    if len(content) != count + _DIGEST_SIZE:
        return None
    images = content[:count].reshape(shape)
    return images if _digest_images(images) == content[count:].tobytes() else None


def _write_cache(cache: Path, images: UInt8[np.ndarray, "N C H W"]) -> None:
    write_atomically(cache, images.data, _digest_images(images))
    place = cache.name.partition("-")[0]
    for older in cache.parent.glob(f"{place}-*.bytes"):
        if older != cache:
            older.unlink(missing_ok=True)
