import os
import re
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import ExifTags, Image

from capsnet.data import DataConfig, Split, load_split
from capsnet.data.folder import list_folder, load_folder


def write_image(path: Path, *, size: tuple[int, int] = (9, 9), colour: int = 200) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, colour).save(path)


def write_classes(folder: Path, counts: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            write_image(folder / name / f"{number:02}.png", colour=50 * label + number)
    return folder


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "animals", {"cat": 10, "dog": 15, "eel": 5})


def load(folder: Path, split: str = "train", **options: object) -> Split:
    config = DataConfig("folder", folder, image_size=9, image_channels=1, **options)  # type: ignore[arg-type]
    return load_split(config, split)  # type: ignore[arg-type]


def labels_of(split: Split) -> list[int]:
    return split.test_batch(np.arange(len(split))).labels[:, 0].tolist()


def test_a_fraction_of_each_class_is_for_testing(animals: Path) -> None:
    train, test = load(animals), load(animals, "test")
    assert train.class_names == ("cat", "dog", "eel")
    assert (train.image_shape, train.num_classes) == ((1, 9, 9), 3)
    assert labels_of(test) == [0, 0, 1, 1, 1, 2]
    assert sorted(labels_of(train)) == [0] * 8 + [1] * 12 + [2] * 4
    seen = {
        round(float(image.mean()) * 255)
        for split in (train, test)
        for image in split.test_batch(np.arange(len(split))).images
    }
    assert len(seen) == 30  # every image is in just one of the two


def test_an_image_more_leaves_the_others_where_they_were(animals: Path) -> None:
    before = set(load(animals).files or ())
    digest = load(animals).files_digest
    write_image(animals / "cat" / "000.png")  # comes first in the alphabet
    (animals / "dog" / "07.png").rename(animals / "dog" / "007.png")
    after, tested = load(animals), load(animals, "test")
    assert len(before & set(tested.files or ())) <= 2  # at most one for each that came or went
    assert after.files_digest != digest


def test_files_are_told_by_class_and_name_wherever_they_lie(animals: Path) -> None:
    digest = load(animals).files_digest
    moved = animals.rename(animals.with_name("elsewhere"))
    assert load(moved).files_digest == digest
    assert load(moved, "test").files_digest != digest
    (moved / "cat").rename(moved / "lynx")
    assert load(moved).files_digest != digest


@pytest.mark.parametrize(
    ("side", "mode", "shape"),
    [(36, "L", (1, 36, 36)), (9, "1", (1, 28, 28)), (70, "RGB", (3, 48, 48))],
)
def test_form_of_the_images_is_found(
    animals: Path, side: int, mode: str, shape: tuple[int, int, int]
) -> None:
    for number in range(40):  # more than there are of the fixture's
        Image.new(mode, (side, 5)).save(animals / "cat" / f"more {number}.png")
    config = DataConfig("folder", animals, image_size=None, image_channels=None)
    assert load_split(config, "test").image_shape == shape
    (animals / "dog" / "note.txt").write_text("woof")
    with pytest.raises(ValueError, match=r"note.txt is no image that can be read"):
        load_split(config, "test")


def test_the_seed_decides_which_images_are_for_testing(animals: Path) -> None:
    def test_part(seed: int) -> list[float]:
        split = load(animals, "test", generation_seed=seed)
        return split.test_batch(np.arange(len(split))).images.mean((1, 2, 3)).tolist()

    assert test_part(0) == test_part(0)
    assert test_part(0) != test_part(1)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_image_knows_its_file(animals: Path, split: str) -> None:
    part = load(animals, split, held_out=4)
    assert part.files is not None
    images = part.test_batch(np.arange(len(part))).images
    for image, path in zip(images, part.files, strict=True):
        assert round(float(image.mean()) * 255) == np.asarray(Image.open(path)).mean()


