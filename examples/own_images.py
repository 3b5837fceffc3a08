"""One's own images, from a folder to predictions: draw shapes, train on them, recognise new ones.

Run: python examples/own_images.py [folder for images and run]
"""

import random
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import capsnet
from capsnet.training import configure, train

SIZE = 24


def draw(shape: str, randomness: random.Random) -> Image.Image:
    """A shape somewhere on a dark picture; your own pictures would take its place."""
    image = Image.new("RGB", (SIZE, SIZE), (20, 20, 40))
    left, top, side = (randomness.randint(*span) for span in ((2, 8), (2, 8), (10, 14)))
    pen = ImageDraw.Draw(image)
    box = (left, top, left + side, top + side)
    pen.ellipse(box, fill="orange") if shape == "circle" else pen.rectangle(box, fill="orange")
    return image


def main(folder: Path, *, num_images: int = 60, epochs: int = 40) -> int:
    randomness = random.Random(0)
    for shape in ("circle", "square"):
        (folder / "images" / shape).mkdir(parents=True, exist_ok=True)
        for number in range(num_images):
            draw(shape, randomness).save(folder / "images" / shape / f"{number}.png")
    config = configure(
        "folder",
        {
            "epochs": epochs,
            "batch_size": 16,
            "data": {"data_dir": folder / "images", "image_size": SIZE},
            "model": {"conv_channels": 16, "primary_types": 4, "output_dim": 8},
        },
    )
    run = folder / "run"
    train(config, run, resume=run.exists())  # a second call goes on from the first, or uses it
    shapes = ("circle", "square") * 10
    answers = capsnet.classify([draw(shape, randomness) for shape in shapes], weights=run)
    best = [next(iter(lengths)) for lengths in answers]  # the class of the longest capsule
    num_right = sum(ours == shape for ours, shape in zip(best, shapes, strict=True))
    print(f"{num_right} of {len(shapes)} new shapes are recognised")
    return num_right


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
