"""The examples are short, and do what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from capsnet import CapsNet, CapsNetConfig
from capsnet.models.weights import save_weights

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_example_has_less_than_sixty_lines() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path.name


def test_a_model_of_capsule_layers_learns_digits() -> None:
    assert load("own_model").main(num_steps=120) < 0.5  # guessing is wrong nine times of ten


def test_own_images_are_learned_and_recognised(tmp_path: Path) -> None:
    for _ in range(2):  # the second time with what the first has left
        assert load("own_images").main(tmp_path) >= 19  # of 20


def test_a_routing_trace_tells_of_every_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = CapsNet(CapsNetConfig(conv_channels=4, primary_types=3, num_iterations=4))
    save_weights(tmp_path / "small.safetensors", model, {})
    shares = load("routing_trace").main(str(tmp_path / "small.safetensors"), 3)
    assert len(shares) == 4
    assert shares[0] == pytest.approx(0.1)
    assert "test digit 3 is a 0" in capsys.readouterr().out
