"""Adam as PyTorch has it, in its fused form, for weights of any memory layout."""

from collections.abc import Iterable

import torch
from torch import Tensor


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam(fused=True)` that sees every weight as one contiguous run of memory.

    Same numbers. PyTorch's fused kernel for CPUs walks through memory without regard to layout: a
    gradient or moment that lies otherwise than its weight gives a wrong update without a word, and
    of a gradient that is not contiguous it makes a copy that nobody reads, which takes several
    times as long as the update. So moments and gradients get the layout of their weight here, and
    the kernel gets views in which that layout is the contiguous one.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 3).t())
    >>> optimiser = FusedAdam([weight], lr=0.1)
    >>> weight.grad = torch.ones(3, 2)
    >>> optimiser.step()
    >>> weight[0]
    tensor([-0.1000, -0.1000], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    def _init_group(
        self,
        group: dict[str, object],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        *rest: list[Tensor],
    ) -> bool:
        is_complex: bool = super()._init_group(  # type: ignore[no-untyped-call]
            group, params_with_grad, grads, exp_avgs, *rest
        )
        exp_avg_sqs = rest[0]
        for index, weight in enumerate(params_with_grad):
            moments = self.state[weight]
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = _laid_out_as(weight, moments[name])
            order = sorted(range(weight.ndim), key=weight.stride, reverse=True)
            params_with_grad[index] = weight.permute(order)
            grads[index] = _laid_out_as(weight, grads[index]).permute(order)
            exp_avgs[index] = moments["exp_avg"].permute(order)
            exp_avg_sqs[index] = moments["exp_avg_sq"].permute(order)
        return is_complex


def _laid_out_as(weight: Tensor, values: Tensor) -> Tensor:
    if values.stride() == weight.stride():
        return values
    return torch.empty_like(weight, requires_grad=False).copy_(values)
