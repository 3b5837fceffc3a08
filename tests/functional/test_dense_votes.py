import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from capsnet.functional import Votes, dynamic_routing, iterate_routing
from capsnet.functional import dense_votes as module
from capsnet.functional.dense_votes import DenseVotes, store_parents_first


@pytest.fixture(params=[None, 40], ids=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems in one block, or cut along images and capsules as large ones are."""
    if request.param is not None:
        monkeypatch.setattr(module, "_BLOCK_NUMBERS", request.param)
        monkeypatch.setattr(module, "_BLOCK_IMAGES", 2)
        monkeypatch.setattr(module, "_BLOCK_PARENTS", 2)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Capsules (B, I, D) = (3, 11, 4) and a weight (I, J, D, E) = (11, 5, 4, 6)."""
    return torch.randn(3, 11, 4, dtype=dtype), torch.randn(11, 5, 4, 6, dtype=dtype)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("num_iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("orphan", [False, True])
def test_routing_without_votes_equals_the_reference(num_iterations: int, orphan: bool) -> None:
    capsules, weight = problem()
    prior_logits = torch.randn(11, 5, dtype=torch.float64)
    bias = torch.randn(5, 6, dtype=torch.float64)
    steps = list(
        iterate_routing(
            DenseVotes(capsules, weight),
            num_iterations,
            prior_logits=prior_logits,
            bias=bias,
            orphan=orphan,
        )
    )
    for image, step_outputs in enumerate(steps[-1].outputs):
        votes = reference.dense_votes(capsules[image].numpy(), weight.numpy())
        outputs, coupling, logits = reference.routing(
            votes,
            num_iterations,
            prior_logits=prior_logits.numpy(),
            bias=bias.numpy(),
            orphan=orphan,
        )
        assert_close(step_outputs, torch.from_numpy(outputs), rtol=0, atol=1e-12)
        assert_close(steps[-1].coupling[image], torch.from_numpy(coupling), rtol=0, atol=1e-12)
        assert_close(steps[-1].logits[image], torch.from_numpy(logits), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("blocks")
def test_gradients_equal_those_of_votes_in_memory() -> None:
    capsules, weight = (tensor.requires_grad_() for tensor in problem())
    ahead = torch.randn(3, 5, 6, dtype=torch.float64)
    held = Votes(torch.einsum("bid,ijde->bije", capsules, weight))
    expected = torch.autograd.grad(dynamic_routing(held), (capsules, weight), ahead)
    without = dynamic_routing(DenseVotes(capsules, weight))
    got = torch.autograd.grad(without, (capsules, weight), ahead)
    assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("blocks")
def test_gradcheck_through_all_iterations_priors_and_bias() -> None:
    inputs = [
        torch.randn(2, 5, 4, dtype=torch.float64),
        torch.randn(5, 3, 4, 6, dtype=torch.float64),
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(3, 6, dtype=torch.float64),
    ]

    def route(capsules: Tensor, weight: Tensor, prior_logits: Tensor, bias: Tensor) -> Tensor:
        return dynamic_routing(
            DenseVotes(capsules, weight), prior_logits=prior_logits, bias=bias, orphan=True
        )

    assert torch.autograd.gradcheck(route, [tensor.requires_grad_() for tensor in inputs])


def test_both_operations_by_hand() -> None:
    capsules = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # two capsules of two numbers
    weight = torch.tensor([[[[1.0], [10.0]]], [[[100.0], [1000.0]]]])  # one parent of one number
    votes = DenseVotes(capsules, weight)  # 21 and 4300
    coupling = torch.tensor([[[0.5], [0.1]]])
    assert_close(votes.weighted_sum(coupling), torch.tensor([[[440.5]]]))  # 0.5 · 21 + 0.1 · 4300
    assert_close(votes.weighted_sum(0.5), torch.tensor([[[2160.5]]]))
    assert_close(votes.agreement(torch.tensor([[[2.0]]])), torch.tensor([[[42.0], [8600.0]]]))


def test_no_tensor_of_the_size_of_the_votes_is_made() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    capsules, weight = torch.randn(7, 30, 4), torch.randn(30, 20, 4, 16)
    with Watch():  # type: ignore[no-untyped-call]
        leaves = capsules.requires_grad_(), weight.requires_grad_()
        dynamic_routing(DenseVotes(*leaves)).sum().backward()
    assert largest < 7 * 30 * 20 * 16
    assert largest == 30 * 20 * 4 * 16  # the weight itself


def test_layout_of_the_weight_survives_the_optimiser() -> None:
    weight = nn.Parameter(store_parents_first(torch.randn(7, 3, 4, 5)))
    stride = weight.stride()
    assert stride == (1, 140, 7, 28)
    optimiser = torch.optim.Adam([weight], fused=True)
    dynamic_routing(DenseVotes(torch.randn(2, 7, 4), weight)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == stride
    optimiser.step()
    assert optimiser.state[weight]["exp_avg"].stride() == stride


def test_autocast_leaves_routing_in_full_precision() -> None:
    capsules, weight = problem(torch.float32)
    expected = dynamic_routing(DenseVotes(capsules, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dynamic_routing(DenseVotes(capsules, weight))
        rounded = dynamic_routing(DenseVotes(capsules.bfloat16(), weight))
    assert_close(got, expected)
    assert rounded.dtype == torch.float32


@pytest.mark.usefixtures("without_annotation_checks")
def test_capsules_and_weight_must_fit() -> None:
    with pytest.raises(ValueError, match=r"must agree in I and D, got \(3, 11, 4\) and \(11, 5, 6"):
        DenseVotes(torch.randn(3, 11, 4), torch.randn(11, 5, 6, 4))
    with pytest.raises(ValueError, match=r"capsules torch.float64, weight torch.float32"):
        DenseVotes(torch.randn(3, 11, 4).double(), torch.randn(11, 5, 4, 6))


@pytest.mark.usefixtures("blocks")
def test_second_derivatives_are_right() -> None:
    capsules, weight = torch.randn(2, 3, 2).double(), torch.randn(3, 4, 2, 3).double()

    def route(capsules: Tensor, weight: Tensor) -> Tensor:
        return dynamic_routing(DenseVotes(capsules, weight), 2)

    inputs = (capsules.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradgradcheck(route, inputs)


def test_an_empty_batch_has_no_outputs() -> None:
    _, weight = problem()
    assert dynamic_routing(DenseVotes(weight.new_empty(0, 11, 4), weight)).shape == (0, 5, 6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("of_weight", [False, True])
def test_many_gradients_at_once_are_those_one_by_one(of_weight: bool) -> None:
    capsules, weight = problem()

    def route(inputs: Tensor) -> Tensor:
        votes = DenseVotes(capsules, inputs) if of_weight else DenseVotes(inputs, weight)
        return dynamic_routing(votes)[:2]

    inputs = weight if of_weight else capsules
    one_by_one = torch.autograd.functional.jacobian(route, inputs)
    assert_close(torch.autograd.functional.jacobian(route, inputs, vectorize=True), one_by_one)
    leaf = inputs.clone().requires_grad_()
    outputs = route(leaf).flatten()
    unit = torch.eye(len(outputs), dtype=torch.float64)
    at_once = torch.vmap(lambda v: torch.autograd.grad(outputs, leaf, v, retain_graph=True)[0])
    assert_close(at_once(unit).reshape(one_by_one.shape), one_by_one)


def test_logits_of_another_precision_are_refused() -> None:
    capsules, weight = problem()
    with pytest.raises(ValueError, match=r"got logits torch.float32, weight torch.float64"):
        dynamic_routing(DenseVotes(capsules, weight), prior_logits=torch.zeros(11, 5))
    with pytest.raises(ValueError, match=r"got total_input torch.float64, bias torch.float32"):
        dynamic_routing(DenseVotes(capsules, weight), bias=torch.zeros(5, 6))
