"""Networks for the playground's tests: small untrained ones, and the shipped trained ones."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import uvicorn
from shipped import require_weights

from capsnet import CapsNet, CapsNetConfig
from capsnet.playground.networks import TrainedNetwork, load_networks
from capsnet.playground.server import create_app

SMALL = CapsNetConfig(
    conv_channels=4, primary_types=3, primary_dim=5, output_dim=6, primary_stride=4, num_classes=10
)


@pytest.fixture(scope="session")
def small() -> list[TrainedNetwork]:
    """Untrained networks: one for digits, one for pairs, one without decoder, one for colours."""
    torch.manual_seed(3)
    configs = {
        "digit": SMALL,
        "pair": CapsNetConfig(**{**vars(SMALL), "image_height": 36, "image_width": 36}),
        "blind": CapsNetConfig(**{**vars(SMALL), "decoder": False, "num_iterations": 1}),
        "colour": CapsNetConfig(
            **{**vars(SMALL), "image_channels": 3, "image_height": 32, "image_width": 30}
        ),
    }
    return [TrainedNetwork(name, CapsNet(config).eval(), {}) for name, config in configs.items()]


@pytest.fixture(scope="session")
def trained() -> list[TrainedNetwork]:
    """The shipped networks for one and two digits."""
    require_weights("mnist", "multimnist")
    return load_networks(["mnist", "multimnist"])


@contextmanager
def serve_in_background(weights: list[TrainedNetwork]) -> Iterator[str]:
    """The address of a server on a free port of the loopback interface, in a thread."""
    # A browser may keep a connection half open: no more than a second is waited for it.
    config = uvicorn.Config(
        create_app(weights), port=0, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="session")
def background() -> Callable[[list[TrainedNetwork]], AbstractContextManager[str]]:
    """Starts a server for the networks and gives its address."""
    return serve_in_background
