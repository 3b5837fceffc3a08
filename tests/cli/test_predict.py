"""`capsnet predict` on real files: every size, mode and polarity, and every mistake."""

import csv
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shipped import require_weights

from capsnet import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.cli import main
from capsnet.data import DataConfig, load_split
from capsnet.models.weights import save_weights
from capsnet.playground.pictures import to_bytes

NUM_DIGITS = 30


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_status:
        main(["predict", *map(str, arguments)])
    return int(exit_status.value.code or 0)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(4)
    config = CapsNetConfig(conv_channels=3, primary_types=2, primary_dim=5, output_dim=4)
    path = tmp_path / "small.safetensors"
    save_weights(path, CapsNet(config), {"class_names": [f"n{number}" for number in range(10)]})
    return path


def test_digits_are_right_in_every_size_mode_and_polarity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_weights("mnist")
    batch = load_split(DataConfig("mnist"), "test").test_batch(np.arange(NUM_DIGITS))
    smooth = Image.Resampling.BICUBIC
    for number, levels in enumerate(to_bytes(batch.images[:, 0].numpy())):
        digit = Image.fromarray(levels)
        page = Image.new("L", (130, 90), 245)
        page.paste(Image.fromarray(255 - levels).resize((60, 60), smooth), (55, 20))
        alpha = Image.new("LA", (28, 28), 0)
        alpha.putalpha(digit)
        variants = {
            "plain": digit,
            "large": digit.resize((280, 280), smooth),
            "tiny": digit.resize((20, 20), Image.Resampling.BOX),
            "inverted": Image.fromarray(255 - levels).convert("RGB"),
            "page": page.convert("CMYK"),
            "transparent": alpha.resize((84, 84), smooth),
            "deep": Image.fromarray(levels.astype(np.uint16) * 257),
        }
        for name, image in variants.items():
            (tmp_path / name).mkdir(exist_ok=True)
            suffix = "jpg" if name == "page" else "png"
            image.save(tmp_path / name / f"{number:02d}.{suffix}")
    labels = [str(label) for label in batch.labels[:, 0].tolist()]
    for name in variants:
        assert run(tmp_path / name, "--format", "json") == 0
        answers = json.loads(capsys.readouterr().out)
        wrong = sum(
            answer["classes"] != [label] for answer, label in zip(answers, labels, strict=True)
        )
        assert wrong <= (1 if name in ("plain", "inverted", "deep") else 3), name
        dark = name in ("inverted", "page", "transparent")
        expected = "dark on light" if dark else "light on dark"
        assert {answer["polarity"] for answer in answers} == {expected}


