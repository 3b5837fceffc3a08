"""Capsule layers: modules that own weights, for use inside any `torch.nn.Module`."""

from capsnet.layers.conv import ConvCapsules
from capsnet.layers.convolution import Convolution
from capsnet.layers.decoder import Decoder
from capsnet.layers.dense import DenseCapsules
from capsnet.layers.primary import PrimaryCapsules
from capsnet.layers.routed import RoutedCapsules

__all__ = [
    "ConvCapsules",
    "Convolution",
    "Decoder",
    "DenseCapsules",
    "PrimaryCapsules",
    "RoutedCapsules",
]
