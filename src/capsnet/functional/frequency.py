"""Convolution through the frequency domain, forward and backward, as matrix products.

The matrices of a `Plan` turn data and kernel into *factors*, independent of each other: one matrix
product over channels for every factor, and the outputs are interpolated from the results. Data
lies as (tile, row, column, channel) throughout, weights as (tap, in, out); so every step is a
matrix product on views and nothing large is transposed.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from capsnet.functional.patches import differentiable_gradients, own_view
from capsnet.functional.plan import Plan, cut_outputs, cut_tiles, join_outputs, join_tiles
from capsnet.functional.routing import in_full_precision, is_batched

Factors: TypeAlias = Iterable[Iterable[Tensor]]
"""Factors of every phase and band."""


def kernel_factors(plan: Plan, weight: Tensor) -> Factors:
    """Yields the kernel factors of every phase and band, (factors, C, out) each."""
    by_tap = weight.permute(2, 3, 1, 0)  # (kH, kW, C, out)
    for phase in plan.phases:
        taps = by_tap[phase.row :: plan.stride, phase.column :: plan.stride].flatten(0, 1)
        factors = torch.cat(phase.taps) @ taps.flatten(1)
        yield factors.unflatten(1, taps.shape[1:]).split([len(matrix) for matrix in phase.taps])


@dataclass(frozen=True)
class _Remembered:
    state: tuple[int, int]
    fingerprint: Tensor
    factors: dict[Plan, list[list[Tensor]]]


_remembered: MutableMapping[Tensor, _Remembered] = WeakIdKeyDictionary()

# Factors take several times the memory of their weight: enough for whole batches and a last,
# smaller one, which may be cut into other tiles.
_MOST_PLANS = 2


def recall_factors(plan: Plan, weight: Tensor) -> list[list[Tensor]] | None:
    """Returns `kernel_factors` of a weight at rest, made once; None for one in training.

    A change of the weight shows in its version, which in-place operations count up; not so fused
    optimisers, after whose steps everything is forgotten, nor what is written through `.data` or
    NumPy, which shows in the fingerprint. What other processes may write to is not remembered.
    """
    if (
        (torch.is_grad_enabled() and weight.requires_grad)
        or weight.is_inference()
        or weight.is_shared()
    ):
        _remembered.pop(weight, None)
        return None
    state, fingerprint = (weight._version, weight.data_ptr()), _fingerprint(weight.detach())
    known = _remembered.get(weight)
    is_same = known and known.state == state and torch.equal(known.fingerprint, fingerprint)
    factors = known.factors if known and is_same else {}
    if plan not in factors:
        # What is made in inference mode could not serve a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            made = [list(bands) for bands in kernel_factors(plan, weight)]
        factors = dict([*factors.items(), (plan, made)][-_MOST_PLANS:])
        _remembered[weight] = _Remembered(state, fingerprint, factors)
    return factors[plan]


def _fingerprint(weight: Tensor) -> Tensor:
    """Numbers that differ, to rounding, for any other values or order of values of the weight."""
    rows = weight.flatten(1) if weight.is_contiguous() else weight.permute(2, 3, 1, 0).flatten(0, 2)
    return rows @ _random_numbers(rows.shape[1], weight.dtype)


@lru_cache(maxsize=64)
def _random_numbers(count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    # Kept for all callers, whatever mode or default device the first one is in.
    with torch.inference_mode(False):
        return torch.rand(count, dtype=dtype, device="cpu", generator=generator) + 0.5


def forget_factors(*_: object) -> None:
    """Forgets the factors of all weights, as any of them may have changed."""
    _remembered.clear()


register_optimizer_step_post_hook(forget_factors)


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
    products: list[Tensor] = []
    for index, (data, factors) in enumerate(zip(data_factors(plan, tiles), kernel, strict=True)):
        for band, (left, right) in enumerate(zip(data, factors, strict=True)):
            left = left.transpose(0, 1)
            if not products:
                products = _new_products(plan, len(tiles), right)
            # The first phase has all factors; others may lack the last of a band, or a band.
            part = products[band][: len(left)]
            torch.baddbmm(part, left, right, beta=min(index, 1), out=part)
    return products


def _new_products(plan: Plan, num_tiles: int, like: Tensor) -> list[Tensor]:
    """Room for the products of every band, in one piece: small ones would litter the memory."""
    sizes = [matrix.shape[1] for matrix in plan.column_output]
    room = like.new_empty(sum(sizes), num_tiles, like.shape[-1])
    return list(room.split(sizes))


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
    _, columns, num_tiles, _ = gradient.shape
    values = (plan.row_output.t() @ gradient.flatten(1)).unflatten(1, (columns, -1))
    products = _new_products(plan, num_tiles, gradient)
    for band, matrix, part in zip(plan.bands, plan.column_output, products, strict=True):
        torch.mm(matrix.t(), values[band].flatten(0, 1), out=part.flatten(1))
    return products


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
            left = _sum_in_parts(gradient[: len(matrix)], right)
            torch.mm(matrix.t(), left.flatten(1), out=values[band].flatten(0, 1))
        target = tiles[:, :, phase.row, :, phase.column].permute(2, 1, 0, 3)
        for column in range(columns):  # a column is small enough for the cache
            part = phase.row_data.t() @ values[:, column]
            target[column, : phase.num_rows] = part.unflatten(1, (num_tiles, channels))
        target[:, phase.num_rows :] = 0
    return tiles.flatten(3, 4).flatten(1, 2)


def _sum_in_parts(left: Tensor, right: Tensor, length: int = 64) -> Tensor:
    """The product of left and rightᵀ whose sums are taken in parts: a short sum rounds less."""
    total = left.new_empty(*left.shape[:2], right.shape[1])
    for start in range(0, left.shape[2], length):
        part = slice(start, start + length)
        # Copied before it is transposed: oneDNN, which copies it else, does so by single numbers.
        columns = right[:, :, part].contiguous().transpose(1, 2)
        torch.baddbmm(total, left[:, :, part], columns, beta=min(start, 1), out=total)
    return total


def weight_gradient(plan: Plan, gradients: list[Tensor], tiles: Tensor) -> Tensor:
    """Returns the gradient of the weight, (out, C, kH, kW), stored with its taps first."""
    channels, num_outputs = tiles.shape[3], gradients[0].shape[2]
    by_tap = tiles.new_empty(*plan.kernel, channels, num_outputs)
    room = tiles.new_empty(sum(map(len, plan.phases[0].taps)), channels, num_outputs)
    for phase, data in zip(plan.phases, data_factors(plan, tiles), strict=True):
        sizes = [len(matrix) for matrix in phase.taps]
        factors = room[: sum(sizes)]  # (factors, C, out) of all bands
        for part, left, gradient in zip(factors.split(sizes), data, gradients, strict=False):
            left = left.transpose(0, 1).contiguous()  # else oneDNN copies it, by single numbers
            torch.bmm(left.transpose(1, 2), gradient[: len(part)], out=part)
        taps = torch.cat(phase.taps).t() @ factors.flatten(1)
        grid = taps.unflatten(1, (channels, num_outputs)).unflatten(0, phase.tap_grid)
        by_tap[phase.row :: plan.stride, phase.column :: plan.stride] = grid
    return by_tap.permute(3, 2, 0, 1)


if TYPE_CHECKING:

    class _Context(FunctionCtx):
        plan: Plan
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
else:
    _Context = FunctionCtx


# Tiles that go through all steps together: enough for matrix products at full speed, while what is
# in between the steps stays small.
_BLOCK_TILES = 256


class FrequencyConvolution(torch.autograd.Function):
    """Convolution as products in the frequency domain; so are both gradients.

    Between the passes images, weight and its factors are kept. The images are cut and transformed
    again: their factors take more memory the more images there are, and less time to make.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        kernel: list[list[Tensor]] | None,
    ) -> Tensor:
        """Returns (B, out, outH, outW); the kernel factors may come with the weight."""
        if kernel is None:
            kernel = [list(bands) for bands in kernel_factors(plan, weight)]
        ctx.plan = plan
        ctx.save_for_backward(images, weight, *(chain(*kernel) if ctx.needs_input_grad[0] else ()))
        size = _block_size(plan)
        if len(images) <= size:
            return own_view(_convolve(plan, images, bias, kernel))
        outputs = torch.empty(
            (len(images), len(weight), *plan.output_grid),
            dtype=weight.dtype,
            device=weight.device,
            memory_format=torch.channels_last,
        )
        for block, target in zip(images.split(size), outputs.split(size), strict=True):
            target.copy_(_convolve(plan, block, bias, kernel))
        return outputs

    @staticmethod
    @in_full_precision
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Returns the gradients of images, weight and bias."""
        plan = ctx.plan
        images, weight, *factors = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(gradient):
            return (
                *differentiable_gradients(
                    images,
                    weight,
                    gradient,
                    stride=plan.stride,
                    padding=plan.padding,
                    needed=ctx.needs_input_grad,
                ),
                None,
                None,
            )
        remaining = iter(factors)
        kernel = [list(islice(remaining, len(phase.taps))) for phase in plan.phases]
        parts = [
            _convolve_back(ctx, block, ahead, kernel)
            for block, ahead in zip(
                images.split(_block_size(plan)), gradient.split(_block_size(plan)), strict=True
            )
        ]
        by_images, by_weight = parts[0]
        for _, part in parts[1:]:
            by_weight = None if by_weight is None or part is None else by_weight.add_(part)
        if by_images is not None and len(parts) > 1:
            by_images = torch.cat(
                [part.permute(0, 2, 3, 1) for part, _ in parts if part is not None]
            )
            by_images = by_images.permute(0, 3, 1, 2)
        by_bias = gradient.sum(dim=(0, 2, 3)) if ctx.needs_input_grad[2] else None
        return by_images, by_weight, by_bias, None, None


def _convolve(plan: Plan, images: Tensor, bias: Tensor | None, kernel: Factors) -> Tensor:
    """The outputs of one block of images."""
    products = multiply_factors(plan, cut_tiles(plan, images), kernel)
    outputs = interpolate(plan, products)  # (row, column, tile, out)
    if bias is not None:
        outputs += bias
    return join_outputs(plan, outputs)


def _convolve_back(
    ctx: _Context, images: Tensor, gradient: Tensor, kernel: Factors
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of images and weight of one block of images, where they are needed."""
    plan = ctx.plan
    by_images = by_weight = None
    gradients = transform_gradient(plan, cut_outputs(plan, gradient))
    if ctx.needs_input_grad[1]:
        by_weight = weight_gradient(plan, gradients, cut_tiles(plan, images))
    if ctx.needs_input_grad[0]:
        tiles = tile_gradient(plan, gradients, kernel, channels=images.shape[1])
        by_images = join_tiles(plan, tiles)
    return by_images, by_weight


def _block_size(plan: Plan) -> int:
    """How many images go through all steps together."""
    return max(1, _BLOCK_TILES // (plan.num_tiles[0] * plan.num_tiles[1]))