def test_json_and_csv_say_the_same(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = Image.new("L", (40, 50), 255)
    image.paste(0, (10, 5, 15, 40))
    image.save(tmp_path / "a, b.png")
    common = (tmp_path / "a, b.png", "--weights", weights, "--num-labels", 2)
    drawn = (*common, "--reconstructions", tmp_path / "seen")
    assert run(*drawn, "--format", "json") == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert run(*drawn, "--format", "csv", "--overwrite") == 0
    [row] = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["reconstruction"] == answer["reconstruction"]
    assert row["file"] == answer["file"] == str(tmp_path / "a, b.png")
    assert row["classes"] == "; ".join(answer["classes"])
    assert row["polarity"] == answer["polarity"] == "dark on light"
    assert {name: float(row[name]) for name in answer["lengths"]} == answer["lengths"]
    lengths = answer["lengths"]
    assert answer["classes"] == sorted(lengths, key=lambda name: -lengths[name])[:2]
    assert run(*common) == 0
    first, second = answer["classes"]
    assert f"{first} ({lengths[first]:.2f}), {second}" in capsys.readouterr().out


def test_reconstructions_are_written_beside_what_was_seen(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    long = "ü" * 125  # as long as a name may be
    for name in ("b.png", "a.png", f"{long}.png"):
        Image.new("L", (28, 28)).save(tmp_path / "in" / name)
    Image.new("L", (28, 28)).save(tmp_path / "in" / "deeper" / "c.gif")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    out = tmp_path / "out"
    assert run(tmp_path / "in", "--weights", weights, "--reconstructions", out) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert sorted(path.name for path in out.iterdir()) == [
        "00000-a.png",
        "00001-b.png",
        "00002-c.png",
        f"00003-{long[:100]}.png",
    ]
    with Image.open(out / "00000-a.png") as picture:
        assert picture.size == (56, 28)


def test_reconstructions_of_an_earlier_call_are_not_replaced_unasked(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "00000-a.png").write_text("of an earlier call")
    drawn = (tmp_path / "a.png", "--weights", weights, "--reconstructions", tmp_path / "out")
    assert run(*drawn) == 2
    shown = capsys.readouterr()
    assert shown.err == f"capsnet: {tmp_path / 'out'} has some already; --overwrite replaces them\n"
    assert shown.out == ""
    assert (tmp_path / "out" / "00000-a.png").read_text() == "of an earlier call"
    assert run(*drawn, "--overwrite") == 0
    with Image.open(tmp_path / "out" / "00000-a.png") as picture:
        assert picture.size == (56, 28)


def test_a_long_classification_for_programs_tells_how_far_it_is(
    tmp_path: Path,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("capsnet.progress.PATIENCE", -1.0)
    monkeypatch.setattr("capsnet.cli.predict.BATCH_SIZE", 1)
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    assert run(*[tmp_path / "a.png"] * 3, "--weights", weights, "--json") == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)) == 3
    assert re.search(r"classified 1 of 3 examples, \d+ s left\n", shown.err)


def test_files_may_be_large_and_named_by_any_bytes(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = Image.new("L", (5000, 5100), 255)
    image.paste(0, (2000, 900, 2400, 4000))
    image.save(tmp_path / os.fsdecode("groß ".encode() + b"large \xff.png"))
    assert run(tmp_path, "--weights", weights) == 0
    assert "large \\udcff.png: n" in capsys.readouterr().out
    assert run(tmp_path, "--weights", weights, "--json") == 0
    said = capsys.readouterr().out
    assert said.isascii()  # and so the same JSON whatever the encoding of stdout
    [answer] = json.loads(said)
    assert answer["file"].endswith("groß large \udcff.png")
    assert answer["polarity"] == "dark on light"


def test_baselines_answer_with_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CNNConfig(conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(3,))
    save_weights(tmp_path / "cnn.safetensors", CNN(config), {})
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    assert run(tmp_path / "a.png", "--weights", tmp_path / "cnn.safetensors", "--format=json") == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-3)


def test_baseline_of_two_labels_has_independent_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CNNConfig(conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(3,))
    path = tmp_path / "cnn.safetensors"
    save_weights(path, CNN(config), {"config": {"data": {"name": "multimnist"}}})
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    assert run(tmp_path / "a.png", "--weights", path, "--num-labels", 2, "--json") == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert sum(answer["probabilities"].values()) > 2  # near one half each, untrained


def test_bad_files_are_named_and_the_good_ones_classified(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").write_text("no image")
    image = Image.new("L", (28, 28))
    image.paste(255, (10, 5, 15, 20))
    image.save(tmp_path / "good.png")
    names = [tmp_path / name for name in ("bad.png", "none.png", "good.png")]
    assert run(*names, "--weights", weights) == 2
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path / 'good.png'}: n")
    assert len(said.out.splitlines()) == 1
    missing, bad = said.err.splitlines()
    assert "none.png is not there" in missing
    assert "bad.png: an image must be one of" in bad


def test_a_folder_gives_its_visible_images_and_names_what_is_left_out(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / ".hidden").mkdir(parents=True)
    for name in ("a.png", "b.JFIF", "c.pnm", ".hidden/d.png"):
        form = {".JFIF": "JPEG", ".pnm": "PPM"}.get(Path(name).suffix)
        Image.new("L", (28, 28)).save(tmp_path / "in" / name, format=form)
    for name in ("._a.png", "notes.txt"):
        (tmp_path / "in" / name).write_text("no image")
    assert run(tmp_path / "in", "--weights", weights, "--json") == 0
    said = capsys.readouterr()
    names = [Path(answer["file"]).name for answer in json.loads(said.out)]
    assert names == ["a.png", "b.JFIF", "c.pnm"]
    assert said.err == f"capsnet: left out, by their endings: {tmp_path / 'in' / 'notes.txt'}\n"


def test_blank_image_is_said_to_have_no_ink(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (50, 40), 255).save(tmp_path / "blank.png")
    assert run(tmp_path / "blank.png", "--weights", weights) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"{tmp_path / 'blank.png'}: there is no ink in it; the network answers n"
    )
    assert run(tmp_path / "blank.png", "--weights", weights, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["blank"] is True


def test_nothing_is_decoded_unless_asked_for(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("decoded")

    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    monkeypatch.setattr(CapsNet, "decode", fail)
    assert run(tmp_path / "a.png", "--weights", weights) == 0


def test_each_mistake_is_one_sentence(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "text.png").write_text("no image")
    Image.new("L", (28, 28)).save(tmp_path / "good.png")
    config = CapsNetConfig(conv_channels=2, primary_types=2, decoder=False)
    save_weights(tmp_path / "blind.safetensors", CapsNet(config), {})
    good = tmp_path / "good.png"
    mistakes = [
        ((), "predict needs at least one image or folder"),
        ((tmp_path / "none.png",), "none.png is not there"),
        ((tmp_path / "pipe.png",), "pipe.png is no file"),
        ((tmp_path / "empty",), "holds no images"),
        ((tmp_path / "text.png", "--weights", weights), "text.png: an image must be one of"),
        ((good, "--weights", "minst"), "unknown weights 'minst'"),
        ((good, "--weights", weights, "--json", "--format", "csv"), "contradict each other"),
        ((good, "--weights", weights, "--num-labels", 11), "num_labels must be 1 to 10, got 11"),
        (
            (good, "--weights", tmp_path / "blind.safetensors", "--reconstructions", tmp_path),
            "have no decoder",
        ),
        (
            (good, "--weights", weights, "--reconstructions", good),
            "--reconstructions must be a folder, but",
        ),
    ]
    for arguments, sentence in mistakes:
        assert run(*arguments) == 2
        said = capsys.readouterr()
        assert sentence in said.err
        assert "Traceback" not in said.err
        assert said.out == ""
