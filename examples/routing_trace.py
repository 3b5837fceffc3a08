"""Reading a routing trace: how the primary capsules of one digit make up their minds.

Run: python examples/routing_trace.py [weights] [test digit]
"""

import sys

import numpy as np
import torch

from capsnet.data import DataConfig, load_split
from capsnet.playground.networks import load_networks
from capsnet.playground.pictures import place_digit


def main(weights: str = "mnist", index: int = 0) -> list[float]:
    [network] = load_networks([weights])
    model = network.capsules
    batch = load_split(DataConfig("mnist"), "test").test_batch(np.array([index]))
    image = place_digit(batch.images[0, 0].numpy(), model.config.image_shape, right=0, down=0)
    with torch.inference_mode():
        output = model(network.to_input(image[None]), trace=True)
    winner = int(output.lengths.argmax())
    label, name = int(batch.labels[0, 0]), network.class_names[winner]
    print(f"test digit {index} is a {label} and is taken for a {name}")
    rows, columns = model.config.primary_grid
    shares = []
    for number, step in enumerate(output.routing, start=1):
        lengths = step.outputs[0].norm(dim=-1)  # (K,)
        coupling = step.coupling[0, :, winner]  # (I,), the share that each sends to the winner
        places = coupling.unflatten(0, (rows, columns, model.config.primary_types))
        by_place = places.mean(dim=2)  # (rows, columns)
        best = divmod(int(by_place.argmax()), columns)
        is_even = torch.allclose(by_place, by_place[0, 0])  # as in the first iteration
        strongest = "all places alike" if is_even else "strongest place row {} column {}"
        shares.append(float(coupling.mean()))
        print(
            f"iteration {number}: length {lengths[winner]:.2f}, "
            f"mean share {coupling.mean():.1%}, largest share {coupling.max():.1%}, "
            + strongest.format(*best)
        )
    return shares


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else "mnist", int(given[1]) if len(given) > 1 else 0)
