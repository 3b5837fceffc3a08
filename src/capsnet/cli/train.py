"""The commands train and list."""

import ast
import inspect
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, make_dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_type_hints

from cyclopts import Parameter

from capsnet.cli import Flag
from capsnet.data import DataConfig, list_datasets
from capsnet.data.storage import is_gone
from capsnet.models import CapsNetConfig, CNNConfig
from capsnet.models.weights import list_weights, read_tensors
from capsnet.training import PRESETS, Preset, TrainConfig, TrainingStopped, configure
from capsnet.training import train as train_model
from capsnet.training.checkpoint import check_same_config, newest_checkpoint
from capsnet.training.config import from_dict, override, to_dict
from capsnet.training.preparation import prepare
from capsnet.training.processes import Processes
from capsnet.training.records import CONFIG, RESULT, check_run, read_json

#: Fields that are no flags of their own: the data decides them, or the command does.
_NO_FLAG = {
    "training": {"preset", "data", "model"},
    "data": set(),
    "model": {"image_channels", "image_height", "image_width", "num_classes"},
}
_ALIASES = {"learning_rate": "--lr"}
_TABLES: dict[str, tuple[type, ...]] = {
    "training": (TrainConfig,),
    "data": (DataConfig,),
    "model": (CapsNetConfig, CNNConfig),
}
_GROUPS = {
    TrainConfig: "Training",
    DataConfig: "Data",
    CapsNetConfig: "Model: CapsNet only",
    CNNConfig: "Model: CNN only (presets that end in -cnn)",
}


class _Setting(NamedTuple):
    """A field of a run's settings as a flag."""

    table: str
    field: str
    hint: object
    text: str
    group: str


def _field_docs(cls: type) -> dict[str, str]:
    """The first sentence of the docstring under each field."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(doc, ast.Expr)
            text = inspect.cleandoc(ast.literal_eval(doc.value))
            docs[field.target.id] = " ".join(text.split("\n\n")[0].split())
    return docs


def _flags() -> dict[str, _Setting]:
    """Flag name to what it sets, for every field of a run's settings."""
    flags: dict[str, _Setting] = {}
    for table, classes in _TABLES.items():
        for cls in classes:
            docs, hints = _field_docs(cls), get_type_hints(cls)
            for name in (field.name for field in fields(cls)):
                flag = "dataset" if (table, name) == ("data", "name") else name
                hint, text = hints[name], docs[name]
                if hint == tuple[int, ...]:  # given once, it holds for all layers
                    hint = int | tuple[int, ...]
                    text = f"{text.rstrip('.')}; one number for all, or the flag once for each."
                if name in _NO_FLAG[table]:
                    continue
                if flag in flags:  # both kinds of model have it
                    text = f"CapsNet: {flags[flag].text} CNN: {text}"
                    flags[flag] = _Setting(table, name, hint, text, "Model")
                else:
                    flags[flag] = _Setting(table, name, hint, text, _GROUPS[cls])
    return flags


_FLAGS = _flags()
if TYPE_CHECKING:
    Settings = object
else:
    Settings = make_dataclass(
        "Settings",
        [
            (
                flag,
                Annotated[
                    hint | None,
                    Parameter(
                        help=text,
                        group=group,
                        alias=_ALIASES.get(flag),
                        show_default=False,
                    ),
                ],
                None,
            )
            for flag, (_, _, hint, text, group) in _FLAGS.items()
        ],
        namespace={"__module__": __name__},
    )


def _changes(settings: object) -> dict[str, object]:
    """The settings that were given, as `override` takes them."""
    changes: dict[str, object] = {"data": {}, "model": {}}
    for flag, setting in _FLAGS.items():
        value = getattr(settings, flag)
        if value is not None:
            target = changes if setting.table == "training" else changes[setting.table]
            assert isinstance(target, dict)
            target[setting.field] = value
    return changes


def train(
    preset: Annotated[str, Parameter(help=f"One of {', '.join(PRESETS)}.")],
    *,
    out: Path | None = None,
    resume: Flag = False,
    overwrite: Flag = False,
    config: Path | None = None,
    dry_run: Flag = False,
    json: Flag = False,
    settings: Annotated[Settings, Parameter(name="*")] = Settings(),  # noqa: B008
) -> int:
    """Train a preset of the paper (capsnet list shows all), or on your own images.

    The run's directory gets config.json, log.jsonl, weights.safetensors and result.json. Ctrl-C
    saves and stops; --resume goes on from there, also after a crash.

    Args:
        preset: What to train; the help lists the presets as they are registered.
        out: Directory of the run; default: runs/PRESET-seedSEED.
        resume: Go on with the run that is in the directory.
        overwrite: Remove the run that is in the directory and begin anew.
        config: TOML file with settings; flags come before it.
        dry_run: Check all settings against the data, print them and do nothing.
        json: Print the result as JSON.
        settings: Any field of the run's settings.
    """
    changes = _merge(_read_toml(config) if config is not None else {}, _changes(settings))
    run_config = configure(preset, changes)
    run = out or Path("runs") / run_config.run_name
    if resume:
        run_config = _stored_config(run, preset, changes) or run_config
    if dry_run:
        check_run(run, resume=resume, overwrite=overwrite)
        _print_json(to_dict(prepare(run_config, Processes(), run=run, resume=resume).config))
        return 0
    command = shlex.join(["capsnet", "train", preset, "--out", str(run), "--resume"])
    speaks = os.environ.get("RANK", "0") == "0"  # of torchrun's processes, the first
    try:
        result = train_model(run_config, run, resume=resume, overwrite=overwrite)
    except TrainingStopped as stopped:
        if speaks:
            print(f"{stopped}\ngo on with: {command}", file=sys.stderr if json else sys.stdout)
        return 128 + stopped.signal_number
    except FloatingPointError as error:
        if not speaks:
            return 1
        raise FloatingPointError(
            f"{error}; a lower rate may help: "
            f"--learning-rate {run_config.learning_rate / 2:g} --overwrite"
        ) from None
    if json and speaks:
        _print_json(result)
    elif speaks:
        _say_result(result, run, PRESETS[preset])
    return 0


