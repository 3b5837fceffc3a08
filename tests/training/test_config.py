import json
from dataclasses import replace

import pytest
from tiny_runs import tiny_config

from capsnet.checks import unknown_name
from capsnet.data import DataConfig
from capsnet.models import CNNConfig
from capsnet.training import TrainConfig, configure
from capsnet.training.config import (
    differing_fields,
    from_dict,
    override,
    to_dict,
    total_steps,
)


def test_settings_survive_json() -> None:
    config = tiny_config(evaluate_on=["affnist"], data={"data_dir": "some/where", "held_out": 7})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_settings_of_a_baseline_survive_json() -> None:
    config = replace(tiny_config(), model=CNNConfig(conv_channels=(3, 4), conv_kernels=(5, 3)))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_steps_take_epochs_back_and_the_reverse() -> None:
    by_steps = override(tiny_config(epochs=4), {"steps": 9})
    assert (by_steps.steps, by_steps.epochs) == (9, None)
    by_epochs = override(by_steps, {"epochs": 3})
    assert (by_epochs.steps, by_epochs.epochs) == (None, 3)


def test_total_steps_count_epochs_or_steps() -> None:
    assert total_steps(tiny_config(epochs=3), 5) == 15
    assert total_steps(tiny_config(epochs=None, steps=7), 5) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsize": 3}, r"unknown setting 'batchsize'; did you mean 'batch_size'\?"),
        ({"data": {"nane": 3}}, r"unknown setting 'nane'; did you mean 'name'\?"),
        ({"model": {"num_iteration": 3}}, r"did you mean 'num_iterations'\?"),
        ({"data": 3}, "data must be a table of settings, got 3"),
        ({"batch_size": "many"}, "batch_size must be a whole number, got 'many'"),
        ({"batch_size": True}, "batch_size must be a whole number, got True"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got 'fast'"),
        ({"schedule": "linear"}, "schedule must be 'cosine' or 'paper', got 'linear'"),
        ({"evaluate_on": [3]}, "evaluate_on must be text, got 3"),
        ({"evaluate_on": 3}, "evaluate_on must be a list of names, got 3"),
        ({"data": {"data_dir": 3}}, "data_dir must be a path, got 3"),
        ({"epochs": 2, "steps": 3}, "either epochs or steps, and not both"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"learning_rate": 0}, "learning_rate must be positive, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive, got nan"),
        ({"absent_weight": -1}, "absent_weight must not be negative, got -1.0"),
        ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
        ({"compile": 1}, "compile must be true or false, got 1"),
        ({"modle": {}}, r"unknown setting 'modle'; did you mean 'model'\?"),
        ({"model": {"dropout": 0.1}}, "dropout is a setting of a CNN, but mnist trains a CapsNet"),
        ({"model": {"conv_channels": [3, 4]}}, "conv_channels must be a whole number, got"),
        ({"upper": 0.1}, "upper must exceed lower, got 0.1 and 0.1"),
        ({"average_decay": 1}, r"average_decay must lie in \[0, 1\), got 1.0"),
        ({"checkpoint_minutes": float("inf")}, "checkpoint_minutes must be finite, got inf"),
        ({"upper": float("inf")}, "upper must be finite, got inf"),
        ({"seed": 2**63}, r"seed must be at least 0 and less than 2\^63, got 9223372036854775808"),
        ({"seed": -1}, "seed must be at least 0 and less than .*, got -1"),
        ({"model": {"kind": "cnn"}}, "kind of mnist's model is 'capsnet', got 'cnn'"),
        (
            {"data": {"image_size": 16}},
            "image_size is a setting of folder, but mnist trains",
        ),
        (
            {"data": {"name": "cifar10", "shift": 1}},
            "shift is a setting of .*, but mnist .* cifar10",
        ),
        ({"data": {"generation_seed": 1}}, "generation_seed is a setting of affnist, folder, "),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(tiny_config(), changes)


def test_only_fields_that_decide_the_outcome_count_as_different() -> None:
    config = tiny_config()
    other = override(config, {"threads": 7, "seed": 5, "data": {"data_dir": "elsewhere"}})
    assert differing_fields(config, other) == {"seed": (0, 5)}


def test_settings_in_the_form_of_a_config_file_are_taken() -> None:
    config = tiny_config()
    assert override(config, to_dict(config)) == config
    seeded = override(config, {"evaluate_on": ["affnist"], "data": {"generation_seed": 1}})
    assert seeded.data.generation_seed == 1


def test_number_in_place_of_float_is_taken() -> None:
    assert override(tiny_config(), {"learning_rate": 1}).learning_rate == 1.0


def test_one_number_holds_for_all_layers_of_a_baseline() -> None:
    config = override(configure("mnist-cnn"), {"model": {"conv_channels": 16}})
    assert isinstance(config.model, CNNConfig)
    assert config.model.conv_channels == (16, 16, 16)
    with pytest.raises(ValueError, match="num_iterations is a setting of a CapsNet"):
        override(config, {"model": {"num_iterations": 2}})


def test_name_without_neighbour_gets_no_guess() -> None:
    assert "did you mean" not in str(unknown_name("preset", "zzzz", ["mnist"]))


def test_run_is_named_after_preset_and_seed() -> None:
    config = TrainConfig(preset="a", data=DataConfig(), model=CNNConfig(), steps=1, seed=3)
    assert config.run_name == "a-seed3"
