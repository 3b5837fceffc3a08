import torch
from torch import Tensor, nn
from torch.testing import assert_close

from capsnet.training.optimiser import FusedAdam


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
