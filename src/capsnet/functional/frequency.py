"""Convolution through the frequency domain, forward and backward, as matrix products.

A stride of s splits rows and columns into s phases each: s² convolutions of stride 1 whose results
add up. `toom_cook` gives the matrices that turn each of them into independent products of data and
kernel *factors*, one matrix product over channels for every factor. Data lies as (tile, row,
column, channel) throughout, weights as (tap, in, out); so every step is a matrix product on views
and nothing large is transposed.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from capsnet.functional import toom_cook
from capsnet.functional.patches import own_view

Factors: TypeAlias = Iterable[Iterable[Tensor]]
"""Factors of every phase and band."""


@dataclass(frozen=True)
class Phase:
    """One of the stride² parts of a convolution: every stride-th row and column from an offset."""

    row: int
    column: int
    tap_grid: tuple[int, int]
    """Rows and columns of the kernel in this phase."""
    num_rows: int
    """Rows of a tile that it reads."""
    row_data: Tensor
    """From rows to the values at every row point."""
    column_data: tuple[Tensor, ...]
    """From a row point's values to the data factors of its band, for each band."""
    taps: tuple[Tensor, ...]
    """From taps to the kernel factors of each band."""


@dataclass(frozen=True)
class Plan:
    """How to convolve images of one size: tiles, phases and their matrices."""

    stride: int
    padding: int
    image_grid: tuple[int, int]
    kernel: tuple[int, int]
    output_grid: tuple[int, int]
    num_tiles: tuple[int, int]
    tile_outputs: tuple[int, int]
    """Rows and columns of the output that one tile yields."""
    phase_grid: tuple[int, int]
    """Rows and columns of a tile in one phase."""
    phases: tuple[Phase, ...]
    bands: tuple[slice, ...]
    """Where the values of each row point lie: one row if it is real, two if complex."""
    column_output: tuple[Tensor, ...]
    """From the products of a band to the row point's value at every output column."""
    row_output: Tensor
    """From those to the rows of the output."""


@lru_cache(maxsize=64)
def make_plan(
    image_grid: tuple[int, int],
    kernel: tuple[int, int],
    *,
    stride: int,
    padding: int,
    num_tiles: tuple[int, int],
    dtype: torch.dtype,
) -> Plan:
    """Returns the tiles and matrices of a convolution."""
    output_rows, output_columns = (
        (size + 2 * padding - taps) // stride + 1
        for size, taps in zip(image_grid, kernel, strict=True)
    )
    tile_outputs = ceil(output_rows / num_tiles[0]), ceil(output_columns / num_tiles[1])
    most_taps = ceil(kernel[0] / stride), ceil(kernel[1] / stride)
    phase_grid = tile_outputs[0] + most_taps[0] - 1, tile_outputs[1] + most_taps[1] - 1

    def algorithm(axis: int, offset: int) -> toom_cook.Axis:
        num_taps = len(range(offset, kernel[axis], stride))
        infinity = num_taps == most_taps[axis]
        return toom_cook.axis_algorithm(tile_outputs[axis], num_taps, infinity=infinity)

    def matrix(values: toom_cook.Real) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def make_phase(row: int, column: int) -> Phase:
        rows, columns = algorithm(0, row), algorithm(1, column)
        bands = range(len(rows.data))
        return Phase(
            row,
            column,
            tap_grid=(rows.taps.shape[1], columns.taps.shape[1]),
            num_rows=rows.data.shape[1],
            row_data=matrix(toom_cook.row_data_matrix(rows)),
            column_data=tuple(
                matrix(
                    toom_cook.column_data_matrix(
                        columns, band < rows.num_pairs, width=phase_grid[1]
                    )
                )
                for band in bands
            ),
            taps=tuple(matrix(toom_cook.tap_matrix(rows, columns, band)) for band in bands),
        )

    rows, columns = algorithm(0, 0), algorithm(1, 0)
    pairs, num_bands = rows.num_pairs, len(rows.data)
    return Plan(
        stride,
        padding,
        image_grid,
        kernel,
        (output_rows, output_columns),
        num_tiles,
        tile_outputs,
        phase_grid,
        phases=tuple(
            make_phase(row, column)
            for row, column in product(*(range(min(stride, taps)) for taps in kernel))
        ),
        bands=tuple(
            slice(2 * band, 2 * band + 2) if band < pairs else slice(pairs + band, pairs + band + 1)
            for band in range(num_bands)
        ),
        column_output=tuple(
            matrix(toom_cook.column_output_matrix(columns, band < pairs))
            for band in range(num_bands)
        ),
        row_output=matrix(toom_cook.row_output_matrix(rows)),
    )


