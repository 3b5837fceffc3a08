"""RoutedCapsules: what every layer with routing shares."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import RoutingStep, VoteSource, dynamic_routing, iterate_routing


class RoutedCapsules(nn.Module):
    """A layer that routes by agreement; a subclass says how capsules become votes.

    Args:
        num_iterations: Iterations of routing.
        priors: Shape of the learned routing logits, or None for equal priors.
        bias: Shape of the learned bias of the total inputs, or None.
        orphan: Whether a capsule may be routed to "none of the above" (§7).
    """

    def __init__(
        self,
        num_iterations: int,
        *,
        priors: tuple[int, ...] | None,
        bias: tuple[int, ...] | None,
        orphan: bool,
    ) -> None:
        super().__init__()
        check_sizes({"num_iterations": num_iterations})
        self.num_iterations = num_iterations
        self.orphan = orphan
        self.prior_logits = None if priors is None else nn.Parameter(torch.zeros(priors))
        self.bias = None if bias is None else nn.Parameter(torch.zeros(bias))

    def vote(self, capsules: Tensor) -> VoteSource:
        """Returns what the capsules below predict for those of this layer (Eq. 2)."""
        raise TypeError(f"{type(self).__name__} does not say how its capsules vote")

    def route(self, capsules: Tensor) -> Float[Tensor, "B *parents E"]:
        """Returns the outputs of the last iteration (Procedure 1)."""
        return dynamic_routing(
            self.vote(capsules),
            self.num_iterations,
            prior_logits=self.prior_logits,
            bias=self.bias,
            orphan=self.orphan,
        )

    def iterate(self, capsules: Tensor, num_iterations: int | None = None) -> Iterator[RoutingStep]:
        """Yields every iteration of the routing; the last one's outputs are the layer's.

        Args:
            capsules: Those of the layer below.
            num_iterations: How many, if not as many as the layer makes.
        """
        return iterate_routing(
            self.vote(capsules),
            self.num_iterations if num_iterations is None else num_iterations,
            prior_logits=self.prior_logits,
            bias=self.bias,
            orphan=self.orphan,
        )

    def extra_repr(self) -> str:
        """Returns what `repr` shows of the routing."""
        return (
            f"num_iterations={self.num_iterations}, "
            f"learned_priors={self.prior_logits is not None}, "
            f"bias={self.bias is not None}, orphan={self.orphan}"
        )
