"""Capsule layers inside a model of one's own: two routed layers, learning a few MNIST digits.

Run: python examples/own_model.py [steps]
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn

from capsnet.data import DataConfig, load_split
from capsnet.functional import margin_loss
from capsnet.layers import ConvCapsules, DenseCapsules, PrimaryCapsules


class DeepCapsules(nn.Module):
    """A convolution, primary capsules, convolutional capsules and ten class capsules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, kernel_size=5, stride=2)
        self.primary = PrimaryCapsules(32, num_types=8, capsule_dim=4, kernel_size=5, stride=2)
        self.parts = ConvCapsules(8, 4, out_types=6, out_dim=8, kernel_size=3)
        self.digits = DenseCapsules(2 * 2 * 6, 8, out_capsules=10, out_dim=12)

    def forward(self, images: Tensor) -> Tensor:
        """Lengths of the class capsules."""
        grid = self.primary(self.conv(images).relu())  # (B, 4, 4, 8, 4)
        parts = self.parts(grid)  # (B, 2, 2, 6, 8)
        capsules = self.digits(parts.flatten(1, 3))  # (B, 10, 12)
        lengths: Tensor = torch.linalg.vector_norm(capsules, dim=-1)  # (B, 10)
        return lengths


def main(num_steps: int = 300) -> float:
    torch.manual_seed(0)
    model = DeepCapsules()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, test = (load_split(DataConfig("mnist"), split) for split in ("train", "test"))
    for step in range(num_steps):
        epoch, place = divmod(step, len(train) // 64)
        batch = train.train_batch(np.arange(place * 64, (place + 1) * 64), seed=0, epoch=epoch)
        targets = nn.functional.one_hot(batch.labels[:, 0], 10).float()
        loss = margin_loss(model(batch.images), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step}: margin loss {loss.item():.3f}")
    batch = test.test_batch(np.arange(1000))
    with torch.no_grad():
        wrong = model(batch.images).argmax(dim=1) != batch.labels[:, 0]
    print(f"error on 1,000 test digits after {num_steps} steps: {wrong.float().mean():.1%}")
    return float(wrong.float().mean())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
