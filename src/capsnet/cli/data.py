"""The commands data list, data get and data show."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from json import dumps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import numpy as np
from cyclopts import App
from jaxtyping import UInt8

from capsnet.cli import Flag
from capsnet.data import DataConfig, list_datasets, load_split
from capsnet.data.catalogue import check_dataset
from capsnet.data.sources import SOURCES, ProgressBar, RemoteFile, download
from capsnet.data.storage import FORMS, find_data_dir, find_part

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


MAX_SHOWN = 10_000
"""Most images of a sheet."""

app = App(name="data", help="Fetch, check and show datasets.")

_SUMMARIES = {
    "mnist": "handwritten digits, 28×28 (§5)",
    "fashion-mnist": "articles of clothing, 28×28",
    "multimnist": "pairs of overlapping digits, 36×36 (§6.1)",
    "mnist-40": "digits at random places, 40×40 (§5.2)",
    "affnist": "digits under affine transformations, 40×40 (§5.2)",
    "cifar10": "natural images, 24×24 of 32×32 (§7)",
    "smallnorb": "stereo pairs of toys, 32×32 of 48×48 (§7)",
    "svhn": "house numbers, 32×32 (§7)",
    "folder": "images in --data-dir, one subfolder per class",
}


@dataclass(frozen=True)
class DatasetState:
    """What is there of a dataset; printed as it is by --json."""

    name: str
    """The dataset's name."""
    summary: str
    """What it shows."""
    state: str
    """`built in`, `made` when asked for, `here`, `incomplete`, `missing` or `yours`."""
    paths: list[str]
    """The files that it is read from."""
    num_bytes: int
    """Their size."""
    origin: str
    """Where it comes from."""
    terms: str
    """What its authors say about its use."""


@app.command(name="list")
def list_data(*, data_dir: Path | None = None, json: Flag = False) -> int:
    """Show every dataset: whether it is there, its size and where it comes from.

    Args:
        data_dir: Folder of datasets; default: CAPSNET_DATA, or capsnet in the user's cache.
        json: Print as JSON.
    """
    states = [_inspect(name, data_dir) for name in list_datasets()]
    folder = find_data_dir(data_dir)
    if json:
        print(dumps({"data_dir": str(folder), "datasets": [asdict(s) for s in states]}, indent=2))
        return 0
    option = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    print(f"Datasets in {folder} (capsnet data get NAME{option} fetches what is missing):")
    for state in states:
        size = f"{state.num_bytes / 1e6:,.1f} MB" if state.num_bytes else ""
        print(f"  {state.name:<14} {state.state:<10} {size:>10}  {state.summary}; {state.origin}")
        for path in state.paths:
            print(f"{'':<40}{path}")
    return 0


@app.command(name="get")
def get_data(*names: str, data_dir: Path | None = None, json: Flag = False) -> int:
    """Fetch datasets from their authors or a mirror, and verify them.

    Args:
        names: cifar10, svhn, smallnorb, fashion-mnist or affnist.
        data_dir: Folder of datasets; default: CAPSNET_DATA, or capsnet in the user's cache.
        json: Print what is there afterwards as JSON.
    """
    if not names:
        raise ValueError(f"data get needs the name of a dataset: {', '.join(SOURCES)}")
    for name in names:
        check_dataset(name)
    for name in names:
        if name not in SOURCES:
            print(
                f"{name} needs no download: it is {_inspect(name, data_dir).state}", file=sys.stderr
            )
            continue
        with _stopping_cleanly():
            _fetch(name, data_dir)
    if json:
        print(dumps([asdict(_inspect(name, data_dir)) for name in names], indent=2))
    return 0


