"""Decoder: reconstructs an image from the vector of one chosen capsule (§4.1, Fig. 2)."""

import math
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import is_traced

_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Decoder(nn.Module):
    """Three fully connected layers that draw what the chosen capsule describes (Fig. 2).

    Args:
        num_capsules: Capsules to choose from.
        capsule_dim: Numbers in each of them.
        image_shape: Channels, height and width of the image.
        hidden_sizes: Units of the hidden ReLU layers.

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
                **{f"hidden_sizes[{n}]": size for n, size in enumerate(hidden_sizes)},
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
            classes: The one to decode for each image, (B,), or N to decode apart, (B, N). Numbers,
                never one-hot: whole zeros and ones of (B, K) are read as K classes to decode.
        """
        if capsules.shape[1:] != (self.num_capsules, self.capsule_dim):
            raise ValueError(
                f"Decoder needs capsules of shape (B, {self.num_capsules}, {self.capsule_dim}), "
                f"got {tuple(capsules.shape)}"
            )
        if (
            classes.ndim not in (1, 2)
            or classes.shape[0] != capsules.shape[0]
            or classes.dtype not in _WHOLE_NUMBERS
        ):
            raise ValueError(
                f"Decoder needs whole numbers as classes of {capsules.shape[0]} images, in shape "
                f"(B,) or (B, N), got {classes.dtype} of shape {tuple(classes.shape)}"
            )
        if not (is_traced() or classes.is_meta):
            self._check_range(classes)
        known = torch.arange(self.num_capsules, device=classes.device)
        mask = (classes.unsqueeze(-1) == known).to(capsules.dtype)  # (B, [N,] K)
        if classes.ndim == 2:
            capsules = capsules.unsqueeze(1)  # (B, 1, K, E)
        units = (capsules * mask.unsqueeze(-1)).flatten(-2)  # (B, [N,] K * E)
        for layer in self.layers[:-1]:
            units = layer(units).relu()
        pixels: Tensor = self.layers[-1](units).sigmoid()
        return pixels.reshape(*classes.shape, *self.image_shape)

    def _check_range(self, classes: Int[Tensor, "*any"]) -> None:
        beyond = classes[(classes < 0) | (classes >= self.num_capsules)]
        if len(beyond):
            raise ValueError(
                f"Decoder needs classes of 0 to {self.num_capsules - 1}, got {int(beyond[0])}"
            )

    def extra_repr(self) -> str:
        """Returns what `repr` shows beside the layers."""
        return f"{self.num_capsules}x{self.capsule_dim}D -> {self.image_shape}"
