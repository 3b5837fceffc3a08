"""`capsnet predict`: classes of images in files and folders."""

import csv
import io
import json as json_format
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from capsnet.checks import check_num_labels
from capsnet.cli import Flag, describe_os_error
from capsnet.data.folder import FORMATS
from capsnet.models import CapsNet
from capsnet.playground.networks import BATCH_SIZE, TrainedNetwork, load_networks
from capsnet.playground.pictures import Prepared, open_image, to_bytes
from capsnet.progress import Reporter, choose_reporter

Complain = Callable[[str], None]

MAX_BYTES = 200_000_000
_NUM_NAMED = 5  # files of a folder that are said to be left out


def predict(
    *images: Path,
    weights: str = "mnist",
    num_labels: int = 1,
    format: Literal["text", "json", "csv"] | None = None,
    json: Flag = False,
    reconstructions: Path | None = None,
    overwrite: Flag = False,
) -> int:
    """Classify images in files or folders; any size and mode, digits dark on light or the reverse.

    A digit is brought into MNIST's form first: light on dark, scaled into 20×20 pixels, its centre
    of mass in the centre of 28×28. An image that has the network's size already is not scaled.
    A file that is no image is named, the others are classified, and the exit status is 2.

    Args:
        images: Image files, or folders whose images are taken, also those in their subfolders.
        weights: Shipped name, run directory or weights file.
        num_labels: Classes to name for each image, the most probable first: 2 for MultiMNIST.
        format: text for people, the default; json or csv, with every class's length, for programs.
        json: Print as JSON, as --format json does.
        reconstructions: Folder to write what the network reconstructs, as PNG, beside what it saw.
        overwrite: Replace reconstructions of an earlier call in that folder.
    """
    if not images:
        raise ValueError("predict needs at least one image or folder")
    if json and format not in (None, "json"):
        raise ValueError(f"--json and --format {format} contradict each other")
    form = "json" if json else format or "text"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    complaints: list[str] = []

    def complain(sentence: str) -> None:
        print(f"capsnet: {sentence}", file=sys.stderr)
        complaints.append(sentence)

    files = list(_find_images(images, complain))
    if not files:
        return 2
    [network] = load_networks([weights])
    check_num_labels(num_labels, network.model.config.num_classes)
    if reconstructions is not None:
        if not (isinstance(network.model, CapsNet) and network.model.config.decoder):
            raise ValueError(f"weights {weights} have no decoder, so nothing can be reconstructed")
        if reconstructions.exists() and not reconstructions.is_dir():
            raise ValueError(f"--reconstructions must be a folder, but {reconstructions} is a file")
        if not overwrite and any(reconstructions.glob("[0-9][0-9][0-9][0-9][0-9]*-*.png")):
            raise ValueError(f"{reconstructions} has some already; --overwrite replaces them")
        reconstructions.mkdir(parents=True, exist_ok=True)
    answers: list[dict[str, object]] = []
    # Text tells by itself how far it is.
    with closing(Reporter() if form == "text" else choose_reporter("classified")) as reporter:
        for start in range(0, len(files), BATCH_SIZE):
            reporter.evaluated(start, len(files))
            some = files[start : start + BATCH_SIZE]
            prepared = list(_prepare(network, some, num_labels, complain))
            if not prepared:
                continue
            found = _classify(network, prepared, num_labels, draw=reconstructions is not None)
            for (path, _), (answer, picture) in zip(prepared, found, strict=True):
                if reconstructions is not None and picture is not None:
                    stem = os.fsencode(path.stem)[:200].decode(errors="ignore")  # 255 with the rest
                    target = reconstructions / f"{len(answers):05d}-{stem}.png"
                    picture.save(target)
                    answer["reconstruction"] = str(target)
                answers.append(answer)
                if form == "text":
                    print(_describe(answer))
    if form == "json":
        print(json_format.dumps(answers, indent=2))
    elif form == "csv":
        _print_csv(answers, network.class_names)
    return 2 if complaints else 0


