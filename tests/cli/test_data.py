import hashlib
import http.server
import json
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import dataset_files
import numpy as np
import pytest
from PIL import Image

from capsnet.cli import main
from capsnet.data.sources import SOURCES, RemoteFile, Source

CONTENT = b"house numbers" * 1000


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server of two files, for which SVHN's are taken."""
    served = tmp_path / "served"
    served.mkdir()
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (served / name).write_bytes(CONTENT)
    handler = partial(QuietHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def offer_svhn(monkeypatch: pytest.MonkeyPatch, address: str, sha256: str) -> None:
    files = tuple(
        RemoteFile(name, len(CONTENT), sha256, (f"{address}/{name}",))
        for name in ("train_32x32.mat", "test_32x32.mat")
    )
    monkeypatch.setitem(SOURCES, "svhn", Source("http://example.org", "free", files))


def test_list_shows_every_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "list", "--data-dir", str(tmp_path)) == 0
    text = capsys.readouterr().out
    for words in (
        f"Datasets in {tmp_path} ",
        "mnist          built in",
        "multimnist     made",
        "cifar10        missing",
        "folder         yours",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ):
        assert words in text


def test_list_says_what_is_there_and_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = dataset_files.write_cifar10(tmp_path / "cifar10", python=False, archive=False)
    (tmp_path / "train_32x32.mat").write_bytes(bytes(100))
    (tmp_path / "test.mat").write_bytes(bytes(10))
    assert run("data", "list", "--data-dir", str(tmp_path), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["data_dir"] == str(tmp_path)
    states = {state["name"]: state for state in record["datasets"]}
    assert states["cifar10"]["state"] == "here"
    assert states["cifar10"]["num_bytes"] == 6 * 4 * 3073
    assert states["cifar10"]["paths"] == [str(path) for path in sorted(batches.iterdir())]
    assert states["svhn"]["state"] == "incomplete"
    assert states["affnist"]["state"] == "here"
    assert states["smallnorb"]["state"] == "missing"
    assert states["mnist"]["terms"] == "CC BY-SA 3.0"
    assert 9e6 < states["mnist"]["num_bytes"] < 10e6


def test_what_is_empty_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / name).touch()
    batches = dataset_files.write_cifar10(tmp_path, python=True, archive=False)
    (batches / "data_batch_3").write_bytes(b"")
    assert run("data", "list", "--data-dir", str(tmp_path), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    states = {state["name"]: state["state"] for state in record["datasets"]}
    assert (states["cifar10"], states["svhn"]) == ("incomplete", "missing")


def test_the_environment_names_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path / "mine"))
    assert run("data", "list") == 0
    assert f"Datasets in {tmp_path / 'mine'} " in capsys.readouterr().out


def test_get_fetches_and_verifies(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer_svhn(monkeypatch, address, hashlib.sha256(CONTENT).hexdigest())
    assert run("data", "get", "svhn", "--data-dir", str(tmp_path), "--json") == 0
    shown = capsys.readouterr()
    (state,) = json.loads(shown.out)
    assert state["state"] == "here"
    assert state["num_bytes"] == 2 * len(CONTENT)
    assert shown.err == f"svhn is in {tmp_path / 'svhn'}, verified (free)\n"
    assert (tmp_path / "svhn" / "test_32x32.mat").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["a[/b]", "a[bold]"])
