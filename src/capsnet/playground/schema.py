"""Requests and answers of the playground's API."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from capsnet.playground.engine import MAX_ITERATIONS

MAX_FIELDS = 20
"""More than any request has; each unknown one would be a mistake of its own."""

Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Intensity = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Class = Annotated[int, Field(ge=0, lt=100_000)]
Iterations = Annotated[int, Field(ge=1, le=MAX_ITERATIONS)]
#: Of many wrong numbers only the first is looked at: an error for each would take gigabytes.
Row = Annotated[list[Intensity], Field(max_length=512, fail_fast=True)]
WeightsName = Annotated[str, Field(max_length=200, description="A name that /api/weights lists.")]


class Body(BaseModel):
    """A request; fields that do not exist and numbers in quotation marks are mistakes."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: object) -> object:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise ValueError(f"there must be at most {MAX_FIELDS} fields, got {len(body)}")
        return body


class Picture(Body):
    """Pixels as bytes."""

    channels: int = Field(ge=1)
    height: int = Field(ge=1, le=4096)
    width: int = Field(ge=1, le=4096)
    data: str = Field(description="Base64 of channels × height × width bytes, 0 to 255.")


class ImageBody(Body):
    """An image in one of four forms."""

    test: int | None = Field(None, ge=0, lt=10_000, description="Index of an MNIST test digit.")
    file: str | None = Field(
        None,
        description="Base64 of a PNG, JPEG, GIF, BMP, WebP, TIFF or PPM, up to 4096×4096 pixels.",
    )
    pixels: Annotated[list[Row], Field(max_length=512, fail_fast=True)] | None = Field(
        None,
        description="Rows of intensities from 0 to 1, of the network's height and width; "
        "28×28 of a digit in a pair.",
    )

    picture: Picture | None = Field(
        None,
        description="Bytes of an image of any size; used as they are if they have the size that "
        "pixels must have.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> "ImageBody":
        forms = (self.test, self.file, self.pixels, self.picture)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("an image must have exactly one of test, file, pixels and picture")
        return self


class PredictBody(Body):
    """An image to recognise."""

    weights: WeightsName
    image: ImageBody
    num_iterations: Iterations | None = Field(None, description="As trained if left out.")
    reconstruct: Class | None = Field(
        None, description="Class to reconstruct; that of the longest capsule if left out."
    )


class RouteBody(Body):
    """An image whose routing to show."""

    weights: WeightsName
    image: ImageBody
    num_iterations: Iterations | None = None


class ReconstructBody(Body):
    """A capsule's vector to turn into an image."""

    weights: WeightsName
    class_: Class = Field(alias="class")
    capsule: list[Number] = Field(max_length=256)


class PerturbBody(ReconstructBody):
    """A capsule's vector whose dimensions to move one at a time."""

    dimensions: list[Class] = Field(min_length=1, max_length=256)
    offsets: list[Number] = Field(min_length=1, max_length=21)


class ShiftedDigit(Body):
    """A digit and how far it is moved from the centre."""

    image: ImageBody
    right: int = Field(0, ge=-64, le=64)
    down: int = Field(0, ge=-64, le=64)


class SegmentBody(Body):
    """Two digits to lay over each other and take apart."""

    weights: WeightsName
    digits: Annotated[list[ShiftedDigit], Field(min_length=2, max_length=2)]
    classes: Annotated[list[Class], Field(min_length=2, max_length=2)] | None = Field(
        None, description="Classes to reconstruct; the two predicted ones if left out."
    )


class Mistake(BaseModel):
    """What is wrong with a request."""

    error: str = Field(description="One sentence.")


class WeightsInfo(BaseModel):
    """A network that can be asked."""

    name: str
    classes: list[str]
    channels: int
    height: int
    width: int
    capsule_dim: int
    num_primary: int = Field(description="Primary capsules, which vote for the classes.")
    num_iterations: int = Field(description="Iterations of routing it was trained with.")
    decoder: bool
    digits: bool = Field(description="Whether it was trained on digits in MNIST's form.")
    num_parameters: int
    dataset: str | None
    error_rate: float | None = Field(description="Test error by its record, as a share.")


class WeightsList(BaseModel):
    """All networks that can be asked."""

    weights: list[WeightsInfo]


class Digit(BaseModel):
    """A digit of the MNIST test set."""

    label: int
    image: Picture


class Predicted(BaseModel):
    """What a network says about an image."""

    classes: list[int] = Field(description="All classes, that of the longest capsule first.")
    lengths: list[float]
    capsules: list[list[float]]
    input: Picture = Field(description="The image as the network saw it.")
    polarity: str | None = Field(description="How the digit stood out before it was prepared.")
    blank: bool = Field(description="Whether there is nothing in it: every pixel is 0.")
    label: int | None = Field(
        description="The true class, if it is a test digit and the network sees digits."
    )
    reconstructed: int
    reconstruction: Picture | None = Field(description="None for a network without a decoder.")


class Reconstructed(BaseModel):
    """The image that a capsule describes."""

    image: Picture


class Perturbed(BaseModel):
    """Images by dimension and offset."""

    images: list[list[Picture]]


class RoutedIteration(BaseModel):
    """One iteration, as maps of (class, row, column)."""

    lengths: list[float]
    coupling: list[list[list[float]]] = Field(
        description="Share of their output that the capsules of a place send to the class."
    )
    agreement: list[list[list[float]]] = Field(
        description="What the capsules of a place contribute along the class's output."
    )


class RoutedPart(BaseModel):
    """A primary capsule that contributes much to a class."""

    row: int
    column: int
    type: int
    coupling: list[float] = Field(description="Share sent to the class, by iteration.")
    contribution: float


class Routed(BaseModel):
    """How primary capsules chose their parents."""

    iterations: list[RoutedIteration]
    parts: list[list[RoutedPart]] = Field(description="The strongest of each class.")
    field: int = Field(description="Rows and columns of the image that one capsule sees.")
    stride: int = Field(description="Pixels between the fields of neighbouring places.")
    start: int = Field(description="Row and column of the first field; below zero if padded.")
    input: Picture
    label: int | None


class SegmentedPart(BaseModel):
    """One of the digits that were found."""

    class_: int = Field(serialization_alias="class")
    image: Picture


class Segmented(BaseModel):
    """Two digits taken apart, in the order in which they were given."""

    input: Picture
    lengths: list[float]
    predicted: list[int] = Field(description="Classes of the two longest capsules.")
    parts: list[SegmentedPart]
    truth: list[Picture]
    labels: list[int | None]
