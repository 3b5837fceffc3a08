"""What the page asks of trained networks: predict, reconstruct, perturb, route and segment.

Nothing here knows of HTTP; images are arrays of intensities in [0, 1], answers are dataclasses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from capsnet.checks import unknown_name
from capsnet.data import DataConfig, Split, load_split
from capsnet.functional import RoutingStep, VoteSource
from capsnet.models import CapsNet
from capsnet.playground.networks import TrainedNetwork
from capsnet.playground.pictures import place_digit

Pixels = Float32[np.ndarray, "C H W"]

MAX_ITERATIONS = 10
NUM_PARTS = 8
"""Primary capsules listed for each class as the strongest parts."""


@dataclass(frozen=True)
class Prediction:
    """What a network says about one image."""

    classes: tuple[int, ...]
    """All classes, that of the longest capsule first."""
    lengths: Float[Tensor, " K"]
    """Lengths of the class capsules."""
    capsules: Float[Tensor, "K E"]
    """Their vectors."""
    reconstruction: Pixels | None
    """The image that the chosen capsule describes; None without a decoder."""
    reconstructed: int
    """The class that was chosen."""


@dataclass(frozen=True)
class RoutingView:
    """One iteration of routing, seen from each class on the grid of primary capsules."""

    lengths: Float[Tensor, " K"]
    """Lengths of the class capsules after this iteration."""
    coupling: Float[Tensor, "K gridH gridW"]
    """Share of their output that the primary capsules of a place send to the class."""
    agreement: Float[Tensor, "K gridH gridW"]
    """What they contribute along the class's output: Σ c û·v over the types of the place."""


@dataclass(frozen=True)
class Part:
    """A primary capsule that contributes much to a class."""

    row: int
    """Its place on the grid."""
    column: int
    """Its place on the grid."""
    type: int
    """Its type."""
    coupling: tuple[float, ...]
    """The share it sends to the class in each iteration."""
    contribution: float
    """c û·v in the last iteration."""


@dataclass(frozen=True)
class Routing:
    """How the primary capsules of one image chose their parents."""

    iterations: tuple[RoutingView, ...]
    """Every iteration."""
    parts: tuple[tuple[Part, ...], ...]
    """The strongest parts of each class."""
    field: int
    """Rows and columns of the image that one primary capsule sees."""
    stride: int
    """Pixels between the fields of neighbouring places."""
    start: int
    """Row and column of the first field; below zero where convolutions are padded."""


@dataclass(frozen=True)
class Segmentation:
    """Two digits taken apart (§6)."""

    image: Pixels
    """What the network saw."""
    lengths: Float[Tensor, " K"]
    """Lengths of the class capsules."""
    predicted: tuple[int, ...]
    """Classes of the two longest capsules, the longest first."""
    parts: tuple[tuple[int, Pixels], ...]
    """Class and reconstruction of each part; where the digits are known, in their order."""


