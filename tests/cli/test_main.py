import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from capsnet.cli import app, describe_os_error, main
from capsnet.experiments.catalogue import EXPERIMENTS
from capsnet.training import PRESETS


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_help_imports_neither_torch_nor_any_command() -> None:
    program = (
        "import sys; from capsnet.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "bad = {'torch', 'matplotlib', 'fastapi', 'onnx', 'scipy', 'capsnet.cli.train'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "train" in done.stdout


@pytest.mark.parametrize("name", [name for name in app if not name.startswith("-")])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    extras = {"serve": "fastapi", "export": "onnx"}
    if name in extras and importlib.util.find_spec(extras[name]) is None:
        pytest.skip(f"{extras[name]} is not installed")
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"capsnet {name}" in shown
    python = re.findall(r"\bNone\b|`|\w\(\)|\w\[\w", shown)
    assert not python, "help is for people who need not know Python"


def test_help_of_reproduce_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reproduce", "--help") == 0
    words = re.findall(r"[\w-]+", capsys.readouterr().out)
    assert set(EXPERIMENTS) <= set(words)


def test_help_of_train_names_every_preset_and_tells_of_resuming(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "--help") == 0
    shown = capsys.readouterr().out
    assert set(PRESETS) <= set(re.findall(r"[\w-]+", shown))
    assert "--resume goes on from there, also after a crash" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train"], "train needs a preset; capsnet train --help tells which"),
        (["export"], "export needs a run; capsnet export --help tells which"),
        (["train", "mnist", "--epochs"], "--epochs requires an argument"),
        (["export", "a", "--format", "b"], 'Choose from: "onnx", "torch-export", "safetensors"'),
        (["train", "minst"], "unknown preset 'minst'; did you mean 'mnist'?"),
        (["train", "mnist", "--epoch", "3"], "Unknown option: --epoch. Did you mean --epochs?"),
        (["train", "mnist", "--epochs", "many"], "--epochs: must be a whole number, got 'many'"),
        (["train", "mnist", "--num-iterations", "2.5"], "must be a whole number, got '2.5'"),
        (["reproduce", "fig4", "--digits", "1", "--digits", "2.0"], "--digits: must be a whole"),
        (["data", "show", "mnist", "--rows", "1.5"], "--rows: must be a whole number"),
        (["evaluate", "a", "--batch-size", "0.5"], "--batch-size: must be a whole number"),
        (["train", "mnist", "--schedule", "fast"], 'Choose from: "cosine", "paper"'),
        (["train", "mnist", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["train", "mnist", "--dataset", "mnits"], "unknown dataset 'mnits'"),
        (["train", "mnist", "--config", "nowhere.toml"], "nowhere.toml: No such file"),
        (["evaluate"], "evaluate needs a run, a weights file or shipped weights"),
        (["evaluate", "runs/nowhere"], "nowhere is not there"),
        (["predict", ""], "no word of a command may be empty"),
        (["train", "mnist", "--out="], "no word of a command may be empty"),
    ],
)
def test_mistake_is_answered_by_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_annotation_checks: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert shown.err.startswith("capsnet: ")
    assert len(shown.err.splitlines()) == 1


def test_memory_and_products_are_chosen_once_a_command_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("capsnet.cli.keep_memory", lambda: chosen.append("memory"))
    monkeypatch.setattr("capsnet.cli.prefer_onednn", lambda: chosen.append("products"))
    assert run("list") == 0
    assert sorted(chosen) == ["memory", "products"]


def test_failure_and_interruption_have_their_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, status in (
        (FloatingPointError("the loss became nan"), 1),
        (KeyboardInterrupt(), 130),
        (OSError("disk\nfull"), 2),
        (MemoryError(), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 2),
        (InductorError(InvalidCxxCompiler(), None), 2),
    ):

        def fail(*arguments: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr("capsnet.cli._run", fail)
        assert run("list") == status
        assert run("train") == status
    shown = capsys.readouterr().err
    assert "capsnet: disk full\n" in shown
    assert shown.count("capsnet: there is not enough memory\n") == 2
    assert shown.count("not enough memory; smaller batches need less (--batch-size)\n") == 2
    assert "torch.compile failed, go on without --compile: InvalidCxxCompiler: No working" in shown
    assert len(shown.splitlines()) == 12


def test_reader_that_goes_away_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run("list") == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)
    assert run("data", "list") == 0
    assert run("data", "get", "mnist") == 0
    assert run("none") == 2


def test_refusal_of_the_system_names_the_file() -> None:
    assert describe_os_error(PermissionError(13, "Permission denied", "/x")) == (
        "/x: Permission denied"
    )
    assert describe_os_error(OSError("plain words")) == "plain words"


def test_programming_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("capsnet.cli._run", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["list"])
