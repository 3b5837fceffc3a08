"""The trained networks that an experiment needs: found among finished runs, shipped, or trained."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Literal

from capsnet.data import DataConfig
from capsnet.experiments.trained import (
    Found,
    Say,
    Trained,
    finished_runs,
    open_run,
    open_source,
    open_weights,
)
from capsnet.models import CapsNetConfig
from capsnet.models.weights import WEIGHTS, list_weights
from capsnet.progress import Reporter
from capsnet.training import TrainConfig, configure, train
from capsnet.training.config import check_count, differing_fields, from_dict, override, to_dict
from capsnet.training.records import CONFIG, RESULT, read_json

_Differences = tuple[tuple[str, str], ...]

#: Settings of the network that leave the paper's architecture as it is.
_FREE_MODEL_SETTINGS = frozenset({"bias", "initialisation", "uniform_primary_coupling"})
#: Settings that keep no runs apart: mere logging, and where earlier parts of the training lay.
_NOT_COMPARED = frozenset({"evaluate_every", "evaluate_on", "log_every", "continue_from"})
#: A miniature: few images, few steps, narrow layers. It shows that a command works, no more.
QUICK_STEPS = 150
_QUICK = {"batch_size": 32, "warmup_steps": 10, "log_every": 5, "threads": 1}
_QUICK_EXAMPLES = 500
_QUICK_CAPSNET = {"conv_channels": 32, "primary_types": 4}
_QUICK_CNN = {"hidden_sizes": (32,)}


@dataclass(frozen=True)
class Need:
    """A trained network that an experiment needs."""

    role: str
    """What the experiment calls it."""

    preset: str
    """The preset that trains it."""

    changes: Mapping[str, object] = field(default_factory=dict)
    """Settings that differ from the preset's."""

    like: str | None = None
    """Role of a network found before, whose other settings it must share to be compared with."""

    trials: int = 1
    """How many are trained, with seeds 0, 1, 2, ..., unless the user says otherwise."""

    most: int | None = None
    """How many of the finished ones are used at most; None for all."""

    shipped: str | None = None
    """Name of shipped weights, which count as a run does."""

    curve: Literal["", "kept", "needed"] = ""
    """Evaluations in the course of training: kept where it is trained, or needed of any run."""

    by_record: bool = False
    """Whether its record is enough, so that without training a run of another machine counts."""


@dataclass(frozen=True)
class Options:
    """What a user may choose about an experiment."""

    runs: Path = Path("runs")
    """Folder of runs, searched for finished ones; new ones are trained there."""

    out: Path | None = None
    """Folder for results and pictures; None: results and docs/images."""

    weights: tuple[str, ...] = ()
    """Run directories, weights files or shipped names to use instead of searching."""

    train: bool = True
    """Whether to train what is missing."""

    trials: int | None = None
    """Runs of each network, with seeds from 0 on; None: as many as the paper reports."""

    epochs: int | None = None
    """Length of runs that are given in epochs; None: the preset's."""

    steps: int | None = None
    """Length of runs that are given in steps; None: the preset's. Decides all runs of quick."""

    quick: bool = False
    """A miniature."""

    data_dir: Path | None = None
    """Folder of datasets."""

    threads: int | None = None
    """CPU threads."""

    device: str = "cpu"
    """Where to train what is missing."""

    num_examples: int | None = None
    """Examples to measure on where an experiment measures itself; None: its own choice."""

    digits: tuple[int, ...] = ()
    """fig4: the digits whose 16 dimensions are shown."""

    overwrite: bool = False
    """Whether to do again what is there already."""

    def __post_init__(self) -> None:
        for name in ("trials", "epochs", "steps", "threads", "num_examples"):
            check_count(name, getattr(self, name))
        if self.out is not None and self.out.is_file():
            raise ValueError(f"{self.out} is a file, but results and pictures need a folder")
        for digit in self.digits:
            if not 0 <= digit <= 9:
                raise ValueError(f"digits must be 0 to 9, got {digit}")

    @property
    def runs_folder(self) -> Path:
        """Where runs are: miniatures have a folder of their own."""
        return self.runs / "quick" if self.quick else self.runs

    def data(self, name: str) -> DataConfig:
        """A dataset by name, in the user's folder."""
        return DataConfig(name, data_dir=self.data_dir)

    def examples(self, full: int) -> int:
        """How many examples to measure on, `full` unless the user or quick says otherwise."""
        return self.num_examples or (min(full, _QUICK_EXAMPLES) if self.quick else full)


