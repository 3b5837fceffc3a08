"""The networks as one would write them in plain PyTorch, for the benchmark to compare with.

Good plain code: library convolutions, votes by one einsum and held in memory, routing as matrix
products. Same parameters under the same names, so both can hold one state dict and be compared.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.models import CapsNetConfig, CNNConfig


def squash(vectors: Tensor) -> Tensor:
    """Eq. 1 as everybody writes it."""
    squared = vectors.square().sum(dim=-1, keepdim=True)
    return vectors * (squared / (1 + squared) / (squared + 1e-8).sqrt())


def route(votes: Tensor, num_iterations: int) -> Tensor:
    """Procedure 1 on votes of (B, I, J, E)."""
    logits = votes.new_zeros(votes.shape[:3])
    for _ in range(num_iterations - 1):
        outputs = squash(torch.einsum("bij,bije->bje", logits.softmax(dim=-1), votes))
        logits = logits + torch.einsum("bije,bje->bij", votes, outputs)
    return squash(torch.einsum("bij,bije->bje", logits.softmax(dim=-1), votes))


class TextbookPrimary(nn.Module):
    """PrimaryCapsules (§4)."""

    def __init__(self, config: CapsNetConfig) -> None:
        super().__init__()
        self.capsule_dim = config.primary_dim
        self.conv = nn.Conv2d(
            config.conv_channels,
            config.primary_types * config.primary_dim,
            config.primary_kernel,
            stride=config.primary_stride,
            padding=config.paddings[1],
        )

    def forward(self, features: Tensor) -> Tensor:
        """Returns capsules of (B, I, D)."""
        maps = self.conv(features).permute(0, 2, 3, 1)  # (B, H, W, T * D)
        return squash(maps.reshape(len(features), -1, self.capsule_dim))


class TextbookClasses(nn.Module):
    """DigitCaps (§4)."""

    def __init__(self, config: CapsNetConfig) -> None:
        super().__init__()
        self.num_iterations = config.num_iterations
        shape = config.num_primary, config.num_classes, config.primary_dim, config.output_dim
        self.weight = nn.Parameter(0.1 * torch.randn(shape))

    def forward(self, capsules: Tensor) -> Tensor:
        """Returns the class capsules of (B, J, E)."""
        votes = torch.einsum("bid,ijde->bije", capsules, self.weight)
        return route(votes, self.num_iterations)


class TextbookDecoder(nn.Module):
    """The decoder (§4.1)."""

    def __init__(self, config: CapsNetConfig) -> None:
        super().__init__()
        self.image_shape = config.image_shape
        sizes = config.num_classes * config.output_dim, 512, 1024
        pixels = torch.Size(config.image_shape).numel()
        self.layers = nn.ModuleList(
            [nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2]), nn.Linear(1024, pixels)]
        )

    def forward(self, capsules: Tensor, classes: Tensor) -> Tensor:
        """Returns an image for each of (B, N) classes."""
        mask = F.one_hot(classes, capsules.shape[1]).to(capsules.dtype)  # (B, N, K)
        units = (capsules[:, None] * mask[..., None]).flatten(2)
        units = self.layers[1](self.layers[0](units).relu()).relu()
        pixels: Tensor = self.layers[2](units).sigmoid()
        return pixels.reshape(*classes.shape, *self.image_shape)


class TextbookCapsNet(nn.Module):
    """CapsNet (§4)."""

    def __init__(self, config: CapsNetConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            config.image_channels,
            config.conv_channels,
            config.conv_kernel,
            padding=config.paddings[0],
        )
        self.primary = TextbookPrimary(config)
        self.classes = TextbookClasses(config)
        self.decoder = TextbookDecoder(config)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns lengths of (B, K), and the images of (B, N) labels if they are given."""
        capsules = self.classes(self.primary(self.conv(images).relu()))
        lengths = torch.linalg.vector_norm(capsules, dim=-1)
        return lengths, None if labels is None else self.decoder(capsules, labels)


class TextbookCNN(nn.Module):
    """The baselines (§5, §6.2)."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        channels = (config.image_channels, *config.conv_channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(below, above, kernel, padding=kernel // 2)
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

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits of (B, K)."""
        units = images
        for conv in self.convs:
            units = self.pool(conv(units).relu())
        units = units.flatten(1)
        for layer in self.hidden:
            units = layer(units).relu()
        logits: Tensor = self.output(self.dropout(units))
        return logits
