import pytest
import torch
from torch import nn
from torch.testing import assert_close

from capsnet.layers import Convolution


def test_convolution_equals_that_of_torch_with_its_state_dict() -> None:
    theirs = nn.Conv2d(40, 5, 3, stride=2, padding=1)
    ours = Convolution(40, 5, kernel_size=3, stride=2, padding=1)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 40, 7, 8)
    assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)


def test_same_seed_gives_the_values_of_torch() -> None:
    torch.manual_seed(0)
    theirs = nn.Conv2d(40, 5, 3)
    torch.manual_seed(0)
    ours = Convolution(40, 5, kernel_size=3)
    assert_close(ours.weight, theirs.weight, rtol=0, atol=0)
    assert ours.weight.stride() != theirs.weight.stride()


def test_weight_of_few_numbers_keeps_the_usual_layout() -> None:
    assert Convolution(3, 4, kernel_size=5).weight.is_contiguous()


def test_algorithm_can_be_chosen_by_hand() -> None:
    images = torch.randn(1, 40, 7, 8)
    layer = Convolution(40, 5, kernel_size=3, algorithm="frequency")
    assert layer(images).grad_fn.name() == "FrequencyConvolutionBackward"
    frequency = layer(images)
    layer.algorithm = "direct"
    assert layer(images).grad_fn.name() == "ConvolutionBackward0"
    assert_close(layer(images), frequency, atol=1e-5, rtol=1e-5)


def test_repr_tells_an_algorithm_chosen_by_hand() -> None:
    assert "algorithm" not in repr(Convolution(3, 4, kernel_size=5))
    assert "stride=(1, 1), algorithm=direct)" in repr(
        Convolution(3, 4, kernel_size=5, algorithm="direct")
    )


@pytest.mark.usefixtures("without_annotation_checks")
def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="kernel_size must be a whole number of at least 1, got 0"):
        Convolution(3, 4, kernel_size=0)
    with pytest.raises(ValueError, match="out_channels must be at most 2147483648, got 1000000000"):
        Convolution(3, 10**10, kernel_size=3)
    with pytest.raises(ValueError, match=r"must be one of \('auto', .*, got 'fast'"):
        Convolution(3, 4, kernel_size=5, algorithm="fast")  # type: ignore[arg-type]
