import sys
from types import SimpleNamespace

import pytest

from capsnet.progress import Bar, Lines, choose_reporter

LINE = {"loss": 0.25, "error_rate": 0.5, "images_per_second": 140.0}


def test_lines_are_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("capsnet.progress.time", SimpleNamespace(monotonic=lambda: 1000.0))
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
    monkeypatch.setattr("capsnet.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
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
    monkeypatch.setattr("capsnet.progress.PATIENCE", -1.0)
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