def test_a_folder_is_named_as_it_is(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    offer_svhn(monkeypatch, address, hashlib.sha256(CONTENT).hexdigest())
    assert run("data", "get", "svhn", "--data-dir", str(tmp_path / name)) == 0
    said = capsys.readouterr().err
    assert said == f"svhn is in {tmp_path / name / 'svhn'}, verified (free)\n"


def test_a_long_download_tells_the_time_left_without_a_terminal(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("capsnet.progress.PATIENCE", -1.0)
    offer_svhn(monkeypatch, address, hashlib.sha256(CONTENT).hexdigest())
    assert run("data", "get", "svhn", "--data-dir", str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert re.search(r"train_32x32\.mat: fetched 1,024 of 13,000 bytes, \d+ s left\n", said)


def test_get_leaves_alone_what_is_there_in_another_form_or_place(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer_svhn(monkeypatch, address, hashlib.sha256(CONTENT).hexdigest())
    batches = dataset_files.write_cifar10(tmp_path, python=False, archive=False)
    (tmp_path / "train_32x32.mat").write_bytes(b"the user's own")
    assert run("data", "get", "cifar10", "svhn", "--data-dir", str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert f"tar.gz is not fetched: {batches / 'data_batch_1.bin'} is there already" in said
    assert f"train_32x32.mat is not fetched: {tmp_path / 'train_32x32.mat'} is there" in said
    assert [path.name for path in (tmp_path / "svhn").iterdir()] == ["test_32x32.mat"]


def test_a_stopped_get_leaves_nothing_half_done(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_svhn(monkeypatch, address, hashlib.sha256(CONTENT).hexdigest())
    folder = tmp_path / "svhn"

    def stop(path: Path) -> str:
        assert len(list(folder.iterdir())) == 1
        signal.raise_signal(signal.SIGTERM)
        return "never"

    monkeypatch.setattr("capsnet.data.sources.file_digest", stop)
    assert run("data", "get", "svhn", "--data-dir", str(tmp_path)) == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_get_refuses_a_wrong_checksum_with_exit_code_2(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer_svhn(monkeypatch, address, "0" * 64)
    assert run("data", "get", "svhn", "--data-dir", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert f"{address}/train_32x32.mat sent a file with a wrong checksum; it was removed" in said
    assert said.strip().endswith(
        "capsnet: no address delivered train_32x32.mat; fetch train_32x32.mat, test_32x32.mat in "
        f"another way (http://example.org) and put them into {tmp_path / 'svhn'}"
    )
    assert list((tmp_path / "svhn").iterdir()) == []


def test_get_has_nothing_to_do_for_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "get", "mnist", "multimnist") == 0
    assert capsys.readouterr().err.splitlines() == [
        "mnist needs no download: it is built in",
        "multimnist needs no download: it is made",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get"], "capsnet: data get needs the name of a dataset: fashion-mnist, "),
        (["get", "cifar"], "capsnet: unknown dataset 'cifar'; did you mean 'cifar10'? (known: "),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("data", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert len(said.splitlines()) == 1


def test_show_draws_a_sheet_of_any_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("data", "show", "affnist", "--rows", "2", "--columns", "5") == 0
    said = "10 images of affNIST-style, regenerated from MNIST (test) are in affnist.png\n"
    assert capsys.readouterr().out == said
    with Image.open("affnist.png") as sheet:
        assert sheet.size == (5 * 42 + 2, 2 * 42 + 2)
        assert np.asarray(sheet).max() > 200
    assert run("data", "show", "affnist") == 2
    said = "capsnet: affnist.png is there already; --out affnist.png replaces it\n"
    assert capsys.readouterr().err == said
    for name in ("red", "blue"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 20), name).save(tmp_path / "own" / name / f"{number}.png")
    arguments = ["--data-dir", "own", "--split", "train", "--augmented", "--out", "own.png"]
    assert run("data", "show", "folder", *arguments) == 0
    with Image.open("own.png") as sheet:
        assert sheet.mode == "RGB"


def test_the_sheet_in_the_documentation_is_the_one_the_command_draws(tmp_path: Path) -> None:
    drawn = tmp_path / "affnist.png"
    assert run("data", "show", "affnist", "--out", str(drawn)) == 0
    documented = Path(__file__).parents[2] / "docs" / "affnist.png"
    with Image.open(drawn) as one, Image.open(documented) as other:
        # A grey level or two may go either way on another machine's arithmetic.
        assert np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["minst"], "unknown dataset 'minst'; did you mean 'mnist'?"),
        (["mnist", "--rows", "0"], "a sheet needs at least one row and column, got 0 and 16"),
        (["mnist", "--columns", "99999"], "a sheet holds at most 10000 images, got 8 × 99999"),
        (["folder"], "dataset 'folder' needs data_dir"),
        (["folder", "--data-dir", "/nowhere"], "a folder of images must exist, got /nowhere"),
        (["cifar10", "--data-dir", "/nowhere"], "cifar10 is not complete in /nowhere/cifar10"),
    ],
)
def test_show_names_mistakes(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("data", "show", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"capsnet: {sentence}")


def write_bad_file(folder: Path, name: str) -> None:
    """One file of the dataset that is not what it should be."""
    if name == "folder":
        for label in ("cat", "dog"):
            (folder / label).mkdir(parents=True)
            for number in (1, 2):
                (folder / label / f"{number}.png").write_text("no image")
        return
    images = dataset_files.write_idx(folder / "images", np.zeros((9, 28, 28), dtype=np.uint8))
    swapped = images.read_bytes()[3::-1] + images.read_bytes()[4:]
    bad = {
        "fashion-mnist": ("fashion-mnist/t10k-images-idx3-ubyte", swapped),
        "cifar10": ("cifar-10-binary.tar.gz", b"half an archive"),
        "smallnorb": ("smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat", bytes(30)),
        "svhn": ("test_32x32.mat", b"no MATLAB file"),
        "affnist": ("test.mat", b""),
    }
    file, content = bad[name]
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fashion-mnist", "t10k-images-idx3-ubyte has its bytes swapped"),
        ("cifar10", "cifar-10-binary.tar.gz is truncated or no tar archive"),
        ("smallnorb", "testing-dat.mat must start with the magic number 1e3d4c55, got 00000000"),
        ("svhn", "test_32x32.mat is truncated or no MATLAB file"),
        ("affnist", "test.mat is truncated or no MATLAB file"),
        ("folder", "cat/1.png is no image that can be read"),
    ],
)
def test_a_bad_file_is_one_sentence_and_exit_code_2(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bad_file(tmp_path, name)
    assert run("data", "show", name, "--data-dir", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("capsnet: ")
    assert sentence in said
    assert len(said.splitlines()) == 1