def plan(
    needs: Sequence[Need],
    options: Options,
    say: Say,
    recorded: Mapping[str, Sequence[Trained]] | None = None,
) -> Found:
    """The networks that an experiment needs, by role: those that are there, and those to train.

    Of several finished runs of a preset, shipped weights among them, those with its settings are
    taken, if there are any, and of these the longest, all trials with the same settings. No test
    error is ever looked at for it.
    `recorded` are those that the result so far names: where nothing is trained and a record is
    enough, they count, too, although their files may be on another machine.
    """
    if options.weights:
        return _assign(needs, options)
    found: Found = {}
    finished = list(finished_runs(options.runs_folder, say))
    for each in needs:
        need = each if found.get(each.like or "") else replace(each, like=None)
        wanted = _settings(need, options, found)
        usable = list(finished)
        shipped = need.shipped or ""
        if shipped in list_weights():  # by its file: a folder here may have the same name
            usable.append(open_weights(shipped, list_weights()[shipped]))
        if recorded and each.by_record and not options.train:
            usable += [run for run in recorded.get(need.role, []) if run.metrics]
        # Others are trained in one part, so only such a run can be what they are compared with.
        is_pattern = any(other.like == need.role for other in needs)
        runs = _choose(usable, wanted, need, options, whole=is_pattern)
        if not runs and is_pattern and not options.train:
            runs = _choose(usable, wanted, need, options)
        if options.train:
            settings = _placed((runs[0].config if runs else None) or wanted, need, options)
            num_missing = max(0, _num_trials(need, options) - len(runs))
            if num_missing and runs and runs[0].parts:
                say(f"{need.role} is not trained: {runs[0].source} was trained in parts")
                num_missing = 0
            used = {run.seed for run in runs}
            unused = (seed for seed in count() if seed not in used)
            runs += [_planned(replace(settings, seed=seed)) for seed in islice(unused, num_missing)]
        found[need.role] = runs[: need.most or options.trials]
    if not any(found.values()):
        presets = ", ".join(dict.fromkeys(need.preset for need in needs))
        raise ValueError(
            f"there is no finished run of {presets} in {options.runs_folder}; "
            "leave out --no-train, or give --weights"
        )
    return found


def train_planned(found: Found, options: Options, say: Say, reporter: Reporter | None) -> Found:
    """The same networks, with those trained that were only planned."""
    return {
        role: [
            _train(run.config, role, options, say, reporter)
            if run.is_planned and run.config is not None
            else run
            for run in runs
        ]
        for role, runs in found.items()
    }


def _planned(config: TrainConfig) -> Trained:
    """A network that is yet to be trained."""
    record = {
        "config": to_dict(config),
        "seed": config.seed,
        "steps": config.steps,
        "epochs": config.epochs,
    }
    return Trained(config.run_name, Path(config.run_name, WEIGHTS), "", record)


def _assign(needs: Sequence[Need], options: Options) -> Found:
    """The user's weights, given to the roles in their order."""
    opened = [open_source(source) for source in options.weights]
    if len(needs) == 1 and needs[0].trials > 1:
        return {needs[0].role: opened}
    if len(opened) != len(needs):
        roles = ", ".join(need.role for need in needs)
        raise ValueError(f"this needs {len(needs)} --weights ({roles}), got {len(opened)}")
    return {need.role: [trained] for need, trained in zip(needs, opened, strict=True)}


def _settings(need: Need, options: Options, found: Found) -> TrainConfig:
    """The settings that the network is trained with if there is no run of it."""
    changes: dict[str, object] = dict(need.changes)
    config = configure(need.preset, changes)
    models = found.get(need.like or "", [])
    pattern = models[0].config if models else None
    if pattern is not None:
        same = {"preset", "data", "model"}
        copied = {name: value for name, value in to_dict(pattern).items() if name not in same}
        config = override(config, copied | {"seed": 0})
        free = {k: v for k, v in asdict(pattern.model).items() if k in _FREE_MODEL_SETTINGS}
        config = replace(config, model=replace(config.model, **free))
    if options.quick:
        config = _miniature(config, options)
    elif options.epochs is not None and config.epochs is not None:
        config = replace(config, epochs=options.epochs)
    elif options.steps is not None and config.steps is not None:
        config = replace(config, steps=options.steps)
    return _placed(config, need, options)


