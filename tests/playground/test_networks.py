"""Networks by name: records are read with care, and images prepared as in training."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_files import write_svhn
from numpy.testing import assert_allclose
from PIL import Image
from shipped import require_weights
from tiny_runs import BreakOff, tiny_config

from capsnet import CNN, CapsNet, CapsNetConfig, CNNConfig, classify
from capsnet.data import DataConfig, load_split
from capsnet.models.weights import save_weights
from capsnet.playground.networks import TrainedNetwork, _open, load_networks
from capsnet.playground.pictures import to_bytes
from capsnet.training import train

GREY = CapsNetConfig(
    image_height=17, image_width=17, conv_channels=2, primary_types=2, primary_dim=3, num_classes=3
)
COLOUR = CapsNetConfig(
    image_channels=3, image_height=24, image_width=24, conv_channels=2, primary_types=2
)


def trained_on(name: str, config: CapsNetConfig) -> TrainedNetwork:
    return TrainedNetwork("some", CapsNet(config), {"config": {"data": {"name": name}}})


def test_class_names_come_from_the_record_if_they_fit() -> None:
    model = CapsNet(GREY)
    named = TrainedNetwork("a", model, {"class_names": ["x", "y", "z"]})
    assert named.class_names == ("x", "y", "z")
    assert TrainedNetwork("a", model, {"class_names": ["x"]}).class_names == ("0", "1", "2")
    assert TrainedNetwork("a", model, {}).class_names == ("0", "1", "2")


def test_error_rate_comes_from_the_record() -> None:
    held_out = {"split": "validation", "error_rate": 0.001}
    record: dict[str, object] = {"metrics": {"mnist": held_out}}
    assert TrainedNetwork("a", CapsNet(GREY), record).error_rate is None
    record = {"metrics": {"mnist": held_out, "mnist test": {"split": "test", "error_rate": 0.0025}}}
    assert TrainedNetwork("a", CapsNet(GREY), record).error_rate == 0.0025
    assert TrainedNetwork("a", CapsNet(GREY), {"metrics": [1]}).error_rate is None


def test_only_digit_networks_get_mnist_form() -> None:
    assert TrainedNetwork("a", CapsNet(GREY), {}).sees_digits
    assert trained_on("affnist", GREY).sees_digits
    assert not trained_on("fashion-mnist", GREY).sees_digits
    assert not trained_on("folder", GREY).sees_digits
    assert not trained_on("svhn", COLOUR).sees_digits


def test_own_images_are_prepared_exactly_as_in_training(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for mode in ("RGBA", "P", "LA", "CMYK", "I;16"):
            levels = generator.integers(0, 256, size=(23, 31, 4), dtype=np.uint8)
            image = Image.fromarray(levels)
            if mode == "I;16":
                image = Image.fromarray(levels[..., 0].astype(np.uint16) * 200)
            elif mode != "RGBA":
                image = image.convert("RGB").convert(mode)
            image.save(tmp_path / name / f"{mode.replace(';', '')}.tiff")
    for channels, shape in ((3, COLOUR), (1, replace(COLOUR, image_channels=1))):
        config = DataConfig("folder", tmp_path, image_size=24, image_channels=channels)
        split = load_split(config, "train")
        expected = split.test_batch(np.arange(len(split))).images.numpy()
        assert split.files is not None
        network = trained_on("folder", shape)
        for image, path in zip(expected, split.files, strict=True):
            assert_allclose(network.prepare(Image.open(path)).pixels, image, atol=1e-6)


def test_two_digits_are_scaled_as_a_pair() -> None:
    page = Image.new("L", (200, 160), color=255)
    page.paste(0, (50, 40, 60, 120))
    network = trained_on("multimnist", replace(GREY, image_height=36, image_width=36))
    for num_digits, side in ((1, 20), (2, 23)):
        rows = network.prepare(page, num_digits).pixels[0].any(axis=1)
        assert rows.sum() == side


def test_svhn_networks_see_images_as_in_training(tmp_path: Path) -> None:
    images = np.random.default_rng(7).integers(0, 256, size=(2, 3, 32, 32), dtype=np.uint8)
    write_svhn(tmp_path / "test_32x32.mat", images, np.arange(2))
    expected = load_split(DataConfig("svhn", tmp_path), "test").test_batch(np.arange(2)).images
    network = trained_on("svhn", replace(COLOUR, image_height=32, image_width=32))
    for image, seen in zip(images, expected, strict=True):
        prepared = network.prepare(Image.fromarray(image.transpose(1, 2, 0)))
        assert_allclose(network.to_input(prepared.pixels[None])[0], seen, atol=1e-5)


def test_cifar_networks_see_the_standardised_centre() -> None:
    levels = np.random.default_rng(6).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)
    network = trained_on("cifar10", COLOUR)
    prepared = network.prepare(Image.fromarray(levels))
    assert_allclose(prepared.pixels, levels[4:28, 4:28].transpose(2, 0, 1) / 255, atol=1e-6)
    seen = network.to_input(prepared.pixels[None])
    assert float(seen.mean()) == pytest.approx(0, abs=1e-5)
    assert float(seen.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_intensities_outside_0_to_1_are_refused() -> None:
    network = TrainedNetwork("a", CapsNet(GREY), {})
    for value in (np.nan, np.inf, -0.1, 1.1):
        with pytest.raises(ValueError, match="numbers from 0 to 1"):
            network.to_input(np.full((1, 1, 17, 17), value, dtype=np.float32))


def test_baselines_have_no_capsules() -> None:
    config = CNNConfig(conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(3,))
    with pytest.raises(ValueError, match="weights 'a' are of a baseline"):
        _ = TrainedNetwork("a", CNN(config), {}).capsules


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"odd\xff.safetensors")
    save_weights(path, CapsNet(GREY), {})
    with pytest.raises(ValueError, match="the name of weights must be text"):
        load_networks([str(path)])


def test_networks_are_named_by_run_or_file_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save_weights(tmp_path / "run" / "weights.safetensors", CapsNet(GREY), {})
    save_weights(tmp_path / "mine.safetensors", CapsNet(GREY), {})
    sources = [str(tmp_path / "run"), str(tmp_path / "mine.safetensors")]
    assert [each.name for each in load_networks(sources)] == ["run", "mine"]
    with pytest.raises(ValueError, match="two sets of weights are named 'run'"):
        load_networks([sources[0], sources[0]])


def test_files_and_pictures_are_classified_alike(tmp_path: Path) -> None:
    require_weights("mnist")
    batch = load_split(DataConfig("mnist"), "test").test_batch(np.arange(70))  # two batches
    pictures = [Image.fromarray(levels) for levels in to_bytes(batch.images[:, 0].numpy())]
    pictures[0].resize((84, 84)).save(tmp_path / "seven.png")
    first, *others = classify([tmp_path / "seven.png", *pictures[1:]])
    assert list(first) == sorted(first, key=lambda name: -first[name])
    assert next(iter(first)) == "7"
    named = [int(next(iter(lengths))) for lengths in others]
    assert named == batch.labels[1:, 0].tolist()  # these 69 it has right
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned to the left, to be turned back by who shows it
    pictures[0].transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    file = tmp_path / "turned.png"
    pictures[0].save(tmp_path / "odd.png", exif=b"garbage")
    opened = [Image.open(path) for path in (file, tmp_path / "odd.png")]
    upright, *others = classify([pictures[0], file, *opened])
    for found in others:
        assert found == pytest.approx(upright)
    with pytest.raises(ValueError, match=r"must be a list, got one image; write \['seven.png'\]"):
        classify("seven.png")
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"notes\.txt: an image must be one of"):
        classify([tmp_path / "notes.txt"])
    with pytest.raises(ValueError, match=r"files or Pillow's .*, got ndarray"):
        _open(batch.images[0, 0].numpy())  # the tests' checks of types would come before


def test_a_run_that_is_not_finished_shows_its_newest_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), tmp_path / "a.b", reporter=BreakOff(9))
    [network] = load_networks([str(tmp_path / "a.b")])
    assert network.name == "a.b"
    assert network.error_rate is None
    assert "a.b is not finished; this is its network after step 8" in caplog.text