def kernel_factors(plan: Plan, weight: Tensor) -> Factors:
    """Yields the kernel factors of every phase and band, (C, factors, out) each."""
    by_tap = weight.permute(2, 3, 1, 0)  # (kH, kW, C, out)
    for phase in plan.phases:
        taps = by_tap[phase.row :: plan.stride, phase.column :: plan.stride].flatten(0, 1)
        taps = taps.transpose(0, 1).contiguous()  # (C, taps, out)
        yield (matrix.expand(len(taps), -1, -1) @ taps for matrix in phase.taps)


@dataclass(frozen=True)
class _Remembered:
    plan: Plan
    version: int
    address: int
    factors: list[list[Tensor]]


_remembered: MutableMapping[Tensor, _Remembered] = WeakIdKeyDictionary()


def recall_factors(plan: Plan, weight: Tensor) -> list[list[Tensor]] | None:
    """Returns `kernel_factors` of a weight at rest, made once; None for one in training.

    A change of the weight shows in its version, which every in-place operation counts up, unless
    it works on `.data`.
    """
    if (torch.is_grad_enabled() and weight.requires_grad) or weight.is_inference():
        _remembered.pop(weight, None)
        return None
    known = _remembered.get(weight)
    if (
        known is None
        or known.plan is not plan
        or (known.version, known.address) != (weight._version, weight.data_ptr())
    ):
        # What is made in inference mode could not serve a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            factors = [list(bands) for bands in kernel_factors(plan, weight)]
        known = _Remembered(plan, weight._version, weight.data_ptr(), factors)
        _remembered[weight] = known
    return known.factors


def data_factors(plan: Plan, tiles: Tensor) -> Factors:
    """Yields the data factors of every phase and band, (tile, factors, C) each."""
    num_tiles, *_, channels = tiles.shape
    by_phase = tiles.unflatten(1, (-1, plan.stride)).flatten(3)  # (tile, row, phase, columns * C)
    for _, group in groupby(plan.phases, key=lambda phase: phase.row):
        phases = list(group)
        first = phases[0]
        rows = first.row_data.expand(num_tiles, -1, -1) @ by_phase[:, : first.num_rows, first.row]
        rows = rows.unflatten(2, (-1, plan.stride, channels))  # (tile, value, column, phase, C)
        for phase in phases:
            values = rows[:, :, :, phase.column]
            yield (
                matrix.expand(num_tiles, -1, -1) @ values[:, band].flatten(1, 2)
                for band, matrix in zip(plan.bands, phase.column_data, strict=False)
            )


def multiply_factors(plan: Plan, tiles: Tensor, kernel: Factors) -> list[Tensor]:
    """Returns the products of every band, summed over channels and phases, (factors, tile, out)."""
    # The first phase has all factors; a later one may lack the last of a band, or the last band.
    products: list[Tensor] = []
    for index, (data, factors) in enumerate(zip(data_factors(plan, tiles), kernel, strict=True)):
        for band, (left, right) in enumerate(zip(data, factors, strict=True)):
            left, right = left.transpose(0, 1), right.transpose(0, 1)
            if index == 0:
                products.append(left @ right)
            else:
                products[band][: len(left)].baddbmm_(left, right)
    return products


def interpolate(plan: Plan, products: list[Tensor]) -> Tensor:
    """Returns the outputs of every tile, (row, column, tile, out)."""
    values = products[0].new_empty(
        plan.row_output.shape[1], plan.tile_outputs[1], products[0][0].numel()
    )
    for band, matrix, factors in zip(plan.bands, plan.column_output, products, strict=True):
        torch.mm(matrix, factors.flatten(1), out=values[band].flatten(0, 1))
    outputs: Tensor = plan.row_output @ values.flatten(1)
    outputs = outputs.unflatten(1, (plan.tile_outputs[1], *products[0].shape[1:]))
    return outputs


