"""Routing between dense layers without a single vote in memory.

A vote û_j|i = W_ij u_i is used in two ways only. The total input of parent j is one matrix product
of all (c_ij u_i) with W_j; the agreements with parent j are u_i · (W_ij v_j), one matrix product
and a sum of D terms. So the votes of a batch, (B, I, J, E), never exist. The work goes parent by
parent through blocks of images and capsules, whose scratch of (B, D, I) stays in the cache.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from capsnet.functional.routing import (
    check_dtypes,
    couple_parents,
    full_precision,
    in_full_precision,
    is_batched,
)

# A block goes through all steps of an operation at once: large enough for matrix products at full
# speed, small enough to stay in the cache.
_BLOCK_IMAGES = 128
_BLOCK_PARENTS = 16
_BLOCK_NUMBERS = 2_000_000

# Blocks of so many capsules, and of multiples, begin where a vector of the processor does.
_ALIGNED = 16


class DenseVotes:
    """Votes W u of every capsule for every parent, as a `VoteSource` that holds none of them.

    Same function as `Votes` of the same votes, to rounding, in time and memory that grow linearly
    with images, capsules and parents; second derivatives hold the votes.

    Args:
        capsules: u, (B, I, D).
        weight: W, (I, J, D, E); best stored by `store_parents_first`.

    >>> from capsnet.functional import dynamic_routing
    >>> capsules, weight = torch.randn(2, 6, 4), torch.randn(6, 3, 4, 5)
    >>> dynamic_routing(DenseVotes(capsules, weight)).shape
    torch.Size([2, 3, 5])
    """

    def __init__(self, capsules: Float[Tensor, "B I D"], weight: Float[Tensor, "I J D E"]) -> None:
        if capsules.ndim != 3 or weight.ndim != 4 or capsules.shape[1:] != weight.shape[0:3:2]:
            raise ValueError(
                f"capsules (B, I, D) and weight (I, J, D, E) must agree in I and D, "
                f"got {tuple(capsules.shape)} and {tuple(weight.shape)}"
            )
        check_dtypes(capsules=capsules, weight=weight)
        num_capsules, num_parents, in_dim, out_dim = weight.shape
        self.edges: tuple[int, ...] = (len(capsules), num_capsules, num_parents)
        self.prior_shape: tuple[int, ...] = (num_capsules, num_parents)
        self.bias_shape: tuple[int, ...] = (num_parents, out_dim)
        num_at_once = (
            max(1, min(len(capsules), _BLOCK_IMAGES)) * min(num_parents, _BLOCK_PARENTS) * in_dim
        )
        num_blocks = ceil(num_capsules * num_at_once / _BLOCK_NUMBERS)
        size = _ALIGNED * ceil(num_capsules / num_blocks / _ALIGNED)
        sizes = [len(block) for block in torch.arange(num_capsules).split(size)]
        # With the capsules innermost, everything below runs along contiguous memory.
        by_number = capsules.to(weight.dtype).transpose(1, 2)  # (B, D, I)
        by_parent = weight.permute(1, 3, 2, 0)  # (J, E, D, I)
        self._capsules = [block.contiguous() for block in by_number.split(sizes, dim=-1)]
        self._weights = [block.contiguous() for block in by_parent.split(sizes, dim=-1)]

    def couple(self, logits: Float[Tensor, "B I J"] | None, orphan: bool) -> Tensor | float:
        """Returns the softmax over the parents (Eq. 3)."""
        check_dtypes(logits=logits, weight=self._weights[0])
        if logits is None or orphan:
            return couple_parents(logits, self.edges[2], orphan=orphan)
        by_parent = logits.permute(2, 0, 1)  # (J, B, I), as `agreement` stores it
        return by_parent.softmax(dim=0).permute(1, 2, 0)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | float) -> Float[Tensor, "B J E"]:
        """Returns Σ_i c_ij û_j|i (Eq. 2)."""
        with full_precision(self._weights[0].device.type):
            if isinstance(coupling, float):
                # One matrix product for all parents, (B, D * I) by (D * I, J * E).
                parts = [
                    capsules.flatten(1) @ weight.flatten(0, 1).flatten(1).t()
                    for capsules, weight in zip(self._capsules, self._weights, strict=True)
                ]
                uniform: Tensor = coupling * reduce(torch.add, parts)
                return uniform.reshape(self.edges[0], *self._weights[0].shape[:2])
            by_parent = coupling.permute(2, 0, 1)  # (J, B, I)
            total: Tensor = _WeightedSum.apply(  # type: ignore[no-untyped-call]
                by_parent, *self._capsules, *self._weights
            )
            return total.transpose(0, 1)

    def agreement(self, outputs: Float[Tensor, "B J E"]) -> Float[Tensor, "B I J"]:
        """Returns û_j|i · v_j."""
        by_parent = outputs.transpose(0, 1)  # (J, B, E)
        with full_precision(outputs.device.type):
            agreement: Tensor = _Agreement.apply(  # type: ignore[no-untyped-call]
                by_parent, *self._capsules, *self._weights
            )
            return agreement.permute(1, 2, 0)


def store_parents_first(weight: Float[Tensor, "I J D E"]) -> Float[Tensor, "I J D E"]:
    """Returns the weight with its shape and values, stored as (J, E, D, I) is.

    `DenseVotes` reads it so. An optimiser's state and a loaded state dict follow the layout.

    >>> store_parents_first(torch.zeros(2, 3, 4, 5)).stride()
    (1, 40, 2, 8)
    """
    return weight.permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)


if TYPE_CHECKING:

    class _Context(FunctionCtx):
        saved_tensors: tuple[Tensor, ...]
else:
    _Context = FunctionCtx


class _Block(NamedTuple):
    """A part of all images, parents and capsules."""

    number: int
    """Which block of capsules."""
    pairs: tuple[slice, slice]
    """Parents and images: where it lies in totals, outputs and their gradients."""
    edges: tuple[slice, slice, slice]
    """Parents, images and capsules: where it lies in logits and coupling."""


def _cut_blocks(capsules: Sequence[Tensor], num_parents: int) -> Iterator[_Block]:
    """Goes through all blocks; capsules are cut already."""
    start = 0
    for number, block in enumerate(capsules):
        num_images, _, num_capsules = block.shape
        part = slice(start, start + num_capsules)
        start += num_capsules
        for image in range(0, num_images, _BLOCK_IMAGES):
            images = slice(image, image + _BLOCK_IMAGES)
            for parent in range(0, num_parents, _BLOCK_PARENTS):
                parents = slice(parent, parent + _BLOCK_PARENTS)
                yield _Block(number, (parents, images), (parents, images, part))


class _Scratch:
    """Memory that one block after the other writes to, so that it stays in the cache."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def __call__(self, *shape: int) -> Tensor:
        size = prod(shape)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


