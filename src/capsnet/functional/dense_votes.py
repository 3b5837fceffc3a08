"""Routing between dense layers without a single vote in memory.

A vote û_j|i = W_ij u_i is used in two ways only. The total input of parent j is one matrix product
of all (c_ij u_i) with W_j; the agreements with parent j are u_i · (W_ij v_j), one matrix product
and a sum of D terms. So the votes of a batch, (B, I, J, E), never exist. The work goes parent by
parent through blocks of images and capsules, whose scratch of (B, D, I) stays in the cache.
"""

from collections.abc import Iterator
from functools import reduce
from math import ceil
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from capsnet.functional.routing import couple_parents

# A block of 128 images and 400,000 numbers is large enough for matrix products at full speed and,
# with the matrices of one parent, small enough for the second-level cache of two cores.
_BLOCK_IMAGES = 128
_BLOCK_NUMBERS = 400_000


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
        num_capsules, num_parents, in_dim, _ = weight.shape
        self.edges: tuple[int, ...] = (len(capsules), num_capsules, num_parents)
        num_images = max(1, min(len(capsules), _BLOCK_IMAGES))
        num_blocks = ceil(num_capsules * num_images * in_dim / _BLOCK_NUMBERS)
        self._sizes = [len(block) for block in torch.arange(num_capsules).chunk(num_blocks)]
        # With the capsules innermost, everything below runs along contiguous memory.
        by_number = capsules.to(weight.dtype).transpose(1, 2)  # (B, D, I)
        by_parent = weight.permute(1, 3, 2, 0)  # (J, E, D, I)
        self._blocks = [
            (block.contiguous(), matrices.contiguous())
            for block, matrices in zip(
                by_number.split(self._sizes, dim=-1),
                by_parent.split(self._sizes, dim=-1),
                strict=True,
            )
        ]

    def couple(self, logits: Float[Tensor, "B I J"] | None, orphan: bool) -> Tensor | float:
        """Returns the softmax over the parents (Eq. 3)."""
        if logits is None or orphan:
            return couple_parents(logits, self.edges[2], orphan=orphan)
        by_parent = logits.permute(2, 0, 1)  # (J, B, I), as `agreement` stores it
        return by_parent.softmax(dim=0).permute(1, 2, 0)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | float) -> Float[Tensor, "B J E"]:
        """Returns Σ_i c_ij û_j|i (Eq. 2)."""
        parts: list[Tensor]
        with torch.autocast(self._blocks[0][0].device.type, enabled=False):
            if isinstance(coupling, float):
                # One matrix product for all parents, (B, D * I) by (D * I, J * E).
                parts = [u.flatten(1) @ w.flatten(0, 1).flatten(1).t() for u, w in self._blocks]
                total: Tensor = coupling * _add(parts)
                return total.reshape(self.edges[0], *self._blocks[0][1].shape[:2])
            shares = coupling.permute(2, 0, 1).split(self._sizes, dim=-1)  # (J, B, I) each
            parts = [
                _WeightedSum.apply(share, u, w)  # type: ignore[no-untyped-call]
                for share, (u, w) in zip(shares, self._blocks, strict=True)
            ]
            return _add(parts).transpose(0, 1)

    def agreement(self, outputs: Float[Tensor, "B J E"]) -> Float[Tensor, "B I J"]:
        """Returns û_j|i · v_j."""
        by_parent = outputs.transpose(0, 1)  # (J, B, E)
        with torch.autocast(outputs.device.type, enabled=False):
            parts = [
                _Agreement.apply(by_parent, u, w)  # type: ignore[no-untyped-call]
                for u, w in self._blocks
            ]
            return torch.cat(parts, dim=-1).permute(1, 2, 0)


