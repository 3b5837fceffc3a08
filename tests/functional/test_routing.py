import math
from collections.abc import Callable

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from capsnet.functional import RoutingStep, dynamic_routing, iterate_routing, squash

B, I, J, E = 2, 5, 3, 4  # noqa: E741, the style guide's letters


def votes_of(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, dtype=torch.float64, generator=generator)


def steps_of(votes: Tensor, *, orphan: bool = False) -> list[RoutingStep]:
    return list(iterate_routing(votes, 3, orphan=orphan))


class TestSquash:
    def test_by_hand(self) -> None:
        assert_close(squash(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 5 * 25 / 26)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_equals_the_reference_on_any_axis(self, dim: int) -> None:
        vectors = votes_of(3, 4, 5)
        expected = np.apply_along_axis(reference.squash, dim, vectors.numpy())
        assert_close(squash(vectors, dim), torch.from_numpy(expected), rtol=0, atol=1e-12)

    @settings(deadline=None)
    @given(
        st.lists(st.floats(-1e150, 1e150, allow_subnormal=False), min_size=1, max_size=6),
    )
    def test_length_is_at_most_one_and_direction_is_kept(self, numbers: list[float]) -> None:
        vector = torch.tensor(numbers, dtype=torch.float64)
        result = squash(vector)
        assert result.norm() <= 1 + 1e-15
        assert (result * vector >= 0).all()

    def test_gradcheck(self) -> None:
        vectors = votes_of(3, 4).requires_grad_()
        assert torch.autograd.gradcheck(squash, vectors)
        assert torch.autograd.gradgradcheck(squash, vectors)

    def test_zero_stays_zero_with_zero_gradient(self) -> None:
        vectors = torch.zeros(2, 3, requires_grad=True)
        squash(vectors).sum().backward()
        assert vectors.grad is not None
        assert_close(squash(vectors), torch.zeros(2, 3))
        assert_close(vectors.grad, torch.zeros(2, 3))

    @pytest.mark.parametrize(
        ("dtype", "huge"), [(torch.float32, 1e38), (torch.float64, 1e300), (torch.float16, 6e4)]
    )
    def test_longest_vectors_have_unit_length_and_finite_gradient(
        self, dtype: torch.dtype, huge: float
    ) -> None:
        vectors = torch.tensor([[huge, -huge], [0.0, huge]], dtype=dtype, requires_grad=True)
        result = squash(vectors)
        result.sum().backward()
        assert vectors.grad is not None
        assert_close(result.norm(dim=1), torch.ones(2, dtype=dtype))
        assert vectors.grad.isfinite().all()

    @pytest.mark.usefixtures("without_annotation_checks")
    def test_rejects_integers(self) -> None:
        with pytest.raises(ValueError, match=r"floating-point vectors, got torch\.int64"):
            squash(torch.tensor([3, 4]))


class TestRouting:
    @pytest.mark.parametrize("num_iterations", [1, 2, 3, 5])
    @pytest.mark.parametrize("orphan", [False, True])
    @pytest.mark.parametrize("extras", [False, True])
    def test_equals_the_reference(self, num_iterations: int, orphan: bool, extras: bool) -> None:
        votes = votes_of(B, I, J, E)
        priors = votes_of(I, J, seed=1) if extras else None
        bias = votes_of(J, E, seed=2) if extras else None
        steps = list(
            iterate_routing(votes, num_iterations, prior_logits=priors, bias=bias, orphan=orphan)
        )
        for image in range(B):
            outputs, coupling, logits = reference.routing(
                votes[image].numpy(),
                num_iterations,
                prior_logits=None if priors is None else priors.numpy(),
                bias=None if bias is None else bias.numpy(),
                orphan=orphan,
            )
            for got, expected in zip(steps[-1], (logits, coupling, outputs), strict=True):
                assert_close(got[image], torch.from_numpy(expected), rtol=0, atol=1e-12)

    def test_by_hand(self) -> None:
        # A capsule votes (1, 0) for A and (0, 0) for B. Iteration 1: c = ½, s = (½, 0), v = (⅕, 0)
        # and the agreement is ⅕. Iteration 2: c = σ(⅕), s = (c, 0), ‖v‖ = c² / (1 + c²).
        outputs = dynamic_routing(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]), num_iterations=2)
        coupling = 1 / (1 + math.exp(-0.2))
        expected = torch.tensor([[[coupling**2 / (1 + coupling**2), 0.0], [0.0, 0.0]]])
        assert_close(outputs, expected)

    @pytest.mark.parametrize("orphan", [False, True])
    def test_gradcheck_of_votes_priors_and_bias(self, orphan: bool) -> None:
        def route(votes: Tensor, priors: Tensor, bias: Tensor) -> Tensor:
            return dynamic_routing(votes, 3, prior_logits=priors, bias=bias, orphan=orphan)

        inputs = [
            votes_of(B, I, J, E).requires_grad_(),
            votes_of(I, J, seed=1).requires_grad_(),
            votes_of(J, E, seed=2).requires_grad_(),
        ]
        assert torch.autograd.gradcheck(route, inputs)

    def test_gradient_flows_through_every_iteration(self) -> None:
        votes = votes_of(B, I, J, E).requires_grad_()
        steps = steps_of(votes)
        (gradient,) = torch.autograd.grad(steps[-1].outputs.sum(), steps[0].outputs)
        assert gradient.abs().min() > 0

    def test_permuting_capsules_below_changes_nothing(self) -> None:
        votes = votes_of(B, I, J, E)
        order = torch.tensor([3, 0, 4, 1, 2])
        assert_close(dynamic_routing(votes[:, order]), dynamic_routing(votes))

    def test_permuting_parents_permutes_the_outputs(self) -> None:
        votes = votes_of(B, I, J, E)
        order = torch.tensor([2, 0, 1])
        assert_close(dynamic_routing(votes[:, :, order]), dynamic_routing(votes)[:, order])

    def test_images_of_a_batch_do_not_mix(self) -> None:
        votes = votes_of(B, I, J, E)
        alone = torch.cat([dynamic_routing(votes[:1]), dynamic_routing(votes[1:])])
        assert_close(dynamic_routing(votes), alone)

    @settings(deadline=None)
    @given(
        sizes=st.tuples(*[st.integers(1, 6)] * 4),
        seed=st.integers(0, 99),
        scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    )
    def test_coupling_sums_to_one_and_lengths_stay_below_it(
        self, sizes: tuple[int, int, int, int], seed: int, scale: float
    ) -> None:
        for step in steps_of(votes_of(*sizes, seed=seed, scale=scale)):
            assert step.logits.shape == step.coupling.shape == sizes[:3]
            assert step.outputs.shape == (sizes[0], sizes[2], sizes[3])
            assert_close(step.coupling.sum(dim=2), torch.ones(sizes[:2], dtype=torch.float64))
            assert (step.outputs.norm(dim=-1) <= 1).all()

    def test_orphan_takes_a_share_of_the_coupling(self) -> None:
        first, *_, last = steps_of(votes_of(B, I, J, E), orphan=True)
        assert_close(first.coupling.sum(dim=2), torch.full((B, I), J / (J + 1)).double())
        assert (last.coupling.sum(dim=2) < 1).all()

    def test_agreeing_votes_win_over_scattered_ones(self) -> None:
        votes = votes_of(1, 8, 2, 4)
        votes[:, :, 0] = votes[:, :1, 0]
        assert (steps_of(votes)[-1].coupling[..., 0] > 0.5).all()

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: dynamic_routing(votes_of(I, J, E)), r"\(B, I, J, E\), got \(5, 3, 4\)"),
            (lambda: dynamic_routing(votes_of(B, I, J, E), 0), "at least 1 iteration, got 0"),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E), prior_logits=votes_of(J, I)),
                r"prior_logits must have shape \(5, 3\), got \(3, 5\)",
            ),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E), prior_logits=votes_of(J)),
                r"prior_logits must have shape \(5, 3\), got \(3,\)",
            ),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E), bias=votes_of(E)),
                r"bias must have shape \(3, 4\), got \(4,\)",
            ),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E), bias=votes_of(J, E).float()),
                r"one floating-point dtype, got votes torch.float64, bias torch.float32",
            ),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E).long()),
                r"one floating-point dtype, got votes torch.int64",
            ),
            (
                lambda: dynamic_routing(votes_of(B, I, J, E), bias=votes_of(E, J)),
                r"bias must have shape \(3, 4\), got \(4, 3\)",
            ),
        ],
    )
    def test_wrong_shapes_are_named(self, call: Callable[[], Tensor], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            call()

    def test_mistakes_are_named_before_the_first_step_is_asked_for(self) -> None:
        with pytest.raises(ValueError, match="at least 1 iteration, got 0"):
            iterate_routing(votes_of(B, I, J, E), 0)
