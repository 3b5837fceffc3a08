"""PrimaryCapsules: a convolution whose output channels are grouped into squashed vectors (§4)."""

from jaxtyping import Float
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import squash
from capsnet.layers.convolution import Convolution


class PrimaryCapsules(nn.Module):
    """Turns feature maps into a grid of capsules; no routing, as features have no pose (§4).

    A capsule's numbers are `capsule_dim` channels at one place of the grid, never one channel at
    several places. Flatten the result with `.flatten(1, 3)` for a dense layer: capsules are then
    ordered by row, column, type.

    Args:
        in_channels: Channels of the feature maps.
        num_types: Types of capsule at each place of the grid.
        capsule_dim: Numbers in each capsule.
        kernel_size: Height and width of the kernels.
        stride: Step between neighbouring places of the grid.
        padding: Zeros added on each side.
        uniform_coupling: Whether to divide the convolution by `num_types` before the bias, as the
            authors' code does. Differs from the paper: it does not mention the factor.

    >>> import torch
    >>> PrimaryCapsules(3, num_types=4, capsule_dim=8, kernel_size=5, stride=2)(
    ...     torch.randn(2, 3, 13, 15)
    ... ).shape
    torch.Size([2, 5, 6, 4, 8])
    """

    def __init__(
        self,
        in_channels: int,
        num_types: int,
        *,
        capsule_dim: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        uniform_coupling: bool = False,
    ) -> None:
        check_sizes({"num_types": num_types, "capsule_dim": capsule_dim})
        super().__init__()
        self.num_types = num_types
        self.capsule_dim = capsule_dim
        self.uniform_coupling = uniform_coupling
        self.conv = Convolution(
            in_channels,
            num_types * capsule_dim,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
        )

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B gridH gridW T D"]:
        """Returns capsules by batch, row, column, type and dimension."""
        maps: Tensor = self.conv(features)
        if self.uniform_coupling:
            assert self.conv.bias is not None
            # The bias is in the maps already, and only the convolution is to be divided.
            share = 1 / self.num_types
            maps = maps * share + ((1 - share) * self.conv.bias)[:, None, None]
        grid = maps.permute(0, 2, 3, 1)  # (B, H, W, T * D)
        return squash(grid.unflatten(3, (self.num_types, self.capsule_dim)))

    def extra_repr(self) -> str:
        """Returns what `repr` shows beside the convolution."""
        return (
            f"num_types={self.num_types}, capsule_dim={self.capsule_dim}, "
            f"uniform_coupling={self.uniform_coupling}"
        )
