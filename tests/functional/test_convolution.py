import weakref
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close

from capsnet.functional import frequency as frequency_module
from capsnet.functional.convolution import (
    Algorithm,
    choose_algorithm,
    choose_tiles,
    convolve2d,
    store_taps_first,
)
from capsnet.functional.frequency import FrequencyConvolution
from capsnet.functional.plan import Plan, make_plan
from capsnet.training.optimiser import FusedAdam

# Image rows and columns, kernel rows and columns, stride, padding, tiles by rows and columns.
SHAPES = [
    pytest.param((20, 20), (9, 9), 2, 0, (1, 1), id="primary capsules on MNIST"),
    pytest.param((28, 28), (5, 5), 1, 2, (2, 2), id="baseline on MNIST"),
    pytest.param((13, 11), (5, 4), 1, 2, (2, 3), id="tiles beyond the edge"),
    pytest.param((12, 14), (4, 5), 3, 0, (1, 1), id="stride that divides no kernel"),
    pytest.param((11, 12), (3, 2), 4, 1, (2, 2), id="stride beyond the kernel"),
    pytest.param((6, 7), (6, 7), 1, 0, (1, 1), id="one output"),
    pytest.param((5, 7), (1, 1), 2, 0, (1, 1), id="one tap"),
    pytest.param((9, 8), (3, 4), 2, 1, (2, 1), id="tiles along rows only"),
]


def frequency(
    images: Tensor, weight: Tensor, stride: int, padding: int, tiles: tuple[int, int]
) -> Tensor:
    plan = make_plan(
        (images.shape[2], images.shape[3]),
        (weight.shape[2], weight.shape[3]),
        stride=stride,
        padding=padding,
        num_tiles=tiles,
        dtype=weight.dtype,
    )
    outputs: Tensor = FrequencyConvolution.apply(images, weight, None, plan, None)  # type: ignore[no-untyped-call]
    return outputs


@pytest.mark.parametrize("store", [torch.clone, store_taps_first])
@pytest.mark.parametrize("algorithm", ["auto", "direct", "patches", "frequency"])
def test_convolution_equals_the_reference(
    algorithm: Algorithm, store: Callable[[Tensor], Tensor]
) -> None:
    images = torch.randn(2, 3, 12, 14, dtype=torch.float64)
    weight = store(torch.randn(5, 3, 4, 7, dtype=torch.float64))
    bias = torch.randn(5, dtype=torch.float64)
    expected = [
        reference.convolution(image.numpy(), weight.numpy(), bias.numpy(), stride=2)
        for image in images
    ]
    got = convolve2d(images, weight, bias, stride=2, algorithm=algorithm)
    for image, known in zip(got, expected, strict=True):
        assert_close(image, torch.from_numpy(known), rtol=0, atol=1e-12)


