"""Readers of the files that the datasets' authors publish.

Images come back as bytes (N, C, H, W), labels as int64 (N,). Nothing in a file is ever executed.
"""

from __future__ import annotations

import gzip
import io
import math
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped, UInt8

from capsnet.checks import missing_library

CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_TEST = ("test_batch",)
_CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue planes
_NORB_BYTES, _NORB_INTS = 0x1E3D4C55, 0x1E3D4C54  # magic numbers of its binary-matrix format
_BLOCK = 1024  # images read at once where they are reduced on the way


def open_plain_or_gzipped(path: Path) -> io.BufferedIOBase:
    """The file for reading, unzipped on the way when it starts like a gzip file."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if gzipped else path.open("rb")


def fill_exactly(
    file: io.BufferedIOBase, array: Shaped[np.ndarray, ...], path: Path, *, last: bool = True
) -> None:
    """Reads the next bytes of the file into the array, with nothing after the `last` of them."""
    view = array.reshape(-1).view(np.uint8).data
    filled = spare = 0
    try:
        while filled < len(view) and (count := file.readinto(view[filled:])):
            filled += count
        spare = len(file.read(1)) if last else 0
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if filled < len(view):
        raise ValueError(f"{path} is truncated: {len(view) - filled} bytes of data are missing")
    if spare:
        raise ValueError(f"{path} is too long: it has more data than its header says")


def read_idx(path: Path, num_dims: int) -> UInt8[np.ndarray, ...]:
    """The array in an IDX file of bytes, MNIST's format; a plain file is memory-mapped.

    Args:
        path: the file, plain or gzipped.
        num_dims: 3 for images, 1 for labels.
    """
    magic = bytes((0, 0, 8, num_dims))
    with open_plain_or_gzipped(path) as file:
        header = np.zeros(4 + 4 * num_dims, dtype=np.uint8)
        fill_exactly(file, header, path, last=False)
        if header[:4].tobytes() == magic[::-1]:
            raise ValueError(f"{path} has its bytes swapped: an IDX file is big-endian")
        if header[:4].tobytes() != magic:
            raise ValueError(
                f"{path} must start with the IDX magic number {magic.hex()}, "
                f"got {header[:4].tobytes().hex()}"
            )
        shape = tuple(int(extent) for extent in header[4:].view(">u4"))
        if isinstance(file, gzip.GzipFile):
            array = _allocate(shape, path)
            fill_exactly(file, array, path)
            return array
    _check_size(path, len(header) + math.prod(shape))
    return np.memmap(path, dtype=np.uint8, mode="r", offset=len(header), shape=shape)


def _allocate(shape: tuple[int, ...], path: Path, dtype: str = "uint8") -> Shaped[np.ndarray, ...]:
    """Room for what a header promises, which a damaged one may do beyond all measure."""
    try:
        return np.empty(shape, dtype=dtype)
    except (MemoryError, ValueError):  # more than there is, more than can be, or less than nothing
        raise ValueError(f"{path} is damaged: its header promises {shape} values") from None


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        raise ValueError(f"{path} is {fault}: it must have {expected} bytes, got {size}")


def read_cifar10(
    path: Path, split: str
) -> tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]:
    """CIFAR-10 in its binary or its Python version.

    Args:
        path: the archive (.tar.gz) or the folder of its batches.
        split: `test`, or anything else for the five training batches.
    """
    stems = CIFAR_TEST if split == "test" else CIFAR_TRAIN
    batches: dict[str, UInt8[np.ndarray, "n 3073"]] = {}
    for name, data in _members(path, stems):
        records = _binary_records if name.endswith(".bin") else _pickled_records
        batches[name.removesuffix(".bin")] = records(data, path / name)
    if missing := [stem for stem in stems if stem not in batches]:
        raise ValueError(f"{path} lacks {', '.join(missing)} of CIFAR-10")
    counts = [len(batches[stem]) for stem in stems]
    images = np.empty((sum(counts), 3, 32, 32), dtype=np.uint8)
    labels = np.empty(sum(counts), dtype=np.int64)
    stop = 0
    for stem, count in zip(stems, counts, strict=True):
        start, stop = stop, stop + count
        records_of_batch = batches.pop(stem)  # freed here: never more than twice the set in memory
        labels[start:stop] = records_of_batch[:, 0]
        images[start:stop] = records_of_batch[:, 1:].reshape(count, 3, 32, 32)
    if labels.max() > 9:
        raise ValueError(f"{path} has a label of {labels.max()}; those of CIFAR-10 are 0 to 9")
    return images, labels


def _members(path: Path, stems: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """The wanted batches in a folder or an archive, whichever of the two versions it holds."""
    wanted = {stem + ending for stem in stems for ending in ("", ".bin")}
    if path.is_dir():
        for name in sorted(wanted):
            if (path / name).is_file():
                yield name, (path / name).read_bytes()
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if (name := Path(member.name).name) in wanted and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None  # a regular file, as asked above
                    yield name, file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise ValueError(f"{path} is truncated or no tar archive: {error}") from error


def _binary_records(data: bytes, path: Path) -> UInt8[np.ndarray, "n 3073"]:
    if not data or len(data) % _CIFAR_RECORD:
        raise ValueError(
            f"{path} must have a multiple of {_CIFAR_RECORD} bytes, got {len(data)}: "
            "it is truncated or no CIFAR-10 batch"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, _CIFAR_RECORD)


def _pickled_records(data: bytes, path: Path) -> UInt8[np.ndarray, "n 3073"]:
    try:
        content = read_pickled_dict(data)
        labels, array = content["labels"], content["data"]
        # What the pickle would have NumPy call: ndarray.__setstate__(version, shape, dtype, …).
        _, (count, width), _, _, pixels = array["state"]  # type: ignore[index]
        flat = np.frombuffer(pixels.encode("latin-1"), dtype=np.uint8)
        images = flat.reshape(count, width)
        if width != _CIFAR_RECORD - 1:
            raise ValueError(f"its images have {width} values")
        if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
            raise ValueError("its labels are no list of numbers")  # nested ones may take for ever
        column = np.array(labels, dtype=np.uint8).reshape(count, 1)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is truncated or no CIFAR-10 batch: {error}") from error
    return np.concatenate((column, images), axis=1)


def read_pickled_dict(data: bytes) -> dict[str, object]:
    r"""The dict in a pickle of the few kinds that CIFAR-10's Python version is made of.

    An interpreter of just these opcodes that never imports or calls anything: an object, such as
    an array, comes back as the dict of what it would have been built from.

    >>> read_pickled_dict(b"\x80\x02}U\x06labels]K\x07as.")
    {'labels': [7]}
    """
    stack: list[object] = []
    marks: list[int] = []
    memo: dict[object, object] = {}

    def pop_to_mark() -> list[object]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SHORT_BINSTRING" | "BINSTRING" | "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case "NONE" | "NEWFALSE" | "NEWTRUE":
                stack.append({"NONE": None, "NEWFALSE": False, "NEWTRUE": True}[opcode.name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(opcode.name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "APPEND" | "APPENDS":
                items = pop_to_mark() if opcode.name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)  # type: ignore[attr-defined]
            case "SETITEM" | "SETITEMS":
                pairs = pop_to_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))  # type: ignore[attr-defined]
            case "GLOBAL":
                stack.append(argument)  # a name, never looked up
            case "REDUCE":
                arguments = stack.pop()
                stack[-1] = {"call": stack[-1], "arguments": arguments}
            case "BUILD":
                state = stack.pop()
                stack[-1]["state"] = state  # type: ignore[index]
            case _:
                raise ValueError(f"it has the pickle opcode {opcode.name}, which none of them has")
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise ValueError("it does not hold one dict")
    return stack[0]


def read_svhn(path: Path) -> tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]:
    """SVHN's cropped digits from their .mat file, in which digit 0 has label 10."""
    content = read_mat(path, ("X", "y"))
    images, labels = content["X"], content["y"]
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise ValueError(f"{path} must hold X of bytes (32, 32, 3, N), got {images.shape}")
    if labels.size != images.shape[3] or not _is_within(labels, 1, 10):
        raise ValueError(f"{path} must hold y of {images.shape[3]} labels 1 to 10")
    pixels = images.T  # (N, C, W, H), contiguous, as MATLAB stores the first axis innermost
    for start in range(0, len(pixels), _BLOCK):  # in place: a copy would double the memory
        block = pixels[start : start + _BLOCK]
        block[...] = block.swapaxes(2, 3).copy()  # (n, C, H, W)
    return pixels, labels.ravel().astype(np.int64) % 10


