"""Fig. 3 and 4: what the capsule of a digit remembers of it, by looking at its reconstructions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capsnet.data import Split, load_split
from capsnet.experiments import figures
from capsnet.experiments.outcome import Outcome, Row, fill
from capsnet.experiments.runs import Options
from capsnet.experiments.trained import Found, Trained
from capsnet.models import CapsNet
from capsnet.training.evaluation import WrongExample, check_models

#: §5.1: each dimension is tweaked by intervals of 0.05 in [-0.25, 0.25].
OFFSETS = tuple(round(-0.25 + 0.05 * step, 2) for step in range(11))
#: Digits whose reconstructions the paper shows in Fig. 3.
_SHOWN = (2, 5, 8, 9)
#: What is measured of a digit, in the words of Fig. 4.
PROPERTIES = (
    "stroke thickness", "width", "height", "skew", "horizontal shift", "vertical shift",
)  # fmt: skip
FIG3 = (
    Row("summed squared error of the reconstructions shown", unit=""),
    Row("test error of the network shown", paper=0.0025),
)
FIG4 = (
    Row("change of width by a digit's widest dimension, in deviations of natural digits", unit=""),
)
#: Effects below this many standard deviations of natural digits do not name a dimension.
_WEAK = 0.5


def open_capsnet(trained: Trained, split: Split) -> CapsNet:
    """The network, if it has capsules and a decoder and takes the split's images."""
    model = trained.load()
    if not isinstance(model, CapsNet) or model.decoder is None:
        raise ValueError(f"{trained.source} has no decoder, whose images are to be shown")
    check_models([model], split)
    return model


def load_test(trained: Trained, options: Options, name: str) -> Split:
    """The test set that belongs to a network: its own, or `name` if it does not say."""
    config = trained.config
    return load_split(options.data(config.data.name if config is not None else name), "test")


# Fig. 3


def sample_reconstructions(found: Found, options: Options) -> Outcome:
    """Correct digits and failures beside their reconstructions (Fig. 3)."""
    trained = found["capsnet"][0]
    split = load_test(trained, options, "mnist")
    model = open_capsnet(trained, split)
    correct, wrong = find_examples(model, split, trained)
    chosen = _first_of_classes(correct, _SHOWN, 4)
    failures = _pick_failures(wrong, 2)
    columns = [[_reconstruct(model, split, example.index, (label, label, label))
                for example in chosen for label in example.labels]]  # fmt: skip
    for example in failures:
        label, prediction = example.labels[0], example.predictions[0]
        triples = [(label, prediction, label), (label, prediction, prediction)]
        columns.append([_reconstruct(model, split, example.index, each) for each in triples])
    indices = np.array([example.index for example in (*chosen, *failures)])
    batch = split.test_batch(indices)
    with torch.no_grad():
        drawn = model(batch.images, reconstruct=batch.labels[:, 0]).reconstruction
    errors = (drawn - batch.images).square().flatten(1).sum(dim=1)  # (B,)
    rows = [fill(FIG3[0], [float(errors.mean())], [trained], num_examples=len(errors))]
    error_rate = trained.error_rate(split.name)
    rows.append(fill(FIG3[1], [] if error_rate is None else [error_rate], [trained]))
    caption = figures.Caption(
        "Fig. 3  Reconstructions of test digits: (label, prediction, reconstructed)",
        f"{_describe(model)}; {trained.describe()}. Right of the thick rule: failures, "
        "reconstructed both ways.",
        options.quick,
    )
    draw = partial(figures.draw_columns, caption, [columns], labels=("Input", "Output"))
    return Outcome(
        rows=tuple(rows),
        pictures={"": lambda path: draw(path=path)},
        data=(split.origin,),
        details={
            "correct": [example.index for example in chosen],
            "failures": [
                {
                    "index": example.index,
                    "label": example.labels[0],
                    "prediction": example.predictions[0],
                }
                for example in failures
            ],
        },
    )


