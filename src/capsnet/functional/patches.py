"""Convolution as one matrix product over all patches of the images, for kernels of few numbers."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.grad import conv2d_input

if TYPE_CHECKING:

    class _Context(FunctionCtx):
        stride: int
        padding: int
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
else:
    _Context = FunctionCtx


def own_view(view: Tensor) -> Tensor:
    """Returns the same memory in the same shape as a tensor that is no view.

    What leaves a Function as a view could not be changed in place, as a ReLU does.
    """
    whole = view.new_empty(0)
    return whole.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


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
        kernel = weight.shape[2:]
        patches = F.unfold(images, kernel, padding=padding, stride=stride)  # (B, numbers, places)
        matrix = weight.flatten(1).t().contiguous()  # (numbers, out)
        outputs = patches.transpose(1, 2) @ matrix.expand(len(images), -1, -1)
        if bias is not None:
            outputs += bias
        rows = (images.shape[2] + 2 * padding - kernel[0]) // stride + 1
        return own_view(outputs.unflatten(1, (rows, -1)).permute(0, 3, 1, 2))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Returns the gradients of images, weight and bias."""
        images, weight = ctx.saved_tensors
        by_images = by_weight = by_bias = None
        by_place = gradient.permute(0, 2, 3, 1).flatten(1, 2)  # (B, places, out)
        if ctx.needs_input_grad[0]:
            by_images = conv2d_input(images.shape, weight, gradient, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            patches = F.unfold(images, weight.shape[2:], padding=ctx.padding, stride=ctx.stride)
            by_weight = (patches @ by_place).sum(dim=0).t().reshape(weight.shape)
        if ctx.needs_input_grad[2]:
            by_bias = by_place.sum(dim=(0, 1))
        return by_images, by_weight, by_bias, None, None
