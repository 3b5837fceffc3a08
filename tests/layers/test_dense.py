import pytest
import reference
import torch
from torch.testing import assert_close

from capsnet.layers import DenseCapsules, RoutedCapsules

B, I, J, D, E = 2, 6, 3, 4, 5  # noqa: E741, the style guide's letters


def layer_of(**options: bool) -> DenseCapsules:
    torch.manual_seed(0)
    layer = DenseCapsules(I, D, out_capsules=J, out_dim=E, **options).double()
    for parameter in (layer.prior_logits, layer.bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("orphan", [False, True])
def test_equals_the_reference(extras: bool, orphan: bool) -> None:
    layer = layer_of(learned_priors=extras, bias=extras, orphan=orphan)
    capsules = torch.randn(B, I, D, dtype=torch.float64)
    got = layer(capsules)
    for image in range(B):
        expected, _, _ = reference.routing(
            reference.dense_votes(capsules[image].numpy(), layer.weight.detach().numpy()),
            3,
            prior_logits=layer.prior_logits.detach().numpy()
            if layer.prior_logits is not None
            else None,
            bias=layer.bias.detach().numpy() if layer.bias is not None else None,
            orphan=orphan,
        )
        assert_close(got[image], torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_gradcheck_of_capsules_and_every_parameter() -> None:
    layer = layer_of(learned_priors=True, bias=True, orphan=True)
    capsules = torch.randn(B, I, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(capsules), (capsules, *layer.parameters()))


def test_last_traced_iteration_is_the_output() -> None:
    layer = layer_of()
    capsules = torch.randn(B, I, D, dtype=torch.float64)
    steps = list(layer.iterate(capsules))
    assert len(steps) == 3
    assert_close(steps[-1].outputs, layer(capsules))


def test_state_dict_names_and_shapes_are_stable() -> None:
    state = layer_of(learned_priors=True, bias=True).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "prior_logits": (I, J),
        "bias": (J, E),
        "weight": (I, J, D, E),
    }


def test_loading_a_state_dict_gives_the_same_outputs() -> None:
    layer, other = layer_of(), DenseCapsules(I, D, out_capsules=J, out_dim=E).double()
    other.load_state_dict(layer.state_dict())
    capsules = torch.randn(B, I, D, dtype=torch.float64)
    assert_close(other(capsules), layer(capsules), rtol=0, atol=0)


def test_initial_outputs_are_neither_dead_nor_saturated() -> None:
    torch.manual_seed(0)
    layer = DenseCapsules(1152, 8, out_capsules=10, out_dim=16, num_iterations=1)
    capsules = torch.nn.functional.normalize(torch.randn(4, 1152, 8), dim=-1)
    lengths = layer(capsules).norm(dim=-1)
    assert 0.3 < lengths.mean() < 0.7


def test_works_under_autocast() -> None:
    layer = layer_of().float()
    capsules = torch.randn(B, I, D)
    expected = layer(capsules)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(layer(capsules).float(), expected, rtol=0.1, atol=0.05)


@pytest.mark.usefixtures("without_annotation_checks")  # sizes are tensors then
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracing_gives_the_same_outputs_for_any_batch() -> None:
    layer = layer_of()
    traced = torch.jit.trace(layer, torch.randn(B, I, D, dtype=torch.float64))
    capsules = torch.randn(B + 1, I, D, dtype=torch.float64)
    assert_close(traced(capsules), layer(capsules))


def test_repr_tells_sizes_and_routing() -> None:
    assert repr(layer_of(orphan=True)) == (
        "DenseCapsules(6x4D -> 3x5D, num_iterations=3, "
        "learned_priors=False, bias=False, orphan=True)"
    )


@pytest.mark.usefixtures("without_annotation_checks")
def test_mistakes_are_named() -> None:
    with pytest.raises(
        ValueError, match="num_iterations must be a whole number of at least 1, got 0"
    ):
        DenseCapsules(I, D, out_capsules=J, out_dim=E, num_iterations=0)
    with pytest.raises(ValueError, match="in_capsules must be a whole number of at least 1, got 0"):
        DenseCapsules(0, D, out_capsules=J, out_dim=E)
    with pytest.raises(ValueError, match=r"shape \(B, 6, 4\), got \(2, 4, 6\)"):
        layer_of()(torch.randn(B, D, I, dtype=torch.float64))
    with pytest.raises(TypeError, match="RoutedCapsules does not say how its capsules vote"):
        RoutedCapsules(3, priors=None, bias=None, orphan=False).route(torch.zeros(B, I, D))