@torch.no_grad()
def find_examples(
    model: CapsNet, split: Split, trained: Trained, *, num_wrong: int = 6
) -> tuple[list[WrongExample], list[WrongExample]]:
    """Some right and some wrong examples, the first ones of the test set.

    The record of a run lists its wrong ones; without it they are searched.
    """
    correct: list[WrongExample] = []
    wrong = _recorded_failures(trained, split)
    recorded = bool(wrong)
    num_labels = split.labels_per_image
    for start in range(0, len(split), 100):
        indices = np.arange(start, min(start + 100, len(split)))
        batch = split.test_batch(indices)
        predictions = model.predict(batch.images, num_labels)
        for index, labels, chosen in zip(
            indices.tolist(), batch.labels.tolist(), predictions.tolist(), strict=True
        ):
            example = WrongExample(index, tuple(labels), tuple(chosen))
            if set(labels) == set(chosen):
                correct.append(example)
            elif not recorded:
                wrong.append(example)
        if len(correct) >= 60 and (recorded or len(wrong) >= num_wrong):
            break
        if start >= 10_000:
            break
    return correct, wrong


def _recorded_failures(trained: Trained, split: Split) -> list[WrongExample]:
    metric = trained.metrics.get(split.name, {})
    recorded = metric.get("wrong")
    if not isinstance(recorded, list) or metric.get("split") != "test":
        return []
    return [
        WrongExample(each["index"], tuple(each["labels"]), tuple(each["predictions"]))
        for each in recorded
    ]


def _first_of_classes(
    examples: Sequence[WrongExample], classes: Sequence[int], num: int
) -> list[WrongExample]:
    """The first example of each class, others where there is none, `num` in all."""
    chosen = []
    for label in classes:
        chosen += [example for example in examples if example.labels == (label,)][:1]
    rest = [example for example in examples if example not in chosen]
    return [*chosen, *rest][:num]


def _pick_failures(wrong: Sequence[WrongExample], num: int) -> list[WrongExample]:
    """The paper's confusion of a 5 with a 3 if there is one, then the first of other labels."""
    ordered = sorted(wrong, key=lambda each: (each.labels, each.predictions) != ((5,), (3,)))
    chosen: list[WrongExample] = []
    for example in ordered:
        if example.labels not in [each.labels for each in chosen]:
            chosen.append(example)
    return chosen[:num]


@torch.no_grad()
def _reconstruct(
    model: CapsNet, split: Split, index: int, classes: tuple[int, int, int]
) -> figures.Column:
    image = split.test_batch(np.array([index])).images
    drawn = model(image, reconstruct=torch.tensor([classes[2]])).reconstruction
    heading = f"({classes[0]}, {classes[1]}, {classes[2]})"
    return figures.Column(heading, figures.grey(image[0]), figures.grey(drawn[0]))


def _describe(model: CapsNet) -> str:
    iterations = model.config.num_iterations
    return f"CapsNet, {iterations} routing iteration{'s' if iterations > 1 else ''}"


# Fig. 4


@dataclass(frozen=True)
class Turned:
    """Reconstructions of one digit of each class with each dimension turned."""

    images: Float[Tensor, "K E S 1 H W"]
    """By class, dimension and offset."""

    effects: Float[Tensor, "K E P"]
    """How each property changes from the first offset to the last, in natural deviations."""

    def name(self, digit: int, dim: int) -> str:
        """What the dimension does, by its strongest effects."""
        return name_effects(self.effects[digit, dim])


def name_effects(effects: Float[Tensor, " P"]) -> str:
    """The properties that change most, in the words of Fig. 4.

    >>> name_effects(torch.tensor([2.0, 0.1, 0.0, 0.3, 1.5, 0.2]))
    'stroke thickness and horizontal shift'
    >>> name_effects(torch.tensor([0.1, 1.9, 1.8, 0.0, 0.0, 0.0]))
    'scale'
    >>> name_effects(torch.tensor([0.1, 0.0, 0.0, 0.2, 0.0, 0.0]))
    'localized part'
    """
    strength = effects.abs()
    if strength.max() < _WEAK:
        return "localized part"
    names = [
        PROPERTIES[place]
        for place in strength.argsort(descending=True).tolist()
        if strength[place] >= max(_WEAK, 0.6 * float(strength.max()))
    ]
    both = {"width", "height"}
    if both <= set(names) and effects[1] * effects[2] > 0:
        names = ["scale", *(name for name in names if name not in both)]
    return " and ".join(names[:2])


