"""Every table and figure of the paper: what it needs, what it costs, and how it is made."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from capsnet.checks import unknown_name
from capsnet.data import load_split
from capsnet.experiments import claims, digits, iterations, overlap, tables
from capsnet.experiments.outcome import Outcome, Row, quick_prefix, read_result
from capsnet.experiments.runs import Need, Options, describe_difference, plan, train_planned
from capsnet.experiments.trained import Found, Say, Trained, recorded_runs
from capsnet.progress import Reporter
from capsnet.training import configure
from capsnet.training.records import describe_environment, write_json


@dataclass(frozen=True)
class Experiment:
    """A table, a figure or a claim of the paper."""

    name: str
    """What `capsnet reproduce` calls it."""

    title: str
    """What it shows, and where the paper has it."""

    needs: tuple[Need, ...]
    """Networks to be trained."""

    expected: tuple[Row, ...]
    """The rows that come out, with the paper's numbers."""

    measure: Callable[[Found, Options], Outcome]
    """Evaluates and prepares the pictures."""

    counts_examples: bool = True
    """Whether the user may say how many examples it measures on: not where it shows recorded
    errors, or as many examples as its picture needs."""


_DIGITS = Need("capsnet", "mnist", most=1, shipped="mnist")


def _set_of_section_7(name: str, title: str, trials: int = 1) -> Experiment:
    shipped = name if trials == 1 else None
    needs = (Need(name, name, trials=trials, shipped=shipped),)
    return Experiment(
        name,
        title,
        needs,
        tables.ROWS_OF_SETS[name],
        tables.other_dataset,
        counts_examples=trials > 1,  # of an ensemble
    )


