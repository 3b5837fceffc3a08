import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from capsnet.functional import margin_loss
from capsnet.layers import ConvCapsules, DenseCapsules, PrimaryCapsules

T, D, U, E = 2, 3, 4, 5


def layer_of(
    kernel_size: int = 3, stride: int = 1, padding: int = 0, **options: bool
) -> ConvCapsules:
    torch.manual_seed(0)
    layer = ConvCapsules(
        T,
        D,
        out_types=U,
        out_dim=E,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        **options,
    ).double()
    for parameter in (layer.prior_logits, layer.bias):
        if parameter is not None:
            nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding"), [(3, 1, 0), (3, 2, 0), (3, 2, 1), (2, 1, 1), (1, 1, 0)]
)
@pytest.mark.parametrize("orphan", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_equals_the_reference(
    kernel_size: int, stride: int, padding: int, orphan: bool, extras: bool
) -> None:
    layer = layer_of(
        kernel_size, stride, padding, learned_priors=extras, bias=extras, orphan=orphan
    )
    priors, bias = layer.prior_logits, layer.bias
    capsules = torch.randn(2, 4, 5, T, D, dtype=torch.float64)
    got = layer(capsules)
    weight = layer.weight.detach().unflatten(0, (kernel_size, kernel_size)).numpy()
    for image in range(2):
        expected, sums = reference.conv_routing(
            capsules[image].numpy(),
            weight,
            stride=stride,
            padding=padding,
            num_iterations=3,
            prior_logits=None
            if priors is None
            else priors.detach().unflatten(0, (kernel_size, kernel_size)).numpy(),
            bias=None if bias is None else bias.detach().numpy(),
            orphan=orphan,
        )
        assert_close(got[image], torch.from_numpy(expected), rtol=0, atol=1e-12)
        assert orphan or all(abs(total - 1) < 1e-12 for total in sums.values())


def test_one_place_and_full_kernel_equals_a_dense_layer() -> None:
    layer = layer_of()
    dense = DenseCapsules(9 * T, D, out_capsules=U, out_dim=E).double()
    with torch.no_grad():
        dense.weight.copy_(layer.weight.flatten(0, 1))
    capsules = torch.randn(2, 3, 3, T, D, dtype=torch.float64)
    assert_close(layer(capsules)[:, 0, 0], dense(capsules.flatten(1, 3)))


def test_coupling_of_a_capsule_sums_to_one_over_all_places_it_reaches() -> None:
    layer = layer_of()
    capsules = torch.randn(1, 5, 5, T, D, dtype=torch.float64)
    for step in layer.iterate(capsules):
        coupling = step.coupling.unflatten(1, (3, 3)).unflatten(3, (3, 3)).sum(dim=-1)
        totals = torch.zeros(5, 5, T, dtype=torch.float64)
        for p in range(3):
            for q in range(3):
                totals[p : p + 3, q : q + 3] += coupling[0, p, q]
        assert_close(totals, torch.ones_like(totals))


def test_moving_the_input_moves_the_output() -> None:
    layer = layer_of()
    capsules = torch.zeros(1, 9, 9, T, D, dtype=torch.float64)
    capsules[:, 2:5, 2:5] = torch.randn(3, 3, T, D, dtype=torch.float64)
    moved = capsules.roll((1, 2), dims=(1, 2))
    assert_close(layer(moved), layer(capsules).roll((1, 2), dims=(1, 2)))


def test_gradcheck_of_capsules_and_every_parameter() -> None:
    layer = layer_of(kernel_size=2, learned_priors=True, bias=True, orphan=True)
    capsules = torch.randn(1, 3, 2, T, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(capsules), (capsules, *layer.parameters()))


def test_an_exported_program_takes_any_batch() -> None:
    layer = layer_of(padding=1, learned_priors=True, bias=True, orphan=True)
    two, seven = (torch.randn(batch, 5, 6, T, D, dtype=torch.float64) for batch in (2, 7))
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (two,), dynamic_shapes=({0: batch},))
    assert_close(program.module()(seven), layer(seven))


def test_large_logits_do_not_overflow() -> None:
    layer = layer_of().float()
    with torch.no_grad():
        layer.weight.mul_(1e4)
    assert layer(100 * torch.randn(1, 5, 5, T, D)).isfinite().all()


class TwoCapsuleLayers(nn.Module):
    """Primary capsules, a convolutional capsule layer and a dense one on tiny images."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = PrimaryCapsules(1, 4, capsule_dim=4, kernel_size=3, stride=1)
        self.middle = ConvCapsules(4, 4, out_types=4, out_dim=6, kernel_size=3, stride=1)
        self.classes = DenseCapsules(4 * 4 * 4, 6, out_capsules=2, out_dim=8)

    def forward(self, images: Tensor) -> Tensor:
        capsules: Tensor = self.classes(self.middle(self.primary(images)).flatten(1, 3))
        lengths: Tensor = torch.linalg.vector_norm(capsules, dim=-1)
        return lengths


def test_a_stack_learns_to_tell_bars_apart() -> None:
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    images = torch.zeros(64, 1, 8, 8)
    for index in range(64):
        line = int(torch.randint(8, ()))
        (images[index, 0, line] if labels[index] else images[index, 0, :, line]).fill_(1.0)
    targets = nn.functional.one_hot(labels, 2)
    model = TwoCapsuleLayers()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        margin_loss(model(images), targets).backward()
        optimizer.step()
    assert (model(images).argmax(dim=1) == labels).double().mean() > 0.95


@pytest.mark.usefixtures("without_annotation_checks")
def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="a kernel of 3 does not fit a grid of 2×5 capsules"):
        layer_of()(torch.randn(1, 2, 5, T, D, dtype=torch.float64))
    with pytest.raises(ValueError, match="padding must be a whole number of at least 0, got -1"):
        layer_of(padding=-1)
    with pytest.raises(ValueError, match=r"\(B, H, W, 2, 3\), got \(1, 5, 5, 3, 2\)"):
        layer_of()(torch.randn(1, 5, 5, D, T, dtype=torch.float64))


def test_repr_tells_sizes_and_routing() -> None:
    assert "2x3D -> 4x5D, kernel_size=3, stride=2, padding=0, num_iterations=3" in repr(
        layer_of(3, 2)
    )


def test_autocast_leaves_routing_in_full_precision() -> None:
    layer = layer_of().float()
    capsules = torch.randn(2, 5, 6, T, D)
    expected = list(layer.iterate(capsules))[-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = list(layer.iterate(capsules))[-1]
        assert layer(capsules.bfloat16()).dtype == torch.float32
    assert_close(found, expected)


@pytest.mark.usefixtures("without_annotation_checks")
def test_capsules_of_another_dtype_are_refused() -> None:
    for capsules in (torch.randn(1, 3, 3, T, D), torch.ones(1, 3, 3, T, D, dtype=torch.int64)):
        with pytest.raises(ValueError, match="all tensors must have one floating-point dtype"):
            layer_of()(capsules)
