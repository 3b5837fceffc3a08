"""DenseCapsules: every capsule below votes for every capsule above, with routing (§2)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import (
    DenseVotes,
    Votes,
    VoteSource,
    is_traced,
    store_parents_first,
)
from capsnet.layers.routed import RoutedCapsules


class DenseCapsules(RoutedCapsules):
    """A layer of capsules that each receive votes from all capsules below (Eq. 2, Procedure 1).

    Args:
        in_capsules: Capsules below.
        in_dim: Numbers in each of them.
        out_capsules: Capsules of this layer, the possible parents.
        out_dim: Numbers in each of them.
        num_iterations: Iterations of routing.
        learned_priors: Whether the initial routing logits are learned (§2) or all zero.
        bias: Whether a learned vector is added to the total input of each capsule before the
            squash. Differs from the paper: the authors' code has it, the text does not.
        orphan: Whether a capsule may be routed to "none of the above" (§7).

    The matrices start normal, with the deviation that gives votes of unit-length capsules a total
    input of about unit length under uniform coupling. In memory the weight lies with its parents
    first, as `DenseVotes` reads it; what insists on contiguous weights, such as
    `parameters_to_vector` and `prune` of `torch.nn.utils`, L-BFGS or
    `safetensors.torch.save_file`, needs a `.contiguous()` copy.

    >>> layer = DenseCapsules(6, 4, out_capsules=3, out_dim=5)
    >>> layer(torch.randn(2, 6, 4)).shape
    torch.Size([2, 3, 5])
    """

    def __init__(
        self,
        in_capsules: int,
        in_dim: int,
        *,
        out_capsules: int,
        out_dim: int,
        num_iterations: int = 3,
        learned_priors: bool = False,
        bias: bool = False,
        orphan: bool = False,
    ) -> None:
        check_sizes(
            {
                "in_capsules": in_capsules,
                "in_dim": in_dim,
                "out_capsules": out_capsules,
                "out_dim": out_dim,
            }
        )
        super().__init__(
            num_iterations,
            priors=(in_capsules, out_capsules) if learned_priors else None,
            bias=(out_capsules, out_dim) if bias else None,
            orphan=orphan,
        )
        weight = torch.empty(in_capsules, out_capsules, in_dim, out_dim)
        nn.init.normal_(weight, std=out_capsules / (in_capsules * out_dim) ** 0.5)
        self.weight = nn.Parameter(store_parents_first(weight))

    def forward(self, capsules: Float[Tensor, "B I D"]) -> Float[Tensor, "B J E"]:
        """Returns the outputs of this layer's capsules after routing."""
        return self.route(capsules)

    def vote(self, capsules: Float[Tensor, "B I D"]) -> VoteSource:
        """Returns û = W u of every capsule for every parent (Eq. 2)."""
        in_capsules, _, in_dim, _ = self.weight.shape
        if capsules.shape[1:] != (in_capsules, in_dim):
            raise ValueError(
                f"DenseCapsules needs capsules of shape (B, {in_capsules}, {in_dim}), "
                f"got {tuple(capsules.shape)}"
            )
        if is_traced():  # a graph of ordinary operations, whatever they cost
            return Votes(torch.einsum("bid,ijde->bije", capsules, self.weight))  # (B, I, J, E)
        return DenseVotes(capsules, self.weight)

    def extra_repr(self) -> str:
        """Returns what `repr` shows."""
        in_capsules, out_capsules, in_dim, out_dim = self.weight.shape
        return f"{in_capsules}x{in_dim}D -> {out_capsules}x{out_dim}D, {super().extra_repr()}"