_ALL = (
    Experiment(
        "table1",
        "Test error on MNIST and MultiMNIST (Table 1)",
        tables.TABLE1_NEEDS,
        tables.TABLE1,
        tables.compare_cells,
        counts_examples=False,
    ),
    Experiment(
        "fig3",
        "Reconstructions of MNIST digits (Fig. 3)",
        (_DIGITS,),
        digits.FIG3,
        digits.sample_reconstructions,
        counts_examples=False,
    ),
    Experiment(
        "fig4",
        "What the dimensions of a capsule mean (Fig. 4, §5.1)",
        (_DIGITS,),
        digits.FIG4,
        digits.dimension_perturbations,
        counts_examples=False,
    ),
    Experiment(
        "affnist",
        "Robustness to affine transformations (§5.2)",
        tables.AFFNIST_NEEDS,
        tables.AFFNIST,
        tables.affine_robustness,
    ),
    Experiment(
        "fig5",
        "Overlapping digits and their segmentation (Fig. 5, §6)",
        (Need("capsnet", "multimnist", most=1, shipped="multimnist"),),
        overlap.FIG5,
        overlap.overlapping_digits,
    ),
    _set_of_section_7("cifar10", "CIFAR-10 (§7)", trials=7),
    _set_of_section_7("smallnorb", "smallNORB (§7)"),
    _set_of_section_7("svhn", "SVHN (§7)"),
    _set_of_section_7("fashion-mnist", "Fashion-MNIST (not in the paper)"),
    Experiment(
        "figA1",
        "How routing settles (Fig. A.1)",
        iterations.FIGA1_NEEDS,
        iterations.FIGA1,
        iterations.routing_convergence,
    ),
    Experiment(
        "figA2",
        "Training loss on CIFAR-10 with 1 and 3 iterations (Fig. A.2)",
        iterations.FIGA2_NEEDS,
        iterations.FIGA2,
        iterations.compare_iterations,
        counts_examples=False,
    ),
    Experiment(
        "claims",
        "Iterations, reconstruction, priors and the dimension of width (§2, §5)",
        claims.CLAIMS_NEEDS,
        claims.CLAIMS,
        claims.measure_claims,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}


@dataclass(frozen=True)
class Reproduced:
    """Where an experiment's result and pictures are."""

    record: dict[str, object]
    """What the result's file holds."""

    result: Path
    """The file."""

    pictures: tuple[Path, ...]
    """The pictures."""

    is_new: bool
    """Whether this call made them, or found them up to date."""


def find_experiment(name: str) -> Experiment:
    """The experiment of that name; a ValueError lists them all."""
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def reproduce(
    name: str,
    options: Options,
    *,
    say: Say = lambda text: None,
    reporter: Reporter | None = None,
) -> Reproduced:
    """Reproduces one table or figure, and writes its result and pictures.

    What is there already is used: finished runs, checkpoints of unfinished ones, and a result that
    was obtained with the same networks and options.

    Args:
        name: one of `EXPERIMENTS`.
        options: where to look and what to do.
        say: takes sentences about the progress.
        reporter: where training tells of its progress; default: a bar on a terminal, else lines.
    """
    experiment = find_experiment(name)
    _check_used(experiment, options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    environment = describe_environment()  # now: training may take hours, and files may change
    prefix = quick_prefix(options.quick)
    results = options.out or Path("results")
    images = options.out or (results if options.quick else Path("docs/images"))
    result = results / f"{prefix}{name}.json"
    stored = read_result(result, keep=not options.overwrite)
    recorded = recorded_runs(stored, say)
    planned = plan(experiment.needs, options, say, recorded)
    _check_data(experiment, planned)
    if stored is not None and not options.overwrite:
        is_current = stored.get("inputs") == _inputs(planned, options, recorded)
        if is_current and _is_of_data(stored, experiment, options):
            names = stored["pictures"]
            assert isinstance(names, list)
            pictures = tuple(images / str(each) for each in names)
            if all(picture.exists() for picture in pictures):
                return Reproduced(stored, result, pictures, is_new=False)
        elif options.weights:
            raise ValueError(
                f"{result} was obtained with other networks, options or data; "
                "another folder (--out) keeps it, --overwrite replaces it"
            )
        else:
            _check_runs_kept(experiment, planned, recorded, result)  # before hours of training
    found = train_planned(planned, options, say, reporter)
    started = time.monotonic()
    outcome = experiment.measure(found, options)
    if stored is not None and not options.overwrite:
        _check_rows_kept(outcome.rows, stored, result)
    drawn = {f"{prefix}{name}{ending}.png": draw for ending, draw in outcome.pictures.items()}
    for file, draw in drawn.items():
        draw(images / file)
    trained = [(role, run) for role, runs in found.items() for run in runs]
    record: dict[str, object] = {
        "name": name,
        "title": experiment.title,
        "quick": options.quick,
        "rows": [row.to_dict() for row in outcome.rows],
        "notes": [*outcome.notes, *_differences(experiment, found, options), *_parts(found)],
        "data": list(outcome.data),
        "runs": [run.to_dict(role) for role, run in trained],
        "training_seconds": sum(run.seconds or 0 for _, run in trained),
        "measuring_seconds": round(time.monotonic() - started, 3),
        **environment,
        "details": dict(outcome.details),
        "pictures": list(drawn),
        "inputs": _inputs(found, options, {}),  # by the networks that this one records
    }
    results.mkdir(parents=True, exist_ok=True)
    write_json(result, record)
    return Reproduced(record, result, tuple(images / file for file in drawn), is_new=True)


def _check_used(experiment: Experiment, options: Options) -> None:
    """Raises a ValueError for an option that would make no difference."""
    configs = [configure(need.preset, need.changes) for need in experiment.needs]
    is_searched = not options.weights  # or trained: what is given by name has its length
    is_used = {
        "trials": options.trials == 1
        or (is_searched and any(need.most != 1 for need in experiment.needs)),
        "epochs": is_searched and not options.quick and any(config.epochs for config in configs),
        "steps": is_searched and (options.quick or any(config.steps for config in configs)),
        "digits": experiment.name == "fig4",
        "num_examples": options.quick or experiment.counts_examples,
    }
    for option, used in is_used.items():
        if getattr(options, option) and not used:
            miniature = "the miniature of " if options.quick else ""
            flag = option.replace("_", "-")
            given = " from --weights" if options.weights else ""
            raise ValueError(f"--{flag} makes no difference to {miniature}{experiment.name}{given}")


def _check_runs_kept(experiment: Experiment, found: Found, recorded: Found, result: Path) -> None:
    """Raises a ValueError if this would drop a run that only the result knows of."""
    for need in experiment.needs:
        runs = recorded.get(need.role, [])
        for run in runs:
            any_will_do = len(runs) == 1 and not need.by_record  # one network is shown
            is_kept = any(
                each.is_same_training(run)
                or ((each.seed == run.seed or any_will_do) and _is_as_long(each, run))
                for each in found[need.role]
            )
            if not is_kept and not run.is_here:
                raise ValueError(
                    f"{result} is all that is here of {run.source}, which this would leave out; "
                    "another folder (--out) keeps it, --overwrite replaces it"
                )


def _is_as_long(run: Trained, other: Trained) -> bool:
    if run.epochs is None:  # planned, and given in steps
        return (run.images or 0) >= (other.images or 0)
    return run.epochs >= (other.epochs or 0)


def _check_rows_kept(rows: Sequence[Row], stored: Mapping[str, object], result: Path) -> None:
    """Raises a ValueError if a number would go, or would be one of fewer examples."""
    new = {row.label: row for row in rows}
    known = stored["rows"]
    assert isinstance(known, list)
    for old in known:
        row = new.get(old["label"])
        if row is None or not old["values"]:
            continue
        count, examples = old["num_examples"] or 0, row.num_examples or 0
        if not row.values:
            loss = f"has the number for {row.label!r}, which this would leave out"
        elif row.num_examples is not None and examples < count:
            loss = f"measured {row.label!r} on {count:,} examples, this would on {examples:,}"
        else:
            continue
        raise ValueError(
            f"{result} {loss}; another folder (--out) keeps it, --overwrite replaces it"
        )


def _check_data(experiment: Experiment, found: Found) -> None:
    """Raises a ValueError if a network is known to be of other data than the experiment's."""
    for need in experiment.needs:
        wanted = configure(need.preset, need.changes).data.name
        for run in found[need.role]:
            if run.config is not None and run.config.data.name != wanted:
                raise ValueError(
                    f"{experiment.name} needs a network trained on {wanted}, "
                    f"but {run.source} was trained on {run.config.data.name}"
                )


def _differences(experiment: Experiment, found: Found, options: Options) -> list[str]:
    """Notes on networks that a user gave and that are not those of the presets."""
    if not options.weights or options.quick:
        return []
    pairs = [(run, need) for need in experiment.needs for run in found[need.role]]
    return [note for run, need in pairs if (note := describe_difference(run, need))]


def _parts(found: Found) -> list[str]:
    """Notes on networks that were trained in several parts."""
    return [note for runs in found.values() for run in runs if (note := run.describe_parts())]


def _is_of_data(stored: Mapping[str, object], experiment: Experiment, options: Options) -> bool:
    """Whether a result is of the files that are there now: affNIST's may have come since."""
    known = stored.get("data")
    assert isinstance(known, list)
    sets = {name for need in experiment.needs for name in configure(need.preset).evaluate_on}
    return all(load_split(options.data(name), "test").origin in known for name in sets)


def _inputs(found: Found, options: Options, recorded: Found) -> dict[str, object]:
    """What a result depends on: another network or option makes it out of date."""

    def digest(role: str, run: Trained) -> str:
        same = [each for each in recorded.get(role, []) if run.is_same_training(each)]
        return (same or [run])[0].digest

    return {
        "networks": {role: [digest(role, run) for run in runs] for role, runs in found.items()},
        "quick": options.quick,
        "num_examples": options.num_examples,
        "digits": list(options.digits),
    }