def transform_gradient(plan: Plan, gradient: Tensor) -> list[Tensor]:
    """Returns the gradient of every band's products from that of the outputs of `interpolate`."""
    _, columns, num_tiles, num_outputs = gradient.shape
    values = (plan.row_output.t() @ gradient.flatten(1)).unflatten(1, (columns, -1))
    return [
        (matrix.t() @ values[band].flatten(0, 1)).unflatten(1, (num_tiles, num_outputs))
        for band, matrix in zip(plan.bands, plan.column_output, strict=True)
    ]


def tile_gradient(plan: Plan, gradients: list[Tensor], kernel: Factors, *, channels: int) -> Tensor:
    """Returns the gradient of the tiles from that of the products."""
    _, num_tiles, _ = gradients[0].shape
    rows, columns = plan.phase_grid
    shape = num_tiles, rows, plan.stride, columns, plan.stride, channels
    has_all = len(plan.phases) == plan.stride**2
    tiles = gradients[0].new_empty(shape) if has_all else gradients[0].new_zeros(shape)
    for phase, factors in zip(plan.phases, kernel, strict=True):
        values = tiles.new_empty(len(phase.row_data), columns, num_tiles * channels)
        for band, matrix, gradient, right in zip(
            plan.bands, phase.column_data, gradients, factors, strict=False
        ):
            left = _sum_in_parts(gradient[: len(matrix)], right.permute(1, 2, 0))
            torch.mm(matrix.t(), left.flatten(1), out=values[band].flatten(0, 1))
        target = tiles[:, :, phase.row, :, phase.column].permute(2, 1, 0, 3)
        for column in range(columns):  # a column is small enough for the cache
            part = phase.row_data.t() @ values[:, column]
            target[column, : phase.num_rows] = part.unflatten(1, (num_tiles, channels))
        target[:, phase.num_rows :] = 0
    return tiles.flatten(3, 4).flatten(1, 2)


def _sum_in_parts(left: Tensor, right: Tensor, length: int = 32) -> Tensor:
    """Batched matrix product whose sums are taken in parts: a short sum rounds less."""
    total = left.new_empty(*left.shape[:2], right.shape[2])
    for start in range(0, left.shape[2], length):
        part = slice(start, start + length)
        torch.baddbmm(total, left[:, :, part], right[:, part], beta=min(start, 1), out=total)
    return total


def weight_gradient(plan: Plan, gradients: list[Tensor], tiles: Tensor) -> Tensor:
    """Returns the gradient of the weight, (out, C, kH, kW), stored with its taps first."""
    channels, num_outputs = tiles.shape[3], gradients[0].shape[2]
    by_tap = tiles.new_empty(*plan.kernel, channels, num_outputs)
    for phase, data in zip(plan.phases, data_factors(plan, tiles), strict=True):
        taps = tiles.new_zeros(channels, phase.taps[0].shape[1], num_outputs)
        for matrix, left, gradient in zip(phase.taps, data, gradients, strict=False):
            factors = left.permute(1, 2, 0) @ gradient[: len(matrix)]  # (factors, C, out)
            taps.baddbmm_(matrix.t().expand(channels, -1, -1), factors.transpose(0, 1))
        grid = taps.transpose(0, 1).unflatten(0, phase.tap_grid)
        by_tap[phase.row :: plan.stride, phase.column :: plan.stride] = grid
    return by_tap.permute(3, 2, 0, 1)


def _pads(plan: Plan) -> tuple[int, ...]:
    """Zeros around (H, W, C) that make every tile whole; negative where no output looks."""
    pads = [0, 0]
    for axis in (1, 0):
        whole = (plan.num_tiles[axis] - 1) * plan.tile_outputs[axis] + plan.phase_grid[axis]
        pads += [plan.padding, plan.stride * whole - plan.image_grid[axis] - plan.padding]
    return tuple(pads)


def cut_tiles(plan: Plan, images: Tensor) -> Tensor:
    """Returns the tiles of (B, C, H, W) images, (tile, row, column, C); neighbours overlap."""
    grid = images.permute(0, 2, 3, 1)  # (B, H, W, C)
    if any(pads := _pads(plan)):
        grid = F.pad(grid, pads)
    if plan.num_tiles != (1, 1):
        for axis in (0, 1):
            grid = grid.unfold(
                1 + axis,
                plan.stride * plan.phase_grid[axis],
                plan.stride * plan.tile_outputs[axis],
            )  # last (B, tileRow, tileColumn, C, row, column)
        grid = grid.permute(0, 1, 2, 4, 5, 3).flatten(0, 2)
    return grid.contiguous()


