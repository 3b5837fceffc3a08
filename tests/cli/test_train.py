import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from shipped import require_weights
from torch.testing import assert_close

from capsnet import CapsNet, CapsNetConfig
from capsnet.cli import main
from capsnet.models.weights import WEIGHTS, read_tensors, save_weights
from capsnet.training import configure
from capsnet.training.config import to_dict
from capsnet.training.records import list_checkpoints, read_json

SMALL = [
    "--batch-size", "16", "--num-train", "64", "--num-evaluated", "30",
    "--conv-channels", "5", "--primary-types", "2", "--primary-dim", "3", "--output-dim", "4",
    "--no-decoder",
]  # fmt: skip
TINY = ["--epochs", "2", *SMALL]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_train_then_evaluate_gives_the_same_error(capsys: pytest.CaptureFixture[str]) -> None:
    average = ["--average-decay", "0.9"]  # what is evaluated is what is saved
    assert run("train", "mnist", "--seed", "3", *TINY, *average, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert run("evaluate", "runs/mnist-seed3", "--json") == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert evaluation == result["metrics"]["mnist"] | {"class_names": list("0123456789")}
    assert evaluation["num_examples"] == 30


def test_a_finished_run_is_continued_or_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "mnist", *TINY) == 0
    on = ["--out", "on", "--continue-from", "runs/mnist-seed0", *SMALL]
    capsys.readouterr()
    assert run("train", "mnist", *on, "--epochs", "2", "--dry-run") == 2
    assert "runs/mnist-seed0 has 8 steps of 16 behind it" in capsys.readouterr().err
    assert run("train", "mnist", *on, "--epochs", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 12


def test_held_out_digits_are_evaluated_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "mnist", *TINY, "--held-out", "40", "--json") == 0
    metric = json.loads(capsys.readouterr().out)["metrics"]["mnist"]
    arguments = ("evaluate", "runs/mnist-seed0", "--split", "validation", "--json")
    assert run(*arguments) == 0
    assert json.loads(capsys.readouterr().out) == metric | {"class_names": list("0123456789")}
    assert (metric["split"], metric["num_available"]) == ("validation", 40)
    assert run("train", "mnist", *TINY, "--held-out", "30", "--out", "runs/other") == 0
    assert run("evaluate", "runs/mnist-seed0", "runs/other", "--split", "validation") == 2
    sentence = "runs/other held out 30 examples and may have learned from others of the 40 that"
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_closing_lines_say_what_where_and_what_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "mnist", *TINY) == 0
    shown = capsys.readouterr()
    assert "error on MNIST (test) after 8 steps" in shown.out
    assert "(paper: 0.25%, Table 1" in shown.out
    assert "in runs/mnist-seed0; next: capsnet evaluate runs/mnist-seed0" in shown.out
    assert "step 8/8" in shown.err


def test_evaluate_names_the_weights_whose_settings_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"config": {**to_dict(configure("mnist")), "colour": "red"}}
    narrow = CapsNetConfig(conv_channels=4, primary_types=2, decoder=False)
    save_weights(tmp_path / "a.safetensors", CapsNet(narrow), record)
    assert run("evaluate", str(tmp_path / "a.safetensors")) == 2
    assert "a.safetensors has settings of another version: " in capsys.readouterr().err


def test_evaluate_lists_wrong_examples_and_takes_ensembles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in ("0", "1"):
        assert run("train", "mnist", "--seed", seed, *TINY) == 0
    capsys.readouterr()
    assert run("evaluate", "runs/mnist-seed0", "runs/mnist-seed1", "--num-examples", "60") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "spread evenly over 10,000" in lines[0]
    assert " taken for " in lines[1]
    assert lines[-1].endswith("more (--json lists them)")
    assert run("evaluate", "runs/mnist-seed0", "--num-examples", "2000") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("more (--json lists the first 1,000)")
    assert run("evaluate", "runs/mnist-seed0", "--dataset", "mnist-40") == 2
    assert "have shape (1, 40, 40), but the model takes (1, 28, 28)" in capsys.readouterr().err


def test_digits_of_one_s_own_are_trained_on_and_tested_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(10):
        Path("digits", str(number)).mkdir(parents=True)
        for name in (b"a.png", b"caf\xe9.png"):  # of a file system that is not UTF-8
            path = Path("digits", str(number), os.fsdecode(name))
            Image.new("L", (28, 28), 20 * number).save(path)
    own = [
        "--data-dir", "digits", "--test-fraction", "0.5", "--batch-size", "5", "--steps", "1",
        "--evaluate-on", "mnist", "--num-evaluated", "100", *SMALL[6:],
    ]  # fmt: skip
    assert run("train", "folder", *own) == 0
    folders = sorted(path.name for path in Path("digits").iterdir())
    assert folders == list("0123456789")  # MNIST lies elsewhere
    assert run("evaluate", "runs/folder-seed0") == 0
    assert run("train", "mnist", *SMALL, "--steps", "1") == 0
    capsys.readouterr()
    other = ["--dataset", "folder", "--data-dir", "digits"]
    assert run("evaluate", "runs/mnist-seed0", *other) == 0
    assert capsys.readouterr().out.startswith("folder test: ")
    assert run("train", "mnist", "--evaluate-on", "folder", "--out", "other") == 2
    assert "evaluate_on takes no folder of images" in capsys.readouterr().err


