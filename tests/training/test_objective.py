from dataclasses import replace

import pytest
import torch
from tiny_runs import tiny_config
from torch.testing import assert_close

from capsnet.data import Batch
from capsnet.models import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.training.objective import compute_losses, learning_rate

TINY_CAPSNET = CapsNetConfig(conv_channels=5, primary_types=2, primary_dim=3, output_dim=4)
TINY_CNN = CNNConfig(conv_channels=(3, 2), conv_kernels=(5, 3), hidden_sizes=(7,), dropout=0.0)


def make_batch(num_labels: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(6, 1, 28, 28, generator=generator)
    labels = torch.tensor([[4, 1], [0, 9], [2, 3], [5, 6], [7, 8], [9, 4]])[:, :num_labels]
    targets = torch.rand(6, num_labels, 1, 28, 28, generator=generator)
    return Batch(images, labels, targets)


def test_paper_schedule_decays_continuously_and_stops_at_its_floor() -> None:
    config = replace(tiny_config(), schedule="paper")
    faster = replace(config, decay_steps=500)
    assert learning_rate(faster, 500, 9) == pytest.approx(0.96e-3)
    assert learning_rate(config, 0, 9) == 1e-3
    assert learning_rate(config, 2000, 9) == pytest.approx(0.96e-3)
    assert learning_rate(config, 1000, 9) == pytest.approx(1e-3 * 0.96**0.5)
    assert learning_rate(config, 10**6, 9) == 1e-6


def test_cosine_schedule_warms_up_and_falls_to_zero() -> None:
    config = replace(tiny_config(), warmup_steps=10)
    rates = [learning_rate(config, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == rates[10] == pytest.approx(1e-3)
    assert rates[60] == pytest.approx(0.5e-3)
    assert rates[110] == pytest.approx(0.0, abs=1e-12)
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_warmup_takes_at_most_a_tenth_of_a_short_run() -> None:
    config = replace(tiny_config(), warmup_steps=200)
    assert learning_rate(config, 1, 20) == 1e-3
    assert learning_rate(config, 0, 3) == 1e-3


@pytest.mark.parametrize("num_labels", [1, 2])
def test_capsnet_loss_is_margin_plus_weighted_squared_error(num_labels: int) -> None:
    model = CapsNet(TINY_CAPSNET)
    batch = make_batch(num_labels)
    config = replace(
        tiny_config(),
        model=TINY_CAPSNET,
        reconstruction_weight=0.25,
        upper=0.8,
        lower=0.05,
        absent_weight=0.3,
    )
    with torch.no_grad():
        losses = compute_losses(model, batch, config)
        output = model(batch.images, reconstruct=batch.labels)
    margin, squared = 0.0, 0.0
    for example in range(6):
        for k in range(10):
            length = float(output.lengths[example, k])
            if k in batch.labels[example]:
                margin += max(0.0, 0.8 - length) ** 2 / 6
            else:
                margin += 0.3 * max(0.0, length - 0.05) ** 2 / 6
        for place in range(num_labels):  # two digits: their errors add
            difference = output.reconstruction[example, place] - batch.targets[example, place]
            squared += float((difference**2).sum()) / 6
    assert_close(float(losses.classification), margin, rtol=1e-5, atol=1e-6)
    assert_close(float(losses.reconstruction), squared, rtol=1e-5, atol=1e-6)
    assert_close(float(losses.total), margin + 0.25 * squared, rtol=1e-5, atol=1e-6)


def test_no_weight_means_no_reconstruction() -> None:
    config = replace(tiny_config(), model=TINY_CAPSNET, reconstruction_weight=0.0)
    losses = compute_losses(CapsNet(TINY_CAPSNET), make_batch(1), config)
    assert float(losses.reconstruction) == 0.0
    assert_close(losses.total, losses.classification)


def test_baseline_loss_is_cross_entropy_of_one_label() -> None:
    model, batch = CNN(TINY_CNN), make_batch(1)
    losses = compute_losses(model, batch, replace(tiny_config(), model=TINY_CNN))
    probabilities = model(batch.images).softmax(dim=1)
    expected = -sum(probabilities[row, batch.labels[row, 0]].log() for row in range(6)) / 6
    assert_close(losses.total, expected)


def test_baseline_loss_is_sigmoid_cross_entropy_of_two_labels() -> None:
    model, batch = CNN(TINY_CNN), make_batch(2)
    losses = compute_losses(model, batch, replace(tiny_config(), model=TINY_CNN))
    probabilities = model(batch.images).sigmoid()
    expected = torch.zeros(())
    for row in range(6):
        for k in range(10):
            present = k in batch.labels[row]
            expected -= (probabilities[row, k] if present else 1 - probabilities[row, k]).log() / 6
    assert_close(losses.total, expected)


def test_an_image_counts_as_wrong_unless_both_labels_are_found() -> None:
    class Lookup(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores = torch.zeros(6, 10)
            for row, classes in enumerate([(4, 1), (9, 0), (2, 5), (8, 7), (7, 8), (9, 4)]):
                scores[row, list(classes)] = torch.tensor([2.0, 1.0])
            return scores

    config = replace(tiny_config(), model=TINY_CNN)
    assert float(compute_losses(Lookup(), make_batch(2), config).num_errors) == 2
    assert float(compute_losses(Lookup(), make_batch(1), config).num_errors) == 2