class _Common(NamedTuple):
    """What the gradients of sums and agreements, both parts of Σ c v u W, share.

    In ordinary operations, for the case that someone wants the gradient of a gradient, or many
    gradients at once.
    """

    back: Tensor
    """W v, (J, B, D, I)."""
    coupled: Tensor
    """c u, (J, B, D * I)."""
    by_capsules: Tensor
    by_weight: Tensor


def _differentiate(coupling: Tensor, outputs: Tensor, capsules: Tensor, weight: Tensor) -> _Common:
    # Many gradients at once know `reshape`, and neither einsum nor `flatten` and `unflatten`.
    back = (outputs @ weight.flatten(2)).reshape(len(weight), *capsules.shape)
    coupled = capsules * coupling.unsqueeze(2)
    matrices = coupled.reshape(*coupled.shape[:2], -1)  # (J, B, D * I)
    by_weight = (outputs.transpose(1, 2) @ matrices).reshape(weight.shape)
    by_capsules = (back * coupling.unsqueeze(2)).sum(dim=0)
    return _Common(back, matrices, by_capsules, by_weight)


class _WeightedSum(torch.autograd.Function):
    """Total inputs (J, B, E) from coupling (J, B, I) and blocks of capsules and of weights.

    Blocks of capsules are (B, D, I) each, of weights (J, E, D, I). Within a block, parents are the
    batch of batched matrix products.
    """

    @staticmethod
    def forward(ctx: _Context, coupling: Tensor, *blocks: Tensor) -> Tensor:
        ctx.save_for_backward(coupling, *blocks)
        capsules, weights = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        num_parents, size = weights[0].shape[:2]
        total = coupling.new_zeros(num_parents, coupling.shape[1], size)
        scratch = _Scratch(coupling)
        for block in _cut_blocks(capsules, num_parents):
            parents, images = block.pairs
            u, share = capsules[block.number][images], coupling[block.edges].unsqueeze(2)
            matrices = weights[block.number][parents].flatten(2)  # (J, E, D * I)
            coupled = torch.mul(u, share, out=scratch(len(share), *u.shape))
            total[block.pairs] += coupled.flatten(2) @ matrices.transpose(1, 2)
        return total

    @staticmethod
    @in_full_precision
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, ...]:
        coupling, *blocks = ctx.saved_tensors
        capsules, weights = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        if torch.is_grad_enabled() or is_batched(gradient):
            u, w = torch.cat(capsules, dim=-1), torch.cat(weights, dim=-1)
            sizes = [each.shape[-1] for each in capsules]
            back, _, by_u, by_w = _differentiate(coupling, gradient, u, w)
            by_coupling = (back * u).sum(dim=2)
            return by_coupling, *by_u.split(sizes, dim=-1), *by_w.split(sizes, dim=-1)
        by_coupling = torch.empty_like(coupling)
        by_capsules = [torch.zeros_like(each) for each in capsules]
        by_weights = [torch.zeros_like(each) for each in weights]
        first, second = _Scratch(gradient), _Scratch(gradient)
        for block in _cut_blocks(capsules, len(gradient)):
            parents, images = block.pairs
            u = capsules[block.number][images]
            share, ahead = coupling[block.edges].unsqueeze(2), gradient[block.pairs]
            back = first(len(share), *u.shape)  # (J, B, D, I)
            torch.bmm(ahead, weights[block.number][parents].flatten(2), out=back.flatten(2))
            coupled = torch.mul(back, share, out=second(*back.shape))
            by_capsules[block.number][images] += coupled.sum(dim=0)
            torch.sum(back.mul_(u), dim=2, out=by_coupling[block.edges])
            torch.mul(u, share, out=coupled)
            by_weights[block.number][parents].flatten(2).baddbmm_(
                ahead.transpose(1, 2), coupled.flatten(2)
            )
        return by_coupling, *by_capsules, *by_weights


