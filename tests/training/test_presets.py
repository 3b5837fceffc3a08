from dataclasses import asdict

import pytest

from capsnet.data import list_datasets
from capsnet.models import CapsNetConfig, CNNConfig, model_config
from capsnet.training import PRESETS, configure

NAMES = [
    "mnist", "mnist-r1", "mnist-norecon", "mnist-r1-norecon", "mnist-cnn",
    "multimnist", "multimnist-r1", "multimnist-cnn", "affnist", "affnist-cnn",
    "cifar10", "smallnorb", "svhn", "fashion-mnist", "folder",
]  # fmt: skip


def test_presets_are_those_of_the_paper() -> None:
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_preset_knows_its_name_and_dataset(name: str) -> None:
    config = configure(name)
    assert config.preset == name
    assert config.data.name in list_datasets()
    assert set(config.evaluate_on) <= set(list_datasets())
    assert PRESETS[name].summary.endswith(".")
    assert PRESETS[name].command == f"capsnet train {name}"


@pytest.mark.parametrize("name", NAMES)
def test_model_of_a_preset_is_what_its_name_says(name: str) -> None:
    model = configure(name).model
    if name.endswith("-cnn"):
        assert isinstance(model, CNNConfig)
        return
    assert isinstance(model, CapsNetConfig)
    assert model.num_iterations == (1 if "-r1" in name else 3)
    assert model.decoder == (not name.endswith("norecon") and name != "cifar10")
    assert model.orphan == (name == "cifar10")


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("mnist", "capsnet_mnist"),
        ("mnist-cnn", "cnn_mnist"),
        ("multimnist", "capsnet_multimnist"),
        ("multimnist-cnn", "cnn_multimnist"),
        ("affnist", "capsnet_affnist"),
        ("affnist-cnn", "cnn_affnist"),
        ("cifar10", "capsnet_cifar10"),
        ("smallnorb", "capsnet_smallnorb"),
        ("svhn", "capsnet_svhn"),
    ],
)
def test_preset_trains_the_network_of_the_paper_with_the_authors_initial_values(
    name: str, network: str
) -> None:
    wanted, model = asdict(model_config(network)), asdict(configure(name).model)
    of_the_authors = {"initialisation": "authors", "bias": True, "uniform_primary_coupling": True}
    assert model == wanted | ({} if name.endswith("-cnn") else of_the_authors)


def test_settings_that_the_docs_name() -> None:
    assert configure("mnist").warmup_steps == 200
    assert configure("mnist").reconstruction_weight == 0.01
    assert configure("svhn").reconstruction_weight == 0.0005
    assert configure("smallnorb").reconstruction_weight == 0.005
    assert configure("multimnist-cnn").learning_rate == 0.002
    assert configure("mnist-cnn").learning_rate == 0.001
    assert configure("mnist").learning_rate == configure("cifar10").learning_rate == 0.004


def test_errors_of_the_paper_outside_table_1_are_as_printed() -> None:
    printed = {name: PRESETS[name].paper_error for name in ("cifar10", "smallnorb", "svhn")}
    assert printed == {"cifar10": 0.106, "smallnorb": 0.027, "svhn": 0.043}
    assert (PRESETS["affnist"].paper_error, PRESETS["affnist-cnn"].paper_error) == (0.21, 0.34)


def test_paper_schedule_brings_the_authors_number_of_steps_and_rate() -> None:
    assert configure("mnist", {"schedule": "paper"}).learning_rate == 1e-3
    assert configure("mnist", {"schedule": "paper", "learning_rate": 0.5}).learning_rate == 0.5
    assert configure("mnist", {"schedule": "paper"}).steps == 300_000
    assert configure("cifar10", {"schedule": "paper"}).steps == 600_000
    assert configure("mnist", {"schedule": "paper", "epochs": 2}).epochs == 2


def test_paper_schedule_brings_adam() -> None:
    assert configure("multimnist").optimiser == "muon"
    assert configure("multimnist", {"schedule": "paper"}).optimiser == "adam"
    assert configure("multimnist", {"schedule": "paper", "optimiser": "muon"}).optimiser == "muon"


def test_batches_are_the_authors() -> None:
    assert {configure(name).batch_size for name in NAMES} == {128}


def test_multimnist_decays_ten_times_slower() -> None:
    slow, fast = configure("multimnist").decay_steps, configure("mnist").decay_steps
    assert slow == 10 * fast


def test_settings_of_another_preset_are_refused() -> None:
    assert configure("mnist", {"preset": "mnist"}).preset == "mnist"
    with pytest.raises(ValueError, match="preset must be mnist, which is trained, got svhn"):
        configure("mnist", {"preset": "svhn"})


def test_unknown_preset_gets_a_suggestion() -> None:
    message = r"unknown preset 'minst'; did you mean 'mnist'\? \(capsnet list shows all\)"
    with pytest.raises(ValueError, match=message):
        configure("minst")
