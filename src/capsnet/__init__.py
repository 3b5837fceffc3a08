"""Dynamic Routing Between Capsules (Sabour, Frosst, Hinton, 2017) in PyTorch.

`capsnet.functional` holds the mathematics, `capsnet.layers` modules to build with, and
`capsnet.models` the networks of the paper.
"""

from capsnet import functional, layers, models
from capsnet.models import CNN, CapsNet, CapsNetConfig, CNNConfig, build_model, list_models
from capsnet.models.weights import load

__all__ = [
    "CNN",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "build_model",
    "functional",
    "layers",
    "list_models",
    "load",
    "models",
]

__version__ = "0.1.0"