class _Agreement(torch.autograd.Function):
    """Agreements (J, B, I) from outputs (J, B, E) and blocks as above."""

    @staticmethod
    def forward(ctx: _Context, outputs: Tensor, *blocks: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, *blocks)
        capsules, weights = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        num_capsules = sum(each.shape[2] for each in capsules)
        agreement = outputs.new_empty(*outputs.shape[:2], num_capsules)
        scratch = _Scratch(outputs)
        for block in _cut_blocks(capsules, len(outputs)):
            parents, images = block.pairs
            u, w = capsules[block.number][images], weights[block.number][parents].flatten(2)
            back = scratch(len(w), *u.shape)  # (J, B, D, I)
            torch.bmm(outputs[block.pairs], w, out=back.flatten(2))
            torch.sum(back.mul_(u), dim=2, out=agreement[block.edges])
        return agreement

    @staticmethod
    @in_full_precision
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, ...]:
        outputs, *blocks = ctx.saved_tensors
        capsules, weights = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        if torch.is_grad_enabled() or is_batched(gradient):
            u, w = torch.cat(capsules, dim=-1), torch.cat(weights, dim=-1)
            sizes = [each.shape[-1] for each in capsules]
            _, coupled, by_u, by_w = _differentiate(gradient, outputs, u, w)
            by_outputs = coupled @ w.flatten(2).transpose(1, 2)
            return by_outputs, *by_u.split(sizes, dim=-1), *by_w.split(sizes, dim=-1)
        by_outputs = torch.zeros_like(outputs)
        by_capsules = [torch.zeros_like(each) for each in capsules]
        by_weights = [torch.zeros_like(each) for each in weights]
        scratch = _Scratch(gradient)
        for block in _cut_blocks(capsules, len(gradient)):
            parents, images = block.pairs
            u, w = capsules[block.number][images], weights[block.number][parents].flatten(2)
            share, output = gradient[block.edges].unsqueeze(2), outputs[block.pairs]
            back = scratch(len(w), *u.shape)  # (J, B, D, I)
            torch.bmm(output, w, out=back.flatten(2))
            by_capsules[block.number][images] += back.mul_(share).sum(dim=0)
            coupled = torch.mul(u, share, out=back).flatten(2)  # (J, B, D * I)
            by_outputs[block.pairs] += coupled @ w.transpose(1, 2)
            by_weights[block.number][parents].flatten(2).baddbmm_(output.transpose(1, 2), coupled)
        return by_outputs, *by_capsules, *by_weights
