"""Every dataset of the paper, and users' own images, as batches that any index reaches at once."""

from capsnet.data.catalogue import DataConfig, list_datasets, load_split
from capsnet.data.splits import Batch, Split, iterate_batches, num_steps

__all__ = [
    "Batch",
    "DataConfig",
    "Split",
    "iterate_batches",
    "list_datasets",
    "load_split",
    "num_steps",
]
