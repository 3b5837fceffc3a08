"""Decoder: reconstructs an image from the vector of one chosen capsule (§4.1, Fig. 2)."""

import math
from itertools import pairwise

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.checks import check_sizes


class Decoder(nn.Module):
    """Three fully connected layers that draw what the chosen capsule describes (Fig. 2).

    Args:
        num_capsules: Capsules to choose from.
        capsule_dim: Numbers in each of them.
        image_shape: Channels, height and width of the image.
        hidden_sizes: Units of the hidden ReLU layers.

    >>> import torch
    >>> decoder = Decoder(10, 16, image_shape=(1, 28, 28))
    >>> decoder(torch.randn(2, 10, 16), torch.tensor([[3, 5], [0, 9]])).shape  # two digits each
    torch.Size([2, 2, 1, 28, 28])
    """

    def __init__(
        self,
        num_capsules: int,
        capsule_dim: int,
        *,
        image_shape: tuple[int, int, int],
        hidden_sizes: tuple[int, ...] = (512, 1024),
    ) -> None:
        channels, height, width = image_shape
        check_sizes(
            {
                "num_capsules": num_capsules,
                "capsule_dim": capsule_dim,
                "channels": channels,
                "height": height,
                "width": width,
            }
        )
        super().__init__()
        self.num_capsules = num_capsules
        self.capsule_dim = capsule_dim
        self.image_shape = image_shape
        sizes = (num_capsules * capsule_dim, *hidden_sizes, math.prod(image_shape))
        self.layers = nn.ModuleList(nn.Linear(below, above) for below, above in pairwise(sizes))

    def forward(
        self, capsules: Float[Tensor, "B K E"], classes: Int[Tensor, " B"] | Int[Tensor, "B N"]
    ) -> Float[Tensor, "B C H W"] | Float[Tensor, "B N C H W"]:
        """Returns intensities in (0, 1) of the image each chosen capsule describes.

        Args:
            capsules: Outputs of the class capsules, (B, K, E).
            classes: The one to decode for each image, (B,), or N to decode apart, (B, N).
        """
        if capsules.shape[1:] != (self.num_capsules, self.capsule_dim):
            raise ValueError(
                f"Decoder needs capsules of shape (B, {self.num_capsules}, {self.capsule_dim}), "
                f"got {tuple(capsules.shape)}"
            )
        if classes.shape[0] != capsules.shape[0] or classes.is_floating_point():
            raise ValueError(
                f"Decoder needs whole numbers as classes of {capsules.shape[0]} images, "
                f"got {classes.dtype} of shape {tuple(classes.shape)}"
            )
        mask = F.one_hot(classes.long(), self.num_capsules).to(capsules.dtype)  # (B, [N,] K)
        if classes.ndim == 2:
            capsules = capsules.unsqueeze(1)  # (B, 1, K, E)
        units = (capsules * mask.unsqueeze(-1)).flatten(-2)  # (B, [N,] K * E)
        for layer in self.layers[:-1]:
            units = layer(units).relu()
        pixels: Tensor = self.layers[-1](units).sigmoid()
        return pixels.reshape(*classes.shape, *self.image_shape)
