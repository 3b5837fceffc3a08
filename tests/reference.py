"""The paper in NumPy loops and float64, written from its text alone. Slow on purpose."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def squash(vector: Array) -> Array:
    """Eq. 1 of one vector."""
    length = math.sqrt(sum(float(x) ** 2 for x in vector))
    if length == 0:
        return np.zeros_like(vector)
    squashed: Array = length**2 / (1 + length**2) * vector / length
    return squashed


def softmax(logits: Array, orphan: bool) -> Array:
    """Eq. 3 of one capsule; with an orphan, one more logit of zero that is dropped afterwards."""
    weights = np.array([math.exp(b) for b in logits])
    share: Array = weights / (sum(weights) + (math.exp(0.0) if orphan else 0.0))
    return share


def routing(
    votes: Array,
    num_iterations: int,
    *,
    prior_logits: Array | None = None,
    bias: Array | None = None,
    orphan: bool = False,
) -> tuple[Array, Array, Array]:
    """Procedure 1 on votes of one image, (I, J, E); returns outputs, last coupling, last logits."""
    below, above, size = votes.shape
    logits = np.zeros((below, above)) if prior_logits is None else prior_logits.copy()
    for _ in range(num_iterations):
        coupling = np.stack([softmax(logits[i], orphan) for i in range(below)])
        outputs = np.zeros((above, size))
        for j in range(above):
            total = np.zeros(size) if bias is None else bias[j].copy()
            for i in range(below):
                total += coupling[i, j] * votes[i, j]
            outputs[j] = squash(total)
        used = logits.copy()
        for i in range(below):
            for j in range(above):
                logits[i, j] += float(np.dot(votes[i, j], outputs[j]))
    return outputs, coupling, used


def dense_votes(capsules: Array, weight: Array) -> Array:
    """Eq. 2, û = W u for one image: capsules (I, D), weight (I, J, D, E) -> (I, J, E)."""
    below, above, in_dim, out_dim = weight.shape
    votes = np.zeros((below, above, out_dim))
    for i in range(below):
        for j in range(above):
            for e in range(out_dim):
                votes[i, j, e] = sum(weight[i, j, d, e] * capsules[i, d] for d in range(in_dim))
    return votes


def margin_loss(lengths: Array, targets: Array) -> float:
    """Eq. 4 with the paper's constants, mean over images of the sum over classes."""
    total = 0.0
    for image in range(lengths.shape[0]):
        for k in range(lengths.shape[1]):
            length, present = lengths[image, k], targets[image, k]
            total += present * max(0.0, 0.9 - length) ** 2
            total += 0.5 * (1 - present) * max(0.0, length - 0.1) ** 2
    return float(total / lengths.shape[0])


def reconstruction_loss(reconstruction: Array, images: Array) -> float:
    """§4.1: squared differences summed over an image, mean over images."""
    total = 0.0
    for drawn, image in zip(reconstruction, images, strict=True):
        for ours, theirs in zip(drawn.flat, image.flat, strict=True):
            total += (float(ours) - float(theirs)) ** 2
    return total / len(images)


def convolution(image: Array, weight: Array, bias: Array, *, stride: int) -> Array:
    """A plain convolution of one image (C, H, W) by kernels (out, C, kh, kw)."""
    out_channels, _, rows, columns = weight.shape
    height = (image.shape[1] - rows) // stride + 1
    width = (image.shape[2] - columns) // stride + 1
    result = np.zeros((out_channels, height, width))
    for k in range(out_channels):
        for y in range(height):
            for x in range(width):
                patch = image[:, y * stride : y * stride + rows, x * stride : x * stride + columns]
                result[k, y, x] = float((patch * weight[k]).sum()) + bias[k]
    return result


def conv_routing(
    capsules: Array,
    weight: Array,
    *,
    stride: int,
    padding: int,
    num_iterations: int,
    prior_logits: Array | None = None,
    bias: Array | None = None,
    orphan: bool,
) -> tuple[Array, dict[tuple[int, int, int], float]]:
    """§2's last paragraph for one image: capsules (H, W, T, D), weight (kh, kw, T, U, D, E).

    Prior logits are (kh, kw, T, U), a bias is (U, E).

    Written from the side of the capsule below: it votes for every parent whose patch it is in, and
    its coupling is a softmax over all of these. Returns the outputs (H', W', U, E) and the sum of
    each capsule's coupling.
    """
    height, width, types, _ = capsules.shape
    rows, columns, _, out_types, _, out_dim = weight.shape
    out_height = (height + 2 * padding - rows) // stride + 1
    out_width = (width + 2 * padding - columns) // stride + 1
    votes: dict[tuple[int, int, int], dict[tuple[int, int, int], Array]] = {}
    logits: dict[tuple[int, int, int], dict[tuple[int, int, int], float]] = {}
    for y in range(height):
        for x in range(width):
            for t in range(types):
                reached = votes.setdefault((y, x, t), {})
                priors = logits.setdefault((y, x, t), {})
                for p in range(out_height):
                    for q in range(out_width):
                        a, b = y + padding - p * stride, x + padding - q * stride
                        if 0 <= a < rows and 0 <= b < columns:
                            for u in range(out_types):
                                reached[p, q, u] = capsules[y, x, t] @ weight[a, b, t, u]
                                priors[p, q, u] = (
                                    0.0 if prior_logits is None else float(prior_logits[a, b, t, u])
                                )
    for _ in range(num_iterations):
        total = np.zeros((out_height, out_width, out_types, out_dim))
        if bias is not None:
            total += bias
        sums = {}
        for child, reached in votes.items():
            if not reached:
                continue
            coupling = softmax(np.array([logits[child][parent] for parent in reached]), orphan)
            sums[child] = float(sum(coupling))
            for share, (parent, vote) in zip(coupling, reached.items(), strict=True):
                total[parent] += share * vote
        outputs = np.zeros_like(total)
        for parent in np.ndindex(out_height, out_width, out_types):
            outputs[parent] = squash(total[parent])
        for child, reached in votes.items():
            for parent, vote in reached.items():
                logits[child][parent] += float(np.dot(vote, outputs[parent]))
    return outputs, sums
