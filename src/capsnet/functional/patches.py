"""Convolution as one matrix product over all patches of the images, for kernels of few numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.grad import conv2d_input, conv2d_weight

from capsnet.functional.routing import in_full_precision, is_batched

if TYPE_CHECKING:

    class _Context(FunctionCtx):
        stride: int
        padding: int
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
else:
    _Context = FunctionCtx


def output_grid(
    grid: Sequence[int], kernel: Sequence[int], *, stride: int = 1, padding: int = 0
) -> tuple[int, int]:
    """Rows and columns of a convolution's result.

    >>> output_grid((20, 20), (9, 9), stride=2)
    (6, 6)
    """
    rows, columns = (
        (size + 2 * padding - taps) // stride + 1 for size, taps in zip(grid, kernel, strict=True)
    )
    return rows, columns


def own_view(view: Tensor) -> Tensor:
    """Returns the same memory in the same shape as a tensor that is no view.

    What leaves a Function as a view could not be changed in place, as a ReLU does.
    """
    whole = view.new_empty(0)
    return whole.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def differentiable_gradients(
    images: Tensor,
    weight: Tensor,
    gradient: Tensor,
    *,
    stride: int,
    padding: int,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of images, weight and bias by operations that have gradients again.

    Slow; for the case that someone wants the gradient of a gradient, or many gradients at once.
    """
    return (
        conv2d_input(images.shape, weight, gradient, stride, padding) if needed[0] else None,
        conv2d_weight(images, weight.shape, gradient, stride, padding) if needed[1] else None,
        gradient.sum(dim=(0, 2, 3)) if needed[2] else None,
    )


def _cut_patches(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """(B, C * kH * kW, places)."""
    return F.unfold(images, weight.shape[2:], padding=padding, stride=stride)


def _cut_patches_by_tap(images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """(B, places, kH * kW * C)."""
    grid = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)  # (B, H, W, C)
    patches = grid.unfold(1, weight.shape[2], stride).unfold(2, weight.shape[3], stride)
    return patches.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


class PatchConvolution(torch.autograd.Function):
    """Convolution by patches, with its result channels last in memory.

    The patches are cut out again for the gradient: they are many times larger than the images.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        padding: int,
    ) -> Tensor:
        """Returns (B, out, outH, outW)."""
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        grid = output_grid(images.shape[2:], weight.shape[2:], stride=stride, padding=padding)
        if weight.is_contiguous():
            patches = _cut_patches(images, weight, stride, padding).transpose(1, 2)
            matrix = weight.flatten(1).t()  # (numbers, out)
        else:  # stored with its taps first: patches in the order of the weight cost less than both
            patches = _cut_patches_by_tap(images, weight, stride, padding)
            matrix = weight.permute(2, 3, 1, 0).flatten(0, 2)
        outputs = patches @ matrix.contiguous().expand(len(images), -1, -1)
        if bias is not None:
            outputs += bias
        return own_view(outputs.unflatten(1, grid).permute(0, 3, 1, 2))

    @staticmethod
    @in_full_precision
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Returns the gradients of images, weight and bias."""
        images, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(gradient):
            return (
                *differentiable_gradients(
                    images,
                    weight,
                    gradient,
                    stride=ctx.stride,
                    padding=ctx.padding,
                    needed=ctx.needs_input_grad,
                ),
                None,
                None,
            )
        by_images = by_weight = by_bias = None
        by_place = gradient.permute(0, 2, 3, 1).flatten(1, 2)  # (B, places, out)
        if ctx.needs_input_grad[0]:
            by_images = conv2d_input(images.shape, weight, gradient, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            patches = _cut_patches(images, weight, ctx.stride, ctx.padding)
            by_weight = (patches @ by_place).sum(dim=0).t().reshape(weight.shape)
        if ctx.needs_input_grad[2]:
            by_bias = by_place.sum(dim=(0, 1))
        return by_images, by_weight, by_bias, None, None
