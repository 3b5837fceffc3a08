"""Examples made when asked for: MultiMNIST (§6.1) and affNIST-style images (§5.2).

The original affNIST files hold 32 random versions of each digit in 40×40. Here they are made again
from the ranges their author gives, so results on them must be called "affNIST-style, regenerated".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from capsnet.data.augment import as_intensities, shift_images
from capsnet.data.order import Draws
from capsnet.data.splits import Batch, Split

PAIRS_PER_DIGIT = 1000  # §6.1: 60M training and 10M test examples
PAIR_SIZE = 36
WARPS_PER_DIGIT = 32
WARP_SIZE = 40
MAX_ROTATION = 20.0  # degrees
MAX_SHEAR = 0.2
MIN_SCALE, MAX_SCALE = 0.8, 1.2


class MultiMNISTSplit(Split):
    """A thousand pairs for each digit, none stored: example k is a function of (seed, k).

    Base digit k div 1000 meets a partner drawn from all digits of another class in the same split;
    each is shifted by up to `shift` pixels in each direction, and their sum is clipped at white.
    """

    labels_per_image = 2

    def __init__(
        self,
        digits: UInt8[np.ndarray, "N 1 28 28"],
        labels: Int64[np.ndarray, " N"],
        *,
        split: str,
        class_names: tuple[str, ...],
        shift: int = 4,
        seed: int = 0,
        origin: str,
    ) -> None:
        """Holds the digits.

        Args:
            digits: (N, 1, 28, 28) the split's digits.
            labels: (N,) their classes, of which there must be two at least.
            split: `train`, `validation` or `test`; examples of different splits differ.
            class_names: what each class is called.
            shift: most pixels a digit moves in each direction.
            seed: decides partners and shifts of every example.
            origin: where the digits come from.
        """
        self.name, self.split = "multimnist", split
        self.class_names, self.origin = class_names, origin
        self.image_shape = (1, PAIR_SIZE, PAIR_SIZE)
        self._digits, self._labels, self._shift, self._seed = digits, labels, shift, seed
        counts = np.bincount(labels, minlength=len(class_names))
        if (counts == len(labels)).any():
            raise ValueError("MultiMNIST needs digits of at least two classes, got only one class")
        # Sorted by class, the digits of all other classes are everything before and after a gap.
        self._by_class = np.argsort(labels, kind="stable")
        self._class_sizes = counts
        self._class_starts = np.cumsum(counts) - counts

    def __len__(self) -> int:
        return PAIRS_PER_DIGIT * len(self._labels)

    def choose_digits(
        self, indices: Int64[np.ndarray, " B"]
    ) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """The base digit of each example and its partner of another class."""
        base = indices // PAIRS_PER_DIGIT
        classes = self._labels[base]
        size, start = self._class_sizes[classes], self._class_starts[classes]
        place = self._draws(indices).below("partner", len(self._labels) - size)
        partner: Int64[np.ndarray, " B"] = self._by_class[place + np.where(place < start, 0, size)]
        return base, partner

    def choose_shifts(self, indices: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, "4 B"]:
        """Rows down and columns right of the base digit, then of its partner."""
        draws = self._draws(indices)
        names = ("base down", "base right", "partner down", "partner right")
        return np.stack([draws.integers(name, -self._shift, self._shift) for name in names])

    def make_batch(self, indices: Int64[np.ndarray, " B"], draws: Draws | None) -> Batch:
        """The pairs with these indices; there is nothing left to augment."""
        base, partner = self.choose_digits(indices)
        base_down, base_right, partner_down, partner_right = self.choose_shifts(indices)
        apart = np.stack(
            (
                shift_images(self._digits[base], base_down, base_right, size=PAIR_SIZE),
                shift_images(self._digits[partner], partner_down, partner_right, size=PAIR_SIZE),
            ),
            axis=1,
        )  # (B, 2, 1, H, W)
        first, second = apart[:, 0], apart[:, 1]
        together = first + np.minimum(second, 255 - first)  # clipped at 255 without leaving bytes
        labels = np.stack((self._labels[base], self._labels[partner]), axis=1)  # (B, 2)
        targets = np.divide(apart, np.float32(255), dtype=np.float32)
        return Batch(
            torch.from_numpy(as_intensities(together)),
            torch.from_numpy(labels),
            torch.from_numpy(targets),
        )

    def _draws(self, indices: Int64[np.ndarray, " B"]) -> Draws:
        return Draws(self._seed, f"multimnist {self.split}", indices)


class Warps(NamedTuple):
    """One affine transformation for each image: `matrix` about the digit's centre, then a shift."""

    matrix: Float64[np.ndarray, "B 2 2"]
    """Takes (column, row) from the digit's centre to (column, row) from its new centre."""
    centre: Float64[np.ndarray, "B 2"]
    """Where in the 40×40 frame (column, row) the digit's centre comes to lie."""


