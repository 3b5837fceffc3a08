"""`capsnet predict`: classes of images in files and folders."""

import csv
import io
import json as json_format
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from capsnet.models import CapsNet
from capsnet.playground.networks import Weights, load_networks
from capsnet.playground.pictures import Prepared, open_image, to_bytes

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
BATCH_SIZE = 64
MAX_BYTES = 200_000_000


def predict(
    *images: Path,
    weights: str = "mnist",
    num_labels: int = 1,
    format: Literal["text", "json", "csv"] = "text",
    reconstructions: Path | None = None,
) -> int:
    """Classify images in files or folders; any size and mode, digits dark on light or the reverse.

    A digit is brought into MNIST's form first: light on dark, scaled into 20×20 pixels, its centre
    of mass in the centre of 28×28. An image that has the network's size already is not scaled.

    Args:
        images: Image files, or folders whose images are taken, also those in their subfolders.
        weights: Shipped name, run directory or weights file.
        num_labels: Classes to name for each image, the most probable first: 2 for MultiMNIST.
        format: text for people; json or csv, with every class's length, for programs.
        reconstructions: Folder to write what the network reconstructs, as PNG, beside what it saw.
    """
    if not images:
        raise ValueError("predict needs at least one image or folder")
    files = list(_find_images(images))
    [network] = load_networks([weights])
    num_classes = network.model.config.num_classes
    if not 1 <= num_labels <= num_classes:
        raise ValueError(f"num_labels must be 1 to {num_classes}, got {num_labels}")
    if reconstructions is not None:
        if not (isinstance(network.model, CapsNet) and network.model.config.decoder):
            raise ValueError(f"weights {weights} have no decoder, so nothing can be reconstructed")
        reconstructions.mkdir(parents=True, exist_ok=True)
    answers: list[dict[str, object]] = []
    for start in range(0, len(files), BATCH_SIZE):
        chunk = files[start : start + BATCH_SIZE]
        prepared = [_prepare(network, path) for path in chunk]
        found = _classify(network, chunk, prepared, num_labels)
        for path, (answer, picture) in zip(chunk, found, strict=True):
            if reconstructions is not None:
                target = reconstructions / f"{len(answers):05d}-{path.stem}.png"
                picture.save(target)
                answer["reconstruction"] = str(target)
            answers.append(answer)
            if format == "text":
                print(_describe(answer))
    if format == "json":
        print(json_format.dumps(answers, indent=2, ensure_ascii=False))
    elif format == "csv":
        _print_csv(answers, network.class_names)
    return 0


def _find_images(given: Sequence[Path]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            found = sorted(
                each
                for each in path.rglob("*")
                if each.suffix.lower() in SUFFIXES and each.is_file()
            )
            if not found:
                raise ValueError(f"{path} holds no images ({', '.join(SUFFIXES)})")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path} is not there")


def _prepare(network: Weights, path: Path) -> Prepared:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} must have at most {MAX_BYTES} bytes, got {path.stat().st_size}")
    try:
        return network.prepare(open_image(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@torch.inference_mode()
def _classify(
    network: Weights, paths: Sequence[Path], prepared: Sequence[Prepared], num_labels: int
) -> list[tuple[dict[str, object], Image.Image]]:
    """For each file its answer, and a picture of what was seen and reconstructed."""
    images = network.to_input(np.stack([each.pixels for each in prepared]))
    model, names = network.model, network.class_names
    if isinstance(model, CapsNet):
        output = model(images)
        measure, scores = "lengths", output.lengths
    else:
        measure, scores = "probabilities", model(images).softmax(dim=1)
    order = scores.argsort(dim=1, descending=True)[:, :num_labels]  # (B, N)
    drawn = None
    if isinstance(model, CapsNet) and model.config.decoder:
        drawn = model.decode(output.capsules, order)  # (B, N, C, H, W)
    found = []
    for row, (path, each) in enumerate(zip(paths, prepared, strict=True)):
        rounded = [round(score, 4) for score in scores[row].tolist()]
        answer: dict[str, object] = {
            "file": str(path),
            "classes": [names[number] for number in order[row].tolist()],
            measure: dict(zip(names, rounded, strict=True)),
            "polarity": each.polarity,
        }
        pictures = [each.pixels, *(drawn[row].numpy() if drawn is not None else ())]
        strip = to_bytes(np.concatenate(pictures, axis=2))  # (C, H, W · (1 + N))
        found.append((answer, Image.fromarray(strip.transpose(1, 2, 0).squeeze())))
    return found


def _describe(answer: dict[str, object]) -> str:
    """One line for people."""
    scores = answer.get("lengths", answer.get("probabilities"))
    classes = answer["classes"]
    assert isinstance(scores, dict)
    assert isinstance(classes, list)
    said = " and ".join(f"{name} ({scores[name]:.2f})" for name in classes)
    note = ", dark on light" if answer["polarity"] == "dark on light" else ""
    return f"{answer['file']}: {said}{note}"


def _print_csv(answers: Sequence[dict[str, object]], names: Sequence[str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "classes", "polarity", *names])
    for answer in answers:
        scores = answer.get("lengths", answer.get("probabilities"))
        classes = answer["classes"]
        assert isinstance(scores, dict)
        assert isinstance(classes, list)
        row = [answer["file"], "; ".join(classes), answer["polarity"] or ""]
        writer.writerow([*row, *(scores[name] for name in names)])
    sys.stdout.write(text.getvalue())
