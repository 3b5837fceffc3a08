"""ConvCapsules: capsules that vote for a local grid of every type above (§2, last paragraph)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import VoteSource, output_grid
from capsnet.functional.routing import check_dtypes, full_precision
from capsnet.layers.routed import RoutedCapsules


class ConvVotes:
    """Votes between two grids of capsules, seen from the grid above: a `VoteSource`.

    Letters beside the style guide's: P places of the grid above, M members of a kernel (its rows
    times its columns), T and U types below and above.
    """

    def __init__(
        self, votes: Float[Tensor, "B P M T U E"], places: Int[Tensor, "P M"], num_places: int
    ) -> None:
        self.votes = votes
        self.places = places.flatten()  # (P * M)
        self.num_places = num_places
        self.edges = tuple(votes.shape[:-1])
        self.prior_shape = tuple(votes.shape[2:5])
        self.bias_shape = tuple(votes.shape[4:])

    def couple(
        self, logits: Float[Tensor, "B P M T U"] | None, orphan: bool
    ) -> Float[Tensor, "B P M T U"]:
        """Returns the softmax over all parents that a capsule can reach (Eq. 3)."""
        if logits is None:
            logits = self.votes.new_zeros(()).expand(self.edges)
        flat = logits.flatten(1, 2)  # (B, P * M, T, U)
        batch, _, types, _ = flat.shape
        peak = flat.new_full((batch, self.num_places, types), 0.0 if orphan else -torch.inf)
        index = self.places[None, :, None].expand(batch, -1, types)
        peak = peak.scatter_reduce(1, index, flat.detach().amax(dim=-1), "amax")
        weights = (flat - peak[:, self.places].unsqueeze(-1)).exp()
        total = (-peak).exp() if orphan else torch.zeros_like(peak)
        total = total.index_add(1, self.places, weights.sum(dim=-1))
        return (weights / total[:, self.places].unsqueeze(-1)).view(self.edges)

    def weighted_sum(self, coupling: Tensor | float) -> Float[Tensor, "B P U E"]:
        """Returns the total input of every capsule above (Eq. 2)."""
        assert isinstance(coupling, Tensor)
        with full_precision(self.votes.device.type):
            return torch.einsum("bpmtu,bpmtue->bpue", coupling, self.votes)

    def agreement(self, outputs: Float[Tensor, "B P U E"]) -> Float[Tensor, "B P M T U"]:
        """Returns the scalar product of every vote with the output it was cast for."""
        with full_precision(self.votes.device.type):
            return torch.einsum("bpmtue,bpue->bpmtu", self.votes, outputs)


class ConvCapsules(RoutedCapsules):
    """A grid of capsules that receive votes from a patch of the grid below.

    Each capsule below votes for a local grid of every type above, with a matrix of its own for
    each member of that grid and each type, shared over places. Its coupling sums to 1 over all the
    parents it reaches. Layers stack: what comes out can go in.

    Args:
        in_types: Types of capsule at each place below.
        in_dim: Numbers in each of them.
        out_types: Types at each place of this layer.
        out_dim: Numbers in each of them.
        kernel_size: Height and width of the patch that a capsule sees.
        stride: Step between neighbouring patches.
        padding: Places added on each side, whose capsules are zero.
        num_iterations: Iterations of routing.
        learned_priors: Whether the initial routing logits are learned (§2) or all zero. Differs
            from the paper, where they depend on the place: they are shared as the matrices are.
        bias: Whether a learned vector is added to each total input before the squash. Differs from
            the paper: the authors' code has one in its dense layer, the text has none.
        orphan: Whether a capsule may be routed to "none of the above" (§7).

    >>> layer = ConvCapsules(3, 4, out_types=2, out_dim=5, kernel_size=3, stride=2)
    >>> layer(torch.randn(2, 7, 9, 3, 4)).shape
    torch.Size([2, 3, 4, 2, 5])
    """

    def __init__(
        self,
        in_types: int,
        in_dim: int,
        *,
        out_types: int,
        out_dim: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        num_iterations: int = 3,
        learned_priors: bool = False,
        bias: bool = False,
        orphan: bool = False,
    ) -> None:
        check_sizes(
            {
                "in_types": in_types,
                "in_dim": in_dim,
                "out_types": out_types,
                "out_dim": out_dim,
                "kernel_size": kernel_size,
                "stride": stride,
            }
        )
        check_sizes({"padding": padding}, minimum=0)
        super().__init__(
            num_iterations,
            priors=(kernel_size**2, in_types, out_types) if learned_priors else None,
            bias=(out_types, out_dim) if bias else None,
            orphan=orphan,
        )
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        members = kernel_size**2
        self.weight = nn.Parameter(torch.empty(members, in_types, out_types, in_dim, out_dim))
        # As in DenseCapsules: votes of unit-length capsules sum to about unit length at first.
        parents = out_types * max(1.0, members / stride**2)
        nn.init.normal_(self.weight, std=parents / (members * in_types * out_dim) ** 0.5)

    def forward(self, capsules: Float[Tensor, "B H W T D"]) -> Float[Tensor, "B outH outW U E"]:
        """Returns the grid of this layer's capsules after routing."""
        outputs = self.route(capsules)  # (B, P, U, E)
        grid: Tensor = outputs.unflatten(1, self._grid(capsules.shape[1], capsules.shape[2]))
        return grid

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        kernel = (self.kernel_size, self.kernel_size)
        grid = output_grid((height, width), kernel, stride=self.stride, padding=self.padding)
        if min(grid) < 1:
            raise ValueError(
                f"a kernel of {self.kernel_size} does not fit a grid of {height}×{width} capsules "
                f"padded by {self.padding}"
            )
        return grid

    def vote(self, capsules: Float[Tensor, "B H W T D"]) -> VoteSource:
        """Returns the votes of every capsule for the parents whose patch it is in."""
        _, in_types, _, in_dim, _ = self.weight.shape
        if capsules.ndim != 5 or capsules.shape[3:] != (in_types, in_dim):
            raise ValueError(
                f"ConvCapsules needs capsules of shape (B, H, W, {in_types}, {in_dim}), "
                f"got {tuple(capsules.shape)}"
            )
        check_dtypes(capsules=capsules, weight=self.weight)
        height, width = capsules.shape[1:3]
        out_height, out_width = self._grid(height, width)
        edge = self.padding
        padded = F.pad(capsules, (0, 0, 0, 0, edge, edge, edge, edge))
        padded_width = width + 2 * edge
        device = capsules.device
        members = torch.arange(self.kernel_size, device=device)
        rows = torch.arange(out_height, device=device)[:, None] * self.stride + members
        columns = torch.arange(out_width, device=device)[:, None] * self.stride + members
        places = rows[:, None, :, None] * padded_width + columns[None, :, None, :]
        places = places.flatten(2).flatten(0, 1)  # (P, M)
        patches = padded.flatten(1, 2)[:, places]  # (B, P, M, T, D)
        with full_precision(device.type):  # as DenseCapsules: shares must sum to 1
            patches = patches.to(self.weight.dtype)
            votes = torch.einsum("bpmtd,mtude->bpmtue", patches, self.weight)
        return ConvVotes(votes, places, (height + 2 * edge) * padded_width)

    def extra_repr(self) -> str:
        """Returns what `repr` shows."""
        _, in_types, out_types, in_dim, out_dim = self.weight.shape
        return (
            f"{in_types}x{in_dim}D -> {out_types}x{out_dim}D, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, {super().extra_repr()}"
        )
