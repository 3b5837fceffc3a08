"""Weights on the disk: a round trip changes nothing, and a bad file is named, never loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shipped import require_weights
from torch.testing import assert_close

import capsnet
from capsnet import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.models import weights

SMALL = CapsNetConfig(
    image_height=19,
    image_width=18,
    conv_channels=5,
    primary_types=3,
    primary_dim=4,
    output_dim=6,
    num_classes=7,
    bias=True,
)


@pytest.fixture
def model() -> CapsNet:
    torch.manual_seed(2)
    return CapsNet(SMALL)


def test_round_trip_gives_the_same_outputs_config_and_record(
    model: CapsNet, tmp_path: Path
) -> None:
    path = tmp_path / weights.WEIGHTS
    weights.save_weights(path, model, {"seed": 3})
    loaded, record = weights.load_weights(path)
    assert isinstance(loaded, CapsNet)
    assert loaded.config == SMALL
    assert not loaded.training
    assert record["seed"] == 3
    images = torch.rand(2, 1, 19, 18)
    assert_close(loaded(images).capsules, model(images).capsules, rtol=0, atol=0)


def test_a_baseline_keeps_its_tuples(tmp_path: Path) -> None:
    config = CNNConfig(conv_channels=(2, 3), conv_kernels=(5, 3), hidden_sizes=(4,), dropout=0.0)
    weights.save_weights(tmp_path / "cnn.safetensors", CNN(config), {})
    assert capsnet.load(tmp_path / "cnn.safetensors").config == config


def test_half_precision_halves_the_file_and_loads_as_float32(
    model: CapsNet, tmp_path: Path
) -> None:
    whole, half = tmp_path / "whole.safetensors", tmp_path / "half.safetensors"
    weights.save_weights(whole, model, {})
    weights.save_weights(half, model, {}, half=True)
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    loaded, _ = weights.load_weights(half)
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32
        assert_close(value, model.state_dict()[name], rtol=1e-3, atol=1e-6)


def test_loading_leaves_the_random_state_alone(model: CapsNet, tmp_path: Path) -> None:
    weights.save_weights(tmp_path / "a.safetensors", model, {})
    before = torch.get_rng_state()
    capsnet.load(tmp_path / "a.safetensors")
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_directory_stands_for_its_weights(model: CapsNet, tmp_path: Path) -> None:
    weights.save_weights(tmp_path / weights.WEIGHTS, model, {})
    assert weights.find_weights(tmp_path) == tmp_path / weights.WEIGHTS


def test_every_shipped_file_loads_and_is_small_enough() -> None:
    for name, path in weights.list_weights().items():
        assert path.stat().st_size <= 25e6
        assert capsnet.load(name).config.num_classes == 10


def test_a_failed_write_leaves_the_old_file(
    model: CapsNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    weights.save_weights(path, model, {"seed": 1})

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        weights.save_weights(path, model, {"seed": 2})
    assert weights.load_weights(path)[1]["seed"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_flipped_byte_of_a_tensor_is_noticed(model: CapsNet, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    weights.save_weights(path, model, {})
    content = bytearray(path.read_bytes())
    for place in (-1, -1000, len(content) // 2):
        damaged = content.copy()
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            weights.load_weights(path)


def test_a_file_of_another_kind_is_named(model: CapsNet, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ValueError, match="is not a safetensors file"):
        weights.load_weights(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="was not written by capsnet"):
        weights.load_weights(path)
    weights.write_tensors(path, {"a": torch.zeros(2)}, {"seed": 1})
    with pytest.raises(ValueError, match="its record has no config under 'model'"):
        weights.load_weights(path)
    with pytest.raises(ValueError, match="is not there"):
        weights.load_weights(tmp_path / "b.safetensors")


def test_a_record_that_is_no_object_is_refused(tmp_path: Path) -> None:
    text = json.dumps([1])
    header = {"record": text, "sha256": weights._digest({}, text)}
    save_file({}, tmp_path / "a.safetensors", header)
    with pytest.raises(ValueError, match="is no JSON object"):
        weights.read_tensors(tmp_path / "a.safetensors")


def test_weights_that_do_not_fit_their_config_are_refused_before_memory_is_taken(
    model: CapsNet, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    tensors = dict(model.state_dict())
    huge = {**weights.config_to_dict(SMALL), "conv_channels": 10**9}
    weights.write_tensors(path, tensors, {"model": huge})
    with pytest.raises(
        ValueError, match=r"a\.safetensors: stored weight conv\.weight must have shape \(1000000000"
    ):
        weights.load_weights(path)
    beyond = {"kind": "cnn", "hidden_sizes": [2**31, 2**31]}
    weights.write_tensors(path, tensors, {"model": beyond})
    with pytest.raises(ValueError, match="no network can be so large"):
        weights.load_weights(path)
    del tensors["classes.bias"]
    weights.write_tensors(path, tensors, {"model": weights.config_to_dict(SMALL)})
    with pytest.raises(ValueError, match=r"classes\.bias on one side only"):
        weights.load_weights(path)


@pytest.mark.parametrize(
    ("plain", "sentence"),
    [
        ({"kind": "vit"}, "must be one of capsnet, cnn, got 'vit'"),
        ({"kind": ["capsnet"]}, r"must be one of capsnet, cnn, got \['capsnet'\]"),
        ({"kind": "capsnet", "depth": 3}, "unknown setting 'depth'"),
        ({"kind": "capsnet", "num_classes": "10"}, "num_classes must be a whole number, got '10'"),
        ({"kind": "capsnet", "decoder": 1}, "decoder must be true or false, got 1"),
        ({"kind": "cnn", "pool": 0}, "pool must be a whole number of at least 1, got 0"),
        (
            {"kind": "cnn", "conv_channels": ["a"]},
            "conv_channels must be a whole number, got 'a'",
        ),
    ],
)
def test_a_config_of_wrong_types_is_refused(plain: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        weights.config_from_dict(plain)


def test_weights_beyond_float16_are_refused(model: CapsNet, tmp_path: Path) -> None:
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match=r"conv\.weight must fit into float16"):
        weights.save_weights(tmp_path / "a.safetensors", model, {}, half=True)


@pytest.mark.parametrize("name", [weights.WEIGHTS, "checkpoints/step-000000001.safetensors"])
def test_run_comes_before_shipped_weights_of_its_name(
    name: str,
    model: CapsNet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "list_weights", lambda: {"mnist": Path("shipped")})
    Path("mnist").mkdir()  # of data, say
    assert weights.find_weights("mnist") == Path("shipped")
    path = Path("mnist", name)
    path.parent.mkdir(exist_ok=True)
    weights.save_weights(path, model, {})
    if path.name == weights.WEIGHTS:
        assert weights.find_weights("mnist") == path
    else:
        with pytest.raises(ValueError, match="mnist is no finished run"):
            weights.find_weights("mnist")
        with pytest.raises(ValueError, match=r"000001.safetensors is a checkpoint; .* run: mnist"):
            weights.find_weights(path)
    assert "mnist is the run in this folder, not the shipped weights" in caplog.text


def test_unknown_weights_are_named_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "list_weights", lambda: {"mnist": tmp_path, "svhn": tmp_path})
    with pytest.raises(ValueError, match=r"unknown weights 'minst'; did you mean 'mnist'\? "):
        weights.find_weights("minst")
    with pytest.raises(ValueError, match="is not there"):
        weights.find_weights("runs/none")
    with pytest.raises(ValueError, match=r"is no run, or one .*: it has no weights\.safetensors"):
        weights.find_weights(tmp_path)


def test_the_first_shipped_weights_are_the_paper_s() -> None:
    require_weights("mnist", "mnist-r1")
    assert next(iter(weights.list_weights())) == "mnist"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # PyTorch's own
@pytest.mark.usefixtures("without_annotation_checks")
def test_a_compiled_network_is_saved_as_the_plain_one(tmp_path: Path, model: CapsNet) -> None:
    compiled = torch.compile(model)
    weights.save_weights(tmp_path / "a.safetensors", compiled, {})  # type: ignore[arg-type]
    loaded, _ = weights.load_weights(tmp_path / "a.safetensors")
    assert_close(dict(loaded.state_dict()), dict(model.state_dict()))