class Engine:
    """Answers questions about a set of trained networks, by name.

    Args:
        weights: The networks.
    """

    def __init__(self, weights: Sequence[TrainedNetwork]) -> None:
        if not weights:
            raise ValueError("the engine needs at least one set of weights")
        self.weights = {each.name: each for each in weights}

    def find(self, name: str) -> TrainedNetwork:
        """Returns the weights of a name; only names given at the start are known."""
        if name not in self.weights:
            raise unknown_name("weights", name, self.weights)
        return self.weights[name]

    @cached_property
    def digits(self) -> Split:
        """The MNIST test set."""
        return load_split(DataConfig("mnist"), "test")

    def test_digit(self, index: int) -> tuple[Float32[np.ndarray, "28 28"], int]:
        """Returns a digit of the MNIST test set and its label."""
        if not 0 <= index < len(self.digits):
            raise ValueError(f"test digits are 0 to {len(self.digits) - 1}, got {index}")
        batch = self.digits.test_batch(np.array([index]))
        return batch.images[0, 0].numpy(), int(batch.labels[0, 0])

    @torch.inference_mode()
    def predict(
        self,
        name: str,
        image: Pixels,
        *,
        num_iterations: int | None = None,
        reconstruct: int | None = None,
    ) -> Prediction:
        """Returns class capsules of an image, and what one of them describes.

        Args:
            name: Weights to use.
            image: Intensities, (C, H, W).
            num_iterations: Iterations of routing; as trained if None.
            reconstruct: Class to decode; that of the longest capsule if None.
        """
        weights = self.find(name)
        model = weights.capsules
        if reconstruct is not None:
            _check_class(model, reconstruct)
        _, _, steps = _run(weights, image, num_iterations)
        capsules = steps[-1].outputs[0]  # (K, E)
        lengths = torch.linalg.vector_norm(capsules, dim=-1)  # (K,)
        order = tuple(lengths.argsort(descending=True).tolist())
        chosen = order[0] if reconstruct is None else reconstruct
        picture = None
        if model.config.decoder:
            picture = model.decode(capsules[None], torch.tensor([chosen]))[0].numpy()
        return Prediction(order, lengths, capsules, picture, chosen)

    @torch.inference_mode()
    def perturb(
        self,
        name: str,
        capsule: Float[Tensor, " E"],
        *,
        number: int,
        dimensions: Sequence[int],
        offsets: Sequence[float],
    ) -> Float32[np.ndarray, "dims offsets C H W"]:
        """Returns images of a capsule whose dimensions are moved one at a time (§5.1, Fig. 4).

        Args:
            name: Weights to use.
            capsule: The vector, (E,).
            number: The class it belongs to.
            dimensions: Dimensions to move.
            offsets: What to add to each.
        """
        model = self.find(name).capsules
        _check_class(model, number)
        size = model.config.output_dim
        if capsule.shape != (size,):
            shape = " × ".join(str(count) for count in capsule.shape)
            raise ValueError(f"a capsule must have {size} numbers, got {shape}")
        for dimension in dimensions:
            if not 0 <= dimension < size:
                raise ValueError(f"dimensions are 0 to {size - 1}, got {dimension}")
        vectors = capsule.expand(len(dimensions), len(offsets), size).clone()
        for row, dimension in enumerate(dimensions):
            vectors[row, :, dimension] += torch.tensor(offsets)
        pictures = _decode(model, vectors.flatten(0, 1), number)
        grid: Float32[np.ndarray, "dims offsets C H W"] = torch.unflatten(
            pictures, 0, (len(dimensions), len(offsets))
        ).numpy()
        return grid

    def reconstruct(self, name: str, capsule: Float[Tensor, " E"], *, number: int) -> Pixels:
        """Returns the image that a capsule's vector describes (§4.1)."""
        picture: Pixels = self.perturb(
            name, capsule, number=number, dimensions=(0,), offsets=(0.0,)
        )[0, 0]
        return picture

    @torch.inference_mode()
    def route(self, name: str, image: Pixels, *, num_iterations: int | None = None) -> Routing:
        """Returns where on the grid the primary capsules send their output, iteration by iteration.

        Args:
            name: Weights to use.
            image: Intensities, (C, H, W).
            num_iterations: Iterations of routing; as trained if None.
        """
        weights = self.find(name)
        grid, votes, steps = _run(weights, image, num_iterations)
        activity = torch.linalg.vector_norm(grid[0], dim=-1, keepdim=True)  # (H, W, T, 1)
        share = activity / activity.sum(dim=2, keepdim=True).clamp(min=1e-12)
        places = grid.shape[1:4]  # (H, W, T)
        views, couplings = [], []
        for step in steps:
            coupling = torch.unflatten(step.coupling[0], 0, places)  # (H, W, T, K)
            agreement = torch.unflatten(votes.agreement(step.outputs)[0], 0, places)
            contribution = coupling * agreement  # (H, W, T, K)
            couplings.append(coupling)
            views.append(
                RoutingView(
                    lengths=torch.linalg.vector_norm(step.outputs[0], dim=-1),
                    coupling=(share * coupling).sum(dim=2).permute(2, 0, 1),  # (K, H, W)
                    agreement=contribution.sum(dim=2).permute(2, 0, 1),
                )
            )
        parts = _strongest_parts(contribution, torch.stack(couplings))
        config = weights.capsules.config
        start = -sum(config.paddings)
        return Routing(tuple(views), parts, config.field, config.primary_stride, start)

    @torch.inference_mode()
    def segment(
        self,
        name: str,
        digits: Sequence[Float32[np.ndarray, "28 28"]],
        *,
        shifts: Sequence[tuple[int, int]],
        classes: Sequence[int] | None = None,
    ) -> tuple[Segmentation, tuple[Pixels, ...]]:
        """Returns two overlapping digits taken apart, and each of them as it really was (§6).

        Args:
            name: Weights to use.
            digits: Two light digits of 28×28.
            shifts: Pixels that each is moved right and down.
            classes: Two classes to reconstruct instead of the predicted ones.
        """
        weights = self.find(name)
        model = weights.capsules
        shape, num_classes = model.config.image_shape, model.config.num_classes
        if num_classes < len(digits):
            raise ValueError(f"{len(digits)} digits need as many classes, got {num_classes}")
        truth = tuple(
            place_digit(digit, shape, right=right, down=down)
            for digit, (right, down) in zip(digits, shifts, strict=True)
        )
        image = np.clip(np.sum(truth, axis=0, dtype=np.float32), 0, 1)  # §6.1: clipped at white
        _, _, steps = _run(weights, image, None)
        capsules = steps[-1].outputs
        lengths = torch.linalg.vector_norm(capsules[0], dim=-1)
        predicted = tuple(lengths.topk(len(digits)).indices.tolist())
        chosen = tuple(classes) if classes is not None else predicted
        for number in chosen:
            _check_class(model, number)
        pictures = model.decode(capsules, torch.tensor([chosen]))[0].numpy()  # (N, C, H, W)
        parts = list(zip(chosen, pictures, strict=True))
        if classes is None:  # the order in which the parts are nearest to the digits
            parts = list(
                min(
                    permutations(parts),
                    key=lambda order: sum(
                        float(np.square(picture - digit).sum())
                        for (_, picture), digit in zip(order, truth, strict=True)
                    ),
                )
            )
        return Segmentation(image, lengths, predicted, tuple(parts)), truth


