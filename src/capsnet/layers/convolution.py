"""Convolution: a `torch.nn.Conv2d` that takes the faster of several algorithms."""

from jaxtyping import Float
from torch import Tensor, nn

from capsnet.checks import check_sizes
from capsnet.functional import convolve2d, store_taps_first
from capsnet.functional.convolution import FEW_NUMBERS, Algorithm, check_algorithm


class Convolution(nn.Conv2d):
    """A convolution with the parameters of `torch.nn.Conv2d`, computed by `convolve2d`.

    State dicts are those of `torch.nn.Conv2d`. In memory a weight of many numbers lies with its
    taps first, as the frequency form reads it; what insists on contiguous weights, such as
    `parameters_to_vector` and `prune` of `torch.nn.utils`, L-BFGS or
    `safetensors.torch.save_file`, needs `.contiguous()` copies of them.

    Without gradients the weight's transform is kept from call to call, until the weight changes.

    Args:
        in_channels: Channels of the images.
        out_channels: Channels of the result.
        kernel_size: Height and width of the kernels.
        stride: Step between neighbouring outputs.
        padding: Zeros added on each side.
        algorithm: As in `convolve2d`; also an attribute, to be changed at any time.

    >>> import torch
    >>> Convolution(3, 4, kernel_size=5, stride=2)(torch.randn(2, 3, 13, 15)).shape
    torch.Size([2, 4, 5, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        algorithm: Algorithm = "auto",
    ) -> None:
        check_sizes(
            {
                "in_channels": in_channels,
                "out_channels": out_channels,
                "kernel_size": kernel_size,
                "stride": stride,
            }
        )
        check_sizes({"padding": padding}, minimum=0)
        check_algorithm(algorithm)
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.algorithm = algorithm
        if self.weight[0].numel() > FEW_NUMBERS:
            self.weight = nn.Parameter(store_taps_first(self.weight.detach()))

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B out outH outW"]:
        """Returns the convolution with bias."""
        return convolve2d(
            images,
            self.weight,
            self.bias,
            stride=self.stride[0],
            padding=int(self.padding[0]),
            algorithm=self.algorithm,
        )

    def extra_repr(self) -> str:
        """Returns what `repr` shows."""
        shown: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return shown if self.algorithm == "auto" else f"{shown}, algorithm={self.algorithm}"
