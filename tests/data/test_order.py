import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsnet.data.order import Draws, random_bits, shuffle, stream_key


def chi_square(counts: np.ndarray) -> float:
    """Excess of the χ² statistic over its mean, in standard deviations."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_random_bits_are_splitmix64() -> None:
    # The first five numbers of the reference implementation for seed 1234567.
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert random_bits(1234567, np.arange(5)).tolist() == known


def test_stream_key_tells_its_parts_apart() -> None:
    assert stream_key(1, 23) != stream_key(12, 3)
    assert stream_key(1, "2") == stream_key("1", 2)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    whole = Draws(3, 5, np.arange(100))
    part = Draws(3, 5, np.array([70, 7]))
    assert part.integers("a", 0, 999).tolist() == whole.integers("a", 0, 999)[[70, 7]].tolist()
    assert part.uniform("a", 0.0, 1.0).tolist() == whole.uniform("a", 0.0, 1.0)[[70, 7]].tolist()


def test_integers_are_uniform_and_reach_both_ends() -> None:
    counts = np.bincount(Draws(0, 0, np.arange(90_000)).integers("shift", -4, 4) + 4)
    assert len(counts) == 9
    assert abs(chi_square(counts)) < 4


def test_below_respects_a_bound_for_each() -> None:
    bounds = np.array([1, 2, 3, 60_000])
    values = np.stack([Draws(s, 0, np.arange(4)).below("x", bounds) for s in range(300)])
    assert (values >= 0).all()
    assert (values.max(axis=0)[:3] == bounds[:3] - 1).all()
    assert (values < bounds).all()


def test_uniform_numbers_fill_their_range_evenly() -> None:
    values = Draws(0, 0, np.arange(100_000)).uniform("angle", -20.0, 20.0)
    assert -20 <= values.min() < -19.99
    assert 19.99 < values.max() < 20
    assert abs(chi_square(np.histogram(values, bins=50, range=(-20, 20))[0])) < 4


@pytest.mark.parametrize(
    "other",
    [
        Draws(1, 0, np.arange(20_000)),
        Draws(0, 1, np.arange(20_000)),
        Draws(0, 0, np.arange(1, 20_001)),
    ],
    ids=["seed", "epoch", "position"],
)
def test_draws_of_other_seeds_epochs_and_positions_are_unrelated(other: Draws) -> None:
    first = Draws(0, 0, np.arange(20_000)).uniform("a", 0.0, 1.0)
    assert abs(np.corrcoef(first, other.uniform("a", 0.0, 1.0))[0, 1]) < 0.025
    assert abs(np.corrcoef(first, other.uniform("b", 0.0, 1.0))[0, 1]) < 0.025


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 9))
def test_shuffle_is_a_permutation_of_any_length(length: int, seed: int, epoch: int) -> None:
    order = shuffle(np.arange(length), length, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("length", [2, 3, 4])
def test_shuffle_reaches_every_permutation_equally_often(length: int) -> None:
    permutations = list(itertools.permutations(range(length)))
    counts = dict.fromkeys(permutations, 0)
    for seed in range(15 * len(permutations)):
        order = shuffle(np.arange(length), length, seed=seed, epoch=0)
        counts[tuple(order.tolist())] += 1
    assert abs(chi_square(np.array(list(counts.values())))) < 4


@pytest.mark.usefixtures("without_annotation_checks")
def test_shuffle_sends_each_position_anywhere_equally_often() -> None:
    length, num_epochs = 37, 800
    orders = np.stack(
        [shuffle(np.arange(length), length, seed=0, epoch=e) for e in range(num_epochs)]
    )
    table = np.stack([np.bincount(column, minlength=length) for column in orders.T])
    assert abs(chi_square(table.ravel())) < 5


def test_shuffle_sends_neighbours_apart() -> None:
    order = shuffle(np.arange(60_000), 60_000, seed=0, epoch=0)
    assert abs(np.corrcoef(np.arange(60_000), order)[0, 1]) < 0.015
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
    steps = np.diff(order) % 60_000
    assert abs(chi_square(np.histogram(steps, bins=100, range=(0, 60_000))[0])) < 5
    # Two epochs agree at about one position, as two random orders do.
    other = shuffle(np.arange(60_000), 60_000, seed=0, epoch=1)
    assert (order == other).sum() < 8


def test_shuffle_of_sixty_million_needs_no_memory() -> None:
    length = 60_000_000
    positions = np.concatenate((np.arange(100_000), np.arange(length - 100_000, length)))
    order = shuffle(positions, length, seed=4, epoch=2)
    assert len(np.unique(order)) == len(order)
    assert abs(chi_square(np.histogram(order, bins=64, range=(0, length))[0])) < 5
    one = shuffle(positions[[150_000]], length, seed=4, epoch=2)
    assert one[0] == order[150_000]


@pytest.mark.parametrize("positions", [[-1], [0, 10]])
def test_shuffle_refuses_positions_outside(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"positions must be in \[0, 10\), got"):
        shuffle(np.array(positions), 10, seed=0, epoch=0)


def test_shuffle_refuses_an_empty_set() -> None:
    with pytest.raises(ValueError, match="only a positive number of examples"):
        shuffle(np.arange(0), 0, seed=0, epoch=0)