def read_affnist(path: Path) -> tuple[UInt8[np.ndarray, "N 1 40 40"], Int64[np.ndarray, " N"]]:
    """AffNIST's digits from a .mat file of theirs or the .zip of it."""
    unzipped = _unzip_mat(path) if zipfile.is_zipfile(path) else None
    content = read_mat(path, ("affNISTdata",), unzipped)
    try:
        record = content["affNISTdata"]
        images, labels = record["image"][0, 0], record["label_int"][0, 0]
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path} must hold affNISTdata with image and label_int") from error
    if images.ndim != 2 or images.shape[0] != 1600 or images.dtype != np.uint8:
        raise ValueError(f"{path} must hold images of bytes (1600, N), got {images.shape}")
    if labels.size != images.shape[1]:
        raise ValueError(f"{path} has {images.shape[1]} images but {labels.size} labels")
    if not _is_within(labels, 0, 9):
        raise ValueError(f"{path} must hold label_int of labels 0 to 9")
    return images.T.reshape(-1, 1, 40, 40), labels.ravel().astype(np.int64)


def _is_within(labels: Shaped[np.ndarray, ...], first: int, last: int) -> bool:
    """Whether these are numbers, each one of the labels."""
    return labels.dtype.kind in "iuf" and bool(np.isin(labels, range(first, last + 1)).all())


