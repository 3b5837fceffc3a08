"""What a run says while it goes on: a bar on a terminal, plain lines elsewhere, TensorBoard."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    pass


class Reporter:
    """Where a run tells of its progress; this one keeps silent."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins or goes on after `step` of `num_steps` updates."""

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """One update is done; with the log's new line where there is one."""

    def say(self, text: str) -> None:
        """A message in the course of the run."""

    def close(self) -> None:
        """The run has ended."""


class Lines(Reporter):
    """One plain line for each line of the log."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._num_steps = 0

    def start(self, step: int, num_steps: int) -> None:
        """Remembers the length of the run."""
        self._num_steps = num_steps

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """Prints the log's line."""
        if line is not None:
            self.say(f"step {step:,}/{self._num_steps:,}  {format_line(line)}")

    def say(self, text: str) -> None:
        """Prints the message."""
        print(text, file=self._stream, flush=True)


class Bar(Reporter):
    """A progress bar with loss, running error, images per second and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
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
        self._task = self._bar.add_task("", total=None, values="")

    def start(self, step: int, num_steps: int) -> None:
        """Shows the bar."""
        self._bar.update(self._task, total=num_steps, completed=step)
        self._bar.start()

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """Moves the bar, and shows the log's line."""
        if line is None:
            self._bar.update(self._task, completed=step)
        else:
            self._bar.update(self._task, completed=step, values=format_line(line))

    def say(self, text: str) -> None:
        """Prints the message above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.stop()


def choose_reporter() -> Reporter:
    """A bar on a terminal, plain lines otherwise."""
    return Bar() if sys.stderr.isatty() else Lines()


def format_line(line: Mapping[str, object]) -> str:
    """A line of the log for people.

    >>> format_line({"loss": 0.5, "error_rate": 0.125, "images_per_second": 140.0})
    'loss 0.5000  error 12.50%  140 images/s'
    """
    parts = [f"loss {line['loss']:.4f}", f"error {line['error_rate']:.2%}"]
    if "images_per_second" in line:
        parts.append(f"{line['images_per_second']:.0f} images/s")
    return "  ".join(parts)


class TensorBoard:
    """Scalars of every log line, and reconstructions, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "tensorboard is not installed; pip install 'capsnet[tensorboard]' brings it"
            ) from None
        self._writer: SummaryWriter = SummaryWriter(str(folder))

    def add_scalars(self, line: Mapping[str, object]) -> None:
        """Writes the numbers of a log line."""
        step = line["step"]
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self._writer.add_scalar(name, value, step)

    def add_images(self, name: str, images: Float[Tensor, "B C H W"], step: int) -> None:
        """Writes a sheet of images."""
        self._writer.add_images(name, images.clamp(0, 1), step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
