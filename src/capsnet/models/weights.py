"""Files of weights that rebuild their network, and the trained ones shipped with the package.

A file is safetensors. Its metadata holds a record as JSON, whose entry "model" is the network's
config with its kind, and a SHA-256 over record and tensors; nothing in it is ever executed.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from capsnet.checks import make_checked, unknown_name
from capsnet.machine import write_atomically
from capsnet.models import CapsNetConfig, CNNConfig, Model, ModelConfig, model_from_config

WEIGHTS = "weights.safetensors"
"""Name of the weights in the directory of a run."""

CHECKPOINTS = "checkpoints"
"""Name of the folder in the directory of a run that holds its checkpoints."""

_KINDS: dict[str, type[CapsNetConfig] | type[CNNConfig]] = {
    "capsnet": CapsNetConfig,
    "cnn": CNNConfig,
}


def save_weights(
    path: Path, model: Model, record: Mapping[str, object], *, half: bool = False
) -> None:
    """Writes a network's weights, config and record as one file, whole or not at all.

    Args:
        path: The file, ending in .safetensors.
        model: The network.
        record: What else to remember: preset, seed, error rates; JSON's types only.
        half: Whether to store float16, half the size; loading gives float32 again.
    """
    plain: Model = getattr(model, "_orig_mod", model)  # torch.compile gives names a prefix
    tensors = dict(plain.state_dict())
    if half:
        tensors = {name: _halve(name, tensor) for name, tensor in tensors.items()}
    write_tensors(path, tensors, {**record, "model": config_to_dict(model.config)})


def load_weights(path: Path) -> tuple[Model, dict[str, object]]:
    """Returns the network of a file, ready for inference in float32, and the file's record."""
    tensors, record = read_tensors(path)
    stored = record.get("model")
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds no network: its record has no config under 'model'")
    try:
        return model_from_tensors(config_from_dict(stored), tensors), record
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def find_weights(source: str | Path) -> Path:
    """Returns the file of weights that a run's directory, a shipped name or a path stands for."""
    shipped = list_weights()
    path = Path(source)
    if (path / WEIGHTS).is_file() or (path / CHECKPOINTS).is_dir():
        warn_of_namesake(source)
    elif str(source) in shipped:
        return shipped[str(source)]
    if path.is_dir():
        if (path / WEIGHTS).is_file():
            return path / WEIGHTS
        has_begun = (path / CHECKPOINTS).is_dir()
        kind = "finished run" if has_begun else "run, or one stopped before its first checkpoint"
        raise ValueError(f"{path} is no {kind}: it has no {WEIGHTS}")
    if path.is_file():
        if path.parent.name == CHECKPOINTS:
            raise ValueError(f"{path} is a checkpoint; give its run: {path.parent.parent}")
        return path
    if path.suffix or len(path.parts) > 1:
        raise ValueError(
            f"weights must be a name, a run's directory or a file; {path} is not there"
        )
    hint = f"shipped: {', '.join(shipped) or 'none'}"
    raise unknown_name("weights", str(source), shipped, hint)


def warn_of_namesake(run: str | Path) -> None:
    """Says that a run is taken, if there are shipped weights of its name."""
    if str(run) in list_weights():
        logging.getLogger("capsnet").warning(
            "%s is the run in this folder, not the shipped weights of that name", run
        )


def list_weights() -> dict[str, Path]:
    """Returns the weights shipped with the package, name to file."""
    folder = Path(str(resources.files("capsnet.models"))) / "files"
    files = {path.stem: path for path in folder.glob("*.safetensors")}
    return dict(sorted(files.items()))


def model_from_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """Returns the config's network holding these weights, for inference.

    Sizes are compared before any memory is taken, and the global random state stays untouched.
    """
    try:
        with torch.device("meta"):
            wanted = model_from_config(config).state_dict()
    except RuntimeError as error:  # PyTorch counts bytes even here
        raise ValueError(f"no network can be so large: {error}") from None
    _check_fit(wanted, tensors)
    with torch.random.fork_rng(devices=[]):
        model = model_from_config(config)
    copy_tensors(model, tensors)
    return model.eval()


@torch.no_grad()
def copy_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies weights into a network in place; it keeps its own dtypes and memory layout."""
    wanted = model.state_dict()
    _check_fit(wanted, tensors)
    for name, value in wanted.items():
        value.copy_(tensors[name])


def config_to_dict(config: ModelConfig) -> dict[str, object]:
    """Returns a network's config as JSON's types, with its kind.

    >>> config_to_dict(CNNConfig(pool=2))["kind"]
    'cnn'
    """
    kind = next(name for name, cls in _KINDS.items() if isinstance(config, cls))
    return {"kind": kind, **json.loads(json.dumps(asdict(config)))}


def config_from_dict(plain: Mapping[str, object]) -> ModelConfig:
    """Returns the config that `config_to_dict` wrote; fields left out have their defaults.

    >>> config_from_dict({"kind": "capsnet", "num_classes": 5}).num_classes
    5
    """
    values = dict(plain)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"the kind of a network must be one of {', '.join(_KINDS)}, got {kind!r}")
    build: Callable[..., ModelConfig] = _KINDS[kind]
    return make_checked(build, _KINDS[kind], values)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, object]) -> None:
    """Writes tensors and a record as one safetensors file, whole or not at all."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(record)
    write_atomically(path, save(stored, {"record": text, "sha256": _digest(stored, text)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns what `write_tensors` wrote; a ValueError names a file that is damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        raise ValueError(
            f"{path} is damaged or holds no weights: it is not a safetensors file"
        ) from None
    if "record" not in header or "sha256" not in header:
        raise ValueError(f"{path} was not written by capsnet: it has no record of its network")
    if _digest(tensors, header["record"]) != header["sha256"]:
        raise ValueError(f"{path} is damaged: its content does not fit its SHA-256")
    record = json.loads(header["record"])
    if not isinstance(record, dict):
        raise ValueError(f"{path} was not written by capsnet: its record is no JSON object")
    return tensors, record


def _halve(name: str, tensor: Tensor) -> Tensor:
    halved = tensor.half() if tensor.is_floating_point() else tensor
    if not halved.isfinite().all():
        raise ValueError(f"{name} must fit into float16, whose largest number is 65504")
    return halved


def _check_fit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    odd = sorted(wanted.keys() ^ found.keys())
    if odd:
        raise ValueError(
            f"stored weights do not fit the network: {', '.join(odd)} on one side only"
        )
    for name, value in wanted.items():
        if found[name].shape != value.shape:
            raise ValueError(
                f"stored weight {name} must have shape {tuple(value.shape)}, "
                f"got {tuple(found[name].shape)}"
            )


def _digest(tensors: Mapping[str, Tensor], record: str) -> str:
    """SHA-256 over the record and every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(record.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
