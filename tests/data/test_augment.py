import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from capsnet.data.augment import (
    Brightness,
    Contrast,
    Crop,
    Flip,
    Shift,
    Step,
    Widen,
    as_intensities,
    crop_images,
    flip_images,
    shift_images,
    standardise,
)
from capsnet.data.order import Draws


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def draws(count: int) -> Draws:
    return Draws(11, 0, np.arange(count))


def shifted_by_loops(image: np.ndarray, down: int, right: int, size: int) -> np.ndarray:
    channels, height, width = image.shape
    result = np.zeros((channels, size, size), dtype=np.uint8)
    margin = (size - height) // 2
    for row in range(height):
        for column in range(width):
            new_row, new_column = margin + row + down, margin + column + right
            if 0 <= new_row < size and 0 <= new_column < size:
                result[:, new_row, new_column] = image[:, row, column]
    return result


@pytest.mark.parametrize("size", [5, 7, 11])
def test_shift_moves_each_image_by_its_own_amount(size: int) -> None:
    images = random_images(6, 2, 5, 5)
    down, right = np.array([0, 1, -2, 3, -3, 2]), np.array([0, -1, 3, 2, -3, 0])
    expected = [
        shifted_by_loops(image, d, r, size)
        for image, d, r in zip(images, down.tolist(), right.tolist(), strict=True)
    ]
    assert_array_equal(shift_images(images, down, right, size=size), np.stack(expected))


def test_shift_of_nothing_is_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert shift_images(random_images(0, 1, 5, 5), none, none, size=7).shape == (0, 1, 7, 7)


def test_shift_refuses_oblong_images_and_odd_frames() -> None:
    zero = np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match="images to shift must be square, got 3×4"):
        shift_images(random_images(2, 1, 3, 4), zero, zero)
    for size in (2, 6):
        with pytest.raises(ValueError, match=f"size must be 3 plus an even number, got {size}"):
            shift_images(random_images(2, 1, 3, 3), zero, zero, size=size)


def test_crop_takes_each_images_own_piece() -> None:
    images = random_images(3, 2, 5, 6)
    pieces = crop_images(images, np.array([0, 1, 2]), np.array([3, 0, 1]), size=3)
    assert_array_equal(pieces[0], images[0, :, 0:3, 3:6])
    assert_array_equal(pieces[1], images[1, :, 1:4, 0:3])
    assert_array_equal(pieces[2], images[2, :, 2:5, 1:4])


@pytest.mark.parametrize("size", [0, 6])
def test_crop_refuses_a_size_that_does_not_fit(size: int) -> None:
    zero = np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match=f"a crop of 5×7 has 1 to 5, got {size}"):
        crop_images(random_images(2, 1, 5, 7), zero, zero, size=size)


def test_flip_mirrors_only_the_chosen() -> None:
    images = random_images(2, 3, 4, 5)
    flipped = flip_images(images, np.array([True, False]))
    assert_array_equal(flipped[0], images[0, :, :, ::-1])
    assert_array_equal(flipped[1], images[1])


def test_standardise_by_hand() -> None:
    # Mean 0.5; deviations ±0.5 with standard deviation 0.5.
    image = np.array([0, 1, 0, 1], dtype=np.float32).reshape(1, 1, 2, 2)
    assert_allclose(standardise(image)[0, 0], [[-1, 1], [-1, 1]], atol=1e-6)


def test_standardise_makes_a_flat_image_zero() -> None:
    assert_array_equal(standardise(np.full((1, 2, 3, 4), 0.25, dtype=np.float32)), 0)


def test_standardise_takes_channels_together_and_images_apart() -> None:
    intensities = as_intensities(random_images(4, 3, 5, 6))
    result = standardise(intensities)
    for one, standardised in zip(intensities.astype(np.float64), result, strict=True):
        assert_allclose(standardised, (one - one.mean()) / one.std(), atol=1e-5)


def test_bytes_become_intensities_exactly() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    expected = np.arange(256).astype(np.float32) / np.float32(255)
    assert_array_equal(as_intensities(levels).ravel(), expected)


def test_shift_step_is_uniform_over_its_square() -> None:
    images = np.zeros((25_000, 1, 5, 5), dtype=np.uint8)
    images[:, :, 2, 2] = 255  # the centre, so that its place tells the shift
    shifted = Shift(2)(images, draws(len(images)))[:, 0].reshape(len(images), 25)
    counts = np.bincount(shifted.argmax(axis=1), minlength=25)
    statistic = ((counts - 1000) ** 2 / 1000).sum()
    assert abs(statistic - 24) < 4 * math.sqrt(48)


def test_crop_step_is_uniform_and_inside() -> None:
    columns = np.broadcast_to(np.arange(7, dtype=np.uint8), (9000, 1, 7, 7))
    first = Crop(5)(columns, draws(9000))[:, 0, 0, 0]
    counts = np.bincount(first, minlength=3)
    assert len(counts) == 3
    assert (abs(counts - 3000) < 4 * math.sqrt(3000)).all()


def test_widened_and_cropped_images_are_shifted_without_black() -> None:
    images = random_images(400, 3, 5, 5) // 2 + 1
    widened = Widen(2)(images, None)
    assert_array_equal(Crop(5)(widened, None), images)
    shifted = Crop(5)(widened, draws(len(images)))
    assert shifted.min() > 0
    corner = (shifted[:, :, 0, 0] == images[:, :, 0, 0]).all(axis=1)  # moved right and down, or not
    assert abs(corner.mean() - 9 / 25) < 4 * math.sqrt(0.36 * 0.64 / 400)


def test_flip_step_flips_about_half() -> None:
    images = np.broadcast_to(np.arange(4, dtype=np.uint8), (8000, 1, 4, 4))
    flipped = (Flip()(images, draws(8000))[:, 0, 0, 0] == 3).sum()
    assert abs(flipped - 4000) < 4 * math.sqrt(2000)


def test_brightness_step_adds_one_amount_to_an_image() -> None:
    images = random_images(500, 2, 3, 4)
    added = Brightness(0.25)(images, draws(500)) - as_intensities(images)
    assert_allclose(np.ptp(added.reshape(500, 24), axis=1), 0, atol=1e-6)
    assert -0.25 <= added.min() < -0.24
    assert 0.24 < added.max() <= 0.25


def test_contrast_step_keeps_each_channels_mean() -> None:
    images = random_images(200, 3, 4, 5)
    before = as_intensities(images)
    after = Contrast(0.2, 1.8)(images, draws(200))
    assert_allclose(after.mean(axis=(2, 3)), before.mean(axis=(2, 3)), atol=1e-6)
    factors = after.std(axis=(2, 3)) / before.std(axis=(2, 3))  # (B, C)
    assert_allclose(np.ptp(factors, axis=1), 0, atol=1e-5)  # one factor for all channels
    assert 0.2 <= factors.min() < 0.25
    assert 1.75 < factors.max() < 1.8


@pytest.mark.parametrize("step", [Shift(2), Flip(), Brightness(), Contrast()])
def test_test_time_leaves_the_image_alone(step: Step) -> None:
    images = random_images(3, 2, 6, 6)
    assert_array_equal(step(images, None), images)


def test_test_time_takes_the_centre() -> None:
    images = random_images(3, 2, 6, 6)
    assert_array_equal(Crop(4)(images, None), images[:, :, 1:5, 1:5])
    framed = Shift(1, size=8)(images, None)
    assert_array_equal(framed[:, :, 1:7, 1:7], images)
    assert framed.sum() == images.sum()
