"""What long work says while it goes on: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import IO

#: Seconds that an evaluation, or the like, may take in silence.
PATIENCE = 2.0


class Reporter:
    """Where a run tells of its progress; this one keeps silent."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins or goes on after `step` of `num_steps` updates."""

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """One update is done; with the log's new line where there is one."""

    def evaluated(self, done: int, count: int) -> None:
        """So many examples of an evaluation are done, of so many: 0 to begin with, all at last."""

    def say(self, text: str) -> None:
        """A message in the course of the run."""

    def close(self) -> None:
        """The run has ended."""


class Lines(Reporter):
    """One plain line for each line of the log, with the time left."""

    def __init__(
        self, stream: IO[str] | None = None, *, deed: str = "evaluated", unit: str = "examples"
    ) -> None:
        self._stream, self._deed, self._unit = stream or sys.stderr, deed, unit
        self._first = self._num_steps = 0
        self._started = self._began = self._due = 0.0

    def start(self, step: int, num_steps: int) -> None:
        """Remembers where and when the run begins."""
        self._first, self._num_steps = step, num_steps
        self._started = time.monotonic()

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """Prints the log's line."""
        if line is not None:
            each = (time.monotonic() - self._started) / (step - self._first)
            left = show_seconds(each * (self._num_steps - step))
            self.say(f"step {step:,}/{self._num_steps:,}  {format_line(line)}  {left} left")

    def evaluated(self, done: int, count: int) -> None:
        """Prints how far a long evaluation is, and how long it will take."""
        now = time.monotonic()
        if done == 0:
            self._began, self._due = now, now + PATIENCE
        elif now >= self._due and done < count:
            left = (now - self._began) * (count - done) / done
            self.say(f"{self._deed} {done:,} of {count:,} {self._unit}, {show_seconds(left)} left")
            self._due = now + 5 * PATIENCE

    def say(self, text: str) -> None:
        """Prints the message."""
        print(text, file=self._stream, flush=True)


class Bar(Reporter):
    """A progress bar with loss, running error, images per second and the time left."""

    def __init__(self, *, deed: str = "evaluated") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskID,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar: Progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._due, self._deed = 0.0, deed

    def start(self, step: int, num_steps: int) -> None:
        """Shows the bar."""
        self._task = self._bar.add_task("", total=num_steps, completed=step, values="")
        self._bar.start()

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """Moves the bar, and shows the log's line."""
        assert self._task is not None
        if line is None:
            self._bar.update(self._task, completed=step)
        else:
            self._bar.update(self._task, completed=step, values=format_line(line))

    def evaluated(self, done: int, count: int) -> None:
        """Shows a bar of its own for a long evaluation."""
        if done == 0:
            self._due = time.monotonic() + PATIENCE
        elif self._evaluation is not None and done == count:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None
        elif self._evaluation is not None:
            self._bar.update(self._evaluation, completed=done)
        elif time.monotonic() >= self._due and done < count:
            self._evaluation = self._bar.add_task(
                "", total=count, completed=done, values=self._deed
            )
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints the message above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.stop()


def choose_reporter(deed: str = "evaluated") -> Reporter:
    """A bar on a terminal, plain lines otherwise; `deed` is what is done to examples."""
    return Bar(deed=deed) if sys.stderr.isatty() else Lines(deed=deed)


def show_seconds(seconds: float) -> str:
    """A time for people.

    >>> show_seconds(45.0), show_seconds(600.0), show_seconds(9000.0)
    ('45 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_line(line: Mapping[str, object]) -> str:
    """A line of the log for people.

    >>> format_line({"loss": 0.5, "error_rate": 0.125, "images_per_second": 140.0})
    'loss 0.5000  error 12.50%  140 images/s'
    """
    speed = f"{line['images_per_second']:.0f} images/s"
    return f"loss {line['loss']:.4f}  error {line['error_rate']:.2%}  {speed}"
