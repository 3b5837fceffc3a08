"""Matrices that turn a two-dimensional convolution into few independent products.

A short convolution is a product of polynomials: evaluate both at enough points, multiply value by
value, interpolate (Toom–Cook). With the points on the unit circle this is the discrete Fourier
transform, as well conditioned as a transform can be. Two of the points here are 0 and ∞ instead:
they are real, so they spare the products of a complex one, and they leave rounding as it is.

Real polynomials take conjugate values at conjugate points, so one of each pair is enough, and a
complex product needs three real ones. In two dimensions a point is a pair of a row point and a
column point; all pairs with one row point form a *band*. Primary capsules on MNIST have 6 outputs
and 5 taps along an axis, so 10 points: in all 142 products in place of 36 · 25.

Everything here is NumPy in float64, done once for each shape.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Complex: TypeAlias = NDArray[np.complex128]
Real: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """Toom–Cook along one axis: out = Σ over points of output · (taps · w) · (data · x).

    Rows are points; the first `num_pairs` stand for a conjugate pair each, the others are real.
    """

    num_pairs: int
    data: Complex
    """Acts on outputs + taps − 1 input values."""
    taps: Complex
    """Acts on the kernel."""
    output: Complex
    """Its transpose interpolates the outputs."""


def axis_algorithm(num_outputs: int, num_taps: int, *, infinity: bool = True) -> Axis:
    """Returns the algorithm for outputs y_k = Σ_t w_t x_(k + t).

    Without the point ∞ the points are those of one more tap, all but ∞, so that kernels of both
    sizes share their interpolation: a stride that does not divide a kernel leaves such a pair.

    >>> axis = axis_algorithm(num_outputs=2, num_taps=3)  # points 1, −1, 0, ∞
    >>> products = (axis.taps @ [1.0, 2.0, 3.0]) * (axis.data @ [1.0, 10.0, 100.0, 1000.0])
    >>> (axis.output.T @ products).real  # 1 + 20 + 300, 10 + 200 + 3000
    array([ 321., 3210.])
    """
    num_points = num_outputs + num_taps - 1
    num_roots = max(num_points - 1 - infinity, 0)
    roots = np.exp(2j * np.pi * np.arange(num_roots) / max(num_roots, 1))
    pairs = roots[1 : (num_roots + 1) // 2]
    real = [1.0, -1.0][: 0 if num_roots == 0 else 2 - num_roots % 2]
    finite = np.array([*pairs, *pairs.conj(), *real, 0.0], dtype=complex)
    infinite = num_points - len(finite)  # 1 or 0

    def evaluate(length: int) -> Complex:
        at_finite: Complex = np.vander(finite, length, increasing=True)
        at_infinity = np.eye(length)[length - infinite :]  # the leading coefficient
        return np.concatenate([at_finite, at_infinity])

    kept = np.r_[0 : len(pairs), 2 * len(pairs) : num_points]
    # The transpose of "evaluate, multiply, interpolate" computes correlations instead of products.
    data = np.linalg.inv(evaluate(num_points)).T.astype(np.complex128)
    return Axis(len(pairs), data[kept], evaluate(num_taps)[kept], evaluate(num_outputs)[kept])


def row_data_matrix(axis: Axis) -> Real:
    """Returns the matrix to the values at every row point; complex ones are two rows, Re and Im."""
    return np.concatenate([
        np.stack([axis.data[: axis.num_pairs].real, axis.data[: axis.num_pairs].imag], 1).reshape(
            2 * axis.num_pairs, axis.data.shape[1]
        ),
        axis.data[axis.num_pairs :].real,
    ])  # fmt: skip


def row_output_matrix(axis: Axis) -> Real:
    """Returns the matrix from the row values of the result, laid out as above, to output rows."""
    pairs = 2 * axis.output[: axis.num_pairs]  # a pair's other half is the conjugate
    both = np.stack([pairs.real, -pairs.imag], 1).reshape(2 * axis.num_pairs, pairs.shape[1])
    return np.concatenate([both, axis.output[axis.num_pairs :].real]).T


def column_data_matrix(axis: Axis, complex_row: bool, *, width: int) -> Real:
    """Returns the matrix from one row value over all columns to the products' data factors.

    A complex row value comes as its real parts, then its imaginary parts, `width` of each; columns
    beyond what the algorithm reads are ignored.
    """
    points = _column_points(axis.data, axis.num_pairs, complex_row)
    padded = np.pad(points, ((0, 0), (0, width - points.shape[1])))
    factors = np.concatenate([padded, 1j * padded], 1) if complex_row else padded
    return _three_factors(factors, len(points) if complex_row else axis.num_pairs)


def column_output_matrix(axis: Axis, complex_row: bool) -> Real:
    """Returns the matrix from a band's products to its row value over all output columns."""
    points = _column_points(axis.output, axis.num_pairs, complex_row)
    num_complex = len(points) if complex_row else axis.num_pairs
    # (a + bi)(c + di) = (1 − i)·ac − (1 + i)·bd + i·(a + b)(c + d)
    three = np.array([1 - 1j, -1 - 1j, 1j])
    columns = (points[:num_complex, None] * three[:, None]).reshape(
        3 * num_complex, points.shape[1]
    )
    if complex_row:
        return np.concatenate([columns.real, columns.imag], 1).T
    return np.concatenate([2 * columns.real, points[num_complex:].real]).T


def tap_matrix(rows: Axis, columns: Axis, band: int) -> Real:
    """Returns the matrix from a kernel's taps, row by row, to a band's kernel factors."""
    complex_row = band < rows.num_pairs
    points = _column_points(columns.taps, columns.num_pairs, complex_row)
    factors = (rows.taps[band][None, :, None] * points[:, None, :]).reshape(len(points), -1)
    return _three_factors(factors, len(points) if complex_row else columns.num_pairs)


def _column_points(values: Complex, num_pairs: int, complex_row: bool) -> Complex:
    """A complex row point meets both halves of a column's pair, a real one needs one of them."""
    if not complex_row:
        return values
    pairs = values[:num_pairs]
    both = np.stack([pairs, pairs.conj()], 1).reshape(2 * num_pairs, values.shape[1])
    return np.concatenate([both, values[num_pairs:]])


def _three_factors(values: Complex, num_complex: int) -> Real:
    """Factors a, b, a + b of a complex value a + bi; the values after `num_complex` are real."""
    parts = values[:num_complex]
    three = np.stack([parts.real, parts.imag, parts.real + parts.imag], 1)
    return np.concatenate([
        three.reshape(3 * num_complex, values.shape[1]), values[num_complex:].real
    ])  # fmt: skip