@pytest.fixture(params=[256, 2], ids=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All images at once, or one after the other as many are in blocks."""
    monkeypatch.setattr("capsnet.functional.frequency._BLOCK_TILES", request.param)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "tiles"), SHAPES)
def test_frequency_form_has_values_and_gradients_of_the_direct_one(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: int,
    tiles: tuple[int, int],
) -> None:
    images = torch.randn(4, 3, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, *kernel, dtype=torch.float64, requires_grad=True)
    direct = F.conv2d(images, weight, stride=stride, padding=padding)
    fast = frequency(images, weight, stride, padding, tiles)
    assert_close(fast, direct, rtol=0, atol=1e-12)
    ahead = torch.randn_like(direct)
    expected = torch.autograd.grad(direct, (images, weight), ahead)
    got = torch.autograd.grad(fast, (images, weight), ahead)
    assert_close(got, expected, rtol=0, atol=1e-11)


def test_patches_gradcheck() -> None:
    inputs = torch.randn(2, 3, 7, 6), torch.randn(4, 3, 3, 2), torch.randn(4)
    assert torch.autograd.gradcheck(
        lambda *inputs: convolve2d(*inputs, stride=2, padding=1, algorithm="patches"),
        [tensor.double().requires_grad_() for tensor in inputs],
    )


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_frequency_form_gradcheck(needed: tuple[bool, bool]) -> None:
    images = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=needed[0])
    weight = torch.randn(4, 3, 3, 2, dtype=torch.float64, requires_grad=needed[1])
    assert torch.autograd.gradcheck(
        lambda images, weight: frequency(images, weight, 2, 1, (2, 1)), (images, weight)
    )


@pytest.mark.parametrize("algorithm", ["patches", "frequency"])
def test_outputs_may_be_changed_in_place_and_bias_gets_its_gradient(algorithm: Algorithm) -> None:
    images, weight = torch.randn(2, 3, 7, 8), torch.randn(4, 3, 3, 2)
    ahead = torch.randn(2, 4, 5, 7)
    gradients: list[Tensor] = []
    for each in (algorithm, "direct"):
        bias = torch.linspace(-1, 1, 4).requires_grad_()
        outputs = convolve2d(images, weight, bias, algorithm=each).relu_()
        gradients += torch.autograd.grad(outputs, bias, ahead)
    assert_close(*gradients)


@pytest.mark.parametrize("algorithm", ["patches", "frequency"])
@pytest.mark.parametrize("num_inputs", [3, 2], ids=["bias", "no bias"])
def test_second_derivatives_are_right(algorithm: Algorithm, num_inputs: int) -> None:
    inputs = (torch.randn(2, 3, 5, 6), torch.randn(4, 3, 3, 2), torch.randn(4))[:num_inputs]
    assert torch.autograd.gradgradcheck(
        lambda *inputs: convolve2d(*inputs, stride=2, padding=1, algorithm=algorithm),
        [tensor.double().requires_grad_() for tensor in inputs],
    )


def test_convolution_by_hand() -> None:
    images = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]]])
    weight = torch.tensor([[[[1.0, 0.0], [0.0, -1.0]]]])
    got = convolve2d(images, weight, torch.tensor([10.0]), stride=2, algorithm="frequency")
    assert_close(got, torch.tensor([[[[6.0]]]]))  # 1 − 5 + 10


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    height=st.integers(4, 17),
    width=st.integers(4, 17),
    kernel_height=st.integers(1, 4),
    kernel_width=st.integers(1, 4),
    stride=st.integers(1, 5),
    padding=st.integers(0, 3),
)
def test_both_forms_agree_on_any_size(
    batch: int,
    height: int,
    width: int,
    kernel_height: int,
    kernel_width: int,
    stride: int,
    padding: int,
) -> None:
    images = torch.randn(batch, 2, height, width, dtype=torch.float64)
    weight = torch.randn(3, 2, kernel_height, kernel_width, dtype=torch.float64)
    fast = convolve2d(images, weight, stride=stride, padding=padding, algorithm="frequency")
    assert_close(fast, F.conv2d(images, weight, stride=stride, padding=padding), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "tiles"), [(20, 9, 2, 0, (1, 1)), (28, 5, 1, 2, (2, 2))]
)
def test_frequency_form_rounds_as_little_as_the_direct_one(
    size: int, kernel: int, stride: int, padding: int, tiles: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Features are positive, weights and gradients are not.
    images = torch.randn(8, 256, size, size, generator=generator).relu().requires_grad_()
    weight = (torch.randn(256, 256, kernel, kernel, generator=generator) * 0.05).requires_grad_()
    exact = F.conv2d(images.double(), weight.double(), stride=stride, padding=padding)
    ahead = torch.randn(exact.shape, generator=generator)
    truth = [exact, *torch.autograd.grad(exact, (images, weight), ahead.double())]

    def errors(outputs: Tensor) -> list[float]:
        values = [outputs, *torch.autograd.grad(outputs, (images, weight), ahead)]
        return [
            float((value.detach().double() - true.detach()).square().mean().sqrt())
            for value, true in zip(values, truth, strict=True)
        ]

    direct = errors(F.conv2d(images, weight, stride=stride, padding=padding))
    fast = errors(frequency(images, weight, stride, padding, tiles))
    scales = [float(true.detach().square().mean().sqrt()) for true in truth]
    for ours, theirs, scale in zip(fast, direct, scales, strict=True):
        assert ours <= 8 * 2**-24 * scale  # eight roundings
        assert ours <= 2 * theirs  # whose order of summation is another one on every kind of CPU


def test_layout_of_the_weight_survives_optimiser_and_state_dict() -> None:
    conv = nn.Conv2d(4, 5, (3, 2))
    conv.weight = nn.Parameter(store_taps_first(conv.weight.detach()))
    stride = conv.weight.stride()
    assert stride == (1, 5, 40, 20)
    optimiser = torch.optim.Adam(conv.parameters(), fused=True)
    convolve2d(torch.randn(2, 4, 6, 7), conv.weight, algorithm="frequency").sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.stride() == stride
    optimiser.step()
    assert optimiser.state[conv.weight]["exp_avg"].stride() == stride
    conv.load_state_dict(nn.Conv2d(4, 5, (3, 2)).state_dict())
    assert conv.weight.stride() == stride


def test_weight_transformed_for_evaluation_is_not_used_after_it_changed() -> None:
    images = torch.randn(2, 3, 8, 9)
    weight = nn.Parameter(torch.randn(4, 3, 5, 6))

    def evaluate() -> Tensor:
        with torch.inference_mode():
            return convolve2d(images, weight, algorithm="frequency").clone()

    first = evaluate()
    assert_close(evaluate(), first, rtol=0, atol=0)
    optimiser = torch.optim.Adam([weight], fused=True)
    convolve2d(images, weight, algorithm="frequency").sum().backward()
    optimiser.step()
    assert_close(evaluate(), F.conv2d(images, weight).detach(), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        weight.copy_(torch.zeros_like(weight))
    assert_close(evaluate(), torch.zeros_like(first))


@pytest.mark.parametrize("make", [FusedAdam, partial(torch.optim.SGD, lr=0.1, fused=True)])
def test_a_fused_step_is_noticed_whatever_the_form_in_training(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> None:
    images, weight = torch.randn(2, 3, 8, 9), nn.Parameter(torch.randn(4, 3, 5, 6))
    optimiser = make([weight])
    convolve2d(images, weight, algorithm="direct").sum().backward()
    with torch.no_grad():
        before = convolve2d(images, weight, algorithm="frequency")
        optimiser.step()
        after = convolve2d(images, weight, algorithm="frequency")
        assert_close(after, convolve2d(images, weight.clone(), algorithm="frequency"))
    assert not torch.equal(after, before)


def count_transforms(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    plans: list[Plan] = []

    def kernel_factors(plan: Plan, weight: Tensor) -> frequency_module.Factors:
        plans.append(plan)
        return transform(plan, weight)

    transform = frequency_module.kernel_factors
    monkeypatch.setattr(frequency_module, "kernel_factors", kernel_factors)
    return plans


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_what_is_written_behind_autograd_s_back_is_noticed(write: str) -> None:
    images, weight = torch.randn(4, 3, 12, 12), torch.nn.Parameter(torch.randn(5, 3, 4, 4))
    with torch.no_grad():
        before = convolve2d(images, weight, algorithm="frequency")
        if write == "data":
            weight.data.mul_(2)
        else:
            weight.numpy()[...] *= 2
        after = convolve2d(images, weight, algorithm="frequency")
    assert_close(after, 2 * before)


@pytest.mark.parametrize("store", [torch.clone, store_taps_first])
@pytest.mark.parametrize("dim", range(4))
def test_a_mirrored_kernel_is_noticed_although_its_sum_is_the_same(
    store: Callable[[Tensor], Tensor], dim: int
) -> None:
    images, weight = torch.randn(4, 3, 12, 12), store(torch.randn(5, 3, 4, 4))
    with torch.no_grad():
        convolve2d(images, weight, algorithm="frequency")
        weight.data.copy_(weight.flip(dim))
        after = convolve2d(images, weight, algorithm="frequency")
    assert_close(after, F.conv2d(images, weight), atol=1e-4, rtol=1e-4)


def test_a_small_change_beside_a_large_sum_is_noticed() -> None:
    images, weight = torch.ones(1, 64, 8, 8), torch.ones(64, 64, 5, 5)
    before = convolve2d(images, weight, algorithm="frequency")
    weight.data[0, 0, 0, 0] += 0.003  # of a sum of 102,400, which float32 has in steps of 0.008
    after = convolve2d(images, weight, algorithm="frequency")
    assert_close(after[0, 0] - before[0, 0], torch.full((4, 4), 0.003), atol=1e-3, rtol=0)


# PyTorch's own forward mode uses what PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("algorithm", ["patches", "frequency"])
def test_forward_mode_has_the_derivative_of_the_direct_form(algorithm: Algorithm) -> None:
    images, weight, direction = (
        torch.randn(size, dtype=torch.float64)
        for size in ((2, 3, 8, 9), (4, 3, 5, 6), (4, 3, 5, 6))
    )
    with forward_ad.dual_level():
        outputs = convolve2d(images, forward_ad.make_dual(weight, direction), algorithm=algorithm)
        tangent = forward_ad.unpack_dual(outputs).tangent
    assert_close(tangent, F.conv2d(images, direction))


def test_weight_at_rest_is_transformed_once_for_each_of_two_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, weight = count_transforms(monkeypatch), torch.randn(4, 3, 5, 6)
    for size in (8, 9, 8, 9):
        convolve2d(torch.randn(2, 3, size, 9), weight, algorithm="frequency")
    assert len(plans) == 2
    for size in (10, 11, 10):  # no more than two are kept
        convolve2d(torch.randn(2, 3, size, 9), weight, algorithm="frequency")
    convolve2d(torch.randn(2, 3, 8, 9), weight, algorithm="frequency")
    assert len(plans) == 5


def test_weight_in_shared_memory_is_transformed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, weight = count_transforms(monkeypatch), torch.randn(4, 3, 5, 6).share_memory_()
    for _ in range(2):
        convolve2d(torch.randn(2, 3, 8, 9), weight, algorithm="frequency")
    assert len(plans) == 2


def test_weight_in_training_is_transformed_once_for_both_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, weight = count_transforms(monkeypatch), nn.Parameter(torch.randn(4, 3, 5, 6))
    images = torch.randn(600, 3, 8, 9, requires_grad=True)  # more than go through together
    convolve2d(images, weight, algorithm="frequency").sum().backward()
    assert len(plans) == 1


def test_factors_kept_for_the_backward_pass_are_freed_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Tensor]] = []

    def kernel_factors(plan: Plan, weight: Tensor) -> frequency_module.Factors:
        factors = [list(bands) for bands in transform(plan, weight)]
        made.extend(weakref.ref(factor) for bands in factors for factor in bands)
        return factors

    transform = frequency_module.kernel_factors
    monkeypatch.setattr(frequency_module, "kernel_factors", kernel_factors)
    images, weight = torch.randn(2, 3, 8, 9), nn.Parameter(torch.randn(4, 3, 5, 6))
    loss = convolve2d(images.requires_grad_(), weight, algorithm="frequency").sum()
    assert [factor() is None for factor in made] == [False] * len(made)
    loss.backward()
    assert [factor() is None for factor in made] == [True] * len(made) != []


def test_plan_does_not_depend_on_the_default_device() -> None:
    images, weight = torch.randn(2, 3, 21, 23), torch.randn(4, 3, 5, 6)
    with torch.device("meta"):
        fast = convolve2d(images, weight, algorithm="frequency")
    assert_close(fast, F.conv2d(images, weight), atol=1e-4, rtol=1e-4)


def test_frozen_weight_transformed_in_inference_mode_serves_a_gradient_of_images() -> None:
    weight = torch.randn(4, 3, 5, 6)
    images = torch.randn(2, 3, 8, 9, requires_grad=True)
    with torch.inference_mode():
        convolve2d(images, weight, algorithm="frequency")
    outputs = convolve2d(images, weight, algorithm="frequency")
    (got,) = torch.autograd.grad(outputs.sum(), images)
    (expected,) = torch.autograd.grad(F.conv2d(images, weight).sum(), images)
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_auto_is_direct_under_autocast_and_frequency_form_stays_exact_there() -> None:
    images, weight = torch.randn(64, 64, 20, 20), torch.randn(64, 64, 9, 9)
    assert choose_algorithm(images, weight, stride=2) == "frequency"
    exact = F.conv2d(images[:1], weight, stride=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert choose_algorithm(images, weight, stride=2) == "direct"
        assert convolve2d(images[:1], weight, stride=2).dtype == torch.bfloat16
        half = images[:1].bfloat16()
        assert convolve2d(half, weight, stride=2, algorithm="frequency").dtype == torch.float32
        kept = convolve2d(images[:1], weight, stride=2, algorithm="frequency")
    assert_close(kept, exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("algorithm", ["auto", "patches", "frequency"])
def test_every_form_is_direct_in_an_exported_program(algorithm: Algorithm) -> None:
    class Layer(nn.Module):
        def forward(self, images: Tensor, weight: Tensor) -> Tensor:
            return convolve2d(images, weight, stride=2, algorithm=algorithm)

    sizes = torch.randn(32, 64, 20, 20), torch.randn(64, 64, 9, 9)
    assert choose_algorithm(*sizes, stride=2) == "frequency"
    targets = [str(node.target) for node in torch.export.export(Layer(), sizes).graph.nodes]
    assert any("conv2d" in target for target in targets)


@pytest.mark.parametrize("algorithm", ["auto", "patches", "frequency"])
def test_every_form_is_direct_elsewhere_than_on_a_cpu(algorithm: Algorithm) -> None:
    images, weight = torch.empty(2, 3, 8, 9, device="meta"), torch.empty(4, 3, 5, 6, device="meta")
    assert convolve2d(images, weight, algorithm=algorithm).shape == (2, 4, 4, 4)


@pytest.mark.parametrize(
    ("images", "weight", "expected"),
    [
        ((128, 256, 20, 20), (256, 256, 9, 9), "frequency"),
        ((1, 256, 11, 11), (256, 256, 9, 9), "direct"),  # fetching all factors is not worth it
        ((128, 1, 28, 28), (256, 1, 9, 9), "patches"),  # one channel: transforms would be all
        ((128, 512, 20, 20), (256, 512, 1, 1), "direct"),  # nothing to save
    ],
)
def test_auto_chooses_by_estimated_work(
    images: tuple[int, ...], weight: tuple[int, ...], expected: str
) -> None:
    assert choose_algorithm(torch.empty(images), torch.empty(weight), stride=1) == expected


def test_large_images_are_cut_into_tiles() -> None:
    tiles, _ = choose_tiles(torch.empty(2, 64, 200, 120), torch.empty(64, 64, 5, 5))
    assert min(tiles) > 1


@pytest.mark.usefixtures("without_annotation_checks")
def test_convolution_names_what_does_not_fit() -> None:
    images, weight = torch.randn(2, 3, 8, 9), torch.randn(4, 3, 5, 6)
    with pytest.raises(ValueError, match=r"must be one of \('auto', 'direct', .*, got 'fast'"):
        convolve2d(images, weight, algorithm="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have the 7 channels of weight"):
        convolve2d(images, torch.randn(4, 7, 5, 6))
    with pytest.raises(ValueError, match=r"must have shape \(B, C, H, W\) .* got \(3, 8, 9\) and"):
        convolve2d(images[0], weight)
    with pytest.raises(ValueError, match=r"each of the 4 outputs .*\(4, 3, 5, 6\), got \(1,\)"):
        convolve2d(images, weight, torch.zeros(1))
    with pytest.raises(ValueError, match=r"one .* dtype, got images torch.uint8, weight torch.fl"):
        convolve2d(images.byte(), weight, algorithm="frequency")
    with pytest.raises(ValueError, match=r"got .*32, weight torch.float32, bias torch.float64"):
        convolve2d(images, weight, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="stride must be at least 1 and padding at least 0, got 0"):
        convolve2d(images, weight, stride=0)
    with pytest.raises(ValueError, match="padding at least 0, got 1 and -1"):
        convolve2d(images, weight, padding=-1)
    with pytest.raises(ValueError, match="kernel of 9×2 does not fit images of 8×9 padded by 0"):
        convolve2d(images, torch.randn(4, 3, 9, 2))


@pytest.mark.parametrize("algorithm", ["frequency", "patches"])
def test_many_gradients_at_once_are_those_one_by_one(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    weight = torch.randn(4, 3, 3, 2, dtype=torch.float64)

    def convolve(images: Tensor, weight: Tensor) -> Tensor:
        return convolve2d(images, weight, stride=2, algorithm=algorithm)

    one_by_one = torch.autograd.functional.jacobian(convolve, (images, weight))
    at_once = torch.autograd.functional.jacobian(convolve, (images, weight), vectorize=True)
    assert_close(at_once, one_by_one)


@pytest.mark.parametrize("algorithm", ["frequency", "patches"])
def test_gradients_taken_under_autocast_are_exact(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 9, 9, requires_grad=True)
    weight = torch.randn(5, 3, 3, 3, requires_grad=True)
    outputs = convolve2d(images, weight, algorithm=algorithm)
    expected = torch.autograd.grad(outputs.square().sum(), (images, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = convolve2d(images, weight, algorithm=algorithm)
        gradients = torch.autograd.grad(outputs.square().sum(), (images, weight))
    assert_close(gradients, expected)
