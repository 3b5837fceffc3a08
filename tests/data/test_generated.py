import hashlib
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

from capsnet.data.generated import (
    AffnistSplit,
    MultiMNISTSplit,
    Warps,
    warp_images,
)
from capsnet.data.storage import load_mnist

DIGITS = tuple("0123456789")
Examples = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def pairs(mnist_test: Examples) -> MultiMNISTSplit:
    return MultiMNISTSplit(*mnist_test, split="test", class_names=DIGITS, origin="MNIST")


@pytest.fixture(scope="module")
def warped(mnist_test: Examples) -> AffnistSplit:
    return AffnistSplit(*mnist_test, split="test", class_names=DIGITS)


# MultiMNIST


def test_multimnist_has_a_thousand_pairs_of_every_digit(pairs: MultiMNISTSplit) -> None:
    assert len(pairs) == 10_000_000
    assert pairs.image_shape == (1, 36, 36)
    assert pairs.labels_per_image == 2
    base, _ = pairs.choose_digits(np.array([0, 999, 1000, 9_999_999]))
    assert base.tolist() == [0, 0, 1, 9999]


def test_multimnist_adds_the_two_shifted_digits_and_clips(
    pairs: MultiMNISTSplit, mnist_test: Examples
) -> None:
    digits, labels = mnist_test
    indices = np.arange(0, 10_000_000, 77_777)
    batch = pairs.test_batch(indices)
    chosen = pairs.choose_digits(indices)
    shifts = pairs.choose_shifts(indices)
    for number in range(len(indices)):
        apart = np.zeros((2, 36, 36))
        for which in range(2):
            down, right = 4 + shifts[2 * which, number], 4 + shifts[2 * which + 1, number]
            digit = digits[chosen[which][number], 0]
            apart[which, down : down + 28, right : right + 28] = digit
            assert batch.labels[number, which] == labels[chosen[which][number]]
        assert_allclose(batch.targets[number, :, 0].numpy(), apart / 255, atol=1e-7)
        together = np.minimum(apart.sum(axis=0), 255) / 255
        assert_allclose(batch.images[number, 0].numpy(), together, atol=1e-7)


def test_multimnist_partners_never_share_a_class(pairs: MultiMNISTSplit) -> None:
    indices = np.random.default_rng(0).integers(0, len(pairs), 200_000)
    base, partner = pairs.choose_digits(indices)
    labels = load_mnist("test")[1]
    assert (labels[base] != labels[partner]).all()


def test_multimnist_partners_are_uniform_over_all_other_digits(mnist_test: Examples) -> None:
    digits, labels = mnist_test[0][:40], mnist_test[1][:40]
    split = MultiMNISTSplit(digits, labels, split="test", class_names=DIGITS, origin="MNIST")
    base, partner = split.choose_digits(np.arange(40_000))
    for digit in (0, 13, 39):
        counts = np.bincount(partner[base == digit], minlength=40)
        others = counts[labels != labels[digit]]
        assert counts.sum() == others.sum() == 1000
        expected = 1000 / len(others)
        statistic = ((others - expected) ** 2 / expected).sum()
        freedom = len(others) - 1
        assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("shift", [4, 6])
def test_multimnist_shifts_are_uniform(shift: int, mnist_test: Examples) -> None:
    split = MultiMNISTSplit(
        *mnist_test, split="test", class_names=DIGITS, shift=shift, origin="MNIST"
    )
    shifts = split.choose_shifts(np.arange(90_000) * 111)
    expected = 90_000 / (2 * shift + 1)
    for row in shifts:
        counts = np.bincount(row + shift)
        assert len(counts) == 2 * shift + 1
        assert (abs(counts - expected) < 5 * math.sqrt(expected)).all()
    assert abs(np.corrcoef(shifts) - np.eye(4)).max() < 0.02
    assert split.test_batch(np.arange(3)).images.shape == (3, 1, 36, 36)


