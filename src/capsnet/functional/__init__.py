"""The mathematics of the paper as pure functions, without parameters or state."""

from capsnet.functional.losses import margin_loss, reconstruction_loss
from capsnet.functional.routing import (
    RoutingStep,
    Votes,
    VoteSource,
    dynamic_routing,
    iterate_routing,
    squash,
)

__all__ = [
    "RoutingStep",
    "VoteSource",
    "Votes",
    "dynamic_routing",
    "iterate_routing",
    "margin_loss",
    "reconstruction_loss",
    "squash",
]
