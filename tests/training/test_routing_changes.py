import torch
from torch.testing import assert_close

from capsnet.data import DataConfig, load_split
from capsnet.models import CapsNet, CapsNetConfig
from capsnet.training import evaluate
from capsnet.training.evaluation import routing_changes

TINY = CapsNetConfig(conv_channels=4, primary_types=2, primary_dim=3, output_dim=5)


def test_a_logit_first_changes_by_its_agreement() -> None:
    torch.manual_seed(0)
    model = CapsNet(TINY)
    images = torch.rand(3, 1, 28, 28)
    changes = routing_changes(model, images, num_iterations=4)
    steps = model(images, trace=True).routing
    assert steps is not None
    assert {name: len(values) for name, values in changes.items()} == {"logits": 4, "coupling": 4}
    # Logits start at zero, so those of the second step are the first change.
    assert_close(torch.tensor(changes["logits"][0]), steps[1].logits.abs().mean())
    assert_close(
        torch.tensor(changes["logits"][1]), (steps[2].logits - steps[1].logits).abs().mean()
    )
    assert_close(torch.tensor(changes["coupling"][0]), (steps[1].coupling - 0.1).abs().mean())


def test_an_evaluation_keeps_ten_changes_of_one_capsnet() -> None:
    split = load_split(DataConfig("mnist"), "test")
    model = CapsNet(TINY)
    alone = evaluate([model], split, num_examples=4)
    assert alone.routing_changes is not None
    assert [len(values) for values in alone.routing_changes.values()] == [10, 10]
    assert alone.to_dict()["routing_changes"] == alone.routing_changes
    assert evaluate([model, model], split, num_examples=4).routing_changes is None
