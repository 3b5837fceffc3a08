import pytest
import torch
from torch.testing import assert_close

from capsnet.layers import Decoder

K, E = 3, 4


def decoder_of() -> Decoder:
    torch.manual_seed(0)
    return Decoder(K, E, image_shape=(2, 5, 6), hidden_sizes=(7, 8)).double()


def test_only_the_chosen_capsule_matters() -> None:
    decoder, classes = decoder_of(), torch.tensor([2, 0])
    capsules = torch.randn(2, K, E, dtype=torch.float64)
    other = torch.randn(2, K, E, dtype=torch.float64)
    for image, chosen in enumerate(classes):
        other[image, chosen] = capsules[image, chosen]
    assert_close(decoder(other, classes), decoder(capsules, classes))
    assert not torch.equal(decoder(capsules, torch.tensor([1, 1])), decoder(capsules, classes))


def test_several_classes_are_decoded_as_if_alone() -> None:
    decoder = decoder_of()
    capsules = torch.randn(2, K, E, dtype=torch.float64)
    classes = torch.tensor([[0, 2], [1, 0]])
    both = decoder(capsules, classes)
    assert both.shape == (2, 2, 2, 5, 6)
    for position in range(2):
        assert_close(both[:, position], decoder(capsules, classes[:, position]))


def test_layers_by_hand() -> None:
    decoder = Decoder(1, 1, image_shape=(1, 1, 1), hidden_sizes=(1,))
    with torch.no_grad():
        for parameter, value in zip(decoder.parameters(), (2.0, 1.0, 3.0, -4.0), strict=True):
            parameter.fill_(value)
    got = decoder(torch.tensor([[[0.5]], [[-2.0]]]), torch.tensor([0, 0])).flatten()
    expected = torch.tensor([3.0 * 2.0 - 4.0, 3.0 * 0.0 - 4.0]).sigmoid()  # relu(2x + 1)
    assert_close(got, expected)


def test_gradcheck() -> None:
    decoder, classes = decoder_of(), torch.tensor([2, 0])
    capsules = torch.randn(2, K, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda capsules: decoder(capsules, classes), capsules)


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_any_whole_numbers_are_classes(dtype: torch.dtype) -> None:
    decoder, classes = decoder_of(), torch.tensor([2, 0])
    capsules = torch.randn(2, K, E, dtype=torch.float64)
    assert_close(decoder(capsules, classes.to(dtype)), decoder(capsules, classes))


def test_repr_tells_sizes() -> None:
    assert "3x4D -> (2, 5, 6)" in repr(decoder_of())


@pytest.mark.usefixtures("without_annotation_checks")
def test_what_does_not_fit_is_rejected() -> None:
    capsules = torch.randn(2, K, E, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"classes of 2 images, .* got torch.int64 of shape \(3,\)"
    ):
        decoder_of()(capsules, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"whole numbers as classes .* got torch.float32"):
        decoder_of()(capsules, torch.tensor([0.0, 1.7]))
    for classes, came in (
        (torch.eye(3, dtype=torch.bool)[:2], r"torch.bool of shape \(2, 3\)"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"torch.int64 of shape \(2, 2, 2\)"),
        (torch.tensor(1), r"torch.int64 of shape \(\)"),
    ):
        with pytest.raises(ValueError, match=rf"in shape \(B,\) or \(B, N\), got {came}"):
            decoder_of()(capsules, classes)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"classes of 0 to 2, got {wrong}"):
            decoder_of()(capsules, torch.tensor([[0, 1], [2, wrong]]))
    with pytest.raises(ValueError, match=r"hidden_sizes\[1\] must be .* at least 1, got 0"):
        Decoder(K, E, image_shape=(2, 5, 6), hidden_sizes=(7, 0))
    with pytest.raises(ValueError, match=r"shape \(B, 3, 4\), got \(2, 1, 4\)"):
        decoder_of()(capsules[:, :1], torch.tensor([0, 1]))
