"""Finished runs written by hand: what experiments see of a run, without the training."""

from pathlib import Path

from capsnet.machine import file_digest
from capsnet.models import model_from_config
from capsnet.models.weights import save_weights
from capsnet.training import configure
from capsnet.training.config import to_dict
from capsnet.training.records import describe_environment, write_json

ORIGINS = {
    "mnist-40": "MNIST, placed at random in 40×40",
    "affnist": "affNIST-style, regenerated from MNIST",
}
TINY: dict[str, object] = {"conv_channels": 4, "primary_types": 2, "primary_dim": 3}


def write_run(
    folder: Path,
    preset: str,
    *,
    error: float,
    seed: int = 0,
    steps: int = 1000,
    with_weights: bool = False,
    changes: dict[str, object] | None = None,
    others: dict[str, float] | None = None,
    earlier: dict[str, object] | None = None,
) -> Path:
    """A run that made `steps` updates and came to this test error, and to others on other sets."""
    config = configure(preset, {"steps": steps, "seed": seed, **(changes or {})})
    size = 60_000_000 if config.data.name == "multimnist" else 60_000
    folder.mkdir(parents=True)
    weights = folder / "weights.safetensors"
    if with_weights:
        save_weights(weights, model_from_config(config.model), {"config": to_dict(config)})
    else:
        weights.write_bytes(b"")
    metrics = {
        name: {
            "dataset": name,
            "split": "validation" if config.data.held_out else "test",
            "origin": ORIGINS.get(name, "made up"),
            "num_examples": 10_000,
            "error_rate": rate,
        }
        for name, rate in {config.data.name: error, **(others or {})}.items()
    }
    record = {
        "preset": preset,
        "config": to_dict(config),
        "seed": seed,
        "steps": steps,
        "epochs": steps / (size // config.batch_size),
        "seconds": 60.0,
        "metrics": metrics,
        **describe_environment(),
        "files": {weights.name: file_digest(weights) if with_weights else f"{folder.name} {error}"},
        **({} if earlier is None else {"earlier": earlier}),
    }
    write_json(folder / "result.json", record)
    return folder
