"""The engine says exactly what the networks compute, and refuses what they cannot."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor
from torch.testing import assert_close

from capsnet import CapsNet, CapsNetConfig
from capsnet.playground.engine import Engine
from capsnet.playground.networks import TrainedNetwork


@pytest.fixture(scope="module")
def engine(small: list[TrainedNetwork]) -> Engine:
    return Engine(small)


@pytest.fixture(scope="module")
def image(engine: Engine) -> np.ndarray:
    pixels, label = engine.test_digit(3)
    assert label == 0
    return pixels[None]


def test_prediction_is_the_models_own(engine: Engine, image: np.ndarray) -> None:
    model = engine.find("digit").capsules
    expected = model(torch.from_numpy(image)[None], reconstruct="prediction")
    said = engine.predict("digit", image)
    assert_close(said.capsules, expected.capsules[0].detach())
    assert_close(said.lengths, expected.lengths[0].detach())
    assert said.reconstruction is not None
    assert_close(torch.from_numpy(said.reconstruction), expected.reconstruction[0].detach())
    assert said.classes[0] == said.reconstructed == int(expected.lengths.argmax())
    assert sorted(said.classes) == list(range(10))


def test_number_of_iterations_can_be_chosen(engine: Engine, image: np.ndarray) -> None:
    model = engine.find("digit").capsules
    steps = model(torch.from_numpy(image)[None], trace=True).routing
    assert steps is not None
    for count, step in enumerate(steps, start=1):
        said = engine.predict("digit", image, num_iterations=count)
        assert_close(said.capsules, step.outputs[0].detach())


def test_reconstructing_the_predicted_capsule_gives_its_reconstruction(
    engine: Engine, image: np.ndarray
) -> None:
    said = engine.predict("digit", image, reconstruct=7)
    assert said.reconstructed == 7
    picture = engine.reconstruct("digit", said.capsules[7], number=7)
    assert said.reconstruction is not None
    assert_close(torch.from_numpy(picture), torch.from_numpy(said.reconstruction))


def test_perturbing_moves_one_dimension_at_a_time(engine: Engine, image: np.ndarray) -> None:
    capsule = engine.predict("digit", image).capsules[2]
    strips = engine.perturb("digit", capsule, number=2, dimensions=(1, 4), offsets=(-0.5, 0.0, 0.5))
    assert strips.shape == (2, 3, 1, 28, 28)
    moved = capsule.clone()
    moved[4] += 0.5
    expected = engine.reconstruct("digit", moved, number=2)
    assert_close(torch.from_numpy(strips[1, 2]), torch.from_numpy(expected))
    assert_array_equal(strips[0, 1], strips[1, 1])


def test_each_place_divides_its_output_among_the_classes(engine: Engine, image: np.ndarray) -> None:
    routing = engine.route("digit", image)
    assert len(routing.iterations) == 3
    for view in routing.iterations:
        assert_close(view.coupling.sum(dim=0), torch.ones(3, 3))
    assert_close(routing.iterations[0].coupling, torch.full((10, 3, 3), 0.1))


def test_contributions_add_up_to_the_capsules_own_agreement(
    engine: Engine, image: np.ndarray
) -> None:
    """Σ_i c_ij û_j|i · v_j = s_j · v_j = ‖s_j‖ ‖v_j‖, and by Eq. 1 ‖s‖² = ‖v‖ / (1 − ‖v‖)."""
    routing = engine.route("digit", image)
    for view in routing.iterations:
        length: Tensor = view.lengths
        total_input = (length / (1 - length)).sqrt()
        assert_close(view.agreement.sum(dim=(1, 2)), total_input * length)


def test_parts_are_the_strongest_contributions_in_order(engine: Engine, image: np.ndarray) -> None:
    routing = engine.route("digit", image)
    for number, parts in enumerate(routing.parts):
        contributions = [part.contribution for part in parts]
        assert contributions == sorted(contributions, reverse=True)
        assert contributions[0] >= float(routing.iterations[-1].agreement[number].max()) / 3
        for part in parts:
            assert 0 <= part.row < 3 > part.column >= 0
            assert 0 <= part.type < 3
            assert part.coupling[0] == pytest.approx(0.1)
    assert (routing.field, routing.stride, routing.start) == (17, 4, 0)


def test_fields_of_padded_convolutions_begin_outside_of_the_image() -> None:
    model = CapsNet(
        CapsNetConfig(
            image_height=12, image_width=12, conv_channels=4, conv_kernel=5, primary_types=2,
            primary_kernel=7, padded=True,
        )
    ).eval()  # fmt: skip
    routing = Engine([TrainedNetwork("padded", model, {})]).route(
        "padded", np.zeros((1, 12, 12), dtype=np.float32)
    )
    assert (routing.field, routing.stride, routing.start) == (11, 2, -5)
    assert routing.iterations[0].coupling.shape == (10, 6, 6)


def test_routing_is_shown_where_it_happens() -> None:
    image = np.random.default_rng(2).random((1, 21, 37), dtype=np.float32)
    torch.manual_seed(4)
    model = CapsNet(
        CapsNetConfig(
            image_height=21, image_width=37, conv_channels=4, primary_types=3, primary_dim=5,
            output_dim=6, primary_stride=4,
        )
    ).eval()  # fmt: skip
    routing = Engine([TrainedNetwork("wide", model, {})]).route("wide", image)
    with torch.no_grad():
        grid = model.encode(torch.from_numpy(image)[None])  # (1, 2, 6, 3, D)
        votes = model.classes.vote(grid.flatten(1, 3))
        *_, last = model.classes.iterate(grid.flatten(1, 3))
        flow = last.coupling[0] * votes.agreement(last.outputs)[0]  # (36, K)
    assert grid.shape[1:4] == (2, 6, 3)
    for number, parts in enumerate(routing.parts):
        for part in parts:
            place = (part.row * 6 + part.column) * 3 + part.type
            assert part.contribution == pytest.approx(float(flow[place, number]), rel=1e-5)
            assert part.coupling[-1] == pytest.approx(float(last.coupling[0, place, number]))
    view = routing.iterations[-1]
    assert view.agreement.shape == view.coupling.shape == (10, 2, 6)
    activity = grid[0].norm(dim=-1)  # (2, 6, 3)
    for row in range(2):
        for column in range(6):
            first = (row * 6 + column) * 3
            assert_close(view.agreement[:, row, column], flow[first : first + 3].sum(dim=0))
            share = activity[row, column] / activity[row, column].sum()
            expected = (share[:, None] * last.coupling[0, first : first + 3]).sum(dim=0)
            assert_close(view.coupling[:, row, column], expected)


def test_two_digits_are_laid_over_each_other_and_clipped(engine: Engine) -> None:
    digits = [engine.test_digit(index)[0] for index in (0, 2)]
    apart, truth = engine.segment("pair", digits, shifts=[(-4, 0), (3, 2)])
    assert_array_equal(truth[0][0, 4:32, 0:28], digits[0])
    assert_array_equal(truth[1][0, 6:34, 7:35], digits[1])
    assert_array_equal(apart.image, np.clip(truth[0] + truth[1], 0, 1))
    model = engine.find("pair").capsules
    expected = model.predict(torch.from_numpy(apart.image)[None], num_labels=2)
    assert list(apart.predicted) == expected[0].tolist()
    assert sorted(number for number, _ in apart.parts) == sorted(apart.predicted)


def test_parts_come_in_the_order_of_the_digits_they_resemble(engine: Engine) -> None:
    digits = [engine.test_digit(index)[0] for index in (0, 2)]
    forth, truth = engine.segment("pair", digits, shifts=[(-4, 0), (4, 0)])
    back, _ = engine.segment("pair", digits[::-1], shifts=[(4, 0), (-4, 0)])
    assert [number for number, _ in forth.parts] == [number for number, _ in back.parts][::-1]

    def error(order: tuple[int, int]) -> float:
        pairs = zip((forth.parts[place][1] for place in order), truth, strict=True)
        return sum(float(np.square(picture - digit).sum()) for picture, digit in pairs)

    assert error((0, 1)) <= error((1, 0))


def test_other_classes_can_be_reconstructed(engine: Engine) -> None:
    digits = [engine.test_digit(index)[0] for index in (0, 2)]
    apart, _ = engine.segment("pair", digits, shifts=[(0, 0), (1, 1)], classes=(9, 8))
    assert [number for number, _ in apart.parts] == [9, 8]


def test_without_a_decoder_there_is_no_reconstruction(engine: Engine, image: np.ndarray) -> None:
    assert engine.predict("blind", image).reconstruction is None
    with pytest.raises(ValueError, match="has no decoder"):
        engine.reconstruct("blind", torch.zeros(6), number=1)


def test_a_network_routes_as_often_as_it_was_trained_to(engine: Engine, image: np.ndarray) -> None:
    config = replace(engine.find("digit").capsules.config, num_iterations=12)
    engine = Engine([TrainedNetwork("long", CapsNet(config).eval(), {})])
    assert len(engine.route("long", image).iterations) == 12
    with pytest.raises(ValueError, match="num_iterations must be 1 to 10, got 12"):
        engine.route("long", image, num_iterations=12)


def test_each_mistake_is_named(engine: Engine, image: np.ndarray) -> None:
    with pytest.raises(ValueError, match="at least one set of weights"):
        Engine([])
    with pytest.raises(ValueError, match=r"unknown weights '../digit'.* \(known: digit, pair"):
        engine.predict("../digit", image)
    with pytest.raises(ValueError, match="test digits are 0 to 9999, got 10000"):
        engine.test_digit(10_000)
    with pytest.raises(ValueError, match="num_iterations must be 1 to 10, got 11"):
        engine.predict("digit", image, num_iterations=11)
    with pytest.raises(ValueError, match="classes are 0 to 9, got 10"):
        engine.predict("digit", image, reconstruct=10)
    with pytest.raises(ValueError, match="a capsule must have 6 numbers, got 5"):
        engine.reconstruct("digit", torch.zeros(5), number=0)
    with pytest.raises(ValueError, match="dimensions are 0 to 5, got 6"):
        engine.perturb("digit", torch.zeros(6), number=0, dimensions=(6,), offsets=(0.0,))
    with pytest.raises(ValueError, match="needs images of shape"):
        engine.route("pair", image)
    single = replace(engine.find("digit").capsules.config, num_classes=1)
    alone = Engine([TrainedNetwork("alone", CapsNet(single).eval(), {})])
    with pytest.raises(ValueError, match="2 digits need as many classes, got 1"):
        alone.segment("alone", [image[0]] * 2, shifts=[(0, 0)] * 2)