def test_wrong_examples_of_own_images_are_named_by_their_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, level in (("cat", 10), ("dog", 200)):
        Path("pets", name).mkdir(parents=True)
        for number in range(50):
            Image.new("L", (28, 28), level + number).save(Path("pets", name, f"{number}.png"))
    own = ["--data-dir", "pets"]
    for flags, form in (([], (28, 1)), (["--image-size", "30", "--image-channels", "3"], (30, 3))):
        assert run("train", "folder", *own, *flags, "--dry-run", *SMALL) == 0
        config = json.loads(capsys.readouterr().out)
        assert (config["data"]["image_size"], config["data"]["image_channels"]) == form
        assert (config["model"]["image_height"], config["model"]["image_channels"]) == form
    assert run("train", "folder", *own, *SMALL, "--steps", "1") == 0
    capsys.readouterr()
    assert run("evaluate", "runs/folder-seed0") == 0
    first = capsys.readouterr().out.splitlines()[1]
    place, _, mistake = first.strip().partition(": ")
    assert mistake in ("cat taken for dog", "dog taken for cat")
    assert Path(place).parent.name == mistake[:3]
    assert Path(place).is_file()
    assert run("evaluate", "runs/folder-seed0", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["class_names"] == ["cat", "dog"]
    assert answer["wrong"][0]["file"] == place
    assert run("train", "mnist", "--dataset", "folder", *own, *SMALL, "--steps", "1") == 0
    assert "paper" not in capsys.readouterr().out  # its error is of other images
    # Each is asked for the images that it learned from itself, whatever the first one did.
    both = ["evaluate", "runs/folder-seed0", "runs/other"]
    for flags, status in ((["--generation-seed", "1"], 2), (["--held-out", "8"], 0)):
        again = ["--out", "runs/other", "--overwrite"]
        assert run("train", "folder", *own, *SMALL, "--steps", "1", *flags, *again) == 0
        capsys.readouterr()
        assert run(*both) == status
        said = capsys.readouterr().err
        assert ("runs/other learned from " in said, "not those" in said) == (status == 2, False)
    Path("pets/dog/new.png").write_bytes(Path("pets/dog/0.png").read_bytes())
    assert run("evaluate", "runs/folder-seed0", "--num-examples", "4") == 0
    warning = "images in pets are not those that runs/folder-seed0 was trained on; some"
    assert warning in capsys.readouterr().err
    Path("pets/dog").rename("pets/wolf")
    assert run("evaluate", "runs/folder-seed0") == 2
    sentence = "the classes of folder are cat, wolf, but the model was trained on cat, dog"
    assert sentence in capsys.readouterr().err
    Path("pets").rename("animals")
    for command in (["evaluate", "runs/folder-seed0"], ["train", "folder", "--resume"]):
        assert run(*command) == 2
        assert "pets; --data-dir says where the data is now" in capsys.readouterr().err


def test_resumed_run_needs_no_settings_but_refuses_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "mnist", *TINY) == 0
    assert run("train", "mnist", *TINY) == 2
    assert run("train", "mnist", "--resume") == 0
    assert run("train", "mnist", "--resume", "--epochs", "5") == 2
    assert "began with epochs = 2, got 5" in capsys.readouterr().err
    assert run("train", "mnist", "--resume", "--epochs", "5", "--dry-run") == 2
    assert "began with epochs = 2, got 5" in capsys.readouterr().err
    assert run("train", "mnist", "--resume", "--steps", "20") == 2
    assert "began without steps, got 20" in capsys.readouterr().err
    assert run("train", "svhn", "--resume", "--out", "runs/mnist-seed0") == 2
    assert "is of preset mnist, got svhn" in capsys.readouterr().err
    assert run("train", "mnist", "--overwrite", *TINY, "--lr", "0.002") == 0
    path = Path("runs/mnist-seed0/config.json")
    assert read_json(path)["learning_rate"] == 0.002
    path.unlink()
    assert run("train", "mnist", "--resume") == 0
    shown = capsys.readouterr().err
    assert "config.json is missing" in shown
    assert "is finished already" in shown


