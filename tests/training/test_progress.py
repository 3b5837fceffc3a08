import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_config

from capsnet.data.splits import ArraySplit
from capsnet.models import CapsNetConfig, model_from_config
from capsnet.training import train
from capsnet.training.progress import Bar, Lines, Reporter, TensorBoard, choose_reporter

LINE = {"loss": 0.25, "error_rate": 0.5, "images_per_second": 140.0}


def test_lines_are_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capsnet.training.progress.time.monotonic", lambda: 1000.0)
    lines = Lines()
    lines.start(0, 1200)
    lines.advance(1, None)
    lines.advance(2, LINE)
    lines.say("hello")
    lines.close()
    expected = "step 2/1,200  loss 0.2500  error 50.00%  140 images/s  0 s left\nhello\n"
    assert capsys.readouterr().err == expected


def test_lines_tell_the_time_left_by_the_steps_of_this_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([1000.0, 1060.0])
    monkeypatch.setattr("capsnet.training.progress.time.monotonic", lambda: next(clock))
    lines = Lines()
    lines.start(900, 1200)
    lines.advance(930, LINE)  # 30 steps took a minute, 270 are left
    assert capsys.readouterr().err.endswith("140 images/s  9 min left\n")


def test_bar_shows_loss_error_speed_and_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.start(1, 4)
    bar.advance(2, LINE)
    bar.advance(3, None)
    bar.say("[hello]")
    bar.close()
    shown = capsys.readouterr().err
    for text in ("loss 0.2500", "error 50.00%", "140 images/s", "[hello]", "3/4"):
        assert text in shown


def test_long_evaluation_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capsnet.training.progress.PATIENCE", -1.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    for reporter, wanted in (
        (Lines(), "evaluated 250 of 1,000 examples, "),
        (Lines(deed="read"), "read 250 of 1,000 examples, "),
        (Bar(), "250"),
    ):
        for done in (0, 250, 500, 1000):
            reporter.evaluated(done, 1000)
        reporter.close()
        assert wanted in capsys.readouterr().err


def test_short_evaluation_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for reporter in (Lines(), Bar()):
        for done in (0, 250, 1000):
            reporter.evaluated(done, 1000)
        reporter.close()
    assert not capsys.readouterr().err.strip()


def test_bar_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_reporter(), Lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(choose_reporter(), Bar)


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
