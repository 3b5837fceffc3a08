"""What a step of training minimises, and at which learning rate."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capsnet.data import Batch
from capsnet.functional import margin_loss, reconstruction_loss
from capsnet.models import CapsNetConfig
from capsnet.training.config import TrainConfig

#: The paper's schedule: factor of one period, and the rate that the authors' code never goes below.
PAPER_DECAY, PAPER_FLOOR = 0.96, 1e-6


class Losses(NamedTuple):
    """What a batch costs, averaged over its images."""

    total: Float[Tensor, ""]
    """What is minimised."""

    classification: Float[Tensor, ""]
    """Margin loss (Eq. 4), or a baseline's cross-entropy."""

    reconstruction: Float[Tensor, ""]
    """Summed squared error of the reconstructions (§4.1), before its weight."""

    num_errors: Float[Tensor, ""]
    """Images of the batch whose labels are not the strongest classes."""


def find_not_finite(loss: float, gradients: Iterable[Tensor]) -> str | None:
    """Returns what would ruin the weights, if something would.

    >>> find_not_finite(1.0, [torch.tensor([3.0, math.inf])])
    'the gradient became inf'
    """
    norm = float(torch.nn.utils.get_total_norm(gradients))
    for name, value in (("loss", loss), ("gradient", norm)):
        if not math.isfinite(value):
            return f"the {name} became {value}"
    return None


def learning_rate(config: TrainConfig, step: int, num_steps: int, *, first_step: int = 0) -> float:
    """Returns the learning rate of update `step` (from 0) of `num_steps`.

    The paper's schedule decays continuously by ×0.96 every `decay_steps`. The cosine schedule
    rises linearly over the warm-up and falls to zero over the run, which begins at `first_step`
    where it continues another.

    Differs from the paper: the cosine schedule, the default, is for runs hundreds of times
    shorter than the authors' 300,000 steps.
    """
    if config.schedule == "paper":
        decayed = config.learning_rate * PAPER_DECAY ** (step / config.decay_steps)
        return float(max(decayed, min(PAPER_FLOOR, config.learning_rate)))
    step, num_steps = step - first_step, num_steps - first_step
    warmup = min(config.warmup_steps, num_steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def compute_losses(forward: nn.Module, batch: Batch, config: TrainConfig) -> Losses:
    """Returns the losses of a batch: margin and reconstruction, or cross-entropy (§3, §4.1, §5).

    Args:
        forward: a CapsNet or CNN, compiled or not.
        batch: images, labels, and what each label's reconstruction should be.
        config: margins and the weight of the reconstruction.
    """
    images, labels, targets = batch
    zero = images.new_zeros(())
    present = F.one_hot(labels, config.model.num_classes).sum(dim=1).float()  # (B, K)
    if isinstance(config.model, CapsNetConfig):
        decode = config.model.decoder and config.reconstruction_weight > 0
        output = forward(images, reconstruct=labels if decode else None)
        scores = output.lengths.float()  # (B, K)
        classification = margin_loss(
            scores,
            present,
            upper=config.upper,
            lower=config.lower,
            absent_weight=config.absent_weight,
        )
        # §4.1, §6.2: the true labels are decoded, two digits each on its own; their losses add.
        reconstruction = (
            reconstruction_loss(output.reconstruction.float(), targets) if decode else zero
        )
        total = classification + config.reconstruction_weight * reconstruction
    else:
        scores = forward(images).float()  # (B, K)
        if labels.shape[1] == 1:
            classification = F.cross_entropy(scores, labels[:, 0])
        else:  # §6.2: a sigmoid for each class; the authors' code has 1/2 as target of either digit
            classification = F.binary_cross_entropy_with_logits(scores, present, reduction="sum")
            classification = classification / len(images)
        total, reconstruction = classification, zero
    return Losses(total, classification, reconstruction, _count_errors(scores, present, labels))


def _count_errors(
    scores: Float[Tensor, "B K"], present: Float[Tensor, "B K"], labels: Int[Tensor, "B N"]
) -> Float[Tensor, ""]:
    strongest = scores.detach().topk(labels.shape[1], dim=1).indices  # (B, N)
    return (present.gather(1, strongest).amin(dim=1) == 0).float().sum()
