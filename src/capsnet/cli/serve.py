"""`capsnet serve`: the playground in a browser."""

import socket
import webbrowser
from socket import AF_INET, AF_INET6
from typing import Annotated

from cyclopts import Parameter

from capsnet.checks import missing_library
from capsnet.models import CapsNet
from capsnet.models.weights import list_weights
from capsnet.playground.networks import load_networks

GRACE_SECONDS = 2
"""How long Ctrl-C waits for requests that have begun."""


def serve(
    *,
    weights: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    open: bool = False,
) -> int:
    """Open the playground: draw digits, turn capsules, watch the routing, take digits apart.

    Args:
        weights: Shipped name, run directory or weights file, shown before the shipped ones; may
            be given several times, to compare them.
        host: Address to listen at; the default is reachable from this machine alone.
        port: Port to listen at.
        open: Open the page in the default browser.
    """
    try:
        import uvicorn

        from capsnet.playground.server import create_app
    except ModuleNotFoundError as error:
        raise missing_library("the playground", str(error.name), "playground") from None
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be 0 to 65535, got {port}")
    shown = load_networks(weights)
    for each in shown:
        _ = each.capsules  # a baseline that was asked for is a mistake; a shipped one is left out
    taken = {each.name for each in shown}
    # By their files: a folder here may have the name of shipped weights.
    others = [str(path) for name, path in list_weights().items() if name not in taken]
    shown += [each for each in load_networks(others) if isinstance(each.model, CapsNet)]
    if not shown:
        raise ValueError("there are no weights to show: train some and give --weights RUN")
    local = host in ("127.0.0.1", "localhost", "::1")
    app = create_app(shown, hosts=("127.0.0.1", "localhost", "[::1]") if local else ("*",))
    listener = socket.create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
    print(f"the playground is at {address} (Ctrl-C ends it)", flush=True)
    if open:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    uvicorn.Server(config).run(sockets=[listener])
    return 0
