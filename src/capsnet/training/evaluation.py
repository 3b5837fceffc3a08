"""How often one trained model, or several together, are wrong."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capsnet.data import Split
from capsnet.data.catalogue import STANDARDISED
from capsnet.functional import reconstruction_loss
from capsnet.models import CapsNet, Model, ModelConfig
from capsnet.training.config import check_count
from capsnet.training.processes import Processes

#: As many wrong examples as this are listed in a record.
MAX_WRONG = 1000
#: As many images as this show how routing settles.
NUM_TRACED = 100


@dataclass(frozen=True)
class WrongExample:
    """One example whose predicted classes are not its labels."""

    index: int
    """Its place in the split."""

    labels: tuple[int, ...]
    """The classes it shows."""

    predictions: tuple[int, ...]
    """The classes that were predicted, the strongest first."""

    file: str | None = None
    """Where it is, if it has a file of its own."""


@dataclass(frozen=True)
class Evaluation:
    """Errors on one split; rates are shares, 0.0025 is 0.25 %."""

    dataset: str
    """The dataset's name."""

    split: str
    """test, or validation for digits held out of the training set."""

    origin: str
    """Where the examples come from."""

    num_examples: int
    """Examples evaluated."""

    num_available: int
    """Examples in the split; more than evaluated if a part was chosen."""

    num_models: int
    """Models in the ensemble, 1 for one alone."""

    num_errors: int
    """Examples whose set of predicted classes is not exactly the set of labels."""

    error_rate: float
    """Share of those: the paper's test error, for two digits by exact set."""

    label_error_rate: float
    """Share of single labels missed: easier, half credit for one digit of two."""

    reconstruction_error: float | None
    """Summed squared error of an image reconstructed from its labels, averaged over images."""

    wrong: tuple[WrongExample, ...]
    """The wrong examples, at most 1,000 of them."""

    routing_changes: dict[str, list[float]] | None = None
    """What `routing_changes` says of the first images; None for baselines and ensembles."""

    def to_dict(self) -> dict[str, object]:
        """Plain dictionary, as result.json holds it."""
        plain = asdict(self)
        plain["wrong"] = [
            {
                "index": example.index,
                "labels": list(example.labels),
                "predictions": list(example.predictions),
                **({} if example.file is None else {"file": example.file}),
            }
            for example in self.wrong
        ]
        return plain

    def summary(self) -> dict[str, object]:
        """The same without the wrong examples, for the log and for weights."""
        return {name: value for name, value in self.to_dict().items() if name != "wrong"}

    def describe(self) -> str:
        """One line for people."""
        is_part = self.num_examples != self.num_available
        spread = f", spread evenly over {self.num_available:,}" if is_part else ""
        made = f" ({self.origin})" if self.dataset == "affnist" else ""  # original or regenerated
        line = (
            f"{self.dataset} {self.split}{made}: {self.error_rate:.2%} error "
            f"({self.num_errors:,} wrong of {self.num_examples:,} examples{spread})"
        )
        if self.label_error_rate != self.error_rate:
            line += f"; single labels missed: {self.label_error_rate:.2%}"
        if self.reconstruction_error is not None:
            line += f"; reconstruction error {self.reconstruction_error:.1f} an image"
        return line


