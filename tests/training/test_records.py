import errno
import json
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import tiny_config, weights_of

from capsnet.data.splits import ArraySplit
from capsnet.models import CapsNetConfig, model_from_config
from capsnet.progress import Reporter
from capsnet.training import train
from capsnet.training.records import (
    RunLog,
    TensorBoard,
    check_run,
    damaged_files,
    describe_environment,
    find_commit,
    list_checkpoints,
    read_json,
    write_json,
)


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    record = {"a": 1.5, "b": [1, None, "ü"], "c": {"d": True}}
    write_json(tmp_path / "record.json", record)
    assert read_json(tmp_path / "record.json") == record
    assert {path.name for path in tmp_path.iterdir()} == {"record.json"}


def test_a_run_that_could_not_be_written_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/run cannot be written: .*/file is read-only or no"):
        check_run(tmp_path / "file" / "run", resume=False, overwrite=False)
    check_run(tmp_path / "new" / "run", resume=False, overwrite=False)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="new/run cannot be written"):
        check_run(tmp_path / "new" / "run", resume=False, overwrite=False)


def test_edited_json_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"error_rate": 0.0035})
    path.write_text(path.read_text().replace("0.0035", "0.0025"))
    with pytest.raises(ValueError, match=r"record.json is damaged: its content does not fit"):
        read_json(path)
    for content in ("[1]", "{}", '{"a": 1}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"record.json is damaged: its content does not fit"):
            read_json(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"record.json is damaged: it is not JSON"):
        read_json(path)


def test_log_goes_back_to_a_position(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.start()
    log.append({"step": 1})
    position = log.position()
    log.append({"step": 2})
    again = RunLog(tmp_path / "log.jsonl")
    assert again.rewind(position) is None
    again.append({"step": 3})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 3}]


def test_log_that_is_gone_before_its_first_line_is_no_loss(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.start()
    position = log.position()
    log.path.unlink()
    assert log.rewind(position) is None
    log.append({"step": 1})
    assert log.path.exists()


def test_every_damaged_log_is_kept(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.start()
    log.append({"step": 1})
    position = log.position()
    for number in (1, 2):
        log.path.write_text(f"damage {number}")
        complaint = log.rewind(position)
        assert complaint is not None
        assert f"renamed to log.old-{number}.jsonl" in complaint
        assert (tmp_path / f"log.old-{number}.jsonl").read_text() == f"damage {number}"


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "weights.safetensors"])
def test_finished_run_names_its_damaged_file(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    train(tiny_config(epochs=1), run, reporter=Reporter())
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[:-7] + b"X" + content[-6:])
    assert damaged_files(run) == {
        name: f"{run / name} is damaged: it does not fit its SHA-256 in result.json"
    }
    (run / name).unlink()
    assert damaged_files(run) == {name: f"{run / name} is missing"}


def test_finished_run_names_its_damaged_result(tmp_path: Path) -> None:
    train(tiny_config(epochs=1), tmp_path / "run", reporter=Reporter())
    (tmp_path / "run" / "result.json").write_text("{}")
    assert "result.json is damaged" in damaged_files(tmp_path / "run")["result.json"]
    with pytest.raises(ValueError, match=r"result.json is damaged"):
        train(tiny_config(epochs=1), tmp_path / "run", resume=True, reporter=Reporter())
    (tmp_path / "run" / "result.json").unlink()
    assert "result.json is missing" in damaged_files(tmp_path / "run")["result.json"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Lets the system refuse to write more, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_checkpoint_that_does_not_fit_on_the_disk_loses_nothing(tmp_path: Path) -> None:
    config, run = tiny_config(), tmp_path / "run"
    train(config, tmp_path / "whole", reporter=Reporter())

    class FillDisk(Reporter):
        def advance(self, step: int, line: Mapping[str, object] | None) -> None:
            if step == 13:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    message = r"checkpoint of step 16 could not be written .*File too large.*000008.* is whole"
    with largest_file(-1), pytest.raises(OSError, match=message):
        train(config, run, reporter=FillDisk())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000008.safetensors"]
    train(config, run, resume=True, reporter=Reporter())
    assert weights_of(run) == weights_of(tmp_path / "whole")


def test_log_that_does_not_fit_on_the_disk_is_one_sentence(tmp_path: Path) -> None:
    with (
        largest_file(2000),
        pytest.raises(OSError, match=r"run could not be written to \(File too large\)"),
    ):
        train(tiny_config(log_every=1, checkpoint_epochs=0), tmp_path / "run", reporter=Reporter())
    assert list_checkpoints(tmp_path / "run") == []


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"/proc/run") as caught:
        train(tiny_config(), Path("/proc/run"), reporter=Reporter())
    assert caught.value.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)


def test_a_gpu_is_named_if_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"Loom {device.index}")
    for device, name in ((None, None), ("cpu", None), ("cuda:1", "Loom 1")):
        used = None if device is None else torch.device(device)
        hardware = describe_environment(device=used)["hardware"]
        assert isinstance(hardware, dict)
        assert hardware["gpu"] == name


def test_environment_names_commit_versions_and_hardware() -> None:
    environment = describe_environment()
    versions, hardware = environment["versions"], environment["hardware"]
    assert isinstance(versions, dict)
    assert isinstance(hardware, dict)
    assert {"python", "torch", "numpy", "capsnet"} == set(versions)
    assert hardware["cpu"]
    assert hardware["cores"] >= 1
    commit = find_commit()
    assert commit is None or len(commit.removesuffix("+")) == 40


def test_tensorboard_gets_scalars_and_reconstructions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(epochs=2, tensorboard=True, evaluate_every=1, model={"decoder": True})
    metrics = train(config, tmp_path / "run", reporter=Reporter())["metrics"]
    assert isinstance(metrics, dict)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"loss", "error_rate", "learning_rate"} <= set(events.Tags()["scalars"])
    assert {"input", "reconstruction"} <= set(events.Tags()["images"])
    tested = events.Scalars("test/error_rate")
    assert [each.step for each in tested] == [8, 16]
    assert tested[-1].value == pytest.approx(metrics["mnist"]["error_rate"])


def test_tensorboard_of_a_killed_run_shows_no_step_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (3, 6, 9)), (6, (9, 12))):
        board = TensorBoard(tmp_path, start)
        for step in steps:
            board.add_scalars({"step": step, "loss": float(start)})
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(each.step, each.value) for each in events.Scalars("loss")]
    assert shown == [(3, 0), (6, 0), (9, 6), (12, 6)]


def test_tensorboard_shows_stereo_pairs(tmp_path: Path) -> None:
    model = model_from_config(CapsNetConfig(image_channels=2, conv_channels=4, primary_types=2))
    pairs = np.zeros((3, 2, 28, 28), dtype=np.uint8)
    split = ArraySplit(
        pairs,
        np.zeros(3, dtype=np.int64),
        name="pairs",
        split="test",
        class_names=("a",),
        origin="made up",
    )
    board = TensorBoard(tmp_path)
    board.add_reconstructions(model, split, step=1)
    board.close()


def test_missing_tensorboard_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"needs tensorboard: pip install '\.\[tensorboard\]'"):
        train(tiny_config(tensorboard=True), tmp_path / "run", reporter=Reporter())