def list_all(*, json: Flag = False) -> int:
    """Show presets with the paper's numbers, datasets, and weights shipped with the package.

    Args:
        json: Print as JSON.
    """
    weights = {name: _describe_weights(path) for name, path in list_weights().items()}
    if json:
        _print_json(
            {
                "presets": [preset.to_dict() for preset in PRESETS.values()],
                "datasets": list(list_datasets()),
                "weights": weights,
            }
        )
        return 0
    print("Presets (capsnet train NAME), with the test error that the paper reports:")
    for each in PRESETS.values():
        error = f"{each.paper_error:.2%}" if each.paper_error is not None else ""
        time = f"; {each.minutes} minutes on 2 cores" if each.minutes is not None else ""
        print(f"  {each.name:<17} {error:>7}  {each.summary} ({each.cell}{time})")
    print(f"\nDatasets (--dataset NAME): {', '.join(list_datasets())}")
    print("Shipped weights (capsnet evaluate NAME), with their test error and the paper's:")
    for name, about in weights.items():
        errors = (about["error_rate"], about["paper_error"])
        own, paper = ("" if error is None else f"{error:.2%}" for error in errors)
        print(f"  {name:<17} {own:>7} {paper:>7}  {about['dataset']}")
    return 0


def _describe_weights(path: Path) -> dict[str, object]:
    """A file of shipped weights, what it was measured on, and what the paper has there."""
    record = read_tensors(path)[1]
    metrics, preset = record.get("metrics"), PRESETS.get(str(record.get("preset")))
    dataset, measured = next(iter(metrics.items())) if isinstance(metrics, dict) else ("", {})
    return {
        "file": str(path),
        "dataset": dataset,
        "error_rate": measured.get("error_rate"),
        "paper_error": preset.paper_error if preset is not None else None,
    }


def _read_toml(path: Path) -> dict[str, object]:
    """Settings from a TOML file with the fields of config.json: top level, [data], [model]."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for name in settings:
        table = _FLAGS[name].table if name in _FLAGS else "training"
        if table != "training":
            raise ValueError(f"{name} must stand under [{table}] in {path}")
    return settings


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Both, table by table; `above` wins."""
    merged = {**below, **above}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in above and other not in above:
            merged.pop(other, None)
    for name in ("data", "model"):
        lower, upper = below.get(name, {}), above.get(name, {})
        if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
            raise ValueError(f"{name} must be a table of settings, got {lower!r}")
        merged[name] = {**lower, **upper}
    return merged


def _stored_config(run: Path, preset: str, changes: Mapping[str, object]) -> TrainConfig | None:
    """The settings a run began with, changed as the command line says; None if it has none."""
    stored: object = None
    with suppress(OSError, ValueError):
        stored = read_json(run / RESULT)["config"]
    with suppress(OSError, ValueError):
        stored = read_json(run / CONFIG)
    if stored is None and (found := newest_checkpoint(run, warn=lambda text: None)) is not None:
        stored = found[1]["config"]
    if not isinstance(stored, dict):
        return None
    config = from_dict(stored)
    if config.preset != preset:
        raise ValueError(f"the run in {run} is of preset {config.preset}, got {preset}")
    changed = override(config, changes)
    check_same_config(run, stored, changed)
    folder = changed.data.data_dir
    if folder is not None and is_gone(folder):
        raise ValueError(f"there is no {folder}; --data-dir says where the data is now")
    return changed


def _say_result(result: Mapping[str, object], run: Path, preset: Preset) -> None:
    """What came out, where it is, what to try next."""
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    rates = ", ".join(
        f"{each['error_rate']:.2%} error on {each['origin']} ({each['split']})"
        for each in metrics.values()
    )
    paper = ""
    if preset.paper_error is not None and preset.build().data.name in metrics:
        paper = f" (paper: {preset.paper_error:.2%}, {preset.cell})"
    minutes = float(str(result["seconds"])) / 60
    print(f"{rates} after {result['steps']:,} steps in {minutes:.1f} minutes{paper}")
    print(f"model, log and record are in {run}; next: capsnet evaluate {shlex.quote(str(run))}")


def _print_json(record: Mapping[str, object]) -> None:
    print(dumps(record, indent=2))
