from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet.data import Batch, DataConfig, Split, load_split
from capsnet.data.order import Draws
from capsnet.models import CNN, CapsNet, CapsNetConfig, CapsNetOutput, CNNConfig
from capsnet.training import evaluate
from capsnet.training.evaluation import check_origin

CONFIG = CNNConfig(image_height=3, image_width=2, conv_channels=(2,), conv_kernels=(3,))


class Written(Split):
    """Images whose first pixel is their index; two labels each."""

    name, split, origin = "written", "test", "written by the test"
    class_names = tuple("0123456789")
    image_shape = (1, 3, 2)

    def __init__(self, labels: list[tuple[int, ...]]) -> None:
        self.labels = torch.tensor(labels)
        self.labels_per_image = self.labels.shape[1]

    def __len__(self) -> int:
        return len(self.labels)

    def make_batch(self, indices: np.ndarray, draws: Draws | None) -> Batch:
        images = torch.zeros(len(indices), 1, 3, 2)
        images[:, 0, 0, 0] = torch.from_numpy(indices)
        labels = self.labels[torch.from_numpy(indices)]
        return Batch(images, labels, images[:, None].repeat(1, labels.shape[1], 1, 1, 1))


class Table(CNN):
    """A baseline whose logits are looked up by the image's first pixel."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(CONFIG)
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training  # no dropout at test time
        return self.logits[images[:, 0, 0, 0].long()]


def logits_for(*classes: tuple[int, ...]) -> Tensor:
    logits = torch.full((len(classes), 10), -5.0)
    for row, chosen in enumerate(classes):
        for place, k in enumerate(chosen):
            logits[row, k] = 5.0 - place
    return logits


def test_two_digits_are_right_only_as_a_set() -> None:
    split = Written([(1, 2), (3, 4), (5, 6), (7, 8)])
    model = Table(logits_for((1, 2), (4, 3), (5, 0), (9, 0)))
    evaluation = evaluate([model], split, batch_size=3)
    assert evaluation.num_errors == 2
    assert evaluation.error_rate == 0.5
    assert evaluation.label_error_rate == 3 / 8  # half credit for (5, 0)
    assert [(w.index, w.labels, w.predictions) for w in evaluation.wrong] == [
        (2, (5, 6), (5, 0)),
        (3, (7, 8), (9, 0)),
    ]
    assert "single labels missed: 37.50%" in evaluation.describe()


def test_ensemble_adds_probabilities() -> None:
    split = Written([(1,)])
    sure_of_1, unsure_of_2 = torch.zeros(1, 10), torch.zeros(1, 10)
    sure_of_1[0, 1], unsure_of_2[0, 2] = 9.0, 1.0
    wrong = evaluate([Table(unsure_of_2)], split)
    right = evaluate([Table(unsure_of_2), Table(sure_of_1), Table(unsure_of_2)], split)
    assert (wrong.num_errors, right.num_errors, right.num_models) == (1, 0, 3)


class Lengths(CapsNet):
    """A CapsNet that finds the same lengths in every image."""

    def __init__(self, *lengths: float) -> None:
        super().__init__(
            CapsNetConfig(
                image_height=3, image_width=2, conv_channels=1, conv_kernel=1,
                primary_types=1, primary_kernel=1, decoder=False,
            )
        )  # fmt: skip
        self.lengths = torch.tensor([lengths])

    def forward(
        self, images: Tensor, *, reconstruct: object = None, trace: bool = False
    ) -> CapsNetOutput:
        return CapsNetOutput(torch.zeros(1, 10, 16), self.lengths, None, None)


def test_ensemble_of_capsnets_adds_lengths() -> None:
    """1.0 is more than 0.95; the squares of the lengths, or a softmax, say otherwise."""
    models = [Lengths(0, 0.9, 0.8, *[0] * 7), Lengths(0, 0.05, 0.2, *[0] * 7)]
    assert evaluate(models, Written([(2,)])).num_errors == 0
    assert evaluate(models[:1], Written([(2,)])).num_errors == 1


def test_part_of_a_split_is_spread_evenly_and_said_so() -> None:
    split = Written([(k % 10,) for k in range(20)])
    model = Table(logits_for(*[((k + 1) % 10,) for k in range(20)]))
    evaluation = evaluate([model], split, num_examples=5)
    assert [example.index for example in evaluation.wrong] == [0, 4, 8, 12, 16]
    assert "5 wrong of 5 examples, spread evenly over 20" in evaluation.describe()
    assert evaluate([model], split, num_examples=99).num_examples == 20


def test_results_on_affnist_say_which_files_it_was() -> None:
    evaluation = evaluate([Table(logits_for((1,)))], Written([(1,)]))
    assert evaluation.describe().startswith("written test: 0.00% error")
    made = replace(evaluation, dataset="affnist", origin="affNIST-style, regenerated from MNIST")
    assert made.describe().startswith(
        "affnist test (affNIST-style, regenerated from MNIST): 0.00% error"
    )


def test_evaluation_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    model = Table(logits_for(*[(1,)] * 5))
    evaluate([model], Written([(1,)] * 5), batch_size=2, watch=lambda *each: told.append(each))
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_evaluation_leaves_the_model_in_its_mode() -> None:
    model = Table(logits_for((1,))).train()
    evaluate([model], Written([(1,)]))
    assert model.training


def test_reconstruction_error_is_the_summed_square_averaged_over_images() -> None:
    split = load_split(DataConfig("mnist"), "test")
    model = CapsNet(CapsNetConfig(conv_channels=5, primary_types=2, primary_dim=3, output_dim=4))
    evaluation = evaluate([model], split, num_examples=7, batch_size=3)
    batch = split.test_batch(np.arange(7) * 10_000 // 7)
    with torch.no_grad():
        reconstruction = model(batch.images, reconstruct=batch.labels).reconstruction
    expected = float(((reconstruction - batch.targets) ** 2).sum()) / 7
    assert evaluation.reconstruction_error == pytest.approx(expected, rel=1e-5)
    assert "reconstruction error" in evaluation.describe()


def test_mismatch_of_model_and_data_is_named() -> None:
    model = Table(logits_for((1,)))
    with pytest.raises(ValueError, match="an evaluation needs at least one model"):
        evaluate([], Written([(1,)]))
    mnist = load_split(DataConfig("mnist"), "test")
    with pytest.raises(ValueError, match=r"mnist have shape \(1, 28, 28\), but .* \(1, 3, 2\)"):
        evaluate([model], mnist)
    few = Written([(1,)])
    few.class_names = ("a", "b")
    with pytest.raises(ValueError, match="written has 2 classes, but the model knows 10"):
        evaluate([model], few)


def test_images_must_be_prepared_as_in_training() -> None:
    mnist = load_split(DataConfig("mnist"), "test")
    check_origin("fashion-mnist", mnist.class_names, mnist)
    check_origin(None, mnist.class_names, mnist)
    sentence = "images of mnist are not standardised, but the model was trained on svhn, whose"
    with pytest.raises(ValueError, match=f"{sentence} images are$"):
        check_origin("svhn", mnist.class_names, mnist)
    other = Written([(1,)])
    other.name = "svhn"
    sentence = "images of svhn are standardised, but the model was trained on folder, whose"
    with pytest.raises(ValueError, match=f"{sentence} images are not$"):
        check_origin("folder", other.class_names, other)