def test_another_dataset_is_looked_for_where_the_run_s_own_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("data").mkdir()
    assert run("train", "mnist", *TINY, "--data-dir", "data") == 0
    Path("data/test.mat").write_bytes(b"the author's")
    assert run("evaluate", "runs/mnist-seed0", "--dataset", "affnist") == 2
    assert "data/test.mat is truncated or no MATLAB file" in capsys.readouterr().err


def test_toml_file_holds_settings_and_flags_come_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = "epochs = 7\nlearning_rate = 0.5\n[data]\nnum_train = 999\n[model]\nbias = true\n"
    Path("settings.toml").write_text(settings)
    assert run("train", "mnist", "--config", "settings.toml", "--epochs", "3", "--dry-run") == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["epochs"], config["learning_rate"]) == (3, 0.5)
    assert config["data"]["num_train"] == 999
    assert config["model"]["bias"] is True
    assert not Path("runs").exists()
    assert run("train", "mnist", "--config", "settings.toml", "--steps", "5", "--dry-run") == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["epochs"], config["steps"]) == (None, 5)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("epochs = ", "settings.toml is not TOML"),
        ("num_iterations = 1", "num_iterations must stand under [model] in settings.toml"),
        ("held_out = 5000", "held_out must stand under [data] in settings.toml"),
        ("epoch = 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("[model]\nnum_iteration = 3", "did you mean 'num_iterations'?"),
        ("[modle]\nbias = true", "unknown setting 'modle'; did you mean 'model'?"),
        ("model = 3", "model must be a table of settings, got 3"),
        ('preset = "svhn"', "preset must be mnist, which is trained, got svhn"),
        ('epochs = "three"', "epochs must be a whole number, got 'three'"),
        (f"learning_rate = 1{'0' * 400}", "learning_rate must be a number, got 10000"),
    ],
)
def test_mistake_in_the_toml_file_is_one_sentence(
    content: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("settings.toml").write_text(content)
    assert run("train", "mnist", "--config", "settings.toml", "--dry-run") == 2
    assert sentence in capsys.readouterr().err


def test_settings_of_the_other_kind_of_model_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "mnist-cnn", "--num-iterations", "2", "--dry-run") == 2
    assert "num_iterations is a setting of a CapsNet" in capsys.readouterr().err
    assert run("train", "mnist", "--dropout", "0.2", "--dry-run") == 2
    assert "dropout is a setting of a CNN" in capsys.readouterr().err


def test_a_size_that_cannot_be_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "mnist-cnn", "--pool", "0", "--dry-run") == 2
    shown = capsys.readouterr().err
    assert "pool must be a whole number of at least 1, got 0" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("numbers", "channels"), [(["16"], [16, 16, 16]), (["16", "8", "4"], [16, 8, 4])]
)
def test_flags_set_the_channels_of_a_baseline(
    numbers: list[str], channels: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for number in numbers for part in ("--conv-channels", number)]
    assert run("train", "mnist-cnn", *flags, "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["model"]["conv_channels"] == channels


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--evaluate-on", "multimnist"], "images of multimnist have shape (1, 36, 36)"),
        (["--num-train", "0"], "num_train must be between 1 and 60000, got 0"),
        (["--num-train", "70000"], "num_train must be between 1 and 60000, got 70000"),
        (["--held-out", "60000"], "held_out must be at least 0 and less than the 60000"),
        (["--num-train", "100"], "batch_size"),
        (["--upper", "0.1"], "upper must exceed lower"),
        (["--evaluate-on", "mnist"], "mnist would be evaluated twice"),
        (["--device", "cuda:9"], "device cuda:9 is not available here"),
        (["--out", "."], "holds something else than a run"),
        (["--steps", "9" * 20], f"steps must be less than 2,147,483,648, got {'9' * 20}"),
        (["--threads", "9" * 11], f"threads must be less than 2,147,483,648, got {'9' * 11}"),
        (["--data-dir", "d\udcff"], "data_dir must be UTF-8, as records are, got 'd\\udcff'"),
    ],
)
def test_run_and_dry_run_refuse_the_same_before_the_first_step(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("something").touch()
    for more in ([], ["--dry-run"]):
        length = [] if "--steps" in arguments else ["--steps", "1"]
        assert run("train", "mnist", *length, *arguments, *more) == 2
        shown = capsys.readouterr()
        assert sentence in shown.err
        assert len(shown.err.splitlines()) == 1
        assert shown.out == ""
    assert not Path("runs/mnist-seed0").exists()
    assert [path.name for path in Path().iterdir()] == ["something"]


def test_dry_run_shows_the_model_fitted_to_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "mnist", "--dataset", "mnist-40", "--dry-run") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["image_height"], model["image_width"]) == (40, 40)


