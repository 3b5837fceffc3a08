from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from capsnet.layers import ConvCapsules, Convolution, DenseCapsules
from capsnet.training.optimiser import MUON_STEP, FusedAdam, Muon, orthogonalise


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(5, 4, 3, 2, generator=generator)),
        nn.Parameter(torch.randn(3, 2, generator=generator).t()),
        nn.Parameter(torch.randn(6, generator=generator)),
    ]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(weight.shape, generator=generator) for weight in weights()]


def permuted() -> list[nn.Parameter]:
    first, *rest = weights()
    return [
        nn.Parameter(first.detach().permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)),
        *rest,
    ]


def run(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for step in range(5):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimiser.step()


def test_update_is_that_of_adam_for_any_layout_of_weights_and_gradients() -> None:
    expected, got = weights(), permuted()
    run(torch.optim.Adam(expected, lr=0.1, fused=False, foreach=False), expected)
    run(FusedAdam(got, lr=0.1), got)  # gradients are contiguous, the first weight is not
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs)


def test_moments_loaded_in_another_layout_are_laid_out_again() -> None:
    whole, broken = permuted(), permuted()
    unbroken, before, after = (FusedAdam(each, lr=0.1) for each in (whole, broken, broken))
    run(unbroken, whole)
    run(unbroken, whole)
    run(before, broken)
    state = before.state_dict()
    for moments in state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = moments[name].contiguous()
    after.load_state_dict(state)
    run(after, broken)
    for ours, theirs in zip(broken, whole, strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)
    assert after.state[broken[0]]["exp_avg"].stride() == broken[0].stride()


def test_weights_without_gradient_are_left_alone() -> None:
    (weight, *_) = permuted()
    before = weight.detach().clone()
    FusedAdam([weight]).step()
    assert_close(weight.detach(), before, rtol=0, atol=0)


def svd_polar(matrix: Tensor) -> Tensor:
    left, _, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return torch.from_numpy(left @ right)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 7)])
def test_orthogonalise_is_the_polar_factor_of_the_svd(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = [svd_polar(matrix) for matrix in matrices.reshape(-1, *shape[-2:])]
    assert_close(orthogonalise(matrices), torch.stack(expected).reshape(shape), rtol=0, atol=1e-12)


def test_orthogonalise_ignores_the_scale_and_leaves_zero_alone() -> None:
    matrix = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    assert_close(orthogonalise(1e-9 * matrix), orthogonalise(matrix))
    assert_close(orthogonalise(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_orthogonalise_does_not_blow_up_what_is_rounding() -> None:
    row = torch.tensor([[1.0, 2.0, 3.0]])
    twins = torch.cat([row, row * (1 + 1e-6)])  # of rank one, but for the last digits
    assert torch.linalg.matrix_norm(orthogonalise(twins), ord=2) < 1.01


class OneOfEach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Convolution(40, 4, kernel_size=3)  # large enough to be stored taps first
        self.parts = ConvCapsules(3, 2, out_types=4, out_dim=5, kernel_size=2)
        self.classes = DenseCapsules(6, 2, out_capsules=3, out_dim=5, bias=True)
        self.decode = nn.Linear(5, 7)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def step_of_muon(num_steps: int) -> tuple[OneOfEach, dict[str, list[Tensor]], dict[str, Tensor]]:
    """A model after some updates, the gradients of each weight, and the weights before."""
    torch.manual_seed(3)
    model = OneOfEach()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    given: dict[str, list[Tensor]] = {name: [] for name in before}
    optimiser = Muon(model, lr=0.1)
    for _ in range(num_steps):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape)
            given[name].append(parameter.grad)
        optimiser.step()
    return model, given, before


def expected_direction(given: list[Tensor], matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """What Muon subtracts in its second update, before its length, from the definition."""
    first, second = given
    momentum = 0.95 * first + second
    return svd_polar(matrix(second + 0.95 * momentum)).float()


def test_muon_steps_orthogonally_for_a_convolution() -> None:
    once, _, _ = step_of_muon(1)
    twice, given, _ = step_of_muon(2)

    def matrix(weight: Tensor) -> Tensor:
        return weight.flatten(1)  # every output from all that is under the kernel

    moved = matrix(once.conv.weight.detach() - twice.conv.weight.detach())
    length = 0.1 * MUON_STEP * (40 * 9) ** 0.5
    assert_close(moved, length * expected_direction(given["conv.weight"], matrix))


@pytest.mark.parametrize(
    ("layer", "parents"),
    [("classes", 3), ("parts", 4)],
)
def test_muon_steps_orthogonally_for_each_parent_of_a_capsule_layer(
    layer: str, parents: int
) -> None:
    once, _, _ = step_of_muon(1)
    twice, given, _ = step_of_muon(2)
    name = f"{layer}.weight"
    before, after = (dict(each.named_parameters())[name].detach() for each in (once, twice))
    for parent in range(parents):

        def matrix(weight: Tensor, parent: int = parent) -> Tensor:
            own = weight[..., parent, :, :]  # ({I} or {M, T}, D, E)
            return own.flatten(0, -2).T  # (E, inputs)

        length = 0.1 * MUON_STEP * matrix(before).shape[1] ** 0.5
        assert_close(matrix(before - after), length * expected_direction(given[name], matrix))


def test_muon_leaves_biases_and_linear_layers_to_adam() -> None:
    model, given, before = step_of_muon(2)
    orthogonal = {"conv.weight", "parts.weight", "classes.weight"}
    names = [name for name in before if name not in orthogonal]
    assert set(names) == {"conv.bias", "classes.bias", "decode.weight", "decode.bias"}
    for name in names:
        weight = nn.Parameter(before[name])
        adam = torch.optim.Adam([weight], lr=0.1)
        for gradient in given[name]:
            weight.grad = gradient
            adam.step()
        assert_close(dict(model.named_parameters())[name], weight)


def test_muon_leaves_weights_without_gradient_alone() -> None:
    model = OneOfEach()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    Muon(model).step()
    for name, value in model.named_parameters():
        assert_close(value.detach(), before[name], rtol=0, atol=0)