class AffnistSplit(Split):
    """Thirty-two warped versions of each digit, none stored: example k is a function of (seed, k).

    Digit k div 32 is scaled by 0.8 to 1.2 (down and across on their own), sheared by up to 0.2,
    rotated by up to 20° and put at random where all of its ink is inside the frame.
    """

    def __init__(
        self,
        digits: UInt8[np.ndarray, "N 1 28 28"],
        labels: Int64[np.ndarray, " N"],
        *,
        split: str,
        class_names: tuple[str, ...],
        seed: int = 0,
    ) -> None:
        """Holds the digits.

        Args:
            digits: (N, 1, 28, 28) the digits to warp.
            labels: (N,) their classes.
            split: `train`, `validation` or `test`; warps of different splits differ.
            class_names: what each class is called.
            seed: decides the warp of every example.
        """
        self.name, self.split, self.class_names = "affnist", split, class_names
        self.image_shape = (1, WARP_SIZE, WARP_SIZE)
        self.origin = "affNIST-style, regenerated from MNIST"
        self._digits, self._labels, self._seed = digits, labels, seed
        self._ink = _find_ink(digits[:, 0])

    def __len__(self) -> int:
        return WARPS_PER_DIGIT * len(self._labels)

    def choose_warps(self, indices: Int64[np.ndarray, " B"]) -> Warps:
        """The transformation of each example."""
        draws = Draws(self._seed, f"affnist {self.split}", indices)
        angle = np.deg2rad(draws.uniform("rotation", -MAX_ROTATION, MAX_ROTATION))
        shear = draws.uniform("shear", -MAX_SHEAR, MAX_SHEAR)
        across = draws.uniform("horizontal scale", MIN_SCALE, MAX_SCALE)
        down = draws.uniform("vertical scale", MIN_SCALE, MAX_SCALE)
        cosine, sine = np.cos(angle), np.sin(angle)
        # rotation · shear · scale
        matrix = np.stack(
            (
                np.stack((cosine * across, (cosine * shear - sine) * down), axis=1),
                np.stack((sine * across, (sine * shear + cosine) * down), axis=1),
            ),
            axis=1,
        )  # (B, 2, 2)
        low, high = self.reach(indices // WARPS_PER_DIGIT, matrix)
        # Between the centres of the outermost pixels, which stay black: proof that nothing is cut.
        first, last = -low, WARP_SIZE - 1 - high
        place = np.stack(
            (draws.uniform("column", 0.0, 1.0), draws.uniform("row", 0.0, 1.0)), axis=1
        )
        return Warps(matrix, first + place * (last - first))

    def make_batch(self, indices: Int64[np.ndarray, " B"], draws: Draws | None) -> Batch:
        """The warped digits with these indices; there is nothing left to augment."""
        digit = indices // WARPS_PER_DIGIT
        images = warp_images(self._digits[digit], self.choose_warps(indices), size=WARP_SIZE)
        return Batch(images, torch.from_numpy(self._labels[digit])[:, None], images[:, None])

    def reach(
        self, digit: Int64[np.ndarray, " B"], matrix: Float64[np.ndarray, "B 2 2"]
    ) -> tuple[Float64[np.ndarray, "B 2"], Float64[np.ndarray, "B 2"]]:
        """How far the warped ink reaches from the digit's centre: least and most column and row.

        The ends of each row of ink decide it. Bilinear interpolation spreads a pixel over less
        than one pixel in each direction of the digit, which the matrix warps, too.
        """
        left, right = self._ink[digit, 0], self._ink[digit, 1]  # (B, h), NaN in rows without ink
        rows = np.arange(left.shape[1]) - (left.shape[1] - 1) / 2
        ends = np.stack((left, right), axis=1)[:, None]  # (B, 1, 2, h)
        warped = matrix[:, :, :1, None] * ends + matrix[:, :, 1:, None] * rows  # (B, 2, 2, h)
        spread = np.abs(matrix).sum(axis=2)  # (B, 2)
        low: Float64[np.ndarray, "B 2"] = np.nanmin(warped, axis=(2, 3)) - spread
        high: Float64[np.ndarray, "B 2"] = np.nanmax(warped, axis=(2, 3)) + spread
        return low, high


def _find_ink(digits: UInt8[np.ndarray, "N h w"]) -> Float64[np.ndarray, "N 2 h"]:
    """First and last column with ink in each row, from the image's centre; NaN where none is."""
    has_ink: Bool[np.ndarray, "N h w"] = np.greater(digits, 0)
    if not has_ink.any(axis=(1, 2)).all():
        raise ValueError("every image must have ink to be kept in the frame, got a black one")
    width = digits.shape[2]
    first = has_ink.argmax(axis=2)
    last = width - 1 - has_ink[:, :, ::-1].argmax(axis=2)
    ends: Float64[np.ndarray, "N 2 h"] = np.stack((first, last), axis=1) - (width - 1) / 2
    return np.where(has_ink.max(axis=2, keepdims=True).swapaxes(1, 2), ends, np.nan)


def warp_images(
    images: UInt8[np.ndarray, "B C h w"], warps: Warps, *, size: int
) -> Float32[torch.Tensor, "B C H W"]:
    """Each image under its own affine transformation, by bilinear interpolation.

    Args:
        images: (B, C, h, w) bytes.
        warps: B transformations.
        size: rows and columns of the result.

    Returns:
        (B, C, size, size) intensities in [0, 1], rounded to whole grey levels.

    >>> image = np.full((1, 1, 1, 1), 255, dtype=np.uint8)
    >>> middle = Warps(np.eye(2)[None], np.array([[1.0, 0.5]]))
    >>> warp_images(image, middle, size=3)[0, 0]
    tensor([[0.0000, 0.5020, 0.0000],
            [0.0000, 0.5020, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    height, width = images.shape[2:]
    inverse = np.linalg.inv(warps.matrix)  # (B, 2, 2)
    columns = np.arange(size) - warps.centre[:, :1]  # (B, W)
    rows = np.arange(size) - warps.centre[:, 1:]  # (B, H)
    # Where each pixel of the result comes from, in pixels from the centre of the digit. Built
    # elementwise: a matrix product may round differently in batches of different sizes.
    source_column = (inverse[:, 0, :1] * columns)[:, None] + (inverse[:, 0, 1:] * rows)[:, :, None]
    source_row = (inverse[:, 1, :1] * columns)[:, None] + (inverse[:, 1, 1:] * rows)[:, :, None]
    # A border of one black pixel, so that ink at the digit's edge fades like any other.
    padded = F.pad(torch.from_numpy(images).float(), (1, 1, 1, 1))
    grid = np.stack((source_column * 2 / (width + 1), source_row * 2 / (height + 1)), axis=3)
    warped = F.grid_sample(
        padded,
        torch.from_numpy(grid.astype(np.float32)),
        mode="bilinear",
        padding_mode="zeros",
        align_corners=True,
    )
    return warped.round_().div_(255)