def _placed(config: TrainConfig, need: Need, options: Options) -> TrainConfig:
    """The settings with what depends on the machine as the user says, in one part, with a curve."""
    usual = 1 if config.epochs else max(1, (config.steps or 1) // 5)
    return replace(
        config,
        evaluate_every=config.evaluate_every or (usual if need.curve else 0),
        continue_from=None,
        threads=options.threads or (config.threads if options.quick else None),
        device=options.device,
        data=replace(config.data, data_dir=options.data_dir),
    )


def _miniature(config: TrainConfig, options: Options) -> TrainConfig:
    """The settings made small: few steps of few images, narrow layers."""
    narrow: dict[str, object] = dict(_QUICK_CAPSNET)
    if not isinstance(config.model, CapsNetConfig):
        narrow = _QUICK_CNN | {"conv_channels": (8,) * len(config.model.conv_channels)}
    steps = options.steps or QUICK_STEPS
    num_evaluated = options.num_examples or _QUICK_EXAMPLES
    changes = _QUICK | {"steps": steps, "num_evaluated": num_evaluated, "model": narrow}
    return override(config, changes)


def _num_trials(need: Need, options: Options) -> int:
    trials = options.trials or (min(need.trials, 2) if options.quick else need.trials)
    return min(trials, need.most or trials)


def _choose(
    runs: Iterable[Trained],
    wanted: TrainConfig,
    need: Need,
    options: Options,
    *,
    whole: bool = False,
) -> list[Trained]:
    """The finished runs of the wanted network, each seed once; `whole`: not trained in parts.

    Of runs with different settings those with the wanted ones but for their length, in one part,
    then those with most epochs, then those with most seeds, then those nearest to the wanted ones.
    """
    groups: dict[_Differences, dict[int, Trained]] = {}
    for run in runs:
        config = run.config
        if config is None or not _fits(config, wanted, need, options) or (whole and run.parts):
            continue
        differences = _differences(config, wanted) | dict.fromkeys(run.parts, "")
        groups.setdefault(tuple(sorted(differences.items())), {}).setdefault(config.seed, run)
    if not groups:
        return []

    def merit(group: tuple[_Differences, dict[int, Trained]]) -> tuple[bool, float, int, int]:
        differences, trials = group
        is_wanted = {name for name, _ in differences} <= {"epochs", "steps", "num_evaluated"}
        epochs = next(iter(trials.values())).epochs or 0
        return is_wanted, epochs, len(trials), -len(differences)

    _, trials = max(groups.items(), key=merit)
    return [trials[seed] for seed in sorted(trials)]


def _differences(config: TrainConfig, wanted: TrainConfig) -> dict[str, str]:
    """Settings of a run, besides its seed, that are not the wanted ones and decide the outcome."""
    differing = differing_fields(replace(config, seed=wanted.seed), wanted)
    return {name: repr(ours) for name, (ours, _) in differing.items() if name not in _NOT_COMPARED}


def are_comparable(ours: Trained, theirs: Trained) -> bool:
    """Whether two runs differ in nothing but their network."""
    if ours.config is None or theirs.config is None or ours.parts != theirs.parts:
        return False
    differing = set(differing_fields(ours.config, theirs.config)) - _NOT_COMPARED
    return all(name.startswith("model.") for name in differing - {"preset", "num_evaluated"})


def describe_difference(run: Trained, need: Need) -> str | None:
    """One sentence on how a network differs from the preset's, if it does."""
    preset = configure(need.preset, need.changes)
    differing = differing_fields(run.config or preset, preset)
    parts = [
        f"{name.partition('.')[2]} {ours} instead of {theirs}"
        for name, (ours, theirs) in differing.items()
        if name.startswith(("data.", "model.")) and _is_decisive(name)
    ]
    if not parts:
        return None
    return f"{run.source} is not as the preset {need.preset} has it: {', '.join(parts)}."


def _is_decisive(name: str) -> bool:
    """Whether a setting makes it another network or other data."""
    part, _, setting = name.partition(".")
    return part in ("preset", "data", "model") and setting not in _FREE_MODEL_SETTINGS


def _fits(config: TrainConfig, wanted: TrainConfig, need: Need, options: Options) -> bool:
    """Whether a run is of the wanted network and data, tested well, and of the user's length."""
    differing = set(_differences(config, wanted))
    decisive = {name for name in differing if _is_decisive(name)}
    if need.like is not None or options.quick:
        decisive |= differing - {"num_evaluated"}
    length = options.epochs if wanted.epochs is not None else options.steps
    if length is not None:
        decisive |= differing & {"epochs", "steps"}
    if need.curve == "needed" and not config.evaluate_every:
        decisive.add("evaluate_every")
    if (config.num_evaluated or math.inf) < (wanted.num_evaluated or math.inf):
        decisive.add("num_evaluated")  # its error would be that of a few examples
    return not decisive


def _train(
    config: TrainConfig, role: str, options: Options, say: Say, reporter: Reporter | None
) -> Trained:
    """Trains a network, or goes on where an earlier call stopped."""
    folder = options.runs_folder / config.run_name
    number = 1
    while folder.exists() and not (_is_same(folder, config) and _is_whole(folder)):
        number += 1
        folder = options.runs_folder / f"{config.preset}-{number}-seed{config.seed}"
    say(f"training {role} in {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    train(config, folder, resume=folder.exists(), reporter=reporter)
    return open_run(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a run that is finished still has its weights."""
    return (folder / WEIGHTS).exists() or not (folder / RESULT).exists()


def _is_same(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in a folder began with these settings."""
    try:
        stored = from_dict(read_json(folder / CONFIG))
    except (OSError, ValueError):
        return False
    return not differing_fields(stored, config)
