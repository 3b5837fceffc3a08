"""Appendix A: how routing settles with more iterations, and how it trains with one and three."""

import numpy as np

from capsnet.experiments import figures, plots
from capsnet.experiments.digits import load_test
from capsnet.experiments.outcome import Outcome, Row, fill
from capsnet.experiments.runs import Need, Options
from capsnet.experiments.trained import Found, Trained
from capsnet.models import CapsNet
from capsnet.training.evaluation import check_models, routing_changes

FIGA1_NEEDS = (Need("capsnet", "mnist", most=1, curve="needed"),)
FIGA1 = (
    Row("mean change of a routing logit in the 2nd iteration", paper=0.007, unit=""),
    Row("mean change of a routing logit in the 5th iteration", paper=1e-5, unit=""),
    Row("mean change of a coupling coefficient in the 2nd iteration", unit=""),
    Row("mean change of a coupling coefficient in the 5th iteration", unit=""),
)
FIGA2_NEEDS = (
    Need("3 iterations", "cifar10", most=1),
    Need(
        "1 iteration",
        "cifar10",
        changes={"model": {"num_iterations": 1}},
        like="3 iterations",
        most=1,
    ),
)
FIGA2 = (
    Row("CIFAR-10 training loss at the end, 3 iterations", unit=""),
    Row("CIFAR-10 training loss at the end, 1 iteration", unit=""),
)
_COLORS = ("#0b2a4a", "#1f5a96", "#6aa5d8", "#d9730d", "#2e8b57")


def routing_convergence(found: Found, options: Options) -> Outcome:
    """Mean change of the routing logits by iteration, over training and at its end (Fig. A.1)."""
    trained = found["capsnet"][0]
    split = load_test(trained, options, "mnist")
    model = trained.load()
    if not isinstance(model, CapsNet):
        raise ValueError(f"{trained.source} has no capsules, whose routing is to be shown")
    check_models([model], split)
    count = min(options.examples(1000), len(split))
    batches = np.split(np.arange(count), range(100, count, 100))
    parts = [routing_changes(model, split.test_batch(batch).images) for batch in batches]
    sizes = [len(batch) for batch in batches]
    final = {
        kind: np.average([part[kind] for part in parts], axis=0, weights=sizes).tolist()
        for kind in ("logits", "coupling")
    }
    during = _changes_in_training(trained)
    caption = figures.Caption(
        "Fig. A.1  Mean change of routing by iteration",
        f"CapsNet trained with {model.config.num_iterations} routing iterations; "
        f"{trained.describe()}; test digits.",
        options.quick,
    )
    over_training = [
        plots.Curve(
            str(place + 1),
            [float(step) for step, _ in during],
            [changes["logits"][place] for _, changes in during],
            _COLORS[place],
            "o",
        )
        for place in range(len(_COLORS))
        if during
    ]
    numbers = [float(place + 1) for place in range(len(final["logits"]))]
    at_end = [
        plots.Curve("logits b", numbers, final["logits"], figures.BLUE, "o"),
        plots.Curve("coupling c", numbers, final["coupling"], figures.ORANGE, "s"),
        plots.Curve("paper, b", [2.0, 5.0], [0.007, 1e-5], figures.GREY, "x"),
    ]
    panels = [
        ("(a) During training", "steps of training", "mean |change of b|", over_training, False),
        ("(b) At the end", "routing iteration", "mean |change|", at_end, True),
    ]
    notes = [
        "By Procedure 1 a logit changes by the agreement of vote and output, which does not vanish "
        "as routing settles; the paper does not say how its change fell to 1e-5. The change of the "
        "coupling is shown beside it."
    ]
    if not during:
        notes.append("This network's run kept no evaluations during training.")
    else:
        notes.append("(a) begins with the first evaluation of the run, not with the first step.")
    values = (final["logits"][1], final["logits"][4], final["coupling"][1], final["coupling"][4])
    return Outcome(
        rows=tuple(
            fill(row, [value], [trained], num_examples=count)
            for row, value in zip(FIGA1, values, strict=True)
        ),
        pictures={"": lambda path: plots.draw_curve_panels(caption, panels, path)},
        data=(split.origin,),
        notes=tuple(notes),
        details={
            "final": final,
            "during": [{"step": step, **changes} for step, changes in during],
        },
    )


def _changes_in_training(trained: Trained) -> list[tuple[int, dict[str, list[float]]]]:
    """Steps of training and the changes by iteration there, as the run's log has them."""
    lines = [(line.get("step"), line.get("evaluation")) for line in trained.log()]
    lines.append((trained.steps, next(iter(trained.metrics.values()), None)))
    return [
        (step, evaluation["routing_changes"])
        for step, evaluation in lines
        if isinstance(step, int) and isinstance(evaluation, dict)
        if isinstance(evaluation.get("routing_changes"), dict)
    ]


def compare_iterations(found: Found, options: Options) -> Outcome:
    """Training loss on CIFAR-10 with one and with three iterations of routing (Fig. A.2)."""
    curves, rows, details = [], [], {}
    colors = {"3 iterations": figures.BLUE, "1 iteration": figures.ORANGE}
    for row, (role, runs) in zip(FIGA2, found.items(), strict=True):
        lines = [line for line in runs[0].log() if "loss" in line] if runs else []
        steps = [float(str(line["step"])) for line in lines]
        losses = [float(str(line["classification_loss"])) for line in lines]
        last = losses[-max(1, len(losses) // 20) :]
        rows.append(fill(row, [float(np.mean(last))] if last else [], runs))
        smooth = plots.smooth(losses)
        curves.append(plots.Curve(f"{role} of routing", steps, smooth, colors[role]))
        details[role] = {"steps": steps, "loss": losses}
    runs = [each[0] for each in found.values() if each]
    caption = figures.Caption(
        "Fig. A.2  Training loss on CIFAR-10",
        f"Batches of {runs[0].config.batch_size if runs[0].config else 128}; "
        f"{' and '.join(run.describe() for run in runs)}.",
        options.quick,
    )
    panels = [("", "steps of training", "margin loss", curves, False)]
    return Outcome(
        rows=tuple(rows),
        pictures={"": lambda path: plots.draw_curve_panels(caption, panels, path, panel=6.0)},
        data=("CIFAR-10",),
        notes=("The loss at the end is the mean of the last twentieth of the training.",),
        details=details,
    )
