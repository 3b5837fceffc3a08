"""The convolutional baselines that the paper compares CapsNet with (§5, §5.2, §6.2)."""

from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.checks import check_num_labels, check_sizes
from capsnet.layers import Convolution


@dataclass(frozen=True)
class CNNConfig:
    """Everything that fixes the shape of a baseline; the defaults are that of MNIST (§5)."""

    image_channels: int = 1
    """Channels of an image."""
    image_height: int = 28
    """Rows of an image."""
    image_width: int = 28
    """Columns of an image."""
    conv_channels: tuple[int, ...] = (256, 256, 128)
    """Feature maps of each convolution; all keep the size of their input (SAME padding)."""
    conv_kernels: tuple[int, ...] = (5, 5, 5)
    """Height and width of each convolution's kernels, odd."""
    pool: int = 1
    """Size and stride of the max-pooling after each convolution; 1 is none."""
    hidden_sizes: tuple[int, ...] = (328, 192)
    """Units of the fully connected layers below the last."""
    dropout: float = 0.5
    """Share of the units below the last layer left out in training (the paper names no rate)."""
    num_classes: int = 10
    """Classes, one logit each."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is int:
                check_sizes({each.name: value})
            elif isinstance(value, tuple):
                check_sizes({f"{each.name}[{n}]": size for n, size in enumerate(value)})
        if len(self.conv_channels) != len(self.conv_kernels):
            raise ValueError(
                f"conv_channels and conv_kernels must be of one length, "
                f"got {self.conv_channels} and {self.conv_kernels}"
            )
        if any(kernel % 2 == 0 for kernel in self.conv_kernels):
            raise ValueError(f"conv_kernels must be odd, got {self.conv_kernels}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if min(self.final_grid) < 1:
            raise ValueError(
                f"{len(self.conv_channels)} poolings by {self.pool} leave nothing of an image of "
                f"{self.image_height}×{self.image_width} pixels"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.image_channels, self.image_height, self.image_width

    @property
    def final_grid(self) -> tuple[int, int]:
        """Rows and columns that the last convolution leaves."""
        shrink = self.pool ** len(self.conv_channels)
        return self.image_height // shrink, self.image_width // shrink


class CNN(nn.Module):
    """Convolutions with ReLU and optional max-pooling, then fully connected layers.

    >>> CNN(CNNConfig(conv_channels=(4, 3), conv_kernels=(5, 3), hidden_sizes=(7,)))(
    ...     torch.rand(2, 1, 28, 28)
    ... ).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        self.config = config
        channels = (config.image_channels, *config.conv_channels)
        self.convs = nn.ModuleList(
            Convolution(below, above, kernel_size=kernel, padding=kernel // 2)
            for below, above, kernel in zip(
                channels[:-1], channels[1:], config.conv_kernels, strict=True
            )
        )
        self.pool = nn.MaxPool2d(config.pool) if config.pool > 1 else nn.Identity()
        rows, columns = config.final_grid
        sizes = (channels[-1] * rows * columns, *config.hidden_sizes)
        self.hidden = nn.ModuleList(nn.Linear(below, above) for below, above in pairwise(sizes))
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(sizes[-1], config.num_classes)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K"]:
        """Returns the logits of the classes."""
        if images.shape[1:] != self.config.image_shape:
            channels, height, width = self.config.image_shape
            raise ValueError(
                f"this CNN needs images of shape (B, {channels}, {height}, {width}), "
                f"got {tuple(images.shape)}"
            )
        units = images
        for conv in self.convs:
            units = self.pool(conv(units).relu())
        units = units.flatten(1)
        for layer in self.hidden:
            units = layer(units).relu()
        logits: Tensor = self.output(self.dropout(units))
        return logits

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B C H W"], num_labels: int = 1) -> Int[Tensor, "B N"]:
        """Returns the classes of the largest logits, the largest first.

        In training mode dropout has its say, too: call `eval()` first.
        """
        check_num_labels(num_labels, self.config.num_classes)
        logits: Tensor = self(images)
        return logits.topk(num_labels, dim=1).indices
