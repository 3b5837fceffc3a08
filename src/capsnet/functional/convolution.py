"""Two-dimensional convolution by the fastest of three algorithms; same function and weights."""

from functools import lru_cache
from itertools import product
from math import ceil
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from capsnet.functional.frequency import FrequencyConvolution, recall_factors
from capsnet.functional.patches import PatchConvolution, output_grid
from capsnet.functional.plan import make_plan
from capsnet.functional.routing import check_dtypes

Algorithm = Literal["auto", "direct", "patches", "frequency"]

FEW_NUMBERS = 256
"""Up to so many numbers under a kernel, a copy of every patch is cheap."""

# From one or two channels to many outputs, `F.conv2d` loses more than that copy costs.
_FEW_CHANNELS = 2
_MANY_OUTPUTS = 32


def convolve2d(
    images: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "out C kH kW"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    algorithm: Algorithm = "auto",
) -> Float[Tensor, "B out outH outW"]:
    """Returns the convolution of `torch.nn.functional.conv2d`, by the faster algorithm.

    Args:
        images: (B, C, H, W); channels last in memory spares the frequency form a copy.
        weight: (out, C, kH, kW); best stored by `store_taps_first`.
        bias: Added to every place of a channel, (out,).
        stride: Step between neighbouring outputs.
        padding: Zeros on each side.
        algorithm: "direct" for that of PyTorch, "patches" for one matrix product over all patches,
            "frequency" for products in the frequency domain, or "auto" for the one that should be
            fastest. All return the same, to rounding. On GPUs, in compilation, export and
            `torch.func` it is "direct" whatever the choice.

    >>> images, weight = torch.randn(2, 3, 12, 14), torch.randn(5, 3, 4, 4)
    >>> fast = convolve2d(images, weight, stride=2, algorithm="frequency")
    >>> torch.testing.assert_close(fast, F.conv2d(images, weight, stride=2), atol=1e-4, rtol=1e-4)
    """
    check_algorithm(algorithm)
    if images.ndim != 4 or weight.ndim != 4:
        raise ValueError(
            f"images must have shape (B, C, H, W) and weight (out, C, kH, kW), "
            f"got {tuple(images.shape)} and {tuple(weight.shape)}"
        )
    if images.shape[1] != weight.shape[1]:
        raise ValueError(
            f"images must have the {weight.shape[1]} channels of weight {tuple(weight.shape)}, "
            f"got {tuple(images.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must have one number for each of the {weight.shape[0]} outputs of weight "
            f"{tuple(weight.shape)}, got {tuple(bias.shape)}"
        )
    check_dtypes(images=images, weight=weight, bias=bias)
    if stride < 1 or padding < 0:
        raise ValueError(
            f"stride must be at least 1 and padding at least 0, got {stride} and {padding}"
        )
    *_, height, width = images.shape
    *_, kernel_height, kernel_width = weight.shape
    if height + 2 * padding < kernel_height or width + 2 * padding < kernel_width:
        raise ValueError(
            f"a kernel of {kernel_height}×{kernel_width} does not fit images of "
            f"{height}×{width} padded by {padding}"
        )
    if images.device.type != "cpu" or is_traced():
        algorithm = "direct"
    elif algorithm == "auto":
        algorithm = choose_algorithm(images, weight, stride=stride, padding=padding)
    if algorithm == "direct":
        return F.conv2d(images, weight, bias, stride, padding)
    # Autocast off: factors are sums of many values, too much for half precision.
    with torch.autocast("cpu", enabled=False):
        images = images.to(weight.dtype)
        if algorithm == "patches":
            outputs: Tensor = PatchConvolution.apply(  # type: ignore[no-untyped-call]
                images, weight, bias, stride, padding
            )
            return outputs
        plan = make_plan(
            (height, width),
            (kernel_height, kernel_width),
            stride=stride,
            padding=padding,
            num_tiles=choose_tiles(images, weight, stride=stride, padding=padding)[0],
            dtype=weight.dtype,
        )
        outputs = FrequencyConvolution.apply(  # type: ignore[no-untyped-call]
            images, weight, bias, plan, recall_factors(plan, weight)
        )
        return outputs


def check_algorithm(algorithm: str) -> None:
    """Raises a ValueError that lists the algorithms if this is none of them."""
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {get_args(Algorithm)}, got {algorithm!r}")


