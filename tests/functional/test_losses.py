import pytest
import reference
import torch
from torch.testing import assert_close

from capsnet.functional import margin_loss, reconstruction_loss


def test_margin_loss_by_hand() -> None:
    loss = margin_loss(torch.tensor([[0.8, 0.3]]), torch.tensor([[1.0, 0.0]]))
    assert_close(loss, torch.tensor(0.03))  # (0.9 - 0.8)² + 0.5 (0.3 - 0.1)²


def test_margin_loss_equals_the_reference_with_several_digits() -> None:
    lengths = torch.rand(4, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    expected = reference.margin_loss(lengths.numpy(), targets.double().numpy())
    got = margin_loss(lengths, targets)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_margin_loss_is_zero_within_both_margins() -> None:
    assert margin_loss(torch.tensor([[0.95, 0.05]]), torch.tensor([[1, 0]])) == 0


def test_margin_loss_settings_are_used() -> None:
    loss = margin_loss(
        torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 0]]), upper=0.8, lower=0.3, absent_weight=0.25
    )
    assert_close(loss, torch.tensor(0.09 + 0.25 * 0.04))


def test_margin_loss_gradcheck() -> None:
    lengths = torch.tensor([[0.3, 0.6, 0.05], [0.97, 0.2, 0.4]], dtype=torch.float64)
    targets = torch.tensor([[1, 0, 0], [0, 1, 1]])
    assert torch.autograd.gradcheck(
        lambda lengths: margin_loss(lengths, targets), lengths.requires_grad_()
    )


def test_reconstruction_loss_sums_over_pixels_and_averages_over_images() -> None:
    reconstruction = torch.zeros(2, 1, 3, 4)
    images = torch.zeros(2, 1, 3, 4)
    images[0] = 1.0
    images[1, 0, 0, 0] = 4.0
    assert_close(reconstruction_loss(reconstruction, images), torch.tensor((12 + 16) / 2.0))


def test_reconstruction_loss_equals_the_reference() -> None:
    reconstruction, images = torch.rand(2, 4, 1, 3, 5, dtype=torch.float64)
    expected = reference.reconstruction_loss(reconstruction.numpy(), images.numpy())
    got = reconstruction_loss(reconstruction, images)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_reconstruction_loss_gradcheck() -> None:
    pair = [torch.rand(2, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(reconstruction_loss, pair)


@pytest.mark.usefixtures("without_annotation_checks")
def test_shapes_must_be_equal_never_broadcast() -> None:
    with pytest.raises(
        ValueError, match=r"of one shape \(B, K\), .*one_hot\), got \(2, 3\) and \(1, 3\)"
    ):
        margin_loss(torch.zeros(2, 3), torch.zeros(1, 3))
    for shape in ((3,), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"of one shape \(B, K\), .*one_hot\), got"):
            margin_loss(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match=r"of one shape, got \(2, 3, 4\) and \(2, 1, 4\)"):
        reconstruction_loss(torch.zeros(2, 3, 4), torch.zeros(2, 1, 4))
