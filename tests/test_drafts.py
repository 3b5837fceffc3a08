import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsnet.drafts import write_atomically


def test_a_killed_writer_leaves_the_good_file_in_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"good")
    code = (
        "import os, sys, time; from pathlib import Path; from capsnet import drafts; "
        "os.fsync = lambda number: (print('written', flush=True), time.sleep(60)); "
        "drafts.write_atomically(Path(sys.argv[1]), b'new' * 100_000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert path.read_bytes() == b"good"
    write_atomically(path, b"newer ", b"still")
    assert path.read_bytes() == b"newer still"


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []
