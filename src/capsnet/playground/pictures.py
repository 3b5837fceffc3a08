"""Images of any size and mode, made into what a network was trained on.

A digit is brought into MNIST's form: light on dark, its longer side scaled to 20 pixels, its centre
of mass in the centre of 28×28. Other images are scaled to the network's size.
"""

import io
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, UnidentifiedImageError

from capsnet.data.folder import FORMATS, as_bytes, fit_image, turn_upright

Polarity = Literal["light on dark", "dark on light"]

MAX_SIDE = 4096
"""Most rows or columns of an image, unless the caller allows more."""
MAX_PIXELS = 178_956_970
"""Most pixels that Pillow opens by itself; no caller allows more."""
MAX_SCANS = {"JPEG": 200, "MPO": 200, "TIFF": 1000}
"""Most passes over the pixels in a file of JPEG's: each takes eleven bytes and milliseconds. An
ordinary file has about ten; in TIFF every strip of rows has its own."""

DIGIT = (1, 28, 28)
"""Shape of a digit of MNIST."""
BOX, FRAME = 20, 28  # MNIST: digits scaled to a box of 20×20, centred in 28×28
PAIR_BOX = 23  # MultiMNIST: the box around two of them is about so large
MIN_CONTRAST = 0.04  # less than ten grey levels of 256 between digit and ground is no digit
FAINT = 0.8  # what is weaker than this at its strongest is made stronger
INK = 0.15  # share of the darkest ink from which on a pixel belongs to the digit


@dataclass(frozen=True)
class Prepared:
    """An image as a network sees it."""

    pixels: Float32[np.ndarray, "C H W"]
    """Intensities in [0, 1]."""
    polarity: Polarity | None
    """How the digit stood out before it was made light on dark; None where that plays no part."""


def open_image(content: bytes, *, max_side: int | None = MAX_SIDE) -> Image.Image:
    """Returns the first picture of a file, turned upright; a ValueError says why it cannot be.

    Args:
        content: The file.
        max_side: Most rows or columns; None leaves it at `MAX_PIXELS`.
    """
    limit = f"{MAX_PIXELS:,}" if max_side is None else f"{max_side}×{max_side}"
    try:
        with warnings.catch_warnings():
            # Too many pixels are refused below, before any is decoded; odd metadata is no matter.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if max_side is not None and max(width, height) > max_side:
                raise ValueError(f"an image must have at most {limit} pixels, got {width}×{height}")
            _check_scans(image, content)
            return turn_upright(image)
    except UnidentifiedImageError:
        names = ", ".join(FORMATS)
        raise ValueError(f"an image must be one of {names}; this is none, or damaged") from None
    except Image.DecompressionBombError:
        raise ValueError(f"an image must have at most {limit} pixels") from None
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # PIL's decoders raise what they like on damaged files
        raise ValueError(f"the image is damaged: {str(error) or type(error).__name__}") from None


def _check_scans(image: Image.Image, content: bytes) -> None:
    """Raises a ValueError for an image of JPEG's whose decoding would take minutes."""
    is_jpeg = image.format != "TIFF" or image.info.get("compression") == "jpeg"
    most = MAX_SCANS.get(image.format or "") if is_jpeg else None
    if most is not None and content.count(b"\xff\xda") > most:  # in JPEG's data a marker only
        raise ValueError(f"an image must have at most {most} scans")


def prepare_image(
    image: Image.Image, shape: tuple[int, int, int], *, digit: bool = True, box: int = BOX
) -> Prepared:
    """Returns an image as a network of this input shape was trained to see it.

    Args:
        image: A picture of any size and mode.
        shape: Channels, height and width of the network's images.
        digit: Whether the picture shows a digit, to be brought into MNIST's form.
        box: Pixels that the longer side of the ink then has.

    >>> page = Image.new("L", (90, 60), color=255)
    >>> page.paste(0, (40, 10, 50, 50))  # a black stroke
    >>> prepared = prepare_image(page, (1, 28, 28))
    >>> prepared.polarity, prepared.pixels.shape
    ('dark on light', (1, 28, 28))
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise ValueError(f"pictures have 1 or 3 channels, but the network takes {channels}")
    if not digit or channels == 3:
        return Prepared(fit_image(image, shape).astype(np.float32) / 255, None)
    flat = _flatten(image)
    small = flat.convert("L").reduce(-(-max(flat.size) // MAX_SIDE))
    grey = np.asarray(small, dtype=np.float32) / 255
    ink, polarity = _find_ink(grey)
    # An image of the network's size, as a dataset's own are, stays as it is unless it is faint.
    fits = grey.shape == (height, width)
    pixels = ink if fits else _frame(fit_digit(ink, box), height, width)
    return Prepared(pixels[None], polarity)


def fit_digit(ink: Float32[np.ndarray, "h w"], box: int = BOX) -> Float32[np.ndarray, "28 28"]:
    """Returns a light digit scaled into a box, its centre of mass in the centre of 28×28."""
    frame = np.zeros((FRAME, FRAME), dtype=np.float32)
    rows, columns = (np.flatnonzero((ink > INK).any(axis=axis)) for axis in (1, 0))
    if rows.size == 0:
        return frame
    found = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = box / max(found.shape)
    height, width = (max(1, round(side * scale)) for side in found.shape)
    resized = Image.fromarray(found).resize((width, height), Image.Resampling.BILINEAR)
    small = np.asarray(resized, dtype=np.float32)
    small = small / small.max()  # thin strokes fade when scaled down
    mass = small.sum()
    corners = []
    for axis, side in enumerate(small.shape):
        centre = float((small.sum(axis=1 - axis) * np.arange(side)).sum() / mass)
        corners.append(min(max(round((FRAME - 1) / 2 - centre), 0), FRAME - side))
    top, left = corners
    frame[top : top + height, left : left + width] = small
    return frame


def place_digit(
    digit: Float32[np.ndarray, "h w"], shape: tuple[int, int, int], *, right: int, down: int
) -> Float32[np.ndarray, "C H W"]:
    """Returns a black image with the digit moved from its centre; all of it must stay inside."""
    channels, height, width = shape
    rows, columns = digit.shape
    top, left = (height - rows) // 2 + down, (width - columns) // 2 + right
    if not (0 <= top <= height - rows and 0 <= left <= width - columns):
        raise ValueError(
            f"a digit of {rows}×{columns} must stay inside the {height}×{width} image, "
            f"got shifts of {right} right and {down} down"
        )
    frame = np.zeros((channels, height, width), dtype=np.float32)
    frame[:, top : top + rows, left : left + columns] = digit
    return frame


def to_bytes(pixels: Float32[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Returns intensities in [0, 1] as bytes."""
    levels: UInt8[np.ndarray, ...] = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return levels


