"""Randomness and order that depend on a position alone: no state, so any example costs the same.

Every random number is a hash of (seed, what it is for, epoch, counter). A run that stops and
continues, or that is shared out among processes, therefore sees exactly the same examples.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Float64, Int64, UInt64

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / φ, the increment of SplitMix64
_FEISTEL_ROUNDS = 8
_MIN_BITS = 6  # a smaller Feistel domain cannot reach every permutation of a tiny set


def random_bits(key: int, counters: Int64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """Number `counter` of the SplitMix64 sequence that starts at `key`, for each counter.

    >>> random_bits(0, np.array([0, 1]))
    array([16294208416658607535,  7960286522194355700], dtype=uint64)
    """
    bits = (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN_RATIO + np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def stream_key(*parts: int | str) -> int:
    """A 64-bit key for the random numbers that serve the purpose `parts` spell out."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Draws:
    """Random numbers for a batch, one per counter and name, independent of everything else.

    The same seed, scope, counter and name give the same number in any batch and process; the scope
    is the epoch in training, and a name for what is drawn once and for all.

    >>> draws = Draws(7, 0, np.array([41, 42, 43]))
    >>> draws.integers("shift down", -2, 2)
    array([-1,  0,  0])
    >>> Draws(7, 0, np.array([42])).integers("shift down", -2, 2)
    array([0])
    """

    def __init__(self, seed: int, scope: int | str, counters: Int64[np.ndarray, " B"]) -> None:
        self.seed = seed
        self.scope = scope
        self.counters = counters

    def integers(self, name: str, low: int, high: int) -> Int64[np.ndarray, " B"]:
        """Uniform integers between low and high, both included."""
        return self.below(name, np.int64(high - low + 1)) + low

    def below(
        self, name: str, bound: np.int64 | Int64[np.ndarray, " B"]
    ) -> Int64[np.ndarray, " B"]:
        """Uniform integers in [0, bound), with one bound for all or one for each; bound < 2³²."""
        # The high half of a 32×32-bit product: uniform to within bound / 2³², without division.
        bits = random_bits(stream_key(self.seed, self.scope, name), self.counters)
        product = (bits >> np.uint64(32)) * np.asarray(bound, dtype=np.uint64)
        return (product >> np.uint64(32)).astype(np.int64)

    def uniform(self, name: str, low: float, high: float) -> Float64[np.ndarray, " B"]:
        """Uniform numbers in [low, high), on a grid of 2⁵³ steps."""
        bits = random_bits(stream_key(self.seed, self.scope, name), self.counters)
        return low + (high - low) * ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def shuffle(
    positions: Int64[np.ndarray, " B"], length: int, *, seed: int, epoch: int
) -> Int64[np.ndarray, " B"]:
    """The examples at the given positions of a random order of [0, length).

    A Feistel network permutes the next power of two; a result outside [0, length) is permuted
    again until it falls inside (cycle walking), which leaves a permutation of [0, length). The
    order needs no memory, so sixty million examples are shuffled as easily as ten.

    >>> shuffle(np.arange(6), 6, seed=1, epoch=0)
    array([1, 0, 5, 3, 4, 2])
    """
    if length < 1:
        raise ValueError(f"only a positive number of examples can be shuffled, got {length}")
    if positions.size and (positions.min() < 0 or positions.max() >= length):
        raise ValueError(
            f"positions must be in [0, {length}), got {positions.min()} to {positions.max()}"
        )
    num_bits = max(_MIN_BITS, (length - 1).bit_length())
    keys = [stream_key(seed, epoch, "shuffle", turn) for turn in range(_FEISTEL_ROUNDS)]
    values = _feistel(positions, num_bits, keys)
    outside = np.flatnonzero(values >= length)
    while outside.size:
        values[outside] = _feistel(values[outside], num_bits, keys)
        outside = outside[values[outside] >= length]
    return values


def _feistel(
    values: Int64[np.ndarray, " n"], num_bits: int, keys: list[int]
) -> Int64[np.ndarray, " n"]:
    """A permutation of [0, 2^num_bits): the halves trade places, one scrambled by the other."""
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = values >> right_bits, values & ((1 << right_bits) - 1)
    for key in keys:
        scramble = (random_bits(key, right) >> np.uint64(1)).astype(np.int64)
        left, right = right, left ^ (scramble & ((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return left << right_bits | right
