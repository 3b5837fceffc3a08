"""Writers of each dataset's true file format, so that readers meet files they did not write."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from scipy.io import savemat

Array = np.ndarray


def write_idx(path: Path, array: Array) -> Path:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())
    return path


def gzip_file(path: Path) -> Path:
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return target


def pack_cifar_binary(images: Array, labels: Array) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
    )


def pack_cifar_python(images: Array, labels: Array) -> bytes:
    """The opcodes that Python 2's cPickle wrote for the authors, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    count = struct.pack("<H", len(labels))
    pixels = images.tobytes()
    return b"".join(
        (
            b"\x80\x02}q\x01(",
            *(text(b"batch_label"), b"q\x02", text(b"training batch 1 of 5"), b"q\x03"),
            *(text(b"labels"), b"q\x04]q\x05("),
            *(b"K" + bytes([label]) for label in labels),
            b"e",
            *(text(b"data"), b"q\x06"),
            b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85",
            *(text(b"b"), b"\x87Rq\x09(K\x01M", count, b"M\x00\x0c\x86"),
            *(b"cnumpy\ndtype\nq\x0a", text(b"u1"), b"K\x00K\x01\x87Rq\x0b(K\x03"),
            *(text(b"|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"),
            *(b"T", struct.pack("<I", len(pixels)), pixels, b"tb"),
            *(text(b"filenames"), b"q\x0c]q\x0d("),
            *(text(b"picture_%d.png" % number) for number in range(len(labels))),
            b"eu.",
        )
    )


def write_cifar10(root: Path, *, python: bool, archive: bool, per_batch: int = 4) -> Path:
    """A whole CIFAR-10 of six small batches, label = image number mod 10."""
    folder = root / ("cifar-10-batches-py" if python else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    for number, stem in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        images = np.random.default_rng(number).integers(0, 256, (per_batch, 3, 32, 32))
        labels = (np.arange(per_batch) + number * per_batch) % 10
        pack = pack_cifar_python if python else pack_cifar_binary
        ending = "" if python else ".bin"
        data = pack(images.astype(np.uint8), labels)
        (folder / f"{stem}{ending}").write_bytes(data)
    if not archive:
        return folder
    path = root / f"cifar-10-{'python' if python else 'binary'}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir(), reverse=True):  # in no helpful order
            tar.add(file, f"{folder.name}/{file.name}")
            file.unlink()
    folder.rmdir()
    return path


def write_norb(path: Path, array: Array) -> Path:
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[array.dtype.name]
    extents = [*array.shape, *[1] * (3 - array.ndim)]
    header = struct.pack(f"<ii{len(extents)}i", magic, array.ndim, *extents)
    path.write_bytes(header + array.tobytes())
    return path


def write_svhn(path: Path, images: Array, labels: Array, *, compressed: bool = True) -> Path:
    stored = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    content = {"X": images.transpose(2, 3, 1, 0), "y": stored}
    savemat(path, content, do_compression=compressed)
    return path


def pack_affnist(images: Array, labels: Array) -> bytes:
    file = io.BytesIO()
    content = {"image": images.reshape(len(images), 1600).T, "label_int": labels[None]}
    savemat(file, {"affNISTdata": content}, do_compression=True)
    return file.getvalue()