def _add(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


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


def _image_blocks(num_images: int) -> Iterator[slice]:
    return (slice(i, i + _BLOCK_IMAGES) for i in range(0, num_images, _BLOCK_IMAGES))


def _common_gradients(
    coupling: Tensor, outputs: Tensor, capsules: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of capsules and weight in Σ c v u W, of which sums and agreements are both parts.

    In ordinary operations, for the case that someone wants the gradient of a gradient.
    """
    return (
        torch.einsum("jbi,jbe,jedi->bdi", coupling, outputs, weight),
        torch.einsum("jbi,jbe,bdi->jedi", coupling, outputs, capsules),
    )


class _WeightedSum(torch.autograd.Function):
    """Total inputs (J, B, E) from coupling (J, B, I), capsules (B, D, I), weight (J, E, D, I)."""

    @staticmethod
    def forward(ctx: _Context, coupling: Tensor, capsules: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(coupling, capsules, weight)
        total = capsules.new_empty(len(weight), len(capsules), weight.shape[1])
        for images in _image_blocks(len(capsules)):
            u = capsules[images]
            scratch = torch.empty_like(u)
            for j, w in enumerate(weight.flatten(2)):
                torch.mul(u, coupling[j, images].unsqueeze(1), out=scratch)
                torch.mm(scratch.flatten(1), w.t(), out=total[j, images])
        return total

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coupling, capsules, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            by_coupling = torch.einsum("jbe,bdi,jedi->jbi", gradient, capsules, weight)
            return by_coupling, *_common_gradients(coupling, gradient, capsules, weight)
        by_coupling = torch.empty_like(coupling)
        by_capsules = torch.zeros_like(capsules)
        by_weight = torch.zeros_like(weight)
        for images in _image_blocks(len(capsules)):
            u = capsules[images]
            scratch, product = torch.empty_like(u), torch.empty_like(u)
            for j, w in enumerate(weight.flatten(2)):
                share = coupling[j, images].unsqueeze(1)
                torch.mm(gradient[j, images], w, out=scratch.flatten(1))
                by_capsules[images].addcmul_(scratch, share)
                torch.sum(torch.mul(scratch, u, out=product), dim=1, out=by_coupling[j, images])
                torch.mul(u, share, out=scratch)
                by_weight[j].flatten(1).addmm_(gradient[j, images].t(), scratch.flatten(1))
        return by_coupling, by_capsules, by_weight


class _Agreement(torch.autograd.Function):
    """Agreements (J, B, I) from outputs (J, B, E), capsules (B, D, I), weight (J, E, D, I)."""

    @staticmethod
    def forward(ctx: _Context, outputs: Tensor, capsules: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, capsules, weight)
        agreement = capsules.new_empty(len(weight), len(capsules), capsules.shape[2])
        for images in _image_blocks(len(capsules)):
            u = capsules[images]
            scratch = torch.empty_like(u)
            for j, w in enumerate(weight.flatten(2)):
                torch.mm(outputs[j, images], w, out=scratch.flatten(1))
                torch.sum(scratch.mul_(u), dim=1, out=agreement[j, images])
        return agreement

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs, capsules, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            by_outputs = torch.einsum("jbi,bdi,jedi->jbe", gradient, capsules, weight)
            return by_outputs, *_common_gradients(gradient, outputs, capsules, weight)
        by_outputs = torch.empty_like(outputs)
        by_capsules = torch.zeros_like(capsules)
        by_weight = torch.zeros_like(weight)
        for images in _image_blocks(len(capsules)):
            u = capsules[images]
            scratch = torch.empty_like(u)
            for j, w in enumerate(weight.flatten(2)):
                share = gradient[j, images].unsqueeze(1)
                torch.mm(outputs[j, images], w, out=scratch.flatten(1))
                by_capsules[images].addcmul_(scratch, share)
                torch.mul(u, share, out=scratch)
                torch.mm(scratch.flatten(1), w.t(), out=by_outputs[j, images])
                by_weight[j].flatten(1).addmm_(outputs[j, images].t(), scratch.flatten(1))
        return by_outputs, by_capsules, by_weight