def to_image(levels: UInt8[np.ndarray, "C H W"]) -> Image.Image:
    """Returns bytes as a picture: 1 channel is grey, 2 grey with alpha, 3 colours, 4 with alpha."""
    modes = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
    channels, height, width = levels.shape
    if channels not in modes:
        raise ValueError(f"a picture must have 1 to 4 channels, got {channels}")
    content = levels.transpose(1, 2, 0).tobytes()
    return Image.frombytes(modes[channels], (width, height), content)


def _flatten(image: Image.Image) -> Image.Image:
    """The picture as 8-bit grey or colours; what is transparent shows white, or black under light.

    Light is the visible part where it has more of white than of black.
    """
    if image.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would clip, not scale
        return as_bytes(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    grey = np.asarray(colours.convert("L"), dtype=np.float32)
    alpha = np.asarray(colours.getchannel("A"), dtype=np.float32)
    ground = "black" if (grey * alpha).sum() > 0.5 * 255 * alpha.sum() else "white"
    return Image.alpha_composite(Image.new("RGBA", colours.size, ground), colours).convert("RGB")


def _find_ink(grey: Float32[np.ndarray, "h w"]) -> tuple[Float32[np.ndarray, "h w"], Polarity]:
    """How far each pixel stands out from the ground, which is what the border shows."""
    ground = _find_ground(grey)
    lighter, darker = np.clip(grey - ground, 0, None), np.clip(ground - grey, 0, None)
    is_light = lighter.sum() >= darker.sum()
    ink = lighter if is_light else darker
    strongest = ink.max()
    if strongest < MIN_CONTRAST:
        ink = np.zeros_like(ink)
    elif strongest < FAINT:
        ink = ink / strongest
    ink = np.minimum(ink, 1)  # a tilted ground may be lighter than white
    return ink, "light on dark" if is_light else "dark on light"


def _find_ground(grey: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
    """One level, or a plane through the border's where light falls unevenly on the page."""
    height, width = (np.linspace(-1, 1, side, dtype=np.float32) for side in grey.shape)
    down, right = np.broadcast_arrays(height[:, None], width)  # (h, w) each
    border, rows, columns = (
        np.concatenate([field[0], field[-1], field[:, 0], field[:, -1]])
        for field in (grey, down, right)
    )
    terms = np.stack([np.ones_like(rows), rows, columns], axis=1)  # (border, 3)
    plane = np.linalg.lstsq(terms, border, rcond=None)[0]
    level = np.median(border)
    # Ink on the border and noise tilt a plane, too, but do not make it fit much better.
    if np.median(np.abs(border - terms @ plane)) >= np.median(np.abs(border - level)) / 2:
        return np.full_like(grey, level)
    tilted: Float32[np.ndarray, "h w"] = plane[0] + plane[1] * down + plane[2] * right
    return tilted


def _frame(
    digit: Float32[np.ndarray, "h w"], height: int, width: int
) -> Float32[np.ndarray, "H W"]:
    """The digit in the middle of a black image, scaled down if it is too large for it."""
    side = min(height, width)
    if max(digit.shape) > side:
        small = Image.fromarray(digit).resize((side, side), Image.Resampling.BILINEAR)
        digit = np.asarray(small, dtype=np.float32)
    framed: Float32[np.ndarray, "H W"] = place_digit(digit, (1, height, width), right=0, down=0)[0]
    return framed
