"""Training and evaluation: presets, one visible loop, checkpoints, records."""

from capsnet.training.checkpoint import load, load_model_and_record
from capsnet.training.config import TrainConfig
from capsnet.training.evaluation import Evaluation, evaluate
from capsnet.training.loop import train
from capsnet.training.presets import PRESETS, Preset, configure
from capsnet.training.processes import TrainingStopped

__all__ = [
    "PRESETS",
    "Evaluation",
    "Preset",
    "TrainConfig",
    "TrainingStopped",
    "configure",
    "evaluate",
    "load",
    "load_model_and_record",
    "train",
]
