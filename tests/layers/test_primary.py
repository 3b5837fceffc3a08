import pytest
import reference
import torch
from torch.testing import assert_close

from capsnet.layers import PrimaryCapsules


def layer_of(uniform_coupling: bool = False) -> PrimaryCapsules:
    torch.manual_seed(0)
    return PrimaryCapsules(
        3, num_types=2, capsule_dim=4, kernel_size=5, stride=2, uniform_coupling=uniform_coupling
    ).double()


@pytest.mark.parametrize("uniform_coupling", [False, True])
def test_equals_the_reference(uniform_coupling: bool) -> None:
    layer = layer_of(uniform_coupling)
    features = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    got = layer(features)
    assert got.shape == (2, 3, 4, 2, 4)
    weight, bias = layer.conv.weight.detach().numpy(), layer.conv.bias
    assert bias is not None
    for image in range(2):
        maps = reference.convolution(
            features[image].numpy(),
            weight / (2 if uniform_coupling else 1),
            bias.detach().numpy(),
            stride=2,
        )
        for row in range(3):
            for column in range(4):
                for kind in range(2):
                    # The numbers of a capsule are neighbouring channels at one place.
                    numbers = maps[4 * kind : 4 * kind + 4, row, column]
                    expected = torch.from_numpy(reference.squash(numbers))
                    assert_close(got[image, row, column, kind], expected, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    layer = layer_of()
    features = torch.randn(1, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(features), (features, *layer.parameters()))


def test_state_dict_is_an_ordinary_convolution() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in layer_of().state_dict().items()}
    assert shapes == {"conv.weight": (8, 3, 5, 5), "conv.bias": (8,)}


def test_repr_tells_types_and_dim() -> None:
    assert "num_types=2, capsule_dim=4, uniform_coupling=False" in repr(layer_of())
