"""The commands evaluate and export: how often trained networks are wrong, and their files."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from capsnet.cli import Flag
from capsnet.data import DataConfig, Split, load_split
from capsnet.data.storage import is_gone
from capsnet.models.export import SUFFIXES, Format, export_model
from capsnet.models.weights import WEIGHTS, save_weights
from capsnet.playground.networks import TrainedNetwork, load_networks
from capsnet.playground.pictures import prepare_image, to_bytes
from capsnet.progress import choose_reporter
from capsnet.training import evaluate as evaluate_models
from capsnet.training import load_model_and_record
from capsnet.training.checkpoint import has_same_files, recorded_config
from capsnet.training.config import check_count
from capsnet.training.evaluation import check_origin
from capsnet.training.processes import find_device
from capsnet.training.records import damaged_files

#: Wrong examples that evaluate prints.
MAX_SHOWN = 20
#: Images that an exported model is compared on.
NUM_CHECKED = 20
HALF_SUFFIX = ".safetensors"


def evaluate(
    *models: str,
    dataset: str | None = None,
    data_dir: Path | None = None,
    split: Literal["train", "validation", "test"] = "test",
    num_examples: int | None = None,
    batch_size: int = 250,
    device: str = "cpu",
    threads: int | None = None,
    json: Flag = False,
) -> int:
    """Test error of a run, a weights file or shipped weights; several are an ensemble.

    Args:
        models: Run directories, weights files or names of shipped weights.
        dataset: Dataset to test on; default: the one the first model was trained on.
        data_dir: Folder with the dataset's files.
        split: test, validation (the digits the run held out) or train.
        num_examples: Use so many examples, spread evenly; default: as many as the run did, or all.
        batch_size: Images at once.
        device: cpu, cuda or mps.
        threads: CPU threads.
        json: Print the result as JSON, with the wrong examples.
    """
    if not models:
        raise ValueError("evaluate needs a run, a weights file or shipped weights (capsnet list)")
    for name, value in (
        ("num_examples", num_examples), ("batch_size", batch_size), ("threads", threads)
    ):  # fmt: skip
        check_count(name, value)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = []
    for source in models:
        loaded.append(load_model_and_record(source))
        if (Path(source) / WEIGHTS).exists():
            for complaint in damaged_files(Path(source)).values():
                print(f"capsnet: {complaint}", file=sys.stderr)
    configs = [
        recorded_config(record, source) for source, (_, record) in zip(models, loaded, strict=True)
    ]
    trained = configs[0]
    data = trained.data if trained is not None else DataConfig()
    if dataset is not None and dataset != data.name:
        channels, height, _ = loaded[0][0].config.image_shape
        data = DataConfig(
            dataset, data_dir=None if data.name == "folder" else data.data_dir,
            generation_seed=data.generation_seed, image_size=height, image_channels=channels,
        )  # fmt: skip
    if data_dir is not None:
        data = replace(data, data_dir=data_dir)
    if num_examples is None and trained is not None:
        num_examples = trained.num_evaluated
    examples = _load_examples(data, split)
    for source, (_, record), config in zip(models, loaded, configs, strict=True):
        known, names = config.data.name if config else None, record.get("class_names")
        if isinstance(names, list):
            check_origin(known, names, examples)
        if config is None or known != data.name or split == "train":
            continue
        own = replace(config.data, data_dir=data.data_dir)
        if known == "folder":
            _check_files(source, record, load_split(own, "train"), examples)
        elif split == "validation" and own.held_out < data.held_out:
            raise ValueError(
                f"{source} held out {own.held_out:,} examples and may have learned "
                f"from others of the {data.held_out:,} that {models[0]} did"
            )
    reporter = choose_reporter()
    try:
        evaluation = evaluate_models(
            [model for model, _ in loaded],
            examples,
            num_examples=num_examples,
            batch_size=batch_size,
            device=str(find_device(device)),
            watch=reporter.evaluated,
        )
    finally:
        reporter.close()
    if json:
        names = {"class_names": list(examples.class_names)}
        print(dumps(evaluation.to_dict() | names, indent=2))
        return 0
    print(evaluation.describe())
    for example in evaluation.wrong[:MAX_SHOWN]:
        labels, predictions = (
            ", ".join(examples.class_names[number] for number in numbers)
            for numbers in (example.labels, example.predictions)
        )
        print(f"  {example.file or f'example {example.index:,}'}: {labels} taken for {predictions}")
    if evaluation.num_errors > MAX_SHOWN:
        num_listed = len(evaluation.wrong)
        them = "them" if num_listed == evaluation.num_errors else f"the first {num_listed:,}"
        print(f"  and {evaluation.num_errors - MAX_SHOWN:,} more (--json lists {them})")
    return 0


def _check_files(source: str, record: Mapping[str, object], learned: Split, tested: Split) -> None:
    """Refuses own images that a network was trained on, and says so if that is not known."""
    assert learned.files is not None
    assert tested.files is not None
    if not has_same_files(record, learned):
        print(
            f"capsnet: {learned.origin} are not those that {source} was trained on; "
            "some that are tested now may be among them",
            file=sys.stderr,
        )
    elif common := set(learned.files) & set(tested.files):
        raise ValueError(
            f"{source} learned from {len(common):,} of the {len(tested):,} images to be tested"
        )


def _load_examples(data: DataConfig, split: Literal["train", "validation", "test"]) -> Split:
    try:
        return load_split(data, split)
    except (OSError, ValueError) as error:
        if data.data_dir is None or not is_gone(data.data_dir):
            raise
        raise ValueError(f"{error}; --data-dir says where the data is now") from None


def export(
    run: str,
    *,
    format: Literal[Format, "safetensors"] = "onnx",
    out: Path | None = None,
    overwrite: Flag = False,
) -> int:
    """Write a trained model as a file that runs without capsnet, checked against PyTorch.

    Input are images (batch, channels, height, width), outputs lengths, capsules and, where there
    is a decoder, reconstruction; a baseline's are logits. The batch may have any size.

    Args:
        run: Run directory, weights file or shipped name.
        format: onnx (extra: export) or torch-export; safetensors: the weights in half precision
            with their record, for capsnet alone, as the shipped ones are.
        out: The file; default: the weights' name with .onnx, .pt2 or .safetensors.
        overwrite: Replace a file that is there.
    """
    [network] = load_networks([run])
    suffix = HALF_SUFFIX if format == "safetensors" else SUFFIXES[format]
    path = out or Path(f"{network.name}{suffix}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} must be a folder that exists")
    if path.is_dir():
        raise ValueError(f"--out must be a file, but {path} is a folder")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; --overwrite replaces it")
    if format == "safetensors":
        if path.suffix != suffix:
            raise ValueError(f"a file of {format} must end in {suffix}, got {path.name}")
        save_weights(path, network.model, network.record, half=True)
        test = f"capsnet evaluate {shlex.quote(str(path))}"
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; {test} tests it")
        return 0
    print(f"writing {path} and comparing it with PyTorch, up to half a minute", file=sys.stderr)
    images = _real_images(network)
    differences = export_model(
        network.model, path, format=format, images=images, class_names=network.class_names
    )
    worst = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(f"largest differences from PyTorch on {len(images)} MNIST test digits: {worst}")
    return 0


def _real_images(network: TrainedNetwork) -> Float[Tensor, "B C H W"]:
    """MNIST test digits in the network's shape: real images that every installation has."""
    channels, height, width = network.model.config.image_shape
    digits = load_split(DataConfig("mnist"), "test").test_batch(np.arange(NUM_CHECKED)).images
    prepared = [
        prepare_image(Image.fromarray(digit), (1, height, width)).pixels
        for digit in to_bytes(digits[:, 0].numpy())
    ]
    return network.to_input(np.repeat(np.stack(prepared), channels, axis=1))
