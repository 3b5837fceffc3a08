"""Trained networks as files that run without this package: ONNX and torch.export.

The exported graph takes images of any batch size and answers with `lengths`, `capsules` and
`reconstruction`, the image that the longest capsule describes; a baseline answers with `logits`.
"""

import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from capsnet.checks import missing_library
from capsnet.machine import draft_of
from capsnet.models import CapsNet, Model

Format = Literal["onnx", "torch-export"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = 1e-5
"""Largest difference from PyTorch that an exported file may have, of outputs up to 1."""


class Exported(nn.Module):
    """A network whose outputs are a plain tuple of tensors, as graphs have them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Tensor, ...]:
        """Returns the outputs that `output_names` names."""
        if not isinstance(self.model, CapsNet):
            return (self.model(images),)
        if not self.model.config.decoder:
            output = self.model(images)
            return output.lengths, output.capsules
        output = self.model(images, reconstruct="prediction")
        return output.lengths, output.capsules, output.reconstruction


def output_names(model: Model) -> tuple[str, ...]:
    """Returns the names of an exported network's outputs, in order."""
    if not isinstance(model, CapsNet):
        return ("logits",)
    return ("lengths", "capsules", "reconstruction")[: 3 if model.config.decoder else 2]


def export_model(
    model: Model,
    path: Path,
    *,
    format: Format,
    images: Float[Tensor, "B C H W"],
    class_names: Sequence[str] = (),
) -> dict[str, float]:
    """Writes a network as one file and returns each output's largest difference from PyTorch.

    Where outputs are larger than 1, as logits are, the difference is that relative to the largest.

    The file is written under a temporary name, read back and run on the images, whole and one
    alone; it gets its name only if every output is within 1e-5 of PyTorch's.

    Args:
        model: The network, for inference.
        path: The file.
        format: "onnx" (needs the extra `export`) or "torch-export".
        images: Real images to check the file with, at least 2.
        class_names: What the classes are called, stored in the file's metadata.
    """
    if format not in SUFFIXES:
        raise ValueError(f"format must be one of {', '.join(SUFFIXES)}, got {format!r}")
    if path.suffix != SUFFIXES[format]:
        raise ValueError(f"a file of {format} must end in {SUFFIXES[format]}, got {path.name}")
    if len(images) < 2:
        raise ValueError(f"the check of an export needs at least 2 images, got {len(images)}")
    if format == "onnx":
        _require_onnx()
    network = Exported(_stored_plainly(model)).eval()
    with draft_of(path) as draft, _quiet():
        program = torch.export.export(
            network,
            (images[:2],),
            dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
        )
        write = _write_onnx if format == "onnx" else _write_program
        write(program, draft, output_names(model), {"class_names": json.dumps(class_names)})
        differences = _compare(network, draft, format, images)
        for name, difference in differences.items():
            if not difference <= TOLERANCE:
                raise FloatingPointError(
                    f"the exported {name} differ from PyTorch's by {difference:.1e}, "
                    f"more than {TOLERANCE:.0e}; nothing was written"
                )
    return differences


def _stored_plainly(model: Model) -> Model:
    """A copy whose weights lie in memory as their shapes say, which files of graphs insist on."""
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data = parameter.data.contiguous()
    return plain


def _require_onnx() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise missing_library("export to ONNX", name, "export")


def _write_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    names: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    written = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["images"],
        output_names=list(names),
        dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}},
        verbose=False,
    )
    assert written is not None
    written.model.metadata_props.update(metadata)
    written.save(path, external_data=False)


def _write_program(
    program: torch.export.ExportedProgram,
    path: Path,
    names: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    extra = {**metadata, "output_names": json.dumps(names)}
    # Into memory first: where PyTorch cannot write a file, it raises what is no OSError, or aborts.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=extra)
    path.write_bytes(content.getbuffer())


@torch.no_grad()
def _compare(
    network: Exported, path: Path, format: Format, images: Float[Tensor, "B C H W"]
) -> dict[str, float]:
    """Differences of a file's outputs from PyTorch's, for all images and for one alone."""
    differences = dict.fromkeys(output_names(network.model), 0.0)
    for batch in (images, images[:1]):
        expected = network(batch)
        found = _run_onnx(path, batch) if format == "onnx" else _run_program(path, batch)
        for name, ours, theirs in zip(differences, expected, found, strict=True):
            difference = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1))
            differences[name] = float(np.maximum(differences[name], difference))  # keeps NaN
    return differences


def _run_onnx(path: Path, images: Tensor) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(value) for value in session.run(None, {"images": images.numpy()})]


def _run_program(path: Path, images: Tensor) -> list[Tensor]:
    with path.open("rb") as file:  # by its name PyTorch would not take a draft for such a file
        return list(torch.export.load(file).module()(images))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch's exporter says about itself and a user can do nothing about."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "torchvision is not installed": it is not needed
    try:
        with warnings.catch_warnings():
            # torch 2.13 still asks isinstance(treespec, LeafSpec) when it copies a graph.
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