@torch.no_grad()
def evaluate(
    models: Sequence[Model],
    split: Split,
    *,
    num_examples: int | None = None,
    batch_size: int = 250,
    device: str = "cpu",
    processes: Processes | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Errors of a model, or of an ensemble by summed lengths, on a split as at test time.

    Args:
        models: one model or several; their scores are added (§7: an ensemble of 7).
        split: the examples.
        num_examples: how many of them, spread evenly over the split; None for all.
        batch_size: examples at once, over all processes together.
        device: where to compute.
        processes: others that share the work, each of which calls this function.
        watch: told before every batch, and at the end, how many examples of how many are done.

    Raises:
        FloatingPointError: if the models answer with what is no number, as ruined ones do.
    """
    check_models(models, split)
    check_count("num_examples", num_examples)
    check_count("batch_size", batch_size)
    processes = processes or Processes()
    count = min(num_examples or len(split), len(split))
    indices = np.arange(count) * len(split) // count  # exact: below 2⁶³ up to 10⁹ of 10⁹
    num_labels = split.labels_per_image
    predictions = torch.zeros(count, num_labels, dtype=torch.int64)
    labels = torch.zeros(count, num_labels, dtype=torch.int64)
    squared_error, num_ruined = torch.zeros(2, dtype=torch.float64)
    modes = [model.training for model in models]
    for model in models:
        model.to(device).eval()
    for start in range(0, count, batch_size):
        if watch is not None:
            watch(start, count)
        chunk = np.arange(start, min(start + batch_size, count))
        places = chunk[processes.slice_of(len(chunk))]
        if not places.size:
            continue
        batch = split.test_batch(indices[places])
        images = batch.images.to(device)
        scores, reconstructed = torch.zeros(len(places), split.num_classes, device=device), None
        for model in models:
            model_scores, reconstructed = _score(model, images, batch.labels.to(device))
            scores += model_scores
        rows = slice(int(places[0]), int(places[-1]) + 1)
        num_ruined += (~scores.isfinite()).any(dim=1).sum().cpu()
        predictions[rows] = scores.topk(num_labels, dim=1).indices.cpu()
        labels[rows] = batch.labels
        if len(models) == 1 and reconstructed is not None:
            mean = reconstruction_loss(reconstructed.cpu(), batch.targets)
            squared_error += mean.double() * len(places)
    if watch is not None:
        watch(count, count)
    changes: dict[str, list[float]] | None = None
    if processes.is_first and len(models) == 1 and isinstance(models[0], CapsNet):
        images = split.test_batch(indices[:NUM_TRACED]).images
        changes = routing_changes(models[0], images.to(device))
    for model, mode in zip(models, modes, strict=True):
        model.train(mode)
    processes.add_up(predictions, labels)
    processes.add_up(squared_error, num_ruined)
    if num_ruined > 0 or not squared_error.isfinite():
        raise FloatingPointError(
            f"the outputs for {split.name} are not all numbers: the weights are ruined, "
            "as too large a learning rate leaves them"
        )
    has_decoder = len(models) == 1 and isinstance(models[0], CapsNet) and models[0].config.decoder
    return _summarise(
        split,
        torch.from_numpy(indices),
        labels,
        predictions,
        num_models=len(models),
        reconstruction_error=squared_error.item() / count if has_decoder else None,
        changes=changes,
    )


@torch.no_grad()
def routing_changes(
    model: CapsNet, images: Float[Tensor, "B C H W"], num_iterations: int = 10
) -> dict[str, list[float]]:
    """Mean absolute changes of logits b_ij and coupling c_ij in each iteration (Fig. A.1).

    The network routes for `num_iterations`, however many it was trained with. By Procedure 1 a
    logit changes by the agreement, which need not vanish as routing settles, so the coupling's
    change is given too.
    """
    # One more: the logits of a step are those that the step before came to.
    steps = model.classes.iterate(model.encode(images).flatten(1, 3), num_iterations + 1)
    changes: dict[str, list[float]] = {"logits": [], "coupling": []}
    for before, after in pairwise(steps):
        changes["logits"].append(float((after.logits - before.logits).abs().mean()))
        changes["coupling"].append(float((after.coupling - before.coupling).abs().mean()))
    return changes


def check_models(models: Sequence[Model], split: Split) -> None:
    """Raises a ValueError unless every model takes the split's images and knows its classes."""
    if not models:
        raise ValueError("an evaluation needs at least one model")
    for model in models:
        check_fit(model.config, split)


def check_fit(config: ModelConfig, split: Split) -> None:
    """Raises a ValueError unless such a model takes the split's images and knows its classes."""
    if config.image_shape != split.image_shape:
        raise ValueError(
            f"images of {split.name} have shape {split.image_shape}, "
            f"but the model takes {config.image_shape}"
        )
    if config.num_classes != split.num_classes:
        raise ValueError(
            f"{split.name} has {split.num_classes} classes, "
            f"but the model knows {config.num_classes}"
        )


def check_origin(dataset: str | None, class_names: Sequence[str], split: Split) -> None:
    """Raises a ValueError unless the split shows what a model was trained on, prepared as there.

    Args:
        dataset: what it was trained on, if that is known.
        class_names: the classes of its training set.
        split: what it is to be evaluated on.
    """
    if tuple(class_names) != split.class_names:
        raise ValueError(
            f"the classes of {split.name} are {', '.join(split.class_names)}, "
            f"but the model was trained on {', '.join(class_names)}"
        )
    if dataset is not None and (dataset in STANDARDISED) != (split.name in STANDARDISED):
        is_ours = split.name in STANDARDISED
        raise ValueError(
            f"images of {split.name} are {'' if is_ours else 'not '}standardised, "
            f"but the model was trained on {dataset}, whose images are{' not' if is_ours else ''}"
        )


def class_probabilities(
    logits: Float[Tensor, "B K"], labels_per_image: int
) -> Float[Tensor, "B K"]:
    """What a baseline's logits say: one class excludes the others, or each stands for itself."""
    return logits.softmax(dim=1) if labels_per_image == 1 else logits.sigmoid()


def _score(
    model: Model, images: Float[Tensor, "B C H W"], labels: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B N C H W"] | None]:
    """Scores that ensembles may add: lengths, or a baseline's probabilities."""
    if isinstance(model, CapsNet):
        output = model(images, reconstruct=labels if model.config.decoder else None)
        return output.lengths.float(), output.reconstruction
    return class_probabilities(model(images).float(), labels.shape[1]), None


def _summarise(
    split: Split,
    indices: Int[Tensor, " n"],
    labels: Int[Tensor, "n N"],
    predictions: Int[Tensor, "n N"],
    *,
    num_models: int,
    reconstruction_error: float | None,
    changes: dict[str, list[float]] | None,
) -> Evaluation:
    found = (predictions[:, :, None] == labels[:, None, :]).any(dim=1)  # (n, N): label predicted
    is_wrong = ~found.all(dim=1)  # (n,)
    num_errors = int(is_wrong.sum())
    wrong = tuple(
        WrongExample(
            int(indices[row]),
            tuple(labels[row].tolist()),
            tuple(predictions[row].tolist()),
            None if split.files is None else _show_path(split.files[indices[row]]),
        )
        for row in is_wrong.nonzero().flatten().tolist()[:MAX_WRONG]
    )
    return Evaluation(
        dataset=split.name,
        split=split.split,
        origin=split.origin,
        num_examples=len(labels),
        num_available=len(split),
        num_models=num_models,
        num_errors=num_errors,
        error_rate=num_errors / len(labels),
        label_error_rate=int((~found).sum()) / found.numel(),
        reconstruction_error=reconstruction_error,
        wrong=wrong,
        routing_changes=changes,
    )


def _show_path(path: Path) -> str:
    """A path as text; its bytes need not be UTF-8, but a record's must."""
    return str(path).encode(errors="backslashreplace").decode()