def _find_images(given: Sequence[Path], complain: Complain) -> Iterator[Path]:
    """Files that were named, and those in folders whose endings are of images; no hidden ones."""
    endings = Image.registered_extensions()
    for path in given:
        if path.is_dir():
            inside = sorted(
                each
                for each in path.rglob("*")
                if each.is_file() and not any(n[0] == "." for n in each.relative_to(path).parts)
            )
            found = [each for each in inside if endings.get(each.suffix.lower()) in FORMATS]
            others = sorted(set(inside) - set(found))
            if not found:
                complain(f"{path} holds no images ({', '.join(FORMATS)})")
            elif others:
                names = ", ".join(str(each) for each in others[:_NUM_NAMED])
                more = ", …" if len(others) > _NUM_NAMED else ""
                print(f"capsnet: left out, by their endings: {names}{more}", file=sys.stderr)
            yield from found
        elif path.is_file():
            yield path
        else:
            complain(f"{path} is no file" if path.exists() else f"{path} is not there")


def _prepare(
    network: TrainedNetwork, paths: Sequence[Path], num_labels: int, complain: Complain
) -> Iterator[tuple[Path, Prepared]]:
    """The files that are images, each with what the network sees of it."""
    for path in paths:
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise ValueError(f"a file must have at most {MAX_BYTES} bytes, got {size}")
            num_digits = min(num_labels, network.labels_per_image)
            yield path, network.prepare(open_image(path.read_bytes(), max_side=None), num_digits)
        except OSError as error:
            complain(describe_os_error(error))
        except ValueError as error:
            complain(f"{path}: {error}")


@torch.inference_mode()
def _classify(
    network: TrainedNetwork,
    prepared: Sequence[tuple[Path, Prepared]],
    num_labels: int,
    *,
    draw: bool,
) -> list[tuple[dict[str, object], Image.Image | None]]:
    """For each file its answer and, if asked for, a picture of what was seen and reconstructed."""
    scores, capsules = network.score(np.stack([each.pixels for _, each in prepared]))
    measure = "probabilities" if capsules is None else "lengths"
    names = network.class_names
    order = scores.argsort(dim=1, descending=True)[:, :num_labels]  # (B, N)
    drawn = None
    if draw and capsules is not None:
        drawn = network.capsules.decode(capsules, order)  # (B, N, C, H, W)
    found: list[tuple[dict[str, object], Image.Image | None]] = []
    for row, (path, each) in enumerate(prepared):
        rounded = [round(score, 4) for score in scores[row].tolist()]
        answer: dict[str, object] = {
            "file": str(path),
            "classes": [names[number] for number in order[row].tolist()],
            measure: dict(zip(names, rounded, strict=True)),
            "polarity": each.polarity,
            "blank": each.polarity is not None and not each.pixels.any(),
        }
        picture = None
        if drawn is not None:
            strip = np.concatenate([each.pixels, *drawn[row].numpy()], axis=2)  # (C, H, W · (1+N))
            picture = Image.fromarray(to_bytes(strip).transpose(1, 2, 0).squeeze())
        found.append((answer, picture))
    return found


def _describe(answer: dict[str, object]) -> str:
    """One line for people."""
    scores = answer.get("lengths", answer.get("probabilities"))
    classes = answer["classes"]
    assert isinstance(scores, dict)
    assert isinstance(classes, list)
    said = ", ".join(f"{name} ({scores[name]:.2f})" for name in classes)
    if answer["blank"]:
        return f"{answer['file']}: there is no ink in it; the network answers {said}"
    note = "; dark on light" if answer["polarity"] == "dark on light" else ""
    return f"{answer['file']}: {said}{note}"


def _print_csv(answers: Sequence[dict[str, object]], names: Sequence[str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    drawn = ["reconstruction"] if any("reconstruction" in answer for answer in answers) else []
    writer.writerow(["file", "classes", "polarity", "blank", *drawn, *names])
    for answer in answers:
        scores = answer.get("lengths", answer.get("probabilities"))
        classes = answer["classes"]
        assert isinstance(scores, dict)
        assert isinstance(classes, list)
        row = [
            answer["file"],
            "; ".join(classes),
            answer["polarity"] or "",
            str(answer["blank"]).lower(),
            *(answer[column] for column in drawn),
        ]
        writer.writerow([*row, *(scores[name] for name in names)])
    sys.stdout.write(text.getvalue())