@pytest.mark.parametrize("flag", ["--num-examples", "--batch-size", "--threads"])
@pytest.mark.parametrize("number", ["0", "-4"])
def test_evaluation_refuses_counts_below_one(
    flag: str, number: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evaluate", str(finished), flag, number) == 2
    name = flag.removeprefix("--").replace("-", "_")
    assert capsys.readouterr().err == f"capsnet: {name} must be at least 1, got {number}\n"


def test_data_in_a_home_that_nobody_has_is_one_sentence(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evaluate", str(finished), "--data-dir", "~nobody9/x") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("capsnet: there is no home folder for ~nobody9/x; name the data")
    assert len(shown.splitlines()) == 1


def test_long_evaluation_leaves_stdout_to_json(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capsnet.progress.PATIENCE", -1.0)
    assert run("evaluate", str(finished), "--json", "--batch-size", "10") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["num_examples"] == 30
    assert "evaluated 10 of 30 examples" in shown.err


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_other_json(path: Path) -> None:
    path.write_text('{"epochs": 3}')


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert run("train", "mnist", *TINY, "--out", str(out)) == 0
    return out


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "weights.safetensors", "result.json"])
@pytest.mark.parametrize("damage", [truncate, flip_byte, Path.unlink, write_other_json])
def test_damaged_file_of_a_finished_run_is_named(
    finished: Path,
    name: str,
    damage: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = Path("copy")
    copy.mkdir()
    for path in finished.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage(copy / name)
    status = run("evaluate", str(copy))
    shown = capsys.readouterr().err
    assert status == (2 if name == "weights.safetensors" else 0)
    assert name in shown
    assert len(shown.splitlines()) == 1


def test_list_shows_presets_with_the_papers_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "mnist               0.25%" in shown
    assert "affnist" in shown
    assert run("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["presets"][0]["paper_error"] == 0.0025
    assert "multimnist" in listed["datasets"]


def test_list_shows_shipped_weights_with_their_error_and_the_papers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_weights("mnist")
    assert run("list", "--json") == 0
    about = json.loads(capsys.readouterr().out)["weights"]["mnist"]
    assert (about["dataset"], about["paper_error"]) == ("mnist", 0.0025)
    assert run("list") == 0
    shown = capsys.readouterr().out.partition("Shipped weights")[2]
    assert re.search(rf"mnist +{about['error_rate']:.2%} +0.25%  mnist", shown)


def test_not_a_number_ends_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "mnist", *TINY, "--lr", "1e38") == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "at learning rate" in shown
    assert "a lower rate may help: --learning-rate 5e+37 --overwrite" in shown


def test_a_network_that_the_last_step_ruins_is_no_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("train", "mnist", *SMALL, "--steps", "1", "--lr", "1e30") == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("capsnet: the outputs for mnist are not all numbers")
    assert "a lower rate may help" in shown
    assert not Path("runs/mnist-seed0/result.json").exists()


def start(*arguments: str, program: tuple[str, ...] = ("-m", "capsnet")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for(path: Path) -> None:
    for _ in range(1200):
        if path.exists() and path.stat().st_size:
            return
        time.sleep(0.05)
    pytest.fail(f"{path} did not appear")


def test_ctrl_c_saves_and_says_how_to_go_on() -> None:
    program = start(
        "train", "mnist", *SMALL, "--epochs", "4000", "--log-every", "1", "--out", "a b"
    )
    wait_for(Path("a b/log.jsonl"))
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGINT, err
    assert "which is saved in a b" in out
    assert "go on with: capsnet train mnist --out 'a b' --resume" in out
    assert len(list(Path("a b/checkpoints").iterdir())) >= 1
    assert "Traceback" not in err
    step = int(list_checkpoints(Path("a b"))[0].stem.removeprefix("step-"))
    out, err = start("evaluate", "a b").communicate(timeout=120)
    sentence = f"capsnet: a b is not finished; this is its network after step {step:,}\n"
    assert "wrong" in out
    assert err.startswith(sentence)


def test_stopped_run_keeps_stdout_for_json() -> None:
    program = start("train", "mnist", *SMALL, "--epochs", "4000", "--json", "--out", "run")
    wait_for(Path("run/config.json"))
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGTERM, err
    assert out == ""
    assert "go on with: capsnet train mnist --out run --resume" in err


def test_torchrun_trains_the_model_of_one_process() -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    pair = start("-m", "capsnet", "train", "mnist", *TINY, "--out", "two", program=torchrun)
    out, err = pair.communicate(timeout=240)
    assert pair.returncode == 0, err
    assert out.count("after 8 steps") == 1, out
    assert run("train", "mnist", *TINY, "--out", "one") == 0
    (one, _), (two, _) = (read_tensors(Path(name) / WEIGHTS) for name in ("one", "two"))
    for name, value in one.items():
        assert_close(two[name], value, rtol=1e-5, atol=1e-5)
