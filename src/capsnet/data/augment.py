"""The paper's augmentations on whole batches, and what each of them does at test time.

A step is called with a batch of images and the draws of its examples; with `None` for the draws it
does what takes its place at test time. Geometric steps keep the type of the pixels (uint8 stays
uint8); photometric ones turn them into intensities in [0, 1] first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped, UInt8
from numpy.lib.stride_tricks import sliding_window_view

from capsnet.data.order import Draws

Images = Shaped[np.ndarray, "B C H W"]
NewImages = Shaped[np.ndarray, "B C h w"]


class Step(ABC):
    """One augmentation: random with draws, its test-time counterpart without."""

    @abstractmethod
    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """The images, augmented."""


def as_intensities(images: Images) -> Float32[np.ndarray, "B C H W"]:
    """Bytes as float32 in [0, 1]; float images come back as they are."""
    if images.dtype == np.float32:
        return images
    intensities: Float32[np.ndarray, "B C H W"] = np.divide(
        images, np.float32(255), dtype=np.float32
    )
    return intensities


def shift_images(
    images: UInt8[np.ndarray, "B C h w"],
    down: Int64[np.ndarray, " B"],
    right: Int64[np.ndarray, " B"],
    *,
    size: int | None = None,
) -> UInt8[np.ndarray, "B C H W"]:
    """Each image moved from the centre of a black square, by its own whole number of pixels (§5).

    Args:
        images: (B, C, h, w) square images.
        down: (B,) rows each image moves down, negative for up.
        right: (B,) columns each image moves right, negative for left.
        size: rows and columns of the square; None keeps those of the images.

    Returns:
        (B, C, size, size); what leaves the frame is lost, what enters is zero.

    >>> image = np.arange(1, 5, dtype=np.uint8).reshape(1, 1, 2, 2)
    >>> shift_images(image, np.array([1]), np.array([-1]))[0, 0]
    array([[0, 0],
           [2, 0]], dtype=uint8)
    """
    num_images, num_channels, height, width = images.shape
    if height != width:
        raise ValueError(f"images to shift must be square, got {height}×{width}")
    size = height if size is None else size
    if size < height or (size - height) % 2:
        raise ValueError(f"size must be {height} plus an even number, got {size}")
    if num_images == 0:
        return np.zeros((0, num_channels, size, size), dtype=np.uint8)
    margin = (size - height) // 2
    reach = int(max(np.abs(down).max(), np.abs(right).max()))
    spare = max(0, reach - margin)  # room around the frame for what leaves it
    canvas = np.zeros((num_images, num_channels, size + 2 * spare, size + 2 * spare), np.uint8)
    places = sliding_window_view(canvas, (height, width), axis=(2, 3), writeable=True)
    corner = margin + spare
    places[np.arange(num_images), :, corner + down, corner + right] = images
    return canvas[:, :, spare : spare + size, spare : spare + size]


def crop_images(
    images: Images,
    top: Int64[np.ndarray, " B"],
    left: Int64[np.ndarray, " B"],
    *,
    size: int,
) -> Shaped[np.ndarray, "B C s s"]:
    """A size × size piece of each image, from its own row and column on.

    >>> image = np.arange(9, dtype=np.uint8).reshape(1, 1, 3, 3)
    >>> crop_images(image, np.array([1]), np.array([0]), size=2)[0, 0]
    array([[3, 4],
           [6, 7]], dtype=uint8)
    """
    height, width = images.shape[2:]
    if not 1 <= size <= min(height, width):
        raise ValueError(f"a crop of {height}×{width} has 1 to {min(height, width)}, got {size}")
    places = sliding_window_view(images, (size, size), axis=(2, 3))
    pieces: Shaped[np.ndarray, "B C s s"] = places[np.arange(len(images)), :, top, left]
    return pieces


def flip_images(images: Images, flipped: Bool[np.ndarray, " B"]) -> Images:
    """The chosen images mirrored left to right, the others as they are."""
    return np.where(flipped[:, None, None, None], images[..., ::-1], images)


def standardise(
    intensities: Float32[np.ndarray, "B C H W"],
) -> Float32[np.ndarray, "B C H W"]:
    """Each image with mean 0 and standard deviation 1, over its channels and pixels together.

    The deviation counts as at least one grey level over √(C·H·W), so a flat image becomes zero
    instead of noise.
    """
    flat = intensities.reshape(len(intensities), math.prod(intensities.shape[1:]))  # (B, C·H·W)
    floor = np.float32(1 / (255 * math.sqrt(flat.shape[1])))
    centred = flat - flat.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True))
    scaled: Float32[np.ndarray, "B CHW"] = centred / np.maximum(deviation, floor)
    return scaled.reshape(intensities.shape)


@dataclass(frozen=True)
class Shift(Step):
    """Moves each image by up to `limit` pixels in each direction, zero padded (§5)."""

    limit: int
    """Most pixels up, down, left or right."""
    size: int | None = None
    """Rows and columns of the result; None keeps those of the image."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """Shifted at random; in the centre at test time."""
        if draws is None:
            zero = np.zeros(len(images), dtype=np.int64)
            return shift_images(images, zero, zero, size=self.size)
        down = draws.integers("shift down", -self.limit, self.limit)
        right = draws.integers("shift right", -self.limit, self.limit)
        return shift_images(images, down, right, size=self.size)


@dataclass(frozen=True)
class Widen(Step):
    """Repeats the outermost pixels around each image: before a crop, a shift without black bars."""

    margin: int
    """Rows and columns added on every side."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """The same with and without draws."""
        around = (self.margin, self.margin)
        return np.pad(images, ((0, 0), (0, 0), around, around), mode="edge")


@dataclass(frozen=True)
class Crop(Step):
    """Cuts a random `size` × `size` piece; the central one at test time (§7)."""

    size: int
    """Rows and columns of the piece."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """Cropped at random; from the centre at test time."""
        spare_rows, spare_columns = (extent - self.size for extent in images.shape[2:])
        if draws is None:
            top, left = spare_rows // 2, spare_columns // 2
            return images[:, :, top : top + self.size, left : left + self.size]
        top = draws.integers("crop top", 0, spare_rows)
        left = draws.integers("crop left", 0, spare_columns)
        return crop_images(images, top, left, size=self.size)


@dataclass(frozen=True)
class Flip(Step):
    """Mirrors half of the images left to right; none at test time."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """Mirrored with probability one half; as it is at test time."""
        if draws is None:
            return images
        return flip_images(images, draws.integers("flip", 0, 1).astype(bool))


@dataclass(frozen=True)
class Brightness(Step):
    """Adds a random amount to all pixels of an image; nothing at test time."""

    limit: float = 63 / 255
    """Largest amount added or taken away, in intensities."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """Brightened or darkened; as it is at test time."""
        if draws is None:
            return images
        amount = draws.uniform("brightness", -self.limit, self.limit).astype(np.float32)
        return as_intensities(images) + amount[:, None, None, None]


@dataclass(frozen=True)
class Contrast(Step):
    """Scales the distance of pixels from their channel's mean; nothing at test time."""

    low: float = 0.2
    """Smallest factor."""
    high: float = 1.8
    """Largest factor."""

    def __call__(self, images: Images, draws: Draws | None) -> NewImages:
        """With more or less contrast; as it is at test time."""
        if draws is None:
            return images
        factor = draws.uniform("contrast", self.low, self.high).astype(np.float32)
        intensities = as_intensities(images)
        mean = intensities.mean(axis=(2, 3), keepdims=True)  # (B, C, 1, 1)
        scaled: Images = (intensities - mean) * factor[:, None, None, None] + mean
        return scaled
