"""The claims around the tables: iterations, reconstruction, priors, the dimension of width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float

from capsnet.data import Split, load_split
from capsnet.experiments import figures, plots
from capsnet.experiments.digits import (
    OFFSETS,
    PROPERTIES,
    find_examples,
    load_test,
    measure_digits,
    natural_deviations,
    one_of_each,
    open_capsnet,
    turn_dimensions,
)
from capsnet.experiments.outcome import Outcome, Row, fill
from capsnet.experiments.runs import Need, Options, are_comparable
from capsnet.experiments.tables import (
    describe_budget,
    find_dataset,
    list_errors,
    list_origins,
    make_dot,
    wrap,
)
from capsnet.experiments.trained import Found, Trained
from capsnet.models import CapsNet


def _compare(
    role: str, preset: str, model: Mapping[str, object] | None = None, like: str = "mnist"
) -> Need:
    changes = {"model": model} if model else {}
    return Need(role, preset, changes, like=like, by_record=True)


CLAIMS_NEEDS = (
    Need("mnist", "mnist", shipped="mnist", curve="kept", by_record=True),
    _compare("mnist-r1", "mnist-r1"),
    _compare("mnist-norecon", "mnist-norecon"),
    _compare("mnist-r1-norecon", "mnist-r1-norecon"),
    _compare("learned priors", "mnist", {"learned_priors": True}),
    Need("multimnist", "multimnist", shipped="multimnist", by_record=True),
    _compare("multimnist-r1", "multimnist-r1", like="multimnist"),
)
_DIFFERENCES = (
    ("3 iterations against 1, MNIST", "mnist", "mnist-r1", 0.0025 - 0.0029),
    ("3 iterations against 1, MultiMNIST", "multimnist", "multimnist-r1", 0.052 - 0.075),
    ("reconstruction against none, 3 iterations, MNIST", "mnist", "mnist-norecon",
     0.0025 - 0.0035),
    ("reconstruction against none, 1 iteration, MNIST", "mnist-r1", "mnist-r1-norecon",
     0.0029 - 0.0034),
    ("priors learned against equal, MNIST", "learned priors", "mnist", None),
)  # fmt: skip
CLAIMS = (
    *(
        Row(f"change of the test error: {label}", paper=None if paper is None else round(paper, 6))
        for label, _, _, paper in _DIFFERENCES
    ),
    Row("digits of 10 with a dimension that turns their width by a natural deviation", unit=""),
    Row("correlation of the best dimension with the width of test digits, mean of 10", unit=""),
)


def measure_claims(found: Found, options: Options) -> Outcome:
    """What routing, reconstruction and priors change, and which dimension follows the width."""
    rows: list[Row] = []
    compared: Found = {}
    presets = {need.role: need.preset for need in CLAIMS_NEEDS}
    for row, (_, first, second, _) in zip(CLAIMS, _DIFFERENCES, strict=False):
        pairs = [
            (pair, errors)
            for pair in _pair(found.get(first, []), found.get(second, []))
            if len(errors := list_errors(pair, find_dataset(presets[first]))) == 2
        ]
        changes = [ours - theirs for _, (ours, theirs) in pairs]
        compared[row.label] = [ours for (ours, _), _ in pairs]
        filled = fill(row, changes, compared[row.label])
        seconds = sum(run.seconds or 0 for pair, _ in pairs for run in pair)
        rows.append(replace(filled, seconds=seconds) if pairs else filled)
    present = [run for run in found["mnist"] if run.is_here]
    widths = _measure_widths(present[0], options) if present else _NO_WIDTHS
    rows += widths.rows
    caption = figures.Caption(
        "§5  What routing, reconstruction and one dimension do",
        f"{describe_budget(compared)}. Left of zero: the first of the two makes fewer errors.",
        options.quick,
    )
    dots = [
        replace(make_dot(row), label=wrap(label))
        for row, (label, *_) in zip(rows, _DIFFERENCES, strict=False)
    ]
    return Outcome(
        rows=tuple(rows),
        pictures={"": lambda path: plots.draw_claims(caption, dots, widths.curves, path)},
        data=list_origins(found),
        notes=(
            "A change is in percentage points, below zero where the first of the two makes fewer "
            "errors. It is that between two runs of one seed that differ in their network alone, "
            "not between the means of Table 1; without such a pair it counts as not run yet.",
            "A natural deviation is the standard deviation of width over test digits of a class.",
            "The dimension that correlates best with the width is chosen on training digits.",
        ),
        details=widths.details,
    )


def _pair(first: Sequence[Trained], second: Sequence[Trained]) -> list[tuple[Trained, Trained]]:
    """Runs that differ in their network alone, of the same seed: only those are to be compared."""
    return [(ours, theirs) for ours in first for theirs in second if are_comparable(ours, theirs)]


@dataclass(frozen=True)
class _Widths:
    """Which dimension follows the width of each digit: rows, curves and further numbers."""

    rows: tuple[Row, ...]
    curves: tuple[plots.Curve, ...]
    details: dict[str, object]


_NO_WIDTHS = _Widths(CLAIMS[-2:], (), {})


def _measure_widths(trained: Trained, options: Options) -> _Widths:
    split = load_test(trained, options, "mnist")
    model = open_capsnet(trained, split)
    correct, _ = find_examples(model, split, trained, num_wrong=0)
    turned = turn_dimensions(model, split, one_of_each(correct, split))
    width = PROPERTIES.index("width")
    widest = turned.effects[:, :, width].abs().max(dim=1)  # (K,)
    num_wide = float((widest.values >= 1).sum())
    count = min(max(300, options.examples(2000)), len(split))  # some of every class
    training = load_split(options.data(split.name), "train")
    chosen = _width_correlations(model, training, count).argmax(dim=1)  # (K,)
    correlations = _width_correlations(model, split, count).gather(1, chosen[:, None])[:, 0]
    deviations = natural_deviations(split, torch.arange(split.num_classes))[:, width]
    colors = ("#1f5a96", "#d9730d", "#2e8b57", "#c8102e", "#7b4ea3",
              "#8c564b", "#d16ba5", "#6b6b6b", "#a8a300", "#17a2b8")  # fmt: skip
    curves = []
    for digit in range(split.num_classes):
        dim = int(widest.indices[digit])
        widths = measure_digits(turned.images[digit, dim])[:, width] / deviations[digit]
        curves.append(
            plots.Curve(
                f"{digit} (dim {dim})", OFFSETS, (widths - widths[5]).tolist(), colors[digit % 10]
            )
        )
    return _Widths(
        rows=(
            fill(CLAIMS[-2], [num_wide], [trained]),
            fill(CLAIMS[-1], [float(correlations.mean())], [trained], num_examples=count),
        ),
        curves=tuple(curves),
        details={
            "correlations": [round(value, 4) for value in correlations.tolist()],
            "correlated_dimensions": chosen.tolist(),
            "dimensions": widest.indices.tolist(),
        },
    )


@torch.no_grad()
def _width_correlations(
    model: CapsNet, split: Split, num_examples: int
) -> Float[torch.Tensor, "K E"]:
    """How closely each dimension of a class's capsule follows the width of its digits."""
    capsules, widths, labels = [], [], []
    for start in range(0, min(num_examples, len(split)), 100):
        batch = split.test_batch(np.arange(start, min(start + 100, len(split), num_examples)))
        chosen = batch.labels[:, 0]
        capsules.append(model(batch.images).capsules[torch.arange(len(chosen)), chosen])  # (B, E)
        widths.append(measure_digits(batch.images)[:, PROPERTIES.index("width")])
        labels.append(chosen)
    vectors, width, label = torch.cat(capsules), torch.cat(widths), torch.cat(labels)
    both = torch.cat((vectors, width[:, None]), dim=1)  # (B, E + 1)
    rows = [both[label == digit].T.corrcoef()[-1, :-1] for digit in range(split.num_classes)]
    return torch.stack(rows).abs().nan_to_num()  # what never changes follows nothing
