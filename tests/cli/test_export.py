"""`capsnet export` writes a checked file, and names each mistake."""

import os
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from capsnet import CapsNet, CapsNetConfig
from capsnet.cli import main
from capsnet.models.weights import load_weights, save_weights

COLOUR = CapsNetConfig(
    image_channels=3, image_height=24, image_width=24, conv_channels=2, primary_types=2
)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_status:
        main(["export", *map(str, arguments)])
    return int(exit_status.value.code or 0)


def test_a_run_becomes_a_file_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-run").mkdir()
    record = {"config": {"data": {"name": "cifar10"}}}
    save_weights(tmp_path / "my-run" / "weights.safetensors", CapsNet(COLOUR), record)
    monkeypatch.chdir(tmp_path)
    assert run("my-run", "--format", "torch-export") == 0
    assert "largest differences from PyTorch on 20 MNIST test digits" in capsys.readouterr().out
    before = (tmp_path / "my-run.pt2").read_bytes()
    assert run("my-run", "--format", "torch-export") == 2
    assert "my-run.pt2 exists; --overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "my-run.pt2").read_bytes() == before
    assert run("my-run", "--format", "torch-export", "--out", "my-run") == 2
    assert "--out must be a file, but my-run is a folder" in capsys.readouterr().err
    (tmp_path / "my-run.pt2").write_text("something else")
    assert run("my-run", "--format", "torch-export", "--overwrite") == 0
    program = torch.export.load(tmp_path / "my-run.pt2").module()
    assert program(torch.rand(1, 3, 24, 24))[0].shape == (1, 10)


@pytest.mark.parametrize(("format", "suffix"), [("onnx", ".onnx"), ("torch-export", ".pt2")])
def test_a_file_that_cannot_be_written_is_one_sentence(
    format: str,
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_weights(tmp_path / "a.safetensors", CapsNet(COLOUR), {})
    monkeypatch.setattr("capsnet.machine.secrets.token_hex", lambda count: "7")
    (tmp_path / f".a{suffix}.{os.getpid()}-7.partial").mkdir()  # in the way of the draft
    assert (
        run(tmp_path / "a.safetensors", "--format", format, "--out", tmp_path / f"a{suffix}") == 2
    )
    assert capsys.readouterr().err.splitlines()[-1].endswith("Is a directory")
    assert not (tmp_path / f"a{suffix}").exists()


def test_weights_in_half_precision_keep_their_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = CapsNet(COLOUR)
    save_weights(tmp_path / "whole.safetensors", model, {"seed": 7})
    half = tmp_path / "a half.safetensors"
    assert run(tmp_path / "whole.safetensors", "--format", "safetensors", "--out", half) == 0
    assert f"capsnet evaluate '{half}' tests it" in capsys.readouterr().out
    loaded, record = load_weights(half)
    assert record["seed"] == 7
    assert half.stat().st_size < 0.6 * (tmp_path / "whole.safetensors").stat().st_size
    for name, value in loaded.state_dict().items():
        assert_close(value, model.state_dict()[name].half().float(), rtol=0, atol=0)


def test_each_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_weights(tmp_path / "a.safetensors", CapsNet(COLOUR), {})
    mistakes = [
        (("nothing",), "unknown weights 'nothing'"),
        ((tmp_path,), "is no run"),
        ((tmp_path / "a.safetensors", "--out", tmp_path / "no" / "a.onnx"), "must be a folder"),
        ((tmp_path / "a.safetensors", "--format", "tflite"), "tflite"),
        (
            (tmp_path / "a.safetensors", "--format", "safetensors", "--out", tmp_path / "a.bin"),
            "a file of safetensors must end in .safetensors, got a.bin",
        ),
    ]
    for arguments, sentence in mistakes:
        assert run(*arguments) == 2
        assert sentence in capsys.readouterr().err