def measure_digits(images: Float[Tensor, "B 1 H W"]) -> Float[Tensor, "B P"]:
    """Thickness, width, height, skew and place of digits, in pixels, from moments of their ink.

    Thickness is twice the ink over its outline; width and height are deviations about the centre;
    skew is by how much a row moves for each row down.
    """
    ink = images[:, 0]  # (B, H, W)
    mass = ink.sum(dim=(1, 2)).clamp(min=1e-6)
    rows = torch.arange(ink.shape[1], dtype=ink.dtype)[:, None]
    columns = torch.arange(ink.shape[2], dtype=ink.dtype)[None]
    row = (ink * rows).sum(dim=(1, 2)) / mass
    column = (ink * columns).sum(dim=(1, 2)) / mass
    down, right = rows - row[:, None, None], columns - column[:, None, None]
    height_squared = (ink * down.square()).sum(dim=(1, 2)) / mass
    width_squared = (ink * right.square()).sum(dim=(1, 2)) / mass
    together = (ink * down * right).sum(dim=(1, 2)) / mass
    skew = together / height_squared.clamp(min=1e-6)
    # Of the width, what leaning alone would cause is left out.
    upright = (width_squared - skew.square() * height_squared).clamp(min=0)
    outline = ink.diff(dim=1).abs().sum(dim=(1, 2)) + ink.diff(dim=2).abs().sum(dim=(1, 2))
    thickness = 2 * mass / outline.clamp(min=1e-6)
    return torch.stack(
        (thickness, upright.sqrt(), height_squared.sqrt(), skew, column, row), dim=1
    )  # (B, P)


@torch.no_grad()
def turn_dimensions(model: CapsNet, split: Split, examples: Sequence[int]) -> Turned:
    """The reconstructions of one example of each class with each dimension turned (§5.1)."""
    batch = split.test_batch(np.array(examples))
    labels = batch.labels[:, 0]
    capsules = model(batch.images).capsules  # (K, K, E)
    dims = capsules.shape[2]
    offsets = torch.tensor(OFFSETS)
    turns = torch.einsum("ed,s->esd", torch.eye(dims), offsets)  # (E, S, E)
    images = []
    for capsule, label in zip(capsules, labels, strict=True):
        turned = capsule.expand(dims, len(OFFSETS), *capsule.shape).clone()  # (E, S, K, E)
        turned[:, :, label] += turns
        classes = label.expand(dims * len(OFFSETS))
        drawn = model.decode(turned.flatten(0, 1), classes)  # (E * S, 1, H, W)
        images.append(drawn.unflatten(0, (dims, len(OFFSETS))))
    stacked = torch.stack(images)  # (K, E, S, 1, H, W)
    measured = measure_digits(stacked.flatten(0, 2)).unflatten(0, stacked.shape[:3])
    change = measured[:, :, -1] - measured[:, :, 0]  # (K, E, P)
    return Turned(stacked, change / natural_deviations(split, labels)[:, None])


def natural_deviations(split: Split, labels: Int[Tensor, " K"]) -> Float[Tensor, "K P"]:
    """How much the digits of each class differ, shifted as in training: their deviations."""
    batch = split.test_batch(np.arange(min(2000, len(split))))
    measured = measure_digits(batch.images)
    deviations = torch.stack(
        [measured[batch.labels[:, 0] == label].std(dim=0) for label in labels]
    )  # (K, P)
    # MNIST's digits are centred; those of training are shifted by -2, -1, 0, 1 or 2 pixels (§5),
    # whose variance is 2.
    is_shift = torch.tensor([name.endswith("shift") for name in PROPERTIES])
    return (deviations.square() + 2 * is_shift).sqrt()


