"""Trained networks by name, with what their records say of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from PIL import Image
from torch import Tensor

from capsnet.data.augment import standardise
from capsnet.data.catalogue import STANDARDISED
from capsnet.data.folder import turn_upright
from capsnet.models import CapsNet, Model
from capsnet.models.weights import WEIGHTS
from capsnet.playground.pictures import BOX, PAIR_BOX, Prepared, open_image, prepare_image
from capsnet.training.checkpoint import load_model_and_record
from capsnet.training.evaluation import class_probabilities

BATCH_SIZE = 64
"""Images that are classified at once."""

_DIGIT_DATASETS = ("mnist", "multimnist", "mnist-40", "affnist")
_UNCROPPED = {"cifar10": 32}  # §7: the network sees the central 24×24 of these


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network with its name and what is known of its training."""

    name: str
    """What requests call it."""
    model: Model
    """The network, ready for inference."""
    record: dict[str, object]
    """The record of its file."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes are called: by the record, else by their numbers."""
        num_classes = self.model.config.num_classes
        names = self.record.get("class_names")
        if isinstance(names, list) and len(names) == num_classes:
            return tuple(str(name) for name in names)
        return tuple(str(number) for number in range(num_classes))

    @property
    def dataset(self) -> str | None:
        """What the network was trained on, by the record."""
        config = self.record.get("config")
        data = config.get("data") if isinstance(config, dict) else None
        name = data.get("name") if isinstance(data, dict) else None
        return name if isinstance(name, str) else None

    @property
    def sees_digits(self) -> bool:
        """Whether the network was trained on digits in MNIST's form; unknown counts as yes."""
        is_grey = self.model.config.image_channels == 1
        return is_grey and (self.dataset is None or self.dataset in _DIGIT_DATASETS)

    @property
    def labels_per_image(self) -> int:
        """How many classes an image of the network's training set shows."""
        return 2 if self.dataset == "multimnist" else 1

    @property
    def error_rate(self) -> float | None:
        """Test error by the record, as a share."""
        metrics = self.record.get("metrics")
        for each in metrics.values() if isinstance(metrics, dict) else ():
            if isinstance(each, dict) and each.get("split") == "test":
                rate = each.get("error_rate")
                return rate if isinstance(rate, float) else None
        return None

    @property
    def capsules(self) -> CapsNet:
        """The network, if it is one of capsules."""
        if not isinstance(self.model, CapsNet):
            raise ValueError(f"weights {self.name!r} are of a baseline, which has no capsules")
        return self.model

    def prepare(self, image: Image.Image, num_digits: int = 1) -> Prepared:
        """Returns a picture, of one digit or two over each other, as in this network's training."""
        channels, height, width = self.model.config.image_shape
        if self.dataset not in _UNCROPPED:
            box = PAIR_BOX if num_digits > 1 else BOX
            shape = (channels, height, width)
            return prepare_image(image, shape, digit=self.sees_digits, box=box)
        size = max(_UNCROPPED[self.dataset], height, width)
        whole = prepare_image(image, (channels, size, size), digit=False).pixels
        top, left = (size - height) // 2, (size - width) // 2
        return Prepared(whole[:, top : top + height, left : left + width], None)

    def to_input(self, images: Float32[np.ndarray, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Returns intensities in [0, 1] as the network's input, standardised if need be."""
        if not np.isfinite(images).all() or images.min() < 0 or images.max() > 1:
            raise ValueError("intensities must be numbers from 0 to 1")
        return torch.from_numpy(standardise(images) if self.dataset in STANDARDISED else images)

    @torch.inference_mode()
    def score(
        self, images: Float32[np.ndarray, "B C H W"]
    ) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K E"] | None]:
        """Returns the lengths of the class capsules and these, or a baseline's probabilities."""
        if isinstance(self.model, CapsNet):
            output = self.model(self.to_input(images))
            return output.lengths, output.capsules
        return class_probabilities(self.model(self.to_input(images)), self.labels_per_image), None


def load_networks(sources: Sequence[str]) -> list[TrainedNetwork]:
    """Returns trained networks, each named as shipped or by the run or file it comes from.

    Args:
        sources: Shipped names, run directories or files; a name may stand only once.
    """
    loaded: list[TrainedNetwork] = []
    for source in sources:
        path = Path(source)
        path = path.parent if path.name == WEIGHTS else path
        name = path.resolve().name if path.is_dir() else path.stem
        if not name.isprintable():  # bytes that are no text could not be sent to the page
            raise ValueError(f"the name of weights must be text, got {name!r}; rename them")
        if any(each.name == name for each in loaded):
            raise ValueError(f"two sets of weights are named {name!r}; rename one of them")
        loaded.append(TrainedNetwork(name, *load_model_and_record(source)))
    return loaded


def classify(
    images: Iterable[str | Path | Image.Image], *, weights: str | Path = "mnist"
) -> list[dict[str, float]]:
    """Returns for each image its classes, the most probable first, with their lengths.

    An image is brought into the form that the network was trained on, as `capsnet predict` does.
    A baseline, which has no capsules, gives probabilities.

    Args:
        images: Files of images, or images of Pillow's, of any size and mode.
        weights: Shipped name, run directory or weights file.

    >>> page = Image.new("L", (90, 60), color=255)
    >>> page.paste(0, (40, 10, 46, 50))  # a black stroke on white
    >>> [lengths] = classify([page])
    >>> next(iter(lengths))
    '1'
    """
    if isinstance(images, str | Path | Image.Image):
        raise ValueError(f"images must be a list, got one image; write [{images!r}]")
    [network] = load_networks([str(weights)])
    pixels = [network.prepare(_open(image)).pixels for image in images]
    answers = []
    for start in range(0, len(pixels), BATCH_SIZE):
        scores, _ = network.score(np.stack(pixels[start : start + BATCH_SIZE]))
        for row in scores.tolist():
            named = zip(network.class_names, row, strict=True)
            answers.append(dict(sorted(named, key=lambda pair: -pair[1])))
    return answers


def _open(image: object) -> Image.Image:
    if isinstance(image, Image.Image):
        return turn_upright(image.copy())
    if not isinstance(image, str | PathLike):
        kind = type(image).__name__
        raise ValueError(f"images must be files or Pillow's (Image.fromarray), got {kind}")
    try:
        return open_image(Path(image).read_bytes(), max_side=None)
    except ValueError as error:
        raise ValueError(f"{image}: {error}") from None
