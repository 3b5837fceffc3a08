"""Adam in its fused form for weights of any memory layout, and Muon for those that are matrices."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capsnet.layers import ConvCapsules, DenseCapsules

#: Root mean square of a step of Muon at learning rate 1, about that of one of Adam's.
MUON_STEP = 0.2
#: Share of Muon's momentum that stays in a step.
_MUON_MOMENTUM = 0.95
#: Squared singular values below this share of the largest are rounding of float32.
_NEGLIGIBLE = 1e-7


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
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
    ) -> None:
        # TensorFlow's defaults (§4). PyTorch adds ε after the bias correction, TensorFlow before.
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)

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


class Muon(FusedAdam):
    """Adam, except that convolutions and capsule layers go equally far in every direction.

    What leads from the inputs of such a layer to its outputs, or to those of one capsule, is a
    matrix. Often few directions dominate its gradient. Here the momentum of the gradient is made
    orthogonal before the step, so that weak directions go as far as strong ones (K. Jordan et al.,
    Muon, 2024). The step has about the length of one of Adam's (J. Liu et al., 2025), so one
    learning rate serves biases and decoder, which Adam keeps, as well.

    Differs from the paper: §4 names Adam; docs/log.md has what this brings.

    >>> layer = nn.Conv2d(3, 2, kernel_size=1, bias=False)
    >>> optimiser = Muon(layer, lr=0.1)
    >>> layer.weight.grad = torch.randn(2, 3, 1, 1)
    >>> before = layer.weight.detach().clone()
    >>> optimiser.step()
    >>> step = (layer.weight - before).detach().flatten(1)
    >>> torch.allclose(step @ step.T, 3 * 0.02**2 * torch.eye(2), atol=1e-6)
    True
    """

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        forms = {
            module.weight: form
            for module in model.modules()
            for kind, form in _FORMS.items()
            if isinstance(module, kind)
        }
        groups: list[dict[str, object]] = [
            {"params": [weight], "matrices": forms.get(weight)} for weight in model.parameters()
        ]
        super().__init__(groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update."""
        for group in self.param_groups:
            form = group["matrices"]
            for weight in group["params"]:
                if form is None or weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].mul_(_MUON_MOMENTUM).add_(weight.grad)
                ahead = weight.grad.add(momentum, alpha=_MUON_MOMENTUM)  # Nesterov's
                direction = orthogonalise(form.show(ahead))
                length = MUON_STEP * max(direction.shape[-2:]) ** 0.5
                weight.sub_(form.restore(direction, weight), alpha=group["lr"] * length)
        super().step(closure)

    def _init_group(
        self, group: dict[str, object], params_with_grad: list[Tensor], *rest: list[Tensor]
    ) -> bool:
        if group["matrices"] is not None:
            return False  # nothing of it is Adam's
        return super()._init_group(group, params_with_grad, *rest)


def orthogonalise(
    matrices: Float[Tensor, "*batch rows columns"],
) -> Float[Tensor, "*batch rows columns"]:
    """Returns the nearest matrices whose singular values are all 1; zero stays zero.

    Of M = U Σ Vᵀ it is U Vᵀ = (M Mᵀ)^(−½) M, and of the two squares of M the smaller is taken.
    Directions that only rounding has put there are left shorter.

    >>> orthogonalise(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -2.0]]))
    tensor([[ 1.,  0.,  0.],
            [ 0.,  0., -1.]])
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalise(matrices.mT).mT
    square = (matrices @ matrices.mT).to("cpu", torch.float64)  # not every device has float64
    values, vectors = torch.linalg.eigh(square)
    largest = values[..., -1:].clamp_min(torch.finfo(torch.float32).tiny)
    roots = torch.maximum(values, _NEGLIGIBLE * largest).rsqrt()
    inverse_root: Tensor = (vectors * roots[..., None, :]) @ vectors.mT
    return inverse_root.to(matrices) @ matrices


@dataclass(frozen=True)
class _Matrices:
    """How a weight is seen as matrices: its dimensions in another order, some of them joined."""

    order: tuple[int, ...]
    first: int
    last: int

    def show(self, weight: Tensor) -> Tensor:
        return weight.permute(self.order).flatten(self.first, self.last)

    def restore(self, matrices: Tensor, weight: Tensor) -> Tensor:
        sizes = [weight.shape[dim] for dim in self.order[self.first : self.last + 1]]
        inverse = sorted(range(weight.ndim), key=self.order.__getitem__)
        apart: Tensor = matrices.unflatten(self.first, sizes)
        return apart.permute(inverse)


#: The matrices of each kind of layer. The large weights of the paper's networks lie in memory in
#: this order, so that to see them so copies nothing.
_FORMS: dict[type[nn.Module], _Matrices] = {
    nn.Conv2d: _Matrices((2, 3, 1, 0), 0, 2),  # (kH · kW · C, out)
    DenseCapsules: _Matrices((1, 3, 2, 0), 2, 3),  # (J, E, D · I)
    ConvCapsules: _Matrices((2, 4, 0, 1, 3), 2, 4),  # (U, E, M · T · D)
}
