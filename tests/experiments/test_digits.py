from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_runs import TINY, write_run
from torch.testing import assert_close

from capsnet.data import DataConfig, Split, load_split
from capsnet.experiments import overlap
from capsnet.experiments.digits import (
    OFFSETS,
    PROPERTIES,
    _pick_failures,
    measure_digits,
    name_effects,
    turn_dimensions,
)
from capsnet.experiments.overlap import (
    Pairs,
    _absent,
    choose_threshold,
    overlapping_digits,
    score_masks,
    see_pairs,
)
from capsnet.experiments.runs import Options
from capsnet.experiments.trained import open_source
from capsnet.models import CapsNet, CapsNetConfig
from capsnet.training.evaluation import WrongExample


def measures(image: torch.Tensor) -> dict[str, float]:
    return dict(zip(PROPERTIES, measure_digits(image[None, None])[0].tolist(), strict=True))


def bar(top: int, bottom: int, left: int, right: int) -> torch.Tensor:
    image = torch.zeros(28, 28)
    image[top:bottom, left:right] = 1
    return image


def test_measures_of_a_bar_by_hand() -> None:
    found = measures(bar(4, 20, 10, 14))
    assert found["horizontal shift"] == pytest.approx(11.5)
    assert found["vertical shift"] == pytest.approx(11.5)
    assert found["width"] == pytest.approx(1.25**0.5, rel=1e-5)  # four columns: (4² - 1) / 12
    assert found["height"] == pytest.approx(21.25**0.5, rel=1e-5)  # sixteen rows: (16² - 1) / 12
    assert found["skew"] == pytest.approx(0, abs=1e-6)
    assert found["stroke thickness"] == pytest.approx(2 * 64 / 40)  # ink over half the outline


def test_a_leaning_bar_is_skewed_and_not_wide() -> None:
    leaning = torch.zeros(28, 28)
    for row in range(4, 20):
        leaning[row, 4 + row // 2 : 8 + row // 2] = 1
    upright = measures(bar(4, 20, 10, 14))
    found = measures(leaning)
    assert found["skew"] == pytest.approx(0.5, abs=0.01)
    assert found["width"] == pytest.approx(upright["width"], rel=0.05)


def test_the_name_is_of_the_strongest_effect() -> None:
    assert name_effects(torch.tensor([0.2, -3.0, 0.0, 0.1, 0.3, 0.0])) == "width"


def test_turning_by_nothing_leaves_the_reconstruction_and_each_dimension_turns_alone() -> None:
    torch.manual_seed(0)
    config = CapsNetConfig(conv_channels=4, primary_types=2, primary_dim=3, output_dim=5)
    model = CapsNet(config).eval()
    split = load_split(DataConfig("mnist"), "test")
    examples = [3, 2, 1]  # 0, 1, 2
    turned = turn_dimensions(model, split, examples)
    assert turned.images.shape == (3, 5, 11, 1, 28, 28)
    assert turned.effects.shape == (3, 5, len(PROPERTIES))
    batch = split.test_batch(np.array(examples))
    with torch.no_grad():
        output = model(batch.images, reconstruct=batch.labels[:, 0])
        capsules = output.capsules.clone()
        capsules[2, 2, 4] += OFFSETS[0]
        by_hand = model.decode(capsules, batch.labels[:, 0])[2]
    for dim in range(5):
        assert_close(turned.images[:, dim, OFFSETS.index(0.0)], output.reconstruction)
    assert_close(turned.images[2, 4, 0], by_hand)


def test_offsets_are_the_paper_s() -> None:
    assert OFFSETS == (-0.25, -0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2, 0.25)


def pairs_of(lengths: list[list[float]], labels: list[list[int]]) -> Pairs:
    count = len(labels)
    return Pairs(
        torch.zeros(count, 1, 36, 36),
        torch.tensor(labels),
        torch.zeros(count, 2, 1, 36, 36),
        torch.tensor(lengths),
        torch.zeros(count, len(lengths[0]), 4),
    )


def test_predictions_stand_beside_the_labels_they_agree_with() -> None:
    pairs = pairs_of(
        [[0.9, 0.1, 0.8], [0.9, 0.1, 0.8], [0.9, 0.8, 0.1], [0.1, 0.9, 0.8]],
        [[2, 0], [0, 2], [2, 0], [0, 1]],
    )
    assert pairs.predictions.tolist() == [[2, 0], [0, 2], [1, 0], [2, 1]]
    assert pairs.is_right.tolist() == [True, True, False, False]


def test_a_digit_that_is_absent_was_not_found_either() -> None:
    pairs = pairs_of([[0.9, 0.8, 0.7, 0.6]], [[0, 2]])  # found: 0 and 1
    assert _absent(pairs, 0).tolist() == [0, 3]


def test_a_5_taken_for_a_3_is_the_first_failure_shown_and_each_label_once() -> None:
    wrong = [
        WrongExample(index, (label,), (prediction,))
        for index, (label, prediction) in enumerate([(4, 9), (4, 1), (5, 8), (5, 3)])
    ]
    assert [each.index for each in _pick_failures(wrong, 2)] == [3, 0]


def test_the_level_that_cuts_digits_out_is_chosen_on_training_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Pairs] = {}

    def look(model: CapsNet, split: Split, count: int) -> Pairs:
        made[split.split] = see_pairs(model, split, count)
        return made[split.split]

    def choose(model: CapsNet, pairs: Pairs) -> float:
        assert pairs is made["train"]
        return 0.2

    monkeypatch.setattr(overlap, "see_pairs", look)
    monkeypatch.setattr(overlap, "choose_threshold", choose)
    model = {**TINY, "image_height": 36, "image_width": 36}
    run = write_run(
        tmp_path / "a", "multimnist", error=0.1, changes={"model": model}, with_weights=True
    )
    found = {"capsnet": [open_source(str(run))]}
    outcome = overlapping_digits(found, Options(num_examples=100))
    assert list(made) == ["test", "train"]
    assert "at least 0.2 there" in str(outcome.notes)


def test_a_digit_that_was_not_found_has_no_mask() -> None:
    truth = torch.zeros(1, 2, 1, 2, 2, dtype=torch.bool)
    truth[0, 0, 0, 0] = True
    truth[0, 1, 0, :, 0] = True
    perfect = score_masks(truth, truth, torch.tensor([[True, True]]))
    assert (perfect.iou, perfect.accuracy, perfect.overlap_recall) == (1, 1, 1)
    half = score_masks(truth, truth, torch.tensor([[True, False]]))
    assert half.iou == 0.5
    assert half.accuracy == pytest.approx(1 / 3)  # of three pixels with ink
    assert half.overlap_recall == 0


def test_the_threshold_is_the_one_that_cuts_digits_best() -> None:
    torch.manual_seed(0)
    model = CapsNet(CapsNetConfig(image_height=36, image_width=36, conv_channels=4,
                                  primary_types=2, primary_dim=3, output_dim=4))  # fmt: skip
    pairs = pairs_of([[0.9, 0.8] + [0.0] * 8], [[0, 1]])
    drawn = model.decode(pairs.capsules, pairs.labels)  # all near 1/2
    ink = Pairs(pairs.images, pairs.labels, (drawn > 0.5).float(), pairs.lengths, pairs.capsules)
    assert choose_threshold(model, ink) == 0.5
