"""`capsnet export`: a trained model as ONNX or torch.export, or its weights in half precision."""

from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from capsnet.cli import Flag
from capsnet.data import DataConfig, load_split
from capsnet.models.export import SUFFIXES, Format, export_model
from capsnet.models.weights import save_weights
from capsnet.playground.networks import TrainedNetwork, load_networks
from capsnet.playground.pictures import prepare_image, to_bytes

NUM_CHECKED = 20
HALF_SUFFIX = ".safetensors"


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
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; capsnet evaluate {path} tests it")
        return 0
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
