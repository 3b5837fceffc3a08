"""The two losses of the paper: margin (Eq. 4) and reconstruction (§4.1)."""

from jaxtyping import Float, Shaped
from torch import Tensor


def margin_loss(
    lengths: Float[Tensor, "B K"],
    targets: Shaped[Tensor, "B K"],
    *,
    upper: float = 0.9,
    lower: float = 0.1,
    absent_weight: float = 0.5,
) -> Float[Tensor, ""]:
    """Returns the margin loss, summed over classes, averaged over the batch (Eq. 4).

    Args:
        lengths: Lengths of the class capsules, (B, K).
        targets: 1 where the class is present and 0 elsewhere; several ones are allowed, (B, K).
        upper: m⁺, the length above which a present class costs nothing.
        lower: m⁻, the length below which an absent class costs nothing.
        absent_weight: λ, which keeps the first steps from shrinking all capsules.

    >>> import torch
    >>> margin_loss(torch.tensor([[0.8, 0.3]]), torch.tensor([[1, 0]]))  # 0.1² + 0.5 · 0.2²
    tensor(0.0300)
    """
    if lengths.ndim != 2 or lengths.shape != targets.shape:
        raise ValueError(
            "margin_loss needs lengths and targets of one shape (B, K), 1 for a class that is "
            f"there (F.one_hot), got {tuple(lengths.shape)} and {tuple(targets.shape)}"
        )
    present = targets.to(lengths.dtype)
    too_short = (upper - lengths).clamp(min=0).square()
    too_long = (lengths - lower).clamp(min=0).square()
    return (present * too_short + absent_weight * (1 - present) * too_long).sum(dim=1).mean()


def reconstruction_loss(
    reconstruction: Float[Tensor, "B *image"], images: Float[Tensor, "B *image"]
) -> Float[Tensor, ""]:
    """Returns the sum of squared differences of each image, averaged over the batch (§4.1).

    It is not scaled: the weight it takes in the total loss is the caller's to state.

    >>> import torch
    >>> reconstruction_loss(torch.zeros(2, 1, 3, 3), torch.full((2, 1, 3, 3), 2.0))
    tensor(36.)
    """
    if reconstruction.shape != images.shape:
        raise ValueError(
            "reconstruction_loss needs reconstruction and images of one shape, "
            f"got {tuple(reconstruction.shape)} and {tuple(images.shape)}"
        )
    return (reconstruction - images).square().flatten(1).sum(dim=1).mean()
