"""The mathematics of the paper as pure functions, without parameters or state."""

from capsnet.functional.convolution import convolve2d, is_traced, store_taps_first
from capsnet.functional.dense_votes import DenseVotes, store_parents_first
from capsnet.functional.losses import margin_loss, reconstruction_loss
from capsnet.functional.patches import output_grid
from capsnet.functional.routing import (
    RoutingStep,
    Votes,
    VoteSource,
    dynamic_routing,
    iterate_routing,
    squash,
)

__all__ = [
    "DenseVotes",
    "RoutingStep",
    "VoteSource",
    "Votes",
    "convolve2d",
    "dynamic_routing",
    "is_traced",
    "iterate_routing",
    "margin_loss",
    "output_grid",
    "reconstruction_loss",
    "squash",
    "store_parents_first",
    "store_taps_first",
]