def one_of_each(correct: Sequence[WrongExample], split: Split) -> list[int]:
    """Index of one test digit of every class, a rightly classified one where there is one."""
    labels = split.test_batch(np.arange(min(500, len(split)))).labels[:, 0].tolist()
    chosen = []
    for digit in range(split.num_classes):
        right = [example.index for example in correct if example.labels == (digit,)]
        chosen.append((right or [labels.index(digit)])[0])
    return chosen


def dimension_perturbations(found: Found, options: Options) -> Outcome:
    """Reconstructions with one dimension of the capsule turned (Fig. 4)."""
    trained = found["capsnet"][0]
    split = load_test(trained, options, "mnist")
    model = open_capsnet(trained, split)
    correct, _ = find_examples(model, split, trained, num_wrong=0)
    turned = turn_dimensions(model, split, one_of_each(correct, split))
    num_dims = turned.images.shape[1]
    chosen = [(digit, dim) for digit in options.digits for dim in range(num_dims)]
    shown = chosen or _tell_tale(turned)
    strips = []
    for digit, dim in shown:
        name = _wrap(turned.name(digit, dim).capitalize())
        label = f"{name}\n(digit {digit}, dimension {dim})"
        strips.append((label, figures.strip(turned.images[digit, dim])))
    of = f"{_describe(model)}; {trained.describe()}"
    caption = figures.Caption(
        "Fig. 4  Dimension perturbations",
        f"{of}. One dimension turned from −0.25 to 0.25; names are measured.",
        options.quick,
    )
    sheet_caption = figures.Caption(
        "Fig. 4  All dimensions of all digits",
        f"{of}. Each row is one dimension, turned from −0.25 to 0.25 in steps of 0.05.",
        options.quick,
    )
    blocks = {
        f"digit {digit}": [figures.strip(each) for each in turned.images[digit]]
        for digit in range(len(turned.images))
    }
    ticks = [f"{offset:+.2f}".replace("-", "−") if offset else "0" for offset in OFFSETS]
    widest = turned.effects[:, :, PROPERTIES.index("width")].abs().amax(dim=1)  # (K,)
    return Outcome(
        rows=(fill(FIG4[0], [float(widest.mean())], [trained], num_examples=len(widest)),),
        pictures={
            "": lambda path: figures.draw_strips(caption, strips, path, ticks=ticks),
            "-all": lambda path: figures.draw_sheet(sheet_caption, blocks, path),
        },
        data=(split.origin,),
        details={
            "offsets": list(OFFSETS),
            "properties": list(PROPERTIES),
            "effects": turned.effects.tolist(),
            "names": [
                [turned.name(digit, dim) for dim in range(num_dims)]
                for digit in range(len(turned.images))
            ],
        },
    )


def _tell_tale(turned: Turned) -> list[tuple[int, int]]:
    """Six rows as in the paper: the purest dimension for each property, each of another digit."""
    strength = turned.effects.abs()  # (K, E, P)
    purity = strength - (strength.sum(dim=2, keepdim=True) - strength) / 2
    shown: list[tuple[int, int]] = []
    for place in (0, 1, 3, 2):
        ranked = purity[:, :, place].flatten().argsort(descending=True).tolist()
        pairs = [divmod(each, strength.shape[1]) for each in ranked]
        shown.append(next(pair for pair in pairs if pair[0] not in {digit for digit, _ in shown}))
    # Localized parts: the pixels change much, the digit's measures little.
    change = (turned.images[:, :, -1] - turned.images[:, :, 0]).square().flatten(2).sum(dim=2)
    is_local = strength.amax(dim=2) < _WEAK
    local = change / (strength.amax(dim=2) + _WEAK) + 1e6 * is_local
    for each in local.flatten().argsort(descending=True).tolist():
        digit, dim = divmod(each, strength.shape[1])
        if digit not in {used for used, _ in shown} and len(shown) < 6:
            shown.append((digit, dim))
    return shown


def _wrap(name: str) -> str:
    return name.replace(" and ", " and\n", 1) if len(name) > 24 else name
