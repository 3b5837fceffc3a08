"""Fig. 5 and §6: two overlapping digits, taken apart by their capsules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from capsnet.data import Split, load_split
from capsnet.experiments import figures
from capsnet.experiments.digits import open_capsnet
from capsnet.experiments.outcome import Outcome, Row, fill
from capsnet.experiments.runs import Options
from capsnet.experiments.trained import Found
from capsnet.models import CapsNet

#: Intensities from which on a pixel may count as a digit's; training pairs decide which.
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FIG5 = (
    Row("test error of the network shown", paper=0.052),
    Row("segmentation, IoU of a digit: two longest capsules", headline=True),
    Row("segmentation, IoU of a digit: labels given"),
    Row("segmentation, pixels of ink given to the right digits: two longest capsules"),
    Row("segmentation, pixels of both digits given to both: two longest capsules"),
)


@dataclass(frozen=True)
class Pairs:
    """Images of two digits, and what a network makes of them."""

    images: Float[Tensor, "B 1 H W"]
    """The digits together."""

    labels: Int[Tensor, "B 2"]
    """Their classes."""

    targets: Float[Tensor, "B 2 1 H W"]
    """The digits apart."""

    lengths: Float[Tensor, "B K"]
    """Lengths of the class capsules."""

    capsules: Float[Tensor, "B K E"]
    """The class capsules."""

    @property
    def predictions(self) -> Int[Tensor, "B 2"]:
        """Classes of the two longest capsules, in the order of the labels where they agree."""
        chosen = self.lengths.topk(2, dim=1).indices
        swapped = chosen.flip(1)
        in_order = (chosen == self.labels).any(dim=1, keepdim=True)
        crossed = (swapped == self.labels).any(dim=1, keepdim=True)
        return torch.where(crossed & ~in_order, swapped, chosen)

    @property
    def is_right(self) -> Bool[Tensor, " B"]:
        """Whether both digits are found."""
        return (self.predictions == self.labels).all(dim=1)


@torch.no_grad()
def see_pairs(model: CapsNet, split: Split, num_examples: int) -> Pairs:
    """Examples spread evenly over a split, and the network's answers."""
    indices = np.arange(num_examples) * len(split) // num_examples
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, num_examples, 100):
        batch = split.test_batch(indices[start : start + 100])
        output = model(batch.images)
        parts.append((*batch, output.lengths, output.capsules))
    return Pairs(*(torch.cat(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Segmentation:
    """How well masks fit the true digits; all are shares."""

    iou: float
    """Pixels in both masks over pixels in either, mean over digits."""

    accuracy: float
    """Of the pixels with ink, those whose membership of both digits is right."""

    overlap_recall: float
    """Of the pixels of both digits, those given to both."""


def score_masks(
    masks: Bool[Tensor, "B 2 1 H W"],
    truth: Bool[Tensor, "B 2 1 H W"],
    found: Bool[Tensor, "B 2"],
) -> Segmentation:
    """Compares masks with the true ones; a digit whose class was not found has no mask.

    >>> truth = torch.tensor([[[[[True, True, False]]], [[[False, True, True]]]]])
    >>> masks = torch.tensor([[[[[True, True, False]]], [[[False, False, True]]]]])
    >>> score_masks(masks, truth, torch.tensor([[True, True]]))
    Segmentation(iou=0.75, accuracy=0.666..., overlap_recall=0.0)
    """
    kept = masks & found[:, :, None, None, None]
    both = (kept & truth).flatten(2).sum(dim=2)  # (B, 2)
    either = (kept | truth).flatten(2).sum(dim=2).clamp(min=1)
    ink = truth.any(dim=1)  # (B, 1, H, W)
    agree = (kept == truth).all(dim=1)
    overlap = truth.all(dim=1)
    return Segmentation(
        iou=float((both / either).mean()),
        accuracy=float((agree & ink).sum() / ink.sum()),
        overlap_recall=float((kept.all(dim=1) & overlap).sum() / overlap.sum().clamp(min=1)),
    )


@torch.no_grad()
def decode_pairs(
    model: CapsNet, pairs: Pairs, classes: Int[Tensor, "B 2"]
) -> Float[Tensor, "B 2 1 H W"]:
    """The two digits decoded one at a time (§6)."""
    return model.decode(pairs.capsules, classes)


def choose_threshold(model: CapsNet, pairs: Pairs) -> float:
    """The intensity that cuts digits best out of training pairs; test pairs have no say in it.

    Differs from the paper, which takes any pixel that is not zero (§6): a sigmoid is never zero.
    """
    drawn = decode_pairs(model, pairs, pairs.labels)
    everything = torch.ones_like(pairs.labels, dtype=torch.bool)
    return max(
        THRESHOLDS,
        key=lambda level: score_masks(drawn >= level, pairs.targets > 0, everything).iou,
    )


def overlapping_digits(found: Found, options: Options) -> Outcome:
    """Reconstructions of two overlapping digits, and their segmentation (Fig. 5, §6)."""
    trained = found["capsnet"][0]
    data = options.data("multimnist")
    test = load_split(data, "test")
    model = open_capsnet(trained, test)
    count = options.examples(2000)
    pairs = see_pairs(model, test, count)
    threshold = choose_threshold(
        model, see_pairs(model, load_split(data, "train"), max(100, count // 4))
    )
    truth = pairs.targets > 0
    by_prediction = decode_pairs(model, pairs, pairs.predictions)
    is_found = pairs.predictions == pairs.labels
    scores = score_masks(by_prediction >= threshold, truth, is_found)
    by_label = decode_pairs(model, pairs, pairs.labels)
    given = score_masks(by_label >= threshold, truth, torch.ones_like(is_found))
    error_rate = trained.error_rate("multimnist")
    error_count = trained.num_evaluated("multimnist")
    if error_rate is None:
        error_rate, error_count = float((~pairs.is_right).float().mean()), count
    values = (error_rate, scores.iou, given.iou, scores.accuracy, scores.overlap_recall)
    rows = [
        fill(row, [value], [trained], num_examples=error_count if place == 0 else count)
        for place, (row, value) in enumerate(zip(FIG5, values, strict=True))
    ]
    of = f"CapsNet, {model.config.num_iterations} routing iterations; {trained.describe()}"
    caption = figures.Caption(
        "Fig. 5  Two overlapping digits and their reconstructions",
        f"{of}. L: labels, R: reconstructed, P: predicted, *: a digit that is not there.",
        options.quick,
    )
    mask_caption = figures.Caption(
        "§6  Segmentation of overlapping digits",
        f"{of}. Pixels of at least {threshold:g} in a digit's reconstruction are its own; "
        "yellow belongs to both.",
        options.quick,
    )
    grid = _figure_rows(model, pairs)
    mask_columns = _mask_columns(pairs, by_prediction >= threshold, truth)
    return Outcome(
        rows=tuple(rows),
        pictures={
            "": lambda path: figures.draw_columns(
                caption, grid, path, labels=("Input", "Output"), size=0.92
            ),
            "-segmentation": lambda path: figures.draw_triples(
                mask_caption, mask_columns, path, labels=("Input", "True", "Found")
            ),
        },
        data=(test.origin,),
        notes=(
            "The paper shows the segmentation and gives no number for it. Its error on MultiMNIST "
            "is 5.2 % in Table 1, and 5.0 % in §6.2.",
            "The right pairs of Fig. 5 are those of the first 60 whose digits overlap most.",
            f"A pixel is a digit's if its reconstruction is at least {threshold:g} there, the "
            "level that fits training pairs best.",
        ),
        details={"threshold": threshold, "num_pairs": count},
    )


def _figure_rows(model: CapsNet, pairs: Pairs) -> list[list[list[figures.Column]]]:
    """Two rows as in the paper: four right ones, two with an absent digit, one wrong both ways."""
    right = pairs.is_right.nonzero().flatten().tolist()
    wrong = (~pairs.is_right).nonzero().flatten().tolist()
    # Great overlap is what §6 is about: of the first ones the most overlapping are shown.
    right = sorted(right[:60], key=lambda index: -_overlap(pairs, index))[:12]
    right = right or wrong[:12]
    one_missed = [
        index for index in wrong if (pairs.predictions[index] == pairs.labels[index]).any()
    ]
    failures = [*one_missed, *wrong][:2]
    rows = []
    for number in range(2):
        shown = right[number * 4 : number * 4 + 4]
        groups = [[_column(model, pairs, index, pairs.labels[index]) for index in shown]]
        starred = right[8 + 2 * number : 10 + 2 * number]
        groups.append([_column(model, pairs, i, _absent(pairs, i), mark="*") for i in starred])
        if number < len(failures):
            index = failures[number]
            predicted = _column(model, pairs, index, pairs.predictions[index], mark="P")
            groups.append([_column(model, pairs, index, pairs.labels[index]), predicted])
        rows.append([group for group in groups if group])
    return rows


def _overlap(pairs: Pairs, index: int) -> float:
    """Share of the smaller digit's ink that lies on the other."""
    truth = pairs.targets[index, :, 0] > 0
    return float(truth.all(dim=0).sum() / truth.flatten(1).sum(dim=1).min())


def _absent(pairs: Pairs, index: int) -> Int[Tensor, "2"]:
    """A digit that is there, and the longest capsule of those that are neither label nor found."""
    lengths = pairs.lengths[index].clone()
    lengths[pairs.labels[index]] = -1
    lengths[pairs.predictions[index]] = -1
    return torch.stack((pairs.labels[index, 0], lengths.argmax()))


@torch.no_grad()
def _column(
    model: CapsNet, pairs: Pairs, index: int, classes: Int[Tensor, "2"], *, mark: str = ""
) -> figures.Column:
    drawn = model.decode(pairs.capsules[index : index + 1], classes[None])[0]  # (2, 1, H, W)
    first, second = classes.tolist()
    labels = tuple(pairs.labels[index].tolist())
    prefix = {"": "R:", "*": "*R:", "P": "R:P:"}[mark]
    heading = f"{prefix}({first}, {second})\nL:({labels[0]}, {labels[1]})"
    return figures.Column(
        heading, figures.grey(pairs.images[index]), figures.overlay(drawn[0], drawn[1])
    )


def _mask_columns(
    pairs: Pairs, masks: Bool[Tensor, "B 2 1 H W"], truth: Bool[Tensor, "B 2 1 H W"]
) -> list[tuple[str, Sequence[figures.Image]]]:
    """The first right pairs, others if there are too few: input, true masks, masks found."""
    found = pairs.predictions == pairs.labels
    # Stable: right ones in their order, then the others.
    shown = (~pairs.is_right).int().argsort(stable=True)[:8].tolist()
    columns: list[tuple[str, Sequence[figures.Image]]] = []
    for index in shown:
        here = slice(index, index + 1)
        iou = score_masks(masks[here], truth[here], found[here]).iou
        images = (
            figures.grey(pairs.images[index]),
            figures.overlay(*truth[index].float()),
            figures.overlay(*masks[index].float()),
        )
        first, second = pairs.labels[index].tolist()
        columns.append((f"({first}, {second})\nIoU {iou:.0%}", images))
    return columns
