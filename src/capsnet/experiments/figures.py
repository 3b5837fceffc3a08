"""Pictures of images in the paper's layouts, drawn without any global state of matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from capsnet.machine import draft_of

Image = Float[np.ndarray, "H W"] | Float[np.ndarray, "H W C"]

INK, GREY, RULE = "#1a1a1a", "#6b6b6b", "#b0b0b0"
BLUE, ORANGE, RED = "#1f5a96", "#d9730d", "#c8102e"
SMALL, NORMAL, LARGE = 8.0, 9.0, 11.0
_DPI = 200
#: Inches at the top that the title and its subtitle take.
_HEAD = 0.62
#: Inches that the longest title needs.
_MIN_WIDTH = 6.5


@dataclass(frozen=True)
class Caption:
    """What stands above a picture."""

    title: str
    """Where the paper has it, and what it shows."""

    subtitle: str
    """With which network it was made."""

    quick: bool = False
    """Whether it is a miniature, which must be seen."""


class Canvas:
    """A picture with its title, on which axes are placed in inches from the top left."""

    def __init__(self, caption: Caption, *, width: float, height: float) -> None:
        width = max(width, _MIN_WIDTH)
        self.width, self.height = width, height + _HEAD
        self.figure = Figure(figsize=(self.width, self.height), dpi=_DPI, facecolor="white")
        self.text(0.12, -0.42, caption.title, size=LARGE, weight="bold")
        self.text(0.12, -0.18, caption.subtitle, size=SMALL, color=GREY)
        if caption.quick:
            label = "QUICK MINIATURE, not a result"
            self.text(width - 0.12, -0.42, label, size=NORMAL, weight="bold", color=RED, ha="right")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place, in inches below the title."""
        bottom = self.height - _HEAD - top - height
        place = (
            left / self.width,
            bottom / self.height,
            width / self.width,
            height / self.height,
        )
        return self.figure.add_axes(place)

    def image(self, image: Image, left: float, top: float, width: float, height: float) -> None:
        """An image at a place: grey levels from black to white, or colours."""
        axes = self.axes(left, top, width, height)
        axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set(linewidth=0.4, color=RULE)

    def text(
        self,
        left: float,
        top: float,
        text: str,
        *,
        size: float = NORMAL,
        color: str = INK,
        ha: str = "left",
        va: str = "center",
        weight: str = "normal",
    ) -> None:
        """Text at a place, in inches below the title."""
        self.figure.text(
            left / self.width,
            1 - (top + _HEAD) / self.height,
            text,
            fontsize=size,
            color=color,
            ha=ha,
            va=va,
            fontweight=weight,
        )

    def rule(
        self, left: float, top: float, right: float, bottom: float, *, thick: float = 0.6
    ) -> None:
        """A straight line between two places."""
        from matplotlib.lines import Line2D

        xs = [left / self.width, right / self.width]
        ys = [1 - (each + _HEAD) / self.height for each in (top, bottom)]
        self.figure.add_artist(Line2D(xs, ys, linewidth=thick, color=INK))

    def save(self, path: Path) -> None:
        """Writes the picture as PNG, whole or not at all."""
        with draft_of(path) as draft:
            self.figure.savefig(draft, format="png", metadata={"Software": None})


def grey(image: Float[Tensor, "C H W"]) -> Image:
    """An image for drawing: one channel as grey levels, three as colours, two as the first."""
    array: Image = image.detach().clamp(0, 1).numpy()
    return array.transpose(1, 2, 0) if len(array) == 3 else array[0]


def overlay(red: Float[Tensor, "1 H W"], green: Float[Tensor, "1 H W"]) -> Image:
    """Two digits in one image: the first red, the second green, both yellow (Fig. 5)."""
    first, second = red[0].clamp(0, 1).numpy(), green[0].clamp(0, 1).numpy()
    return np.stack((first, second, np.zeros_like(first)), axis=-1)


def strip(images: Float[Tensor, "N 1 h w"]) -> Image:
    """Images side by side in one, with a light gap between them."""
    tiles = [grey(image) for image in images]
    bar = np.full((tiles[0].shape[0], 1), 0.6, dtype=tiles[0].dtype)
    return np.concatenate([part for tile in tiles for part in (tile, bar)][:-1], axis=1)


@dataclass(frozen=True)
class Column:
    """One image above another, with a heading."""

    heading: str
    """A line or two above the images."""

    above: Image
    """The upper image."""

    below: Image
    """The lower image."""