@app.command(name="show")
def show_data(
    name: str,
    *,
    out: Path | None = None,
    split: Literal["train", "test"] = "test",
    augmented: Flag = False,
    rows: int = 8,
    columns: int = 16,
    data_dir: Path | None = None,
) -> int:
    """Draw a contact sheet of a dataset: examples spread evenly over it, or a training batch.

    Args:
        name: The dataset.
        out: PNG file to write or replace; default: NAME.png, which must not be there yet.
        split: test or train.
        augmented: Shuffled and augmented, as in training with seed 0.
        rows: Rows of images.
        columns: Columns of images.
        data_dir: Folder of datasets, or of your own images.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"a sheet needs at least one row and column, got {rows} and {columns}")
    if rows * columns > MAX_SHOWN:
        raise ValueError(f"a sheet holds at most {MAX_SHOWN} images, got {rows} × {columns}")
    check_dataset(name)
    path = out or Path(f"{name}.png")
    if out is None and path.exists():
        raise ValueError(f"{path} is there already; --out {path} replaces it")
    examples = load_split(DataConfig(name, data_dir), split)
    count = min(rows * columns, len(examples))
    if augmented:
        batch = examples.train_batch(np.arange(count), seed=0, epoch=0)
    else:
        batch = examples.test_batch(np.arange(count) * len(examples) // count)
    # Standardised images have no place in a picture; their targets are the same in [0, 1].
    images = batch.images if examples.labels_per_image > 1 else batch.targets[:, 0]
    _draw_sheet((images * 255).round().byte().numpy(), min(columns, count)).save(path)
    print(f"{count} images of {examples.origin} ({split}) are in {path}")
    return 0


def _draw_sheet(images: UInt8[np.ndarray, "N C H W"], columns: int) -> "Picture":
    """The images side by side on grey, in colour if they have three channels, else the first."""
    from PIL import Image

    count, num_channels, height, width = images.shape
    mode = "RGB" if num_channels == 3 else "L"
    size = (columns * (width + 2) + 2, -(-count // columns) * (height + 2) + 2)
    sheet = Image.new(mode, size, "grey")
    for number, image in enumerate(images):
        tile = image.transpose(1, 2, 0) if num_channels == 3 else image[0]
        place = (number % columns * (width + 2) + 2, number // columns * (height + 2) + 2)
        sheet.paste(Image.fromarray(tile), place)
    return sheet


@contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """Makes SIGTERM an exit that removes what is half done, as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fetch(name: str, data_dir: Path | None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from capsnet.progress import Lines, Reporter

    # On stderr, so that --json has stdout to itself.
    console = Console(stderr=True)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)

    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        class Bar:
            """Shows one file's progress, by lines where there is no terminal; pooch drives it."""

            def __init__(self, file: RemoteFile) -> None:
                self.total = file.size
                self._task = progress.add_task(file.name, total=file.size)
                lines = Lines(deed=f"{file.name}: fetched", unit="bytes")
                self._lines = Reporter() if console.is_terminal else lines
                self.reset()

            def update(self, amount: int) -> None:
                progress.update(self._task, advance=amount)
                self._done += amount
                self._lines.evaluated(self._done, self.total)

            def reset(self) -> None:
                progress.reset(self._task)
                self._done = 0
                self._lines.evaluated(0, self.total)

            def close(self) -> None:
                progress.remove_task(self._task)

        def make_bar(file: RemoteFile) -> ProgressBar:
            return Bar(file)

        paths = download(name, data_dir, report=say, make_progress=make_bar)
    if paths:
        say(f"{name} is in {paths[0].parent}, verified ({SOURCES[name].terms})")


def _inspect(name: str, data_dir: Path | None) -> DatasetState:
    """What is there of a dataset."""
    if name == "mnist":
        origin, terms = "part of capsnet", "CC BY-SA 3.0"
        folder = Path(str(resources.files("capsnet.data"))) / "files"
        size = sum(file.stat().st_size for file in folder.glob("*.xz"))
        return DatasetState(name, _SUMMARIES[name], "built in", [], size, origin, terms)
    if name == "folder":
        return DatasetState(name, _SUMMARIES[name], "yours", [], 0, "your own", "")
    if name not in SOURCES:
        origin, terms = "made from MNIST", "CC BY-SA 3.0"
        return DatasetState(name, _SUMMARIES[name], "made", [], 0, origin, terms)
    found = [find_part(name, part, data_dir) for part in FORMS[name]]
    whole = [path for path in found if path is not None and path.stat().st_size]
    paths = sorted(set(whole))
    if len(whole) == len(found):
        state = "here"
    elif name == "affnist":
        state = "made"  # in the original's stead
    else:
        state = "incomplete" if paths else "missing"
    source = SOURCES[name]
    origin = "made from MNIST, affNIST-style" if state == "made" else source.homepage
    size = sum(path.stat().st_size for path in paths)
    return DatasetState(
        name, _SUMMARIES[name], state, [str(path) for path in paths], size, origin, source.terms
    )