def test_held_out_images_come_from_all_classes_and_are_not_trained_on(animals: Path) -> None:
    train, validation = load(animals, held_out=8), load(animals, "validation", held_out=8)
    assert set(labels_of(validation)) == {0, 1, 2}
    assert train.files is not None
    assert validation.files is not None
    assert (len(train.files), len(validation.files)) == (16, 8)
    assert len({*train.files, *validation.files}) == 24


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"b": 2, "a": 3})
    write_classes(tmp_path / "test", {"b": 1, "a": 2})
    assert sorted(labels_of(load(tmp_path))) == [0, 0, 0, 1, 1]
    assert labels_of(load(tmp_path, "test")) == [0, 0, 1]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("P", 7, (21, 7, 248)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("RGBA", (100, 200, 50, 128), (50, 100, 25)),
        ("LA", (100, 0), (0, 0, 0)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 250, (1, 1, 1)),
        ("I", 32896, (128, 128, 128)),
        ("F", 51.0, (51, 51, 51)),
        ("F", 0.5, (128, 128, 128)),
        ("F", float("nan"), (0, 0, 0)),
    ],
)
def test_any_mode_becomes_colour(
    mode: str, colour: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    (folder / "a" / "00.png").unlink()
    ending = "tiff" if mode in ("CMYK", "F", "LA", "I") else "png"
    image = Image.new(mode, (12, 12), colour)  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette(bytes(chain(*((3 * k % 256, k, 255 - k) for k in range(256)))))
    image.save(folder / "a" / f"00.{ending}")
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    images = load_folder(folder, contents, size=8, num_channels=3)
    middle = images[0, :, 4, 4]
    assert np.abs(middle.astype(int) - expected).max() <= 1


def test_a_dark_pgm_of_16_bits_stays_dark(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    (folder / "a" / "00.png").unlink()
    (folder / "a" / "00.pgm").write_bytes(b"P5 12 12 65535\n" + bytes([0, 250]) * 144)
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    assert load_folder(folder, contents, size=8, num_channels=1)[0].max() == 1


def test_an_oblong_image_is_centred_on_black(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    write_image(folder / "a" / "00.png", size=(40, 20), colour=255)
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    image = load_folder(folder, contents, size=8, num_channels=1)[0, 0]
    assert (image[2:6] == 255).all()
    assert (image[:2] == 0).all()
    assert (image[6:] == 0).all()


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    picture = Image.new("L", (16, 16), 0)
    picture.paste(255, (0, 0, 16, 8))  # white above
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    picture.save(folder / "a" / "00.png", exif=exif)
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    image = load_folder(folder, contents, size=8, num_channels=1)[0, 0]
    assert image[0].max() == 0
    assert image[-1].min() == 255


def test_metadata_that_are_garbage_are_no_matter(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    Image.new("L", (16, 16), 255).save(folder / "a" / "00.png", exif=b"garbage")
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    assert load_folder(folder, contents, size=8, num_channels=1)[0].min() == 255


def test_an_image_is_turned_though_its_metadata_cannot_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_classes(tmp_path / "images", {"a": 2, "b": 2})
    image, exif = Image.new("L", (8, 8), 255), Image.Exif()
    image.paste(0, (0, 0, 8, 4))
    exif[ExifTags.Base.Orientation] = 3  # half a turn
    image.save(folder / "a" / "00.png", exif=exif)

    def refuse(self: Image.Exif, offset: int = 8) -> bytes:
        raise struct.error("required argument is not an integer")

    monkeypatch.setattr(Image.Exif, "tobytes", refuse)
    contents = list_folder(folder, test_fraction=0.5, seed=0)
    seen = load_folder(folder, contents, size=8, num_channels=1)[0, 0]
    assert (seen[:4].min(), seen[4:].max()) == (255, 0)


def test_a_large_photograph_is_read_without_a_warning(
    animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # the images have 81
    assert len(load(animals)) == 24
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    write_image(animals / "cat" / "new.png")
    with pytest.raises(ValueError, match=r"cat/00\.png is no image that can be read: Image size"):
        load(animals)


def test_a_cache_is_used_again_and_rebuilt_when_a_file_changes(
    animals: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set((data_dir / "folders").glob("*")) if (data_dir / "folders").exists() else set()

    def read() -> np.ndarray:
        contents = list_folder(animals, test_fraction=0.2, seed=0)
        return load_folder(animals, contents, size=9, num_channels=1)

    def caches() -> set[Path]:
        return set((data_dir / "folders").glob("*")) - before

    first = read()
    (cache,) = caches()
    with monkeypatch.context() as patch:
        patch.setattr("capsnet.data.folder._read_image", None)  # nothing is decoded again
        again = read()
    assert_array_equal(again, first)
    assert isinstance(again, np.memmap)
    write_image(animals / "cat" / "00.png", colour=99)
    os.utime(animals / "cat" / "00.png", ns=(1, 1))
    assert read()[0, 0, 4, 4] == 99
    (newer,) = caches()  # the old one is gone
    assert newer != cache
    data = bytearray(newer.read_bytes())
    for damaged in (data[:-1], data[:-1] + b"x", bytearray(), bytearray(b"\0") + data[1:] + b"x"):
        newer.write_bytes(bytes(damaged))
        assert read()[0, 0, 4, 4] == 99
        assert newer.read_bytes() == bytes(data)


def test_a_folder_named_in_another_way_has_the_same_cache(
    animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(animals.parent)
    load(Path(animals.name))
    monkeypatch.setattr("capsnet.data.folder._read_image", None)  # nothing is decoded again
    assert len(load(animals)) == 24


def test_images_need_no_disk_for_their_cache(
    animals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("CAPSNET_DATA", str(blocked))
    assert len(load(animals)) == 24
    monkeypatch.setattr("capsnet.data.folder._read_image", None)  # nothing is decoded again
    assert len(load(animals, "test")) == 6


def test_reading_that_takes_long_says_how_long(
    animals: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(animals)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("capsnet.progress.PATIENCE", -1.0)
    write_image(animals / "cat" / "new.png")
    load(animals)
    assert re.match(r"read 1 of 31 examples, \d+ s left\n", capsys.readouterr().err)


def test_what_file_managers_leave_behind_is_ignored(animals: Path) -> None:
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        (animals / name).write_text("x")
        (animals / "cat" / name).write_text("x")
    assert len(load(animals)) == 24


def mischief(folder: Path, name: str) -> None:
    """Spoils a good folder in the named way."""
    if name == "text":
        (folder / "cat" / "notes.txt").write_text("meow")
    elif name == "cut":
        path = folder / "cat" / "00.png"
        noise = np.random.default_rng(0).integers(0, 256, (40, 40)).astype(np.uint8)
        Image.fromarray(noise).save(path)
        os.truncate(path, path.stat().st_size // 2)
    elif name == "empty class":
        (folder / "fox").mkdir()
    elif name == "stray":
        write_image(folder / "stray.png")
    elif name == "nested":
        write_image(folder / "cat" / "old" / "x.png")
    elif name == "broken link":
        (folder / "cat" / "link.png").symlink_to("nowhere")
    elif name == "not UTF-8":
        os.mkdir(os.fsencode(folder) + b"/caf\xe9")  # noqa: PTH102
    elif name == "format":  # Pillow reads it, but `capsnet predict` would not
        write_image(folder / "cat" / "x.tga")
    elif name == "one image":
        write_image(folder / "fox" / "x.png")
    elif name == "train only":
        (folder / "train").mkdir()
    elif name == "mixed":
        (folder / "train").mkdir()
        (folder / "test").mkdir()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("text", r"cat/notes\.txt is no image that can be read: damaged, or none of PNG, JPEG"),
        ("format", r"cat/x\.tga is no image that can be read: damaged, or none of PNG, JPEG"),
        ("cut", r"cat/00\.png is no image that can be read"),
        ("empty class", r"every class must have images, but .*fox is empty"),
        ("stray", r"animals must hold only folders, got the file stray\.png"),
        ("nested", r"a class folder must hold only images, got the folder .*cat/old"),
        ("broken link", r"cat/link\.png is no file, or a link to nowhere"),
        ("not UTF-8", r"names of folders must be UTF-8, got .*animals/caf"),
        ("one image", r"needs two images or more .* but .*fox has 1"),
        ("train only", r"either the folders train and test or one folder per class, got cat, dog"),
        ("mixed", r"either the folders train and test or one folder per class, got cat, dog"),
    ],
)
def test_a_spoilt_folder_is_named_in_one_sentence(animals: Path, name: str, sentence: str) -> None:
    mischief(animals, name)
    with pytest.raises(ValueError, match=sentence):
        load(animals)


@pytest.mark.parametrize("size", [None, 32], ids=["headers", "pixels"])
def test_all_spoilt_files_are_named_at_once(animals: Path, size: int | None) -> None:
    for number in (3, 4):
        (animals / "cat" / f"z{number}.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"cat/z3\.png is no image .*; nor is \S*cat/z4\.png$"):
        load_split(DataConfig("folder", animals, image_size=size), "train")
    (animals / "cat" / "z4.png").unlink()
    mischief(animals, "cut")  # whose header is whole
    with pytest.raises(ValueError, match=r"cat/00\.png is no image .*; nor is \S*cat/z3\.png$"):
        load_split(DataConfig("folder", animals, image_size=size), "train")
    for number in range(9):
        (animals / "dog" / f"z{number}.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"dog/z3\.png, … \(11 in all\)$"):
        load_split(DataConfig("folder", animals, image_size=size), "train")


def test_classes_of_train_and_test_must_agree(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_classes(tmp_path / "test", {"a": 1, "c": 1})
    with pytest.raises(ValueError, match="must have the same classes; b differs"):
        load(tmp_path)


@pytest.mark.parametrize(("counts", "found"), [({}, "none"), ({"cat": 3}, "cat")])
def test_two_classes_are_needed(counts: dict[str, int], found: str, tmp_path: Path) -> None:
    write_classes(tmp_path, counts)
    with pytest.raises(ValueError, match=f"a folder for each of two classes or more, got {found}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image_size": 7}, "image_size must be between 8 and 512, got 7"),
        ({"image_channels": 2}, "image_channels must be 3 for colour or 1 for grey, got 2"),
        ({"test_fraction": 1.0}, r"test_fraction must be between 0 and 1, got 1\.0"),
        ({"data_dir": None}, "dataset 'folder' needs data_dir"),
        ({"data_dir": Path("/nowhere")}, "a folder of images must exist, got /nowhere"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], sentence: str, animals: Path) -> None:
    config = DataConfig(**{"name": "folder", "data_dir": animals, **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        load_split(config, "train")