def draw_columns(
    caption: Caption,
    rows: Sequence[Sequence[Sequence[Column]]],
    path: Path,
    *,
    labels: tuple[str, str],
    size: float = 0.95,
) -> None:
    """Columns of two images each, in groups parted by thick rules (Fig. 3 and 5).

    Args:
        caption: the title.
        rows: for each row its groups, for each group its columns.
        path: the file.
        labels: what the upper and the lower images are.
        size: inches of an image.
    """
    gap, margin, head = 0.1, 0.72, 0.42
    num_columns = max(sum(len(group) for group in groups) for groups in rows)
    width = margin + num_columns * (size + gap) + 0.25
    height = len(rows) * (head + 2 * size + 0.18)
    canvas = Canvas(caption, width=width, height=height)
    for number, groups in enumerate(rows):
        top = number * (head + 2 * size + 0.18)
        left = margin
        for kind, text in enumerate(labels):
            canvas.text(margin - 0.08, top + head + (kind + 0.5) * size, text, ha="right")
        for index, group in enumerate(groups):
            if index:
                x = left - gap / 2 + 0.02
                canvas.rule(x, top + 0.04, x, top + head + 2 * size + 0.04, thick=2.0)
                left += 0.06
            for column in group:
                canvas.text(left + size / 2, top + head / 2 + 0.01, column.heading, ha="center")
                canvas.image(column.above, left, top + head, size, size)
                canvas.image(column.below, left, top + head + size + 0.04, size, size)
                left += size + gap
        canvas.rule(0.12, top + head - 0.05, left, top + head - 0.05)
    canvas.save(path)


def draw_triples(
    caption: Caption,
    columns: Sequence[tuple[str, Sequence[Image]]],
    path: Path,
    *,
    labels: Sequence[str],
) -> None:
    """Columns of several images each, with a heading (§6)."""
    size, gap, margin, head = 0.92, 0.06, 0.62, 0.42
    canvas = Canvas(
        caption,
        width=margin + len(columns) * (size + gap) + 0.15,
        height=head + len(labels) * (size + gap) + 0.1,
    )
    for row, label in enumerate(labels):
        y = head + row * (size + gap)
        canvas.text(margin - 0.08, y + size / 2, label, ha="right")
        for number, (heading, images) in enumerate(columns):
            x = margin + number * (size + gap)
            if row == 0:
                canvas.text(x + size / 2, head / 2, heading, ha="center", size=SMALL)
            canvas.image(images[row], x, y, size, size)
    canvas.save(path)


def draw_strips(
    caption: Caption,
    strips: Sequence[tuple[str, Image]],
    path: Path,
    *,
    ticks: Sequence[str],
) -> None:
    """Named rows of images side by side, parted by rules (Fig. 4)."""
    label_width, row = 1.95, 0.52
    image_width = row * strips[0][1].shape[1] / strips[0][1].shape[0]
    width = label_width + image_width + 0.25
    foot = 0.32
    canvas = Canvas(caption, width=width, height=len(strips) * (row + 0.1) + foot)
    for number, (label, image) in enumerate(strips):
        top = number * (row + 0.1)
        if number:
            canvas.rule(0.12, top - 0.05, width - 0.25, top - 0.05, thick=0.4)
        canvas.text(0.12, top + row / 2, label, size=SMALL if "\n" in label else NORMAL)
        canvas.image(image, label_width, top, image_width, row)
    canvas.rule(label_width - 0.08, 0.0, label_width - 0.08, len(strips) * (row + 0.1) - 0.1)
    each = image_width / len(ticks)
    for index, tick in enumerate(ticks):
        x = label_width + (index + 0.5) * each
        canvas.text(x, len(strips) * (row + 0.1) + 0.04, tick, size=7.0, ha="center", color=GREY)
    canvas.save(path)


def draw_sheet(caption: Caption, blocks: Mapping[str, Sequence[Image]], path: Path) -> None:
    """Blocks of strips, five in a row: every dimension of every digit (Fig. 4)."""
    num_columns, block_width, gap = 5, 2.9, 0.34
    first = next(iter(blocks.values()))
    row = block_width * first[0].shape[0] / first[0].shape[1]
    block_height = len(first) * row + 0.34
    num_rows = -(-len(blocks) // num_columns)
    canvas = Canvas(
        caption,
        width=0.12 + num_columns * (block_width + gap),
        height=num_rows * block_height + 0.1,
    )
    for number, (name, strips) in enumerate(blocks.items()):
        left = 0.34 + number % num_columns * (block_width + gap)
        top = number // num_columns * block_height
        canvas.text(left, top + 0.1, name, weight="bold")
        for dim in range(len(strips)):
            y = top + 0.22 + (dim + 0.5) * row
            canvas.text(left - 0.05, y, str(dim), size=6.5, ha="right", color=GREY)
        canvas.image(np.concatenate(strips), left, top + 0.22, block_width, len(strips) * row)
    canvas.save(path)
