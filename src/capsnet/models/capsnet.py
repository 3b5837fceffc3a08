"""CapsNet, the three-layer network of the paper, on one page (§4, Fig. 1 and 2)."""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.checks import check_num_labels, check_sizes
from capsnet.functional import RoutingStep, output_grid
from capsnet.layers import Convolution, Decoder, DenseCapsules, PrimaryCapsules


@dataclass(frozen=True)
class CapsNetConfig:
    """Everything that fixes the shape of a CapsNet; the defaults are the paper's MNIST network."""

    image_channels: int = 1
    """Channels of an image."""
    image_height: int = 28
    """Rows of an image."""
    image_width: int = 28
    """Columns of an image."""
    conv_channels: int = 256
    """Feature maps of Conv1."""
    conv_kernel: int = 9
    """Height and width of Conv1's kernels; their stride is 1."""
    primary_types: int = 32
    """Types of primary capsule at each place of the grid."""
    primary_dim: int = 8
    """Numbers in a primary capsule."""
    primary_kernel: int = 9
    """Height and width of the kernels of PrimaryCapsules."""
    primary_stride: int = 2
    """Step between neighbouring places of the grid."""
    padded: bool = False
    """Whether both convolutions pad their input by half a kernel (SAME), as the authors' command
    for CIFAR-10 has it; where the stride is 2, TensorFlow has one zero less at the beginning."""
    output_dim: int = 16
    """Numbers in a class capsule."""
    num_classes: int = 10
    """Classes, one capsule each."""
    num_iterations: int = 3
    """Iterations of routing."""
    decoder: bool = True
    """Whether there is a decoder (§4.1)."""
    learned_priors: bool = False
    """Whether the initial routing logits are learned (§2); for MNIST the paper keeps them equal."""
    bias: bool = False
    """Whether class capsules have a bias, as in the authors' code; adds classes × output_dim."""
    orphan: bool = False
    """Whether routing knows "none of the above" (§7)."""
    uniform_primary_coupling: bool = False
    """Whether the primary convolution is divided by the number of types, as the authors do."""
    initialisation: Literal["paper", "authors"] = "paper"
    """Initial values: "paper" leaves the layers' own, as the paper names none; "authors" is a
    truncated normal (Conv1 0.05, all else 0.1) with every bias 0.1, as in the authors' code."""

    def __post_init__(self) -> None:
        sizes = (each.name for each in fields(self) if each.type is int)
        check_sizes({name: getattr(self, name) for name in sizes})
        if self.initialisation not in ("paper", "authors"):
            raise ValueError(
                f"initialisation must be 'paper' or 'authors', got {self.initialisation!r}"
            )
        kernels = self.conv_kernel, self.primary_kernel
        if self.padded and not all(kernel % 2 for kernel in kernels):
            raise ValueError(f"kernels must be odd to be padded, got {kernels[0]} and {kernels[1]}")
        smallest = self.field - 2 * sum(self.paddings)
        if min(self.image_height, self.image_width) < smallest:
            raise ValueError(
                f"kernels of {self.conv_kernel} and {self.primary_kernel} need images of at least "
                f"{smallest}×{smallest} pixels, got {self.image_height}×{self.image_width}"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.image_channels, self.image_height, self.image_width

    @property
    def paddings(self) -> tuple[int, int]:
        """Zeros on each side of the image, and of Conv1's feature maps."""
        return (self.conv_kernel // 2, self.primary_kernel // 2) if self.padded else (0, 0)

    @property
    def field(self) -> int:
        """Rows and columns of the image that one primary capsule sees."""
        return self.conv_kernel + self.primary_kernel - 1

    @property
    def conv_grid(self) -> tuple[int, int]:
        """Rows and columns of Conv1's feature maps."""
        image = self.image_height, self.image_width
        return output_grid(image, (self.conv_kernel,) * 2, padding=self.paddings[0])

    @property
    def primary_grid(self) -> tuple[int, int]:
        """Rows and columns of the grid of primary capsules."""
        kernel, padding = (self.primary_kernel,) * 2, self.paddings[1]
        return output_grid(self.conv_grid, kernel, stride=self.primary_stride, padding=padding)

    @property
    def num_primary(self) -> int:
        """Primary capsules in all."""
        rows, columns = self.primary_grid
        return rows * columns * self.primary_types


class CapsNetOutput(NamedTuple):
    """What a CapsNet says about a batch of images."""

    capsules: Float[Tensor, "B K E"]
    """Outputs of the class capsules."""
    lengths: Float[Tensor, "B K"]
    """Their lengths: how probable it is that each class is present."""
    reconstruction: Float[Tensor, "B C H W"] | Float[Tensor, "B N C H W"] | None
    """Images decoded from the chosen capsules, if asked for."""
    routing: tuple[RoutingStep, ...] | None
    """Every iteration of routing, if asked for."""


class CapsNet(nn.Module):
    """Conv1, PrimaryCapsules, class capsules with routing, and a decoder (Fig. 1 and 2).

    >>> model = CapsNet(CapsNetConfig())
    >>> output = model(torch.rand(2, 1, 28, 28), reconstruct="prediction")
    >>> output.lengths.shape, output.reconstruction.shape
    (torch.Size([2, 10]), torch.Size([2, 1, 28, 28]))
    """

    def __init__(self, config: CapsNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv = Convolution(
            config.image_channels,
            config.conv_channels,
            kernel_size=config.conv_kernel,
            padding=config.paddings[0],
        )
        self.primary = PrimaryCapsules(
            config.conv_channels,
            config.primary_types,
            capsule_dim=config.primary_dim,
            kernel_size=config.primary_kernel,
            stride=config.primary_stride,
            padding=config.paddings[1],
            uniform_coupling=config.uniform_primary_coupling,
        )
        self.classes = DenseCapsules(
            config.num_primary,
            config.primary_dim,
            out_capsules=config.num_classes,
            out_dim=config.output_dim,
            num_iterations=config.num_iterations,
            learned_priors=config.learned_priors,
            bias=config.bias,
            orphan=config.orphan,
        )
        self.decoder = (
            Decoder(config.num_classes, config.output_dim, image_shape=config.image_shape)
            if config.decoder
            else None
        )
        if config.initialisation == "authors":
            self._initialise_as_authors()

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        *,
        reconstruct: Tensor | Literal["prediction"] | None = None,
        trace: bool = False,
    ) -> CapsNetOutput:
        """Returns class capsules and their lengths, with reconstructions and routing on demand.

        Args:
            images: Pixel intensities, (B, C, H, W).
            reconstruct: Classes to decode, (B,), or several to decode apart, (B, N): the labels
                in training (§4.1), "prediction" for the longest capsule, None for no decoding.
            trace: Whether to keep every iteration of routing.
        """
        if reconstruct is not None:
            is_name = isinstance(reconstruct, str) and reconstruct == "prediction"
            if not (isinstance(reconstruct, Tensor) or is_name):
                raise ValueError(
                    f"reconstruct must be a tensor of classes, 'prediction' or None, "
                    f"got {reconstruct!r}"
                )
            self._require_decoder()
        primary = self.encode(images).flatten(1, 3)  # (B, I, D)
        routing = tuple(self.classes.iterate(primary)) if trace else None
        capsules = routing[-1].outputs if routing else self.classes(primary)  # (B, K, E)
        lengths = torch.linalg.vector_norm(capsules, dim=-1)  # (B, K)
        reconstruction = None
        if reconstruct is not None:
            chosen = reconstruct if isinstance(reconstruct, Tensor) else lengths.argmax(dim=1)
            reconstruction = self.decode(capsules, chosen)
        return CapsNetOutput(capsules, lengths, reconstruction, routing)

    def encode(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B gridH gridW T D"]:
        """Returns the grid of primary capsules."""
        if images.shape[1:] != self.config.image_shape:
            channels, height, width = self.config.image_shape
            raise ValueError(
                f"this CapsNet needs images of shape (B, {channels}, {height}, {width}), "
                f"got {tuple(images.shape)}"
            )
        grid: Tensor = self.primary(self.conv(images).relu())
        return grid

    def decode(
        self, capsules: Float[Tensor, "B K E"], classes: Int[Tensor, " B"] | Int[Tensor, "B N"]
    ) -> Float[Tensor, "B C H W"] | Float[Tensor, "B N C H W"]:
        """Returns the images that the chosen capsules describe (§4.1)."""
        images: Tensor = self._require_decoder()(capsules, classes)
        return images

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B C H W"], num_labels: int = 1) -> Int[Tensor, "B N"]:
        """Returns the classes of the longest capsules, the longest first."""
        check_num_labels(num_labels, self.config.num_classes)
        output: CapsNetOutput = self(images)
        return output.lengths.topk(num_labels, dim=1).indices

    def _require_decoder(self) -> Decoder:
        if self.decoder is None:
            raise ValueError("this CapsNet has no decoder: it was built with decoder=False")
        return self.decoder

    @torch.no_grad()
    def _initialise_as_authors(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "classes.prior_logits":
                continue
            if name.endswith("bias"):
                nn.init.constant_(parameter, 0.1)
            else:
                std = 0.05 if name == "conv.weight" else 0.1
                # Drawn apart: where a number falls shall not depend on the weight's memory layout.
                values = torch.empty(parameter.shape)
                parameter.copy_(nn.init.trunc_normal_(values, std=std, a=-2 * std, b=2 * std))
