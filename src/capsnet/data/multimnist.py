"""MultiMNIST: two overlapping digits in 36×36, made when asked for (§6.1)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64, UInt8

from capsnet.data.augment import as_intensities, shift_images
from capsnet.data.order import Draws
from capsnet.data.splits import Batch, Split

EXAMPLES_PER_DIGIT = 1000  # §6.1: 60M training and 10M test examples
SIZE = 36


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
        self.image_shape = (1, SIZE, SIZE)
        self._digits, self._labels, self._shift, self._seed = digits, labels, shift, seed
        counts = np.bincount(labels, minlength=len(class_names))
        if (counts == len(labels)).any():
            raise ValueError("MultiMNIST needs digits of at least two classes, got only one class")
        # Sorted by class, the digits of all other classes are everything before and after a gap.
        self._by_class = np.argsort(labels, kind="stable")
        self._class_sizes = counts
        self._class_starts = np.cumsum(counts) - counts

    def __len__(self) -> int:
        return EXAMPLES_PER_DIGIT * len(self._labels)

    def choose_digits(
        self, indices: Int64[np.ndarray, " B"]
    ) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """The base digit of each example and its partner of another class."""
        base = indices // EXAMPLES_PER_DIGIT
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
                shift_images(self._digits[base], base_down, base_right, size=SIZE),
                shift_images(self._digits[partner], partner_down, partner_right, size=SIZE),
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