def _run(
    weights: TrainedNetwork, image: Pixels, num_iterations: int | None
) -> tuple[Tensor, VoteSource, tuple[RoutingStep, ...]]:
    """Primary capsules, their votes, and every iteration of routing, for one image."""
    model = weights.capsules
    if num_iterations is not None and not 1 <= num_iterations <= MAX_ITERATIONS:
        raise ValueError(f"num_iterations must be 1 to {MAX_ITERATIONS}, got {num_iterations}")
    grid = model.encode(weights.to_input(image[None]))  # (1, H, W, T, D)
    primary = grid.flatten(1, 3)  # (1, I, D)
    steps = model.classes.iterate(primary, num_iterations)
    return grid, model.classes.vote(primary), tuple(steps)


def _decode(model: CapsNet, vectors: Float[Tensor, "B E"], number: int) -> Float[Tensor, "B C H W"]:
    """Images of vectors of one class."""
    capsules = vectors.new_zeros(len(vectors), model.config.num_classes, vectors.shape[1])
    capsules[:, number] = vectors
    return model.decode(capsules, torch.full((len(vectors),), number))


def _check_class(model: CapsNet, number: int) -> None:
    if not 0 <= number < model.config.num_classes:
        raise ValueError(f"classes are 0 to {model.config.num_classes - 1}, got {number}")


def _strongest_parts(
    contribution: Float[Tensor, "H W T K"], couplings: Float[Tensor, "iterations H W T K"]
) -> tuple[tuple[Part, ...], ...]:
    _, width, types, num_classes = contribution.shape
    flat = contribution.flatten(0, 2)  # (I, K)
    paths = couplings.flatten(1, 3)  # (iterations, I, K)
    top = flat.topk(min(NUM_PARTS, len(flat)), dim=0).indices  # (parts, K)
    return tuple(
        tuple(
            Part(
                row=index // (width * types),
                column=index // types % width,
                type=index % types,
                coupling=tuple(paths[:, index, number].tolist()),
                contribution=float(flat[index, number]),
            )
            for index in top[:, number].tolist()
        )
        for number in range(num_classes)
    )
