"""What PyTorch does not know of the machine: memory to keep, units to avoid, files to put whole."""

import ctypes
import glob
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

SUFFIX = ".partial"
"""How the names of drafts end."""

_STALE = 3600.0  # seconds after which nobody is writing to a draft any more

# Names of the options in glibc's malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4

# What Linux tells of the processor.
_CPUINFO = Path("/proc/cpuinfo")

# The first CPUID leaf that says how the tiles of Intel's AMX are laid out.
_TILE_LEAF = 0x1D


def keep_memory() -> bool:
    """Tells the C library to keep the memory that tensors free; returns whether it does.

    By default glibc maps every large tensor anew and gives it back afterwards, and the system
    fills each of its pages with zeros when it is first touched: as much work as a training step's
    arithmetic. Call this once, before the first large tensor. The process then holds on to the
    most that it ever used. Without glibc (macOS, Windows, musl) nothing changes.

    >>> keep_memory() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    accepted = [
        library.mallopt(_MMAP_MAX, 0),  # large blocks come from the heap as well,
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1),  # whose free end is never given back,
        library.mallopt(_TOP_PAD, 2**26),  # and which grows by 64 MiB at a time
    ]
    return all(answer == 1 for answer in accepted)


def avoid_broken_tiles(cpuinfo: Path = _CPUINFO) -> bool:
    """Keeps bfloat16 off AMX tiles that nobody can set up; returns whether they are so.

    Some virtual machines show the processor's flags of AMX and hide how its tiles are laid out. The
    library under PyTorch (oneDNN) then lays out none, and the first product in bfloat16 ends the
    process with "Illegal instruction". `import capsnet` calls this, which helps if it comes before
    PyTorch's first product. A limit that is set already stays.

    >>> avoid_broken_tiles(Path("a machine that tells nothing"))
    False
    """
    told = describe_processor(cpuinfo)
    level = told.get("cpuid level", "")
    has_tiles = "amx_tile" in told.get("flags", "").split()
    if not (has_tiles and level.isdecimal() and int(level) < _TILE_LEAF):
        return False
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    return True


def prefer_onednn(cpuinfo: Path = _CPUINFO) -> bool:
    """Lets oneDNN take float32 matrix products where it is faster, for all of PyTorch.

    Returns whether it does. PyTorch gives such products to MKL, which on AMD's processors leaves
    AVX-512 alone and takes twice the time of oneDNN. PyTorch asks oneDNN only if products may be
    rounded to bfloat16, which oneDNN does on Intel's AMX tiles alone; where there are none the
    results have the precision of float32. A product that rounding would spoil is tried first.
    Elsewhere, and before PyTorch 2.9, nothing changes. `torch.get_float32_matmul_precision()` then
    raises, as PyTorch has no word for this setting, and its counterpart to set it takes it back.

    >>> prefer_onednn(Path("a machine that tells nothing"))
    False
    """
    told = describe_processor(cpuinfo)
    flags = told.get("flags", "").split()
    if told.get("vendor_id") != "AuthenticAMD" or "avx512f" not in flags or "amx_tile" in flags:
        return False
    import torch  # takes seconds, and the rest of this file does without

    products = getattr(torch.backends.mkldnn, "matmul", None)
    if products is None or not hasattr(products, "fp32_precision"):
        return False
    before, products.fp32_precision = products.fp32_precision, "bf16"
    number = torch.full((64, 64), 1 + 2**-20, dtype=torch.float32, device="cpu")
    is_exact = torch.equal(number @ torch.eye(64, dtype=torch.float32, device="cpu"), number)
    if not is_exact:
        products.fp32_precision = before
    return is_exact


def describe_processor(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """What the system tells of the first core; nothing where there is no such file."""
    try:
        with cpuinfo.open() as file:
            lines = [line.partition(":") for line in takewhile(str.strip, file)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in lines}


def make_draft(path: Path) -> Path:
    """A name beside a file, of no one else, to write it under; old drafts of it are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for older in path.parent.glob(f".{glob.escape(path.name)}.*{SUFFIX}"):
        with suppress(OSError):  # another process may have removed it
            if time.time() - older.stat().st_mtime > _STALE:
                older.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A draft that takes the file's place when the block ends, and is removed when it fails."""
    draft = make_draft(path)
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):  # a disk that failed has its own error to tell
            draft.unlink(missing_ok=True)


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Puts a complete file in place at once, when it is safe on the disk.

    Whoever looks finds the old one or the new one.
    """
    with draft_of(path) as draft, draft.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    # Its new name, too: what it replaces may be removed next.
    with suppress(OSError):  # not every system opens folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """A checksum of a file's bytes, in hexadecimal digits."""
    new = partial(hashlib.new, algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, new).hexdigest()
