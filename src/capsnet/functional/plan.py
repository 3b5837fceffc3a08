"""How to convolve in the frequency domain: tiles, phases and their matrices.

Large images are cut into overlapping tiles. A stride of s splits the rows and columns of a tile
into s phases each: s² convolutions of stride 1 whose results add up. `toom_cook` gives the matrices
for each of them. All of it depends on sizes only and is made once.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.functional import toom_cook
from capsnet.functional.patches import output_grid


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


@dataclass(frozen=True, eq=False)
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
    output_rows, output_columns = output_grid(image_grid, kernel, stride=stride, padding=padding)
    tile_outputs = ceil(output_rows / num_tiles[0]), ceil(output_columns / num_tiles[1])
    most_taps = ceil(kernel[0] / stride), ceil(kernel[1] / stride)
    phase_grid = tile_outputs[0] + most_taps[0] - 1, tile_outputs[1] + most_taps[1] - 1

    def algorithm(axis: int, offset: int) -> toom_cook.Axis:
        num_taps = len(range(offset, kernel[axis], stride))
        infinity = num_taps == most_taps[axis]
        return toom_cook.axis_algorithm(tile_outputs[axis], num_taps, infinity=infinity)

    def matrix(values: toom_cook.Real) -> Tensor:
        # Kept for all callers, whatever torch's default device is at the first one.
        return torch.tensor(values, dtype=dtype, device="cpu")

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
