"""Squashing and routing by agreement: Eq. 1–3 and Procedure 1, written once.

The loop of Procedure 1 never looks at a vote. It needs three things of them, named by `VoteSource`:
how logits become coupling, the coupled sum, and the agreement. `Votes` answers from a tensor that
holds every vote; layers with a cheaper way to answer bring a source of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_Context = TypeVar("_Context")
_Gradients = TypeVar("_Gradients")


def squash(vectors: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """Returns each vector shrunk to a length in [0, 1), its direction kept (Eq. 1).

    Exact, without an epsilon: a zero vector stays zero and gets zero gradient, and the longest
    vector that the number format holds neither overflows nor loses its gradient. Rounding may bring
    a long vector to a length of 1 and a last digit more. At zero there is no second derivative, and
    autograd gives NaN for it.

    >>> squash(torch.tensor([3.0, 4.0])).norm()  # 25 / 26
    tensor(0.9615)
    """
    if not vectors.is_floating_point():
        raise ValueError(f"squash needs floating-point vectors, got {vectors.dtype}")
    # With v = m·w the factor m cancels: v·n / (1 + n²) = w·p / (m⁻² + p²), where n = m·p. So m is
    # a constant to autograd, and choosing it near the length keeps p² from overflowing.
    scale = vectors.detach().abs().amax(dim, keepdim=True).clamp(min=1)
    scaled = vectors / scale
    length: Tensor = torch.linalg.vector_norm(scaled, dim=dim, keepdim=True)
    return scaled * (length / (scale.reciprocal().square() + length.square()))


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raises a ValueError unless all have one floating-point dtype, or several under autocast."""
    given = [tensor for tensor in tensors.values() if tensor is not None]
    if all(each.is_floating_point() for each in given):
        if all(each.dtype == given[0].dtype for each in given):
            return
        device = given[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return
    found = ", ".join(f"{name} {each.dtype}" for name, each in tensors.items() if each is not None)
    raise ValueError(f"all tensors must have one floating-point dtype, got {found}")


def is_batched(gradient: Tensor) -> bool:
    """Returns whether it is many gradients at once, as `jacobian(vectorize=True)` sends them."""
    return bool(
        torch._C._functorch.is_batchedtensor(gradient)
        or torch._C._functorch.is_legacy_batchedtensor(gradient)
    )


def full_precision(device: str) -> AbstractContextManager[object]:
    """Autocast off, where a device has it: "meta" has not."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def in_full_precision(
    backward: Callable[[_Context, Tensor], _Gradients],
) -> Callable[[_Context, Tensor], _Gradients]:
    """A Function's backward with autocast off, as it was in its forward."""

    @wraps(backward)
    def run(ctx: _Context, gradient: Tensor) -> _Gradients:
        with full_precision(gradient.device.type):
            return backward(ctx, gradient)

    return run


class RoutingStep(NamedTuple):
    """What one iteration of Procedure 1 started from and came to."""

    logits: Float[Tensor, "B *edges"]
    """b before the softmax; (B, I, J) between dense layers."""
    coupling: Float[Tensor, "B *edges"]
    """c, the share that each capsule sends to each parent."""
    outputs: Float[Tensor, "B *parents E"]
    """v, the squashed outputs of the parents; (B, J, E) between dense layers."""


@runtime_checkable
class VoteSource(Protocol):
    """All that routing asks of the votes û."""

    edges: tuple[int, ...]
    """Shape of the logits: (B, I, J) between dense layers."""
    prior_shape: tuple[int, ...]
    """Shape of the prior logits, which all images share: (I, J) between dense layers."""
    bias_shape: tuple[int, ...]
    """Shape of the bias, which all images share: (J, E) between dense layers."""

    def couple(self, logits: Tensor | None, orphan: bool) -> Tensor | float:
        """Returns the coupling (Eq. 3); None means equal priors, a float one share for all."""

    def weighted_sum(self, coupling: Tensor | float) -> Tensor:
        """Returns the total input s of every parent (Eq. 2)."""

    def agreement(self, outputs: Tensor) -> Tensor:
        """Returns û · v for every pair of a capsule and a parent."""


class Votes:
    """Votes of every capsule for every parent, held in one tensor of (B, I, J, E)."""

    def __init__(self, votes: Float[Tensor, "B I J E"]) -> None:
        self.votes = votes
        self.edges = tuple(votes.shape[:3])
        self.prior_shape = tuple(votes.shape[1:3])
        self.bias_shape = tuple(votes.shape[2:])

    def couple(self, logits: Float[Tensor, "B I J"] | None, orphan: bool) -> Tensor | float:
        """Returns the softmax over the parents (Eq. 3)."""
        return couple_parents(logits, self.edges[2], orphan=orphan)

    def weighted_sum(self, coupling: Float[Tensor, "B I J"] | float) -> Float[Tensor, "B J E"]:
        """Returns Σ_i c_ij û_j|i (Eq. 2)."""
        if isinstance(coupling, float) or coupling.ndim == 0:  # sizes are tensors to jit.trace
            return self.votes.sum(dim=1) * coupling
        return torch.einsum("bij,bije->bje", coupling, self.votes)

    def agreement(self, outputs: Float[Tensor, "B J E"]) -> Float[Tensor, "B I J"]:
        """Returns û_j|i · v_j."""
        return torch.einsum("bije,bje->bij", self.votes, outputs)


def couple_parents(
    logits: Float[Tensor, "B I J"] | None, num_parents: int, *, orphan: bool
) -> Float[Tensor, "B I J"] | float:
    """Returns the softmax over J parents that all capsules share (Eq. 3)."""
    if logits is None:
        return 1 / (num_parents + int(orphan))
    if not orphan:
        return logits.softmax(dim=-1)
    # §7: a capsule may send its output to none of the parents. That its logit is a constant zero
    # is from the authors' code.
    return F.pad(logits, (1, 0)).softmax(dim=-1)[..., 1:]


def iterate_routing(
    votes: Tensor | VoteSource,
    num_iterations: int = 3,
    *,
    prior_logits: Float[Tensor, "*pairs"] | None = None,
    bias: Float[Tensor, "*shared E"] | None = None,
    orphan: bool = False,
) -> Iterator[RoutingStep]:
    """Returns every iteration of routing by agreement (Procedure 1); see `dynamic_routing`.

    >>> steps = list(iterate_routing(torch.randn(2, 5, 3, 4), num_iterations=3))
    >>> [tuple(step.coupling.shape) for step in steps]
    [(2, 5, 3), (2, 5, 3), (2, 5, 3)]
    """
    if isinstance(votes, Tensor):
        if votes.ndim != 4:
            raise ValueError(f"votes must have shape (B, I, J, E), got {tuple(votes.shape)}")
        check_dtypes(votes=votes, prior_logits=prior_logits, bias=bias)
        votes = Votes(votes)
    if num_iterations < 1:
        raise ValueError(f"routing needs at least 1 iteration, got {num_iterations}")
    if prior_logits is not None and prior_logits.shape != votes.prior_shape:
        raise ValueError(
            f"prior_logits must have shape {votes.prior_shape}, got {tuple(prior_logits.shape)}"
        )
    if bias is not None and bias.shape != votes.bias_shape:
        raise ValueError(f"bias must have shape {votes.bias_shape}, got {tuple(bias.shape)}")
    logits = None if prior_logits is None else prior_logits.expand(votes.edges)
    return _iterate(votes, num_iterations, logits=logits, bias=bias, orphan=orphan)


def _iterate(
    votes: VoteSource,
    num_iterations: int,
    *,
    logits: Tensor | None,
    bias: Tensor | None,
    orphan: bool,
) -> Iterator[RoutingStep]:
    """The loop of Procedure 1."""
    for iteration in range(num_iterations):
        coupling = votes.couple(logits, orphan)
        total_input = votes.weighted_sum(coupling)
        if bias is not None:
            check_dtypes(total_input=total_input, bias=bias)
            total_input = total_input + bias
        outputs = squash(total_input)
        yield RoutingStep(
            outputs.new_zeros(()).expand(votes.edges) if logits is None else logits,
            torch.as_tensor(coupling, dtype=outputs.dtype, device=outputs.device).expand(
                votes.edges
            ),
            outputs,
        )
        # Line 7 of the last iteration would change logits that nothing reads any more.
        if iteration + 1 < num_iterations:
            agreement = votes.agreement(outputs)
            logits = agreement if logits is None else logits + agreement


def dynamic_routing(
    votes: Tensor | VoteSource,
    num_iterations: int = 3,
    *,
    prior_logits: Float[Tensor, "*pairs"] | None = None,
    bias: Float[Tensor, "*shared E"] | None = None,
    orphan: bool = False,
) -> Float[Tensor, "B *parents E"]:
    """Returns the outputs of the parents after routing by agreement (Procedure 1, Eq. 2–3).

    Gradients flow through every iteration.

    Args:
        votes: û, (B, I, J, E), or a `VoteSource`.
        num_iterations: r, at least 1.
        prior_logits: b at the start, (I, J): learned log priors (§2); equal priors if None.
        bias: Added to the total input before each squash, (J, E).
        orphan: Whether a capsule may choose "none of the above" (§7): a constant zero logit in
            the softmax, whose share goes nowhere.

    Returns:
        v, (B, J, E), each of a length in [0, 1), up to rounding.

    >>> dynamic_routing(torch.ones(1, 2, 2, 4), num_iterations=1).norm(dim=-1)  # s = (1, 1, 1, 1)
    tensor([[0.8000, 0.8000]])
    """
    for step in iterate_routing(  # noqa: B007, the last step is what remains
        votes, num_iterations, prior_logits=prior_logits, bias=bias, orphan=orphan
    ):
        pass
    return step.outputs