def store_taps_first(weight: Float[Tensor, "out C kH kW"]) -> Float[Tensor, "out C kH kW"]:
    """Returns the weight with its shape and values, stored as (kH, kW, C, out) is.

    The frequency form reads it so. An optimiser's state and a loaded state dict follow the layout.

    >>> store_taps_first(torch.zeros(5, 4, 3, 2)).stride()
    (1, 5, 40, 20)
    """
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def choose_algorithm(
    images: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "out C kH kW"],
    *,
    stride: int = 1,
    padding: int = 0,
) -> Literal["direct", "patches", "frequency"]:
    """Returns which form of a convolution should be fastest on a CPU.

    Direct in reduced precision, for which there is something better. Patches where a kernel sees
    few numbers of one or two channels and makes many outputs of them. Else whichever has the least
    estimated work; patches again for a single image or two, as they read a weight that has its taps
    first, which the direct form must copy.

    >>> choose_algorithm(torch.empty(128, 256, 20, 20), torch.empty(256, 256, 9, 9), stride=2)
    'frequency'
    >>> choose_algorithm(torch.empty(128, 1, 28, 28), torch.empty(256, 1, 9, 9))
    'patches'
    >>> choose_algorithm(torch.empty(128, 3, 32, 32), torch.empty(64, 3, 9, 9))
    'direct'
    """
    if weight.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return "direct"
    # Patches only forwards: putting them together again for a gradient of the images is slow.
    can_cut = not (images.requires_grad and torch.is_grad_enabled())
    num_outputs, channels = weight.shape[:2]
    is_cheap = weight[0].numel() <= FEW_NUMBERS and channels <= _FEW_CHANNELS
    if can_cut and is_cheap and num_outputs >= _MANY_OUTPUTS:
        return "patches"
    rows, columns = output_grid(images.shape[2:], weight.shape[2:], stride=stride, padding=padding)
    num_places = len(images) * rows * columns
    costs: dict[Literal["direct", "patches", "frequency"], float] = {
        "direct": num_places * weight.numel() * _DIRECT_COST,
        "frequency": choose_tiles(images, weight, stride=stride, padding=padding)[1],
    }
    if not weight.is_contiguous():
        costs["direct"] += weight.numel() * _RELAYOUT_COST
        if can_cut and num_places * weight[0].numel() <= weight.numel():
            costs["patches"] = num_places * weight.numel()
    return min(costs, key=lambda name: costs[name])


def is_traced() -> bool:
    """Returns whether someone records or transforms the operations, so that it is no plain run.

    Compilation and export do, the transforms of `torch.func`, derivatives in forward mode, and
    tensors without numbers, by which memory and work are foretold.

    >>> is_traced()
    False
    """
    return (
        torch.compiler.is_compiling()
        or torch.onnx.is_in_onnx_export()
        or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


# Time of a multiplication in the direct form and in transforms, of fetching a kernel factor from
# memory, and of copying a number of a weight into its usual layout, all in units of a
# multiplication in the products of factors. Transforms of fewer than 64 channels take more time to
# begin than to do. Measured with AVX2 at 16 to 512 channels and 1 to 128 images.
_DIRECT_COST = 0.9
_TRANSFORM_COST = 2.0
_FETCH_COST = 9.0
_RELAYOUT_COST = 200.0
_NARROW = 64.0


def choose_tiles(
    images: Float[Tensor, "B C H W"],
    weight: Float[Tensor, "out C kH kW"],
    *,
    stride: int = 1,
    padding: int = 0,
) -> tuple[tuple[int, int], float]:
    """Returns how many tiles to cut rows and columns into, and the estimated work.

    Larger tiles need fewer products for each output, but larger transforms of the images and, for
    every pair of channels, of the kernel.
    """
    return _choose_tiles(
        *images.shape[:2],
        weight.shape[0],
        output_grid(images.shape[2:], weight.shape[2:], stride=stride, padding=padding),
        (weight.shape[2], weight.shape[3]),
        stride,
        weight.requires_grad and torch.is_grad_enabled(),
    )


@lru_cache(maxsize=256)
def _choose_tiles(
    batch: int,
    channels: int,
    num_outputs: int,
    output_grid: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    in_training: bool,
) -> tuple[tuple[int, int], float]:
    most_taps = [ceil(taps / stride) for taps in kernel]
    num_phases = min(stride, kernel[0]) * min(stride, kernel[1])

    def cost(num_tiles: tuple[int, int]) -> float:
        outputs = [ceil(size / tiles) for size, tiles in zip(output_grid, num_tiles, strict=True)]
        rows, columns = (n + taps - 1 for n, taps in zip(outputs, most_taps, strict=True))
        # See toom_cook: a complex pair in a row meets both of a pair in a column.
        row_pairs, column_pairs = max(rows - 3, 0) // 2, max(columns - 3, 0) // 2
        real_factors, complex_factors = columns + column_pairs, 3 * columns
        num_real = rows - 2 * row_pairs
        num_factors = num_real * real_factors + row_pairs * complex_factors
        column_work = num_real * real_factors + row_pairs * complex_factors * 2
        data = rows * rows * columns + column_work * columns
        output = outputs[0] * rows * outputs[1] + column_work * outputs[1]
        tiles = batch * num_tiles[0] * num_tiles[1]
        pairs = channels * num_outputs
        transforms = tiles * (num_phases * data * channels + output * num_outputs)
        if in_training:  # at rest the kernel is transformed once and for all
            transforms += num_factors * kernel[0] * kernel[1] * pairs
        products = num_phases * num_factors * pairs * (tiles + _FETCH_COST)
        narrow = 1 + _NARROW / min(channels, num_outputs)
        return products + _TRANSFORM_COST * narrow * transforms

    # Of all numbers of tiles that leave a tile the same outputs, the smallest costs least.
    candidates = product(
        *(
            {ceil(size / ceil(size / tiles)) for tiles in range(1, max(1, size // 4) + 1)}
            for size in output_grid
        )
    )
    work, rows, columns = min(
        (cost((rows, columns)), rows, columns) for rows, columns in candidates
    )
    return (rows, columns), work
