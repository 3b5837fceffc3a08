"""Pictures of every size and mode come to the network as MNIST's digits do, or are refused."""

import io
import struct

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from capsnet.playground.pictures import (
    MAX_SIDE,
    fit_digit,
    open_image,
    place_digit,
    prepare_image,
    to_bytes,
    to_image,
)

DIGIT = (1, 28, 28)


def stroke(size: tuple[int, int] = (90, 60), ground: int = 0, ink: int = 255) -> Image.Image:
    """A slanted stroke, which has no symmetry to hide a swapped axis."""
    image = Image.new("L", size, ground)
    width, height = size
    image.paste(ink, (width // 3, height // 6, width // 3 + 9, height - 7))
    image.paste(ink, (width // 3, height // 6, width // 3 + 20, height // 6 + 8))
    return image


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_light_on_dark_and_dark_on_light_give_the_same_pixels() -> None:
    light = prepare_image(stroke(), DIGIT)
    dark = prepare_image(stroke(ground=255, ink=0), DIGIT)
    assert (light.polarity, dark.polarity) == ("light on dark", "dark on light")
    assert_array_equal(light.pixels, dark.pixels)


def test_low_contrast_is_stretched() -> None:
    faint = prepare_image(stroke(ground=120, ink=150), DIGIT)
    assert_allclose(faint.pixels, prepare_image(stroke(), DIGIT).pixels, atol=0.01)


@pytest.mark.parametrize(("ground", "ink"), [(230, 26), (90, 235)])
@pytest.mark.parametrize("axis", [0, 1])
def test_uneven_light_changes_nothing(ground: int, ink: int, axis: int) -> None:
    page = np.asarray(stroke(ground=ground, ink=ink), dtype=np.float64)
    light = np.linspace(1, 0.5, page.shape[axis])
    shaded = page * np.expand_dims(light, 1 - axis)
    prepared = prepare_image(Image.fromarray(shaded.round().astype(np.uint8)), DIGIT)
    even = prepare_image(stroke(ground=ground, ink=ink), DIGIT)
    assert prepared.polarity == even.polarity
    assert np.abs(prepared.pixels - even.pixels).mean() < 0.03


def test_ink_on_a_glaring_page_is_at_most_one() -> None:
    page = np.clip(np.tile(np.linspace(0.45, 1.15, 28), (28, 1)), 0, 1)
    page[8:20, 24:27] = 0
    prepared = prepare_image(Image.fromarray((page * 255).astype(np.uint8)), DIGIT)
    assert prepared.pixels[0, 8:20, 24:27].min() > 0.9
    assert prepared.pixels.max() <= 1


def test_ink_at_the_border_does_not_tilt_the_ground() -> None:
    page = stroke()
    cut = page.crop((page.width // 3, 0, page.width, page.height))  # the stroke is the left edge
    alone = Image.new("L", page.size)
    alone.paste(cut, (20, 0))
    assert_array_equal(prepare_image(cut, DIGIT).pixels, prepare_image(alone, DIGIT).pixels)


def test_a_blank_page_is_black() -> None:
    assert prepare_image(Image.new("L", (50, 40), 200), DIGIT).pixels.max() == 0


def test_a_digit_fills_a_box_of_20_with_its_centre_of_mass_in_the_centre() -> None:
    pixels = prepare_image(stroke(), DIGIT).pixels[0]
    rows, columns = (np.flatnonzero(pixels.max(axis=axis) > 0) for axis in (1, 0))
    assert rows[-1] - rows[0] + 1 == 20
    assert columns[-1] - columns[0] + 1 <= 20
    for axis in (0, 1):
        centre = (pixels.sum(axis=1 - axis) * np.arange(28)).sum() / pixels.sum()
        assert abs(centre - 13.5) <= 0.5


def test_size_and_place_of_the_digit_on_the_page_do_not_matter() -> None:
    page = Image.new("L", (300, 200))
    page.paste(stroke(), (150, 20))
    assert_array_equal(prepare_image(page, DIGIT).pixels, prepare_image(stroke(), DIGIT).pixels)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (20, 23)])
def test_an_image_of_the_networks_size_is_left_as_it_is(height: int, width: int) -> None:
    levels = np.zeros((height, width), dtype=np.uint8)
    levels[3:9, 17:19] = 255
    levels[3:4, 10:17] = 40
    prepared = prepare_image(Image.fromarray(levels), (1, height, width))
    assert_array_equal(to_bytes(prepared.pixels[0]), levels)


def test_larger_networks_get_the_digit_in_the_middle() -> None:
    small = prepare_image(stroke(), DIGIT).pixels
    large = prepare_image(stroke(), (1, 36, 40)).pixels
    assert_array_equal(large[:, 4:32, 6:34], small)
    assert large.sum() == pytest.approx(small.sum())
    assert prepare_image(stroke(), (1, 20, 22)).pixels.shape == (1, 20, 22)


@pytest.mark.parametrize(("mode", "value", "level"), [("F", 0.5, 128), ("I;16", 250, 1)])
def test_more_than_eight_bits_are_read_as_in_training(mode: str, value: float, level: int) -> None:
    prepared = prepare_image(Image.new(mode, (9, 9), value), (3, 9, 9), digit=False)
    assert round(float(prepared.pixels[0, 4, 4]) * 255) == level


def test_a_dark_pgm_of_16_bits_stays_dark() -> None:
    image = open_image(b"P5 9 9 65535\n" + bytes([0, 250]) * 81)
    prepared = prepare_image(image, (3, 9, 9), digit=False)
    assert round(float(prepared.pixels[0, 4, 4]) * 255) == 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_gives_the_same_digit(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.asarray(stroke(), dtype=np.uint16) * 257)
    else:
        image = stroke().convert(mode)
    assert_allclose(
        prepare_image(image, DIGIT).pixels, prepare_image(stroke(), DIGIT).pixels, atol=0.02
    )


def test_floats_from_0_to_1_are_intensities() -> None:
    image = Image.fromarray(np.asarray(stroke(), dtype=np.float32) / 255)
    assert image.mode == "F"
    assert_array_equal(prepare_image(image, DIGIT).pixels, prepare_image(stroke(), DIGIT).pixels)


@pytest.mark.parametrize(("ink", "polarity"), [(0, "dark on light"), (255, "light on dark")])
def test_ink_on_a_transparent_page_is_seen(ink: int, polarity: str) -> None:
    image = Image.new("LA", (90, 60), (ink, 0))
    image.putalpha(stroke())
    prepared = prepare_image(image, DIGIT)
    assert prepared.polarity == polarity
    assert_array_equal(prepared.pixels, prepare_image(stroke(), DIGIT).pixels)


def test_colours_keep_their_channels_and_proportions() -> None:
    image = Image.new("RGB", (40, 20), (255, 51, 0))
    pixels = prepare_image(image, (3, 32, 32)).pixels
    assert pixels.shape == (3, 32, 32)
    assert_allclose(pixels[:, 16, 16], [1.0, 0.2, 0.0], atol=1e-6)
    assert pixels[:, 0].max() == 0  # a wide image has bars above and below


def test_an_upright_image_comes_from_a_turned_file() -> None:
    turned = stroke().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90° clockwise to see it upright"
    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    assert_array_equal(np.asarray(open_image(buffer.getvalue())), np.asarray(stroke()))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_metadata_that_are_garbage_are_no_matter(format: str) -> None:
    buffer = io.BytesIO()
    Image.new("L", (30, 20), 200).save(buffer, format, exif=b"garbage")
    assert open_image(buffer.getvalue()).size == (30, 20)


def test_nothing_but_images_of_a_bounded_size_is_opened() -> None:
    with pytest.raises(ValueError, match="must be one of PNG"):
        open_image(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match="the image is damaged"):
        open_image(encode(stroke())[:70])
    with pytest.raises(ValueError, match="at most 4096×4096 pixels, got 10000×10000"):
        open_image(encode(Image.new("1", (10_000, 10_000))))
    with pytest.raises(ValueError, match="at most 4096×4096"):
        open_image(encode(Image.new("1", (20_000, 20_000))))
    assert open_image(encode(Image.new("1", (MAX_SIDE, 3)))).size == (MAX_SIDE, 3)
    large = open_image(encode(Image.new("1", (10_000, 10_000))), max_side=None)
    assert large.size == (10_000, 10_000)
    with pytest.raises(ValueError, match="at most 178,956,970 pixels"):
        open_image(encode(Image.new("1", (20_000, 20_000))), max_side=None)
    with pytest.raises(ValueError, match="must be one of PNG"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


def progressive_jpeg(num_scans: int) -> bytes:
    """Eight by eight grey pixels, with as many passes over them after the first."""

    def segment(marker: int, data: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data

    one_code = b"\1" + bytes(15)
    head = segment(0xDB, b"\0" + b"\1" * 64)
    head += segment(0xC2, struct.pack(">BHHB", 8, 8, 8, 1) + b"\1\x11\0")
    head += segment(0xC4, b"\0" + one_code + b"\0") + segment(0xC4, b"\x10" + one_code + b"\xe0")
    scans = segment(0xDA, b"\1\1\0\0\0\0") + b"\0"
    scans += (segment(0xDA, b"\1\1\0\1\x3f\0") + b"\0") * num_scans
    return b"\xff\xd8" + head + scans + b"\xff\xd9"


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded() -> None:
    assert open_image(progressive_jpeg(199)).size == (8, 8)
    with pytest.raises(ValueError, match="an image must have at most 200 scans"):
        open_image(progressive_jpeg(200))
    buffer = io.BytesIO()
    stroke().convert("L").save(buffer, "TIFF", compression="jpeg")
    assert open_image(buffer.getvalue()).size == stroke().size


def test_networks_of_two_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="1 or 3 channels, but the network takes 2"):
        prepare_image(stroke(), (2, 32, 32))


def test_a_digit_must_stay_inside_the_frame() -> None:
    digit = np.ones((28, 28), dtype=np.float32)
    placed = place_digit(digit, (1, 36, 36), right=4, down=-4)
    assert placed[0, :28, 8:].min() == 1
    assert placed.sum() == 28 * 28
    with pytest.raises(ValueError, match="must stay inside the 36×36 image, got shifts of 5 right"):
        place_digit(digit, (1, 36, 36), right=5, down=0)


def test_an_empty_drawing_is_black() -> None:
    assert fit_digit(np.zeros((5, 7), dtype=np.float32)).max() == 0


def test_bytes_become_a_picture_of_their_channels() -> None:
    levels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(3, 2, 3)
    image = to_image(levels)
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert image.getpixel((2, 1)) == (5, 11, 17)
    with pytest.raises(ValueError, match="1 to 4 channels, got 5"):
        to_image(np.zeros((5, 2, 2), dtype=np.uint8))