def test_multimnist_boxes_overlap_about_as_much_as_the_paper_says(pairs: MultiMNISTSplit) -> None:
    # Two 20×20 boxes, each shifted by up to 4: (20 - |Δrow|) (20 - |Δcolumn|) / 20², on average
    # 0.7257 exactly; §6.1 says 80 %.
    down, right, partner_down, partner_right = pairs.choose_shifts(np.arange(100_000))
    overlap = (20 - abs(down - partner_down)) * (20 - abs(right - partner_right)) / 400
    mean_distance = sum(abs(a - b) for a in range(9) for b in range(9)) / 81
    assert abs(overlap.mean() - (1 - mean_distance / 20) ** 2) < 0.002
    assert 0.72 < overlap.mean() < 0.73


def test_multimnist_example_has_the_same_bytes_in_any_batch_and_process(
    pairs: MultiMNISTSplit,
) -> None:
    indices = np.array([5, 1_234_567, 9_999_999, 5])
    whole = pairs.test_batch(indices)
    for position, index in enumerate(indices):
        alone = pairs.test_batch(np.array([index]))
        for one, other in zip(whole, alone, strict=True):
            assert torch.equal(one[position], other[0])
    code = (
        "import numpy as np; from capsnet.data import *; import hashlib; "
        "split = load_split(DataConfig('multimnist'), 'test'); "
        "batch = split.test_batch(np.array([9_999_999, 5, 1_234_567])); "
        "print(hashlib.md5(batch.images[[1, 2, 0]].numpy().tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = hashlib.md5(whole.images[:3].numpy().tobytes()).hexdigest()
    assert done.stdout.strip() == expected


def test_multimnist_seeds_and_splits_make_other_pairs(mnist_test: Examples) -> None:
    variants = [("test", 0), ("train", 0), ("test", 1)]
    partners = [
        MultiMNISTSplit(
            *mnist_test, split=split, class_names=DIGITS, seed=seed, origin="MNIST"
        ).choose_digits(np.arange(2000))[1]
        for split, seed in variants
    ]
    for other in partners[1:]:
        assert (partners[0] == other).mean() < 0.01


def test_multimnist_needs_two_classes(mnist_test: Examples) -> None:
    digits, labels = mnist_test
    zeros = labels == 0
    with pytest.raises(ValueError, match="at least two classes, got only one class"):
        MultiMNISTSplit(
            digits[zeros], labels[zeros], split="test", class_names=DIGITS, origin="MNIST"
        )


# affNIST


def warp_by_loops(
    image: np.ndarray, matrix: np.ndarray, centre: np.ndarray, size: int
) -> np.ndarray:
    height, width = image.shape
    result = np.zeros((size, size))
    inverse = np.linalg.inv(matrix)
    for row in range(size):
        for column in range(size):
            x, y = inverse @ (np.array([column, row]) - centre)
            x, y = x + (width - 1) / 2, y + (height - 1) / 2
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < height and 0 <= j < width:
                        result[row, column] += image[i, j] * (1 - abs(y - i)) * (1 - abs(x - j))
    return result / 255


def test_warp_equals_bilinear_interpolation_by_loops(
    warped: AffnistSplit, mnist_test: Examples
) -> None:
    indices = np.array([3, 77, 1234, 319_999])
    warps = warped.choose_warps(indices)
    batch = warped.test_batch(indices)
    for number, index in enumerate(indices):
        digit = mnist_test[0][index // 32, 0].astype(np.float64)
        expected = warp_by_loops(digit, warps.matrix[number], warps.centre[number], 40)
        # Half a grey level of rounding, and float32 coordinates.
        assert_allclose(batch.images[number, 0].numpy(), expected, atol=0.5 / 255 + 1e-4)
        assert batch.labels[number, 0] == mnist_test[1][index // 32]


def test_identity_warp_places_the_image_unchanged() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 1, 5, 5)).astype(np.uint8)
    warps = Warps(np.eye(2)[None], np.array([[4.0, 6.0]]))
    result = warp_images(image, warps, size=11)[0, 0]
    assert_close(result[4:9, 2:7] * 255, torch.from_numpy(image[0, 0]).float())
    assert (result > 0).sum() == (image > 0).sum()


def test_affnist_transformations_stay_in_their_ranges_and_fill_them(warped: AffnistSplit) -> None:
    matrix = warped.choose_warps(np.arange(320_000)).matrix
    # rotation · shear · scale, taken apart again by QR.
    across = np.hypot(matrix[:, 0, 0], matrix[:, 1, 0])
    angle = np.rad2deg(np.arctan2(matrix[:, 1, 0], matrix[:, 0, 0]))
    down = np.linalg.det(matrix) / across
    shear = (matrix[:, 0, 0] * matrix[:, 0, 1] + matrix[:, 1, 0] * matrix[:, 1, 1]) / across / down
    for values, low, high in (
        (angle, -20, 20),
        (shear, -0.2, 0.2),
        (across, 0.8, 1.2),
        (down, 0.8, 1.2),
    ):
        assert low - 1e-9 <= values.min() < low + 0.001 * (high - low)
        assert high - 0.001 * (high - low) < values.max() <= high + 1e-9
        counts = np.histogram(values, bins=20, range=(low, high))[0]
        assert (abs(counts - 16_000) < 5 * math.sqrt(16_000)).all()
    assert abs(np.corrcoef((angle, shear, across, down)) - np.eye(4)).max() < 0.01


def test_affnist_loses_no_ink(warped: AffnistSplit, mnist_test: Examples) -> None:
    indices = np.arange(0, 320_000, 61)
    images = warped.test_batch(indices).images[:, 0]
    border = torch.cat((images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]), dim=1)
    assert (border == 0).all()
    # A warp changes the amount of ink as it changes areas; sampling adds a small error.
    area = np.abs(np.linalg.det(warped.choose_warps(indices).matrix))
    before = mnist_test[0][indices // 32].sum(axis=(1, 2, 3)) / 255 * area
    ratio = images.sum((1, 2)).numpy() / before
    assert abs(ratio.mean() - 1) < 0.001
    assert abs(ratio - 1).max() < 0.12
    assert ratio.std() < 0.01


def test_affnist_digits_reach_all_parts_of_the_frame(warped: AffnistSplit) -> None:
    indices = np.arange(320_000)
    matrix, centre = warped.choose_warps(indices)
    low, high = warped.reach(indices // 32, matrix)
    assert (centre + low >= 0).all()
    assert (centre + high <= 39).all()
    assert_allclose((centre + (low + high) / 2).mean(axis=0), 19.5, atol=0.05)
    assert (centre.min(axis=0) < 8).all()
    assert (centre.max(axis=0) > 31).all()
    inked = warped.test_batch(np.arange(0, 320_000, 100)).images[:, 0].amax(0) > 0
    assert inked[1:-1, 10:30].all()  # all rows and columns but the border, if not its corners
    assert inked[10:30, 1:-1].all()


def test_affnist_example_is_the_same_in_any_batch(warped: AffnistSplit) -> None:
    indices = np.arange(100, 164)
    whole = warped.test_batch(indices)
    for size in (1, 7):
        parts = [warped.test_batch(indices[i : i + size]).images for i in range(0, 64, size)]
        assert torch.equal(torch.cat(parts), whole.images)
    assert_array_equal(whole.targets[:, 0], whole.images)


def test_affnist_images_are_whole_grey_levels(warped: AffnistSplit) -> None:
    levels = warped.test_batch(np.arange(50)).images * 255
    assert_close(levels, levels.round())


def test_affnist_seeds_make_other_images(mnist_test: Examples) -> None:
    first, second = (
        AffnistSplit(*mnist_test, split="test", class_names=DIGITS, seed=seed) for seed in (0, 1)
    )
    assert not torch.equal(
        first.test_batch(np.arange(4)).images, second.test_batch(np.arange(4)).images
    )


def test_affnist_refuses_a_black_image(mnist_test: Examples) -> None:
    digits = mnist_test[0][:3].copy()
    digits[1] = 0
    with pytest.raises(ValueError, match="every image must have ink"):
        AffnistSplit(digits, mnist_test[1][:3], split="test", class_names=DIGITS)
