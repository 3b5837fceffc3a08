"""Files that appear whole or not at all: whoever looks finds the old one or the new one."""

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".partial"
"""How the names of drafts end."""

_STALE = 3600.0  # seconds after which nobody is writing to a draft any more


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
    """Puts a complete file in place at once, when it is safe on the disk."""
    with draft_of(path) as draft, draft.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