def join_tiles(plan: Plan, tiles: Tensor) -> Tensor:
    """Returns the gradient of the images from that of their tiles."""
    grid = tiles
    if plan.num_tiles != (1, 1):
        pads = _pads(plan)
        by_place = tiles.unflatten(0, (-1, *plan.num_tiles))
        grid = tiles.new_zeros(
            len(by_place),
            plan.image_grid[0] + pads[4] + pads[5],
            plan.image_grid[1] + pads[2] + pads[3],
            tiles.shape[3],
        )
        _, height, width, _ = tiles.shape
        for row, column in product(*map(range, plan.num_tiles)):
            top = row * plan.stride * plan.tile_outputs[0]
            left = column * plan.stride * plan.tile_outputs[1]
            grid[:, top : top + height, left : left + width] += by_place[:, row, column]
    if any(pads := _pads(plan)):
        grid = F.pad(grid, [-pad for pad in pads])
    return grid.permute(0, 3, 1, 2)


def join_outputs(plan: Plan, outputs: Tensor) -> Tensor:
    """Returns (B, out, outH, outW) from the outputs of all tiles, (row, column, tile, out)."""
    if plan.num_tiles == (1, 1):
        return outputs.permute(2, 3, 0, 1)
    grid: Tensor = outputs.unflatten(2, (-1, *plan.num_tiles)).permute(2, 3, 0, 4, 1, 5)
    grid = grid.flatten(3, 4).flatten(1, 2)  # (B, rows of all tiles, columns of all tiles, out)
    rows, columns = plan.output_grid
    return grid[:, :rows, :columns].permute(0, 3, 1, 2)


def cut_outputs(plan: Plan, gradient: Tensor) -> Tensor:
    """Returns the gradient of `join_outputs`."""
    if plan.num_tiles == (1, 1):
        return gradient.permute(2, 3, 0, 1).contiguous()
    beyond = [
        tiles * outputs - grid
        for tiles, outputs, grid in zip(
            plan.num_tiles, plan.tile_outputs, plan.output_grid, strict=True
        )
    ]
    grid: Tensor = F.pad(gradient.permute(0, 2, 3, 1), (0, 0, 0, beyond[1], 0, beyond[0]))
    grid = grid.unflatten(2, (plan.num_tiles[1], -1)).unflatten(1, (plan.num_tiles[0], -1))
    return grid.permute(2, 4, 0, 1, 3, 5).flatten(2, 4).contiguous()  # (row, column, tile, out)


if TYPE_CHECKING:

    class _Context(FunctionCtx):
        plan: Plan
        kernel: Factors | None
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
else:
    _Context = FunctionCtx


class FrequencyConvolution(torch.autograd.Function):
    """Convolution as products in the frequency domain; so are both gradients.

    Between the passes only the tiles are kept, which are the images themselves if there is one tile
    and no padding: to transform tiles and weight again costs less than to hold their factors.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        kernel: Factors | None,
    ) -> Tensor:
        """Returns (B, out, outH, outW); the kernel factors may come with the weight."""
        tiles = cut_tiles(plan, images)
        ctx.plan, ctx.kernel = plan, kernel
        ctx.save_for_backward(tiles, weight)
        products = multiply_factors(plan, tiles, kernel or kernel_factors(plan, weight))
        outputs = interpolate(plan, products)  # (row, column, tile, out)
        if bias is not None:
            outputs += bias
        return own_view(join_outputs(plan, outputs))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Returns the gradients of images, weight and bias."""
        plan = ctx.plan
        tiles, weight = ctx.saved_tensors
        gradients = transform_gradient(plan, cut_outputs(plan, gradient))
        by_images = by_weight = by_bias = None
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(plan, gradients, tiles)
        if ctx.needs_input_grad[0]:
            kernel = ctx.kernel or kernel_factors(plan, weight)
            by_tiles = tile_gradient(plan, gradients, kernel, channels=tiles.shape[3])
            by_images = join_tiles(plan, by_tiles)
        if ctx.needs_input_grad[2]:
            by_bias = gradient.sum(dim=(0, 2, 3))
        return by_images, by_weight, by_bias, None, None
