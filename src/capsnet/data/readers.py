"""Readers of the files that the datasets' authors publish; all return bytes and int64 labels."""

from __future__ import annotations

import gzip
import io
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8


def open_plain_or_gzipped(path: Path) -> io.BufferedIOBase:
    """The file for reading, unzipped on the way when it starts like a gzip file."""
    file = path.open("rb")
    gzipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not gzipped:
        return file
    return gzip.GzipFile(fileobj=file, mode="rb")


def read_idx(path: Path, num_dims: int) -> UInt8[np.ndarray, ...]:
    """The array in an IDX file of bytes, the format of MNIST; a plain file is memory-mapped.

    Args:
        path: the file, plain or gzipped.
        num_dims: 3 for images, 1 for labels.
    """
    with open_plain_or_gzipped(path) as file:
        header = file.read(4 + 4 * num_dims)
        magic = bytes((0, 0, 8, num_dims))
        if header[:4] == magic[::-1]:
            raise ValueError(f"{path} has its bytes swapped; an IDX file is big-endian")
        if header[:4] != magic:
            raise ValueError(
                f"{path} must start with the IDX magic number {magic.hex()}, "
                f"got {header[:4].hex() or 'an empty file'}"
            )
        if len(header) < 4 + 4 * num_dims:
            raise ValueError(f"{path} is truncated: it ends within its header")
        shape = tuple(int(extent) for extent in np.frombuffer(header[4:], dtype=">u4"))
        if isinstance(file, gzip.GzipFile):
            array = np.empty(shape, dtype=np.uint8)
            fill_exactly(file, array, path)
            return array
    check_size(path, len(header) + math.prod(shape))
    return np.memmap(path, dtype=np.uint8, mode="r", offset=len(header), shape=shape)


def fill_exactly(file: io.BufferedIOBase, array: UInt8[np.ndarray, ...], path: Path) -> None:
    """Reads the rest of the file into the array, which it must fill, no more and no less."""
    view = memoryview(array.data).cast("B")
    filled = 0
    try:
        while filled < len(view) and (count := file.readinto(view[filled:])):
            filled += count
        spare = len(file.read(1))
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if filled < len(view):
        raise ValueError(f"{path} is truncated: it has {filled} of {len(view)} bytes of data")
    if spare:
        raise ValueError(f"{path} has more than the {len(view)} bytes of data its header says")


def check_size(path: Path, expected: int) -> None:
    """Raises unless the file has just as many bytes as its format says."""
    size = path.stat().st_size
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise ValueError(f"{path} {fault}: it must have {expected} bytes, got {size}")
