"""Table 1, §5.2 and §7: test errors of finished runs, and the claims that they carry."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from capsnet.data import Split, load_split
from capsnet.experiments import figures, plots
from capsnet.experiments.outcome import Outcome, Row, fill
from capsnet.experiments.runs import Need, Options
from capsnet.experiments.trained import Found, Trained, show_count, show_length
from capsnet.training import evaluate
from capsnet.training.presets import PRESETS

_CELLS = (
    ("CNN baseline", "mnist-cnn", 3, None),
    ("CapsNet, 1 iteration, no reconstruction", "mnist-r1-norecon", 3, 0.00032),
    ("CapsNet, 1 iteration, reconstruction", "mnist-r1", 3, 0.00011),
    ("CapsNet, 3 iterations, no reconstruction", "mnist-norecon", 3, 0.00036),
    ("CapsNet, 3 iterations, reconstruction", "mnist", 3, 0.00005),
    ("CNN baseline", "multimnist-cnn", 1, None),
    ("CapsNet, 1 iteration, reconstruction", "multimnist-r1", 1, None),
    ("CapsNet, 3 iterations, reconstruction", "multimnist", 1, None),
)
TABLE1_NEEDS = tuple(
    # Fig. A.1 shows the course of training of this one.
    Need(preset, preset, trials=trials, curve="kept" if preset == "mnist" else "", by_record=True)
    for _, preset, trials, _ in _CELLS
)
#: The cells of Table 1: mean and standard deviation of three trials on MNIST.
TABLE1 = tuple(
    Row(
        f"{'MultiMNIST' if preset.startswith('multi') else 'MNIST'}: {label}",
        paper=PRESETS[preset].paper_error,
        paper_spread=spread,
        headline=True,
    )
    for label, preset, _, spread in _CELLS
)


def compare_cells(found: Found, options: Options) -> Outcome:
    """Test errors of the five networks on MNIST and MultiMNIST (Table 1)."""
    rows = []
    for need, row in zip(TABLE1_NEEDS, TABLE1, strict=True):
        rows.append(_fill_error(row, found.get(need.role, []), find_dataset(need.preset)))
    panels: dict[str, list[plots.Dot]] = {"MNIST": [], "MultiMNIST": []}
    for row in rows:
        name, _, label = row.label.partition(": ")
        panels[name].append(replace(make_dot(row), label=label))
    # §6 reports two cells fewer; with a gap for them both panels share their labels.
    for place in (1, 3):
        panels["MultiMNIST"].insert(place, plots.Dot("", None, None, (float("nan"),)))
    caption = figures.Caption(
        "Table 1  Test error of CapsNet and the baseline",
        f"{describe_budget(found)}. Two digits count as right only if both are.",
        options.quick,
    )
    return Outcome(
        rows=tuple(rows),
        pictures={
            "": lambda path: plots.draw_comparison(caption, panels, path, xlabel="test error, %")
        },
        data=list_origins(found),
        notes=(
            "Every error is that of the last step of training; nothing is chosen by the test set.",
            "MultiMNIST: an image is right if the two longest capsules are exactly its two digits, "
            "measured on examples spread evenly over the 10 million of the test set.",
            *_warn_of_lengths(rows),
            *_warn_of_settings(found),
        ),
    )


def _warn_of_lengths(rows: Sequence[Row]) -> Iterator[str]:
    """A note for each dataset of Table 1 whose networks were not trained equally long."""
    for name in ("MNIST", "MultiMNIST"):
        cells = [row for row in rows if row.label.startswith(f"{name}: ")]
        lengths = {row.epochs: row.images for row in cells if row.epochs is not None}
        if len(lengths) > 1:
            least, most = (
                show_length(*each) for each in (min(lengths.items()), max(lengths.items()))
            )
            yield (
                f"{name}: the networks were trained for {least} to {most}, so their order "
                "tells of the length of training as well as of the network."
            )


def _warn_of_settings(found: Found) -> Iterator[str]:
    """A note for each dataset of Table 1 whose networks were not trained alike."""
    for name in ("MNIST", "MultiMNIST"):
        cells: dict[str, list[str]] = {}
        for need, row in zip(TABLE1_NEEDS, TABLE1, strict=True):
            dataset, _, label = row.label.partition(": ")
            for run in found.get(need.role, [])[: dataset == name]:
                if (config := run.config) is not None:
                    rate = f"{config.optimiser} at {config.learning_rate:g}"
                    cells.setdefault(f"{rate} in batches of {config.batch_size}", []).append(label)
        if len(cells) > 1:
            told = "; ".join(f"{how} ({' / '.join(labels)})" for how, labels in cells.items())
            yield f"{name}: the networks' settings differ, at last {told}."


# §5.2

AFFNIST_NEEDS = (
    Need("CapsNet", "affnist", by_record=True),
    Need("CNN", "affnist-cnn", by_record=True),
)
_REGENERATED = " (regenerated)"
AFFNIST = (
    Row("CapsNet on the expanded MNIST test set, right", paper=0.9923),
    Row("CNN on the expanded MNIST test set, right", paper=0.9922),
    Row("CapsNet on affNIST, right", paper=0.79, headline=True),
    Row("CNN on affNIST, right", paper=0.66, headline=True),
)


def affine_robustness(found: Found, options: Options) -> Outcome:
    """Accuracy on affNIST of networks that saw only translated digits (§5.2)."""
    rows, origins = [], []
    for place, row in enumerate(AFFNIST):
        role, dataset = ("CapsNet", "CNN")[place % 2], ("mnist-40", "affnist")[place // 2]
        runs = found.get(role, [])
        measured = [_measure(run, dataset, options) for run in runs]
        origins += [origin for _, _, origin in measured]
        count = measured[0][1] if measured else None
        rows.append(fill(row, [1 - error for error, _, _ in measured], runs, num_examples=count))
    is_original = not any("regenerated" in origin for origin in origins)
    if not is_original:
        label = f"affNIST{_REGENERATED}"
        rows = [replace(row, label=row.label.replace("affNIST", label)) for row in rows]
    affnist_name = "affNIST" if is_original else "affNIST-style, regenerated"
    strips = [
        (name, figures.strip(load_split(options.data(dataset), "test").test_batch(
            np.arange(7) * 37).images))
        for name, dataset in (
            ("expanded MNIST\n(trained on its like)", "mnist-40"),
            (affnist_name.replace(", ", ",\n"), "affnist"),
        )
    ]  # fmt: skip
    caption = figures.Caption(
        "§5.2  Robustness to affine transformations",
        f"{describe_budget(found)}, on translated digits only."
        + ("" if is_original else "  * affNIST-style, regenerated"),
        options.quick,
    )
    dots = [make_dot(row) for row in rows]
    mark = "" if is_original else "*"
    dots = [
        replace(dot, label=wrap(dot.label.replace(_REGENERATED, mark).removesuffix(", right")))
        for dot in dots
    ]
    notes = [
        f"The affine test set is {'the original' if is_original else 'affNIST-style, regenerated'}."
    ]
    if (count := rows[2].num_examples or rows[3].num_examples) is not None:
        size = len(load_split(options.data("affnist"), "test"))
        notes.append(
            f"It is measured on {count:,} of its {size:,} images, spread evenly over them."
        )
    presupposed = ", and the comparison presupposes about 0"
    sets = (("the expanded MNIST test set", presupposed), ("affNIST", ""))
    for place, (name, remark) in enumerate(sets):
        capsnet, cnn = rows[2 * place : 2 * place + 2]
        if capsnet.mean is not None and cnn.mean is not None:
            gap, paper = capsnet.mean - cnn.mean, (capsnet.paper or 0) - (cnn.paper or 0)
            # A paper's difference that is presupposed to be none has no order.
            turned = ": the paper's order is turned round" if gap < 0 and not remark else ""
            notes.append(
                f"On {name} CapsNet is {100 * gap:+.2f} points from the CNN "
                f"(paper: {100 * paper:+.3g}{remark}){turned}.".replace("-", "−")
            )
    return Outcome(
        rows=tuple(rows),
        pictures={"": lambda path: plots.draw_samples_and_dots(caption, strips, dots, path)},
        data=tuple(dict.fromkeys(origins)),
        notes=tuple(notes),
    )


# §7

ROWS_OF_SETS = {
    "cifar10": (
        Row("CIFAR-10, ensemble by summed lengths (paper: of 7)", paper=0.106, headline=True),
        Row("CIFAR-10, single networks", headline=True),
    ),
    "smallnorb": (Row("smallNORB", paper=0.027, headline=True),),
    "svhn": (Row("SVHN", paper=0.043, headline=True),),
    "fashion-mnist": (Row("Fashion-MNIST (not in the paper)", headline=True),),
}


def other_dataset(found: Found, options: Options) -> Outcome:
    """Test error on a dataset of §7, with learning curve and examples."""
    ((name, runs),) = found.items()
    split = load_split(options.data(name), "test")
    expected = ROWS_OF_SETS[name]
    rows = [_fill_error(expected[-1], runs, name)]
    is_ensemble = len(expected) > 1 and len(runs) > 1
    if is_ensemble or not rows[0].values:
        count = options.examples(len(split))
        together = evaluate([run.load() for run in runs], split, num_examples=count)
        row = fill(
            expected[0 if is_ensemble else -1],
            [together.error_rate],
            runs,
            num_examples=together.num_examples,
        )
        rows = [row, *rows] if is_ensemble else [row]
    if len(rows) < len(expected):  # one network is no ensemble
        rows.insert(0, expected[0])
    tiles = _tiles(runs[0], split)
    caption = figures.Caption(
        ("§7  " if expected[0].paper is not None else "") + expected[0].label.partition(",")[0],
        f"{runs[0].describe()}. Test images with label, and in red what it was taken for.",
        options.quick,
    )
    curves = _learning_curves(runs[0], name)
    return Outcome(
        rows=tuple(rows),
        pictures={
            "": lambda path: plots.draw_curves_and_tiles(
                caption, curves, tiles, path, ylabel="error, %"
            )
        },
        data=(split.origin,),
        notes=(f"This ensemble has {len(runs)} networks.",) if is_ensemble else (),
    )


def _tiles(run: Trained, split: Split) -> list[plots.Tile]:
    """The first test images, and the first of them that were taken for something else."""
    model = run.load()
    batch = split.test_batch(np.arange(min(200, len(split))))
    predictions = model.predict(batch.images)[:, 0].tolist()
    labels = batch.labels[:, 0].tolist()
    tiles = []
    for index, (label, prediction) in enumerate(zip(labels, predictions, strict=True)):
        is_right = label == prediction
        text = _short(split.class_names[label])
        if not is_right:
            text += f"\n→ {_short(split.class_names[prediction])}"
        tiles.append(plots.Tile(figures.grey(batch.targets[index, 0]), text, is_right))
    right = [tile for tile in tiles if tile.is_right][:12]
    return [*right, *[tile for tile in tiles if not tile.is_right][:6]]


def _learning_curves(run: Trained, dataset: str) -> list[plots.Curve]:
    lines = run.log()
    training = [line for line in lines if "error_rate" in line]
    errors = plots.smooth([100 * float(str(line["error_rate"])) for line in training])
    epochs = [float(str(line["epoch"])) for line in training]
    curves = [plots.Curve("training batches", epochs, errors, figures.GREY)] if training else []
    per_epoch = (run.steps or 1) / max(run.epochs or 1, 1e-9)
    points = [
        (float(str(line["step"])) / per_epoch, 100 * float(str(evaluation["error_rate"])))
        for line in lines
        if isinstance(evaluation := line.get("evaluation"), dict) and evaluation["split"] == "test"
    ]
    if (final := run.error_rate(dataset)) is not None and run.epochs is not None:
        points.append((run.epochs, 100 * final))
    if points:
        xs, ys = zip(*points, strict=True)
        curves.append(plots.Curve("test set", xs, ys, figures.BLUE, "o"))
    return curves


# Shared with the claims


def find_dataset(preset: str) -> str:
    """The dataset that a preset is tested on."""
    return PRESETS[preset].build().data.name


def list_errors(runs: Sequence[Trained], dataset: str) -> list[float]:
    """The recorded test errors of runs."""
    return [error for run in runs if (error := run.error_rate(dataset)) is not None]


def _fill_error(row: Row, runs: Sequence[Trained], dataset: str) -> Row:
    tested = [run for run in runs if run.error_rate(dataset) is not None]
    count = tested[0].num_evaluated(dataset) if tested else None
    return fill(row, list_errors(tested, dataset), tested, num_examples=count)


def _measure(run: Trained, dataset: str, options: Options) -> tuple[float, int, str]:
    """Error on a dataset, examples and their origin: as recorded of this data, or measured now."""
    split = load_split(options.data(dataset), "test")
    metric = run.metrics.get(dataset, {})
    if metric.get("split") == "test" and metric["origin"] == split.origin:
        error, count = run.error_rate(dataset), run.num_evaluated(dataset)
        assert error is not None
        assert count is not None
        return error, count, split.origin
    measured = evaluate([run.load()], split, num_examples=options.examples(10_000))
    return measured.error_rate, measured.num_examples, measured.origin


def make_dot(row: Row) -> plots.Dot:
    """A row for drawing, in per cent."""
    paper = None if row.paper is None else 100 * row.paper
    spread = None if row.paper_spread is None else 100 * row.paper_spread
    return plots.Dot(row.label, paper, spread, tuple(100 * value for value in row.values))


def describe_budget(found: Found) -> str:
    """How long the networks were trained, in a few words."""
    runs = [run for each in found.values() for run in each]
    images = sorted(run.images for run in runs if run.images is not None)
    trials = max((len(each) for each in found.values()), default=0)
    span = " to ".join(dict.fromkeys(show_count(each) for each in images[:1] + images[-1:]))
    length = f"{span} images" if span else "unknown length"
    return f"{f'Up to {trials} trials' if trials > 1 else 'One trial'} of {length}"


def list_origins(found: Found) -> tuple[str, ...]:
    """Where the examples of the recorded test errors come from."""
    metrics = [m for runs in found.values() for run in runs for m in run.metrics.values()]
    return tuple(dict.fromkeys(str(metric["origin"]) for metric in metrics))


def _short(name: str) -> str:
    return name.removesuffix("/top").removesuffix(" animal").removesuffix(" figure")


def wrap(label: str) -> str:
    """A long label on two lines."""
    if len(label) < 26:
        return label
    middle = min(
        (place for place, letter in enumerate(label) if letter == " "),
        key=lambda place: abs(place - len(label) // 2),
    )
    return f"{label[:middle]}\n{label[middle + 1 :]}"
