"""Dynamic Routing Between Capsules (Sabour, Frosst, Hinton, 2017) in PyTorch.

`capsnet.functional` holds the mathematics, `capsnet.layers` modules to build with, and
`capsnet.models` the networks of the paper.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from capsnet.machine import avoid_broken_tiles

if TYPE_CHECKING:
    from capsnet import functional, layers, models
    from capsnet.machine import keep_memory, prefer_onednn
    from capsnet.models import CNN, CapsNet, CapsNetConfig, CNNConfig, build_model, list_models
    from capsnet.playground.networks import classify
    from capsnet.training import load

__all__ = [
    "CNN",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "build_model",
    "classify",
    "functional",
    "keep_memory",
    "layers",
    "list_models",
    "load",
    "models",
    "prefer_onednn",
]

__version__ = "0.1.0"

avoid_broken_tiles()


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used: torch takes seconds, `capsnet --help` none."""
    if name not in __all__:
        raise AttributeError(f"module 'capsnet' has no attribute {name!r}")
    if name in ("functional", "layers", "models"):
        return import_module(f"capsnet.{name}")
    homes = {
        "classify": "capsnet.playground.networks",
        "keep_memory": "capsnet.machine",
        "load": "capsnet.training",
        "prefer_onednn": "capsnet.machine",
    }
    return getattr(import_module(homes.get(name, "capsnet.models")), name)
