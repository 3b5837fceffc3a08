import errno
import functools
import hashlib
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsnet.data.sources import SOURCES, RemoteFile, Source, download
from capsnet.data.storage import FORMS

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves /good, /bad (other bytes), /short (the connection drops), /stall; else 404."""

    requests: list[str]

    def __init__(self, requests: list[str], *arguments: object) -> None:
        self.requests = requests
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        kind = self.path.split("/")[1]
        if kind not in ("good", "bad", "short", "stall"):
            self.send_error(404)
            return
        content = CONTENT[::-1] if kind == "bad" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if kind in ("good", "bad") else content[: len(content) // 2])
        if kind == "stall":
            self.wfile.flush()
            threading.Event().wait(60)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server:
    def __init__(self, address: str, requests: list[str]) -> None:
        self.address, self.requests = address, requests

    def offer(
        self, monkeypatch: pytest.MonkeyPatch, *kinds: str, names: tuple[str, ...] = ("file.bin",)
    ) -> None:
        """Makes `cifar10` a dataset of these files, each at the given kinds of address."""
        files = tuple(
            RemoteFile(
                name,
                len(CONTENT),
                SHA256,
                tuple(kind if "://" in kind else f"{self.address}/{kind}/{name}" for kind in kinds),
            )
            for name in names
        )
        source = Source("http://example.org/home", "free", files)
        monkeypatch.setitem(SOURCES, "cifar10", source)


@pytest.fixture
def server() -> Iterator[Server]:
    requests: list[str] = []
    handler = functools.partial(Handler, requests)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield Server(f"http://127.0.0.1:{running.server_port}", requests)
        running.shutdown()
        thread.join()


def unused_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_mirror_is_tried_until_one_delivers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, unused_address(), "absent", "bad", "short", "good")
    said: list[str] = []
    assert download("cifar10", tmp_path, report=said.append) == [tmp_path / "cifar10" / "file.bin"]
    assert (tmp_path / "cifar10" / "file.bin").read_bytes() == CONTENT
    assert names_in(tmp_path / "cifar10") == ["file.bin"]
    assert "could not be reached" in said[0]
    assert "404" in said[1]
    assert said[2] == f"{server.address}/bad/file.bin sent a file with a wrong checksum; " + (
        "it was removed"
    )
    assert len(said) == 4


def test_a_verified_file_is_not_fetched_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "good")
    download("cifar10", tmp_path)
    download("cifar10", tmp_path)
    assert server.requests == ["/good/file.bin"]


def test_a_file_of_other_content_is_replaced_and_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "good")
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "file.bin").write_bytes(CONTENT[:-1] + b"x")
    said: list[str] = []
    download("cifar10", tmp_path, report=said.append)
    assert (tmp_path / "cifar10" / "file.bin").read_bytes() == CONTENT
    assert "is not the file that its authors published" in said[0]


def test_without_any_address_the_sentence_names_all_files_and_their_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, unused_address(), names=("one.bin", "two.bin"))
    with pytest.raises(OSError, match=r"no address delivered one\.bin") as caught:
        download("cifar10", tmp_path, report=lambda sentence: None)
    assert str(caught.value) == (
        "no address delivered one.bin; fetch one.bin, two.bin in another way "
        f"(http://example.org/home) and put them into {tmp_path / 'cifar10'}"
    )


def test_a_failed_download_keeps_what_was_there(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "bad")
    (tmp_path / "cifar10").mkdir()
    path = tmp_path / "cifar10" / "file.bin"
    path.write_bytes(b"the user's own")
    with pytest.raises(OSError, match="no address delivered"):
        download("cifar10", tmp_path, report=lambda sentence: None)
    assert path.read_bytes() == b"the user's own"
    assert names_in(tmp_path / "cifar10") == ["file.bin"]


def test_a_killed_download_never_takes_the_files_place(server: Server, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from capsnet.data import sources as s; "
        "file = s.RemoteFile('file.bin', 1, '0' * 64, (sys.argv[1],)); "
        "s.SOURCES['cifar10'] = s.Source('', '', (file,)); "
        "s.download('cifar10', Path(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", code, f"{server.address}/stall/file.bin", str(tmp_path)]
    child = subprocess.Popen(arguments)
    folder = tmp_path / "cifar10"
    while child.poll() is None and not (
        folder.is_dir() and any(path.stat().st_size for path in folder.iterdir())
    ):
        threading.Event().wait(0.05)
    assert child.poll() is None  # in the midst of it
    child.send_signal(signal.SIGKILL)
    child.wait()
    [draft] = folder.iterdir()
    assert draft.name != "file.bin"


def test_drafts_of_killed_downloads_are_removed_and_those_under_way_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "good")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    old, new = ".file.bin.1-a.partial", ".file.bin.2-b.partial"
    for name, age in ((old, 4000), (new, 10), ("my.partial", 4000)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    download("cifar10", tmp_path)
    assert names_in(folder) == [new, "file.bin", "my.partial"]


def test_a_full_disk_names_the_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "good")

    def refuse(path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("capsnet.data.sources.file_digest", refuse)
    with pytest.raises(OSError, match="No space left on device") as caught:
        download("cifar10", tmp_path)
    assert caught.value.filename == str(tmp_path / "cifar10" / "file.bin")
    assert names_in(tmp_path / "cifar10") == []


def test_progress_reaches_the_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.offer(monkeypatch, "good")

    class Bar:
        total = 0
        done = 0
        closed = False

        def update(self, amount: int) -> None:
            self.done += amount

        def reset(self) -> None:
            self.done = 0

        def close(self) -> None:
            self.closed = True

    bar = Bar()
    download("cifar10", tmp_path, make_progress=lambda file: bar)
    assert (bar.total, bar.done, bar.closed) == (len(CONTENT), len(CONTENT), True)


def test_the_table_of_sources_is_whole() -> None:
    for name, source in SOURCES.items():
        assert source.homepage.startswith("http")
        for file in source.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert all(address.endswith(f"/{file.name}") for address in file.addresses)
            assert len(set(file.addresses)) == len(file.addresses) >= 2
        published = {file.name for file in source.files}
        for forms in FORMS[name].values():
            assert published & set(forms), "what is fetched must be what is read"


def test_importing_data_does_not_import_what_only_downloads_need() -> None:
    heavy = {"pooch", "scipy", "PIL", "requests"}
    code = f"import sys, capsnet.data; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