def _unzip_mat(path: Path) -> io.BytesIO:
    """The one .mat file in an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".mat")]
            if len(names) == 1:
                return io.BytesIO(archive.read(names[0]))
    except Exception as error:  # zipfile raises a dozen kinds, from zlib.error to RuntimeError
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    raise ValueError(f"{path} must hold one .mat file, got {len(names)}")


def read_mat(
    path: Path, names: tuple[str, ...], file: io.BytesIO | None = None
) -> dict[str, Shaped[np.ndarray, ...]]:
    """The named variables of a MATLAB file up to version 7, by scipy."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise missing_library("reading .mat files", "scipy", "svhn") from error
    try:
        content = loadmat(file or path, variable_names=names)
    except (FileNotFoundError, PermissionError, MemoryError):
        raise  # the file is not to blame
    except Exception as error:  # scipy raises a dozen kinds, from zlib.error to NotImplementedError
        raise ValueError(f"{path} is truncated or no MATLAB file: {error}") from error
    if missing := [name for name in names if not isinstance(content.get(name), np.ndarray)]:
        raise ValueError(f"{path} lacks the variable {', '.join(missing)}")
    return {name: content[name] for name in names}


def read_norb_labels(path: Path) -> Int64[np.ndarray, " N"]:
    """The categories in a smallNORB `-cat.mat` file, plain or gzipped."""
    with open_plain_or_gzipped(path) as file:
        shape = _read_norb_header(file, path, _NORB_INTS, num_dims=1)
        labels = _allocate(shape, path, "<i4")
        fill_exactly(file, labels, path)
    if labels.size and not 0 <= labels.min() <= labels.max() <= 4:
        raise ValueError(f"{path} has categories outside 0 to 4")
    return labels.astype(np.int64)


def read_norb_images(path: Path) -> UInt8[np.ndarray, "N 2 H W"]:
    """The stereo pairs in a smallNORB `-dat.mat` file, reduced to half their size (§7).

    Differs from the paper: it does not say how 96×96 became 48×48; here each 2×2 is averaged.
    """
    with open_plain_or_gzipped(path) as file:
        shape = _read_norb_header(file, path, _NORB_BYTES, num_dims=4)
        count, num_channels, height, width = shape
        if num_channels != 2 or height % 2 or width % 2:
            raise ValueError(f"{path} must hold stereo pairs of even size, got {shape}")
        reduced = _allocate((count, num_channels, height // 2, width // 2), path)
        for start in range(0, max(count, 1), _BLOCK):  # of none at all, too, the end is looked at
            stop = min(start + _BLOCK, count)
            block = _allocate((stop - start, *shape[1:]), path)
            fill_exactly(file, block, path, last=stop == count)
            total = np.full((stop - start, *reduced.shape[1:]), 2, dtype=np.uint16)  # to round
            for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
                total += block[:, :, row::2, column::2]
            reduced[start:stop] = total >> 2
    return reduced


def _read_norb_header(
    file: io.BufferedIOBase, path: Path, magic: int, num_dims: int
) -> tuple[int, ...]:
    # Three extents are written at least, however few dimensions there are.
    header = np.zeros(2 + max(3, num_dims), dtype="<i4")
    fill_exactly(file, header, path, last=False)
    found = int(header[0])
    if found == struct.unpack("<i", struct.pack(">i", magic))[0]:
        raise ValueError(f"{path} has its bytes swapped: a NORB file is little-endian")
    if found != magic:
        raise ValueError(
            f"{path} must start with the magic number {magic:08x}, got {found & 0xFFFFFFFF:08x}"
        )
    if header[1] != num_dims:
        raise ValueError(f"{path} must have {num_dims} dimensions, got {header[1]}")
    return tuple(int(extent) for extent in header[2 : 2 + num_dims])
