"""The playground's HTTP side: a JSON API over the engine, and the page's files.

One thread does all the work of the networks, behind a queue of bounded length. A mistake in a
request is answered by a status of 4xx and one sentence, {"error": "…"}.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from jaxtyping import Float32, UInt8
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match
from torch import Tensor

from capsnet import __version__
from capsnet.playground.engine import Engine
from capsnet.playground.limits import BodyLimit, KnownHosts, ModelQueue, SecurityHeaders
from capsnet.playground.networks import TrainedNetwork
from capsnet.playground.pictures import (
    DIGIT,
    open_image,
    place_digit,
    prepare_image,
    to_bytes,
    to_image,
)
from capsnet.playground.schema import (
    Digit,
    ImageBody,
    Mistake,
    PerturbBody,
    Perturbed,
    Picture,
    PredictBody,
    Predicted,
    ReconstructBody,
    Reconstructed,
    RouteBody,
    Routed,
    RoutedIteration,
    RoutedPart,
    SegmentBody,
    Segmented,
    SegmentedPart,
    WeightsInfo,
    WeightsList,
)

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_app(weights: Sequence[TrainedNetwork], *, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Returns the playground as an ASGI application.

    Args:
        weights: Networks to show, the default first.
        hosts: Names under which the server may be reached; "*" for any.
    """
    engine = Engine(weights)
    queue = ModelQueue()
    app = FastAPI(
        title="capsnet playground",
        version=__version__,
        description="Look inside a capsule network: predict, reconstruct, perturb, route, segment.",
        docs_url=None,
        redoc_url=None,
        responses={code: {"model": Mistake} for code in (413, 415, 422, 429)},
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(KnownHosts, hosts=hosts)
    app.add_middleware(SecurityHeaders)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(StarletteHTTPException, _answer_http)

    def read(
        name: str, body: ImageBody
    ) -> tuple[Float32[np.ndarray, "C H W"], str | None, int | None]:
        """The image as the network sees it, its polarity, and its label if it has one."""
        chosen = engine.find(name)
        shape = chosen.capsules.config.image_shape
        if body.test is not None:
            digit, number = engine.test_digit(body.test)
            label = number if chosen.sees_digits and number < len(chosen.class_names) else None
            if min(shape[1:]) >= len(digit):
                return place_digit(digit, shape, right=0, down=0), None, label
            return chosen.prepare(to_image(to_bytes(digit[None]))).pixels, None, label
        if body.file is not None:
            prepared = chosen.prepare(open_image(_decode_base64(body.file)))
            return prepared.pixels, prepared.polarity, None
        if body.picture is not None:
            levels = _read_picture(body.picture)
            if levels.shape == shape:
                return levels.astype(np.float32) / np.float32(255), None, None
            prepared = chosen.prepare(to_image(levels))
            return prepared.pixels, prepared.polarity, None
        assert body.pixels is not None
        pixels = _read_pixels(body.pixels)
        if pixels.shape != shape[1:]:
            raise ValueError(
                f"pixels must be {shape[1]}×{shape[2]} for weights {name!r}, "
                f"got {pixels.shape[0]}×{pixels.shape[1]}"
            )
        return np.repeat(pixels[None], shape[0], axis=0), None, None

    def read_digit(body: ImageBody) -> tuple[Float32[np.ndarray, "28 28"], int | None]:
        """A digit in MNIST's form, and its label if it has one."""
        if body.test is not None:
            return engine.test_digit(body.test)
        if body.file is not None:
            return prepare_image(open_image(_decode_base64(body.file)), DIGIT).pixels[0], None
        if body.picture is not None:
            return prepare_image(to_image(_read_picture(body.picture)), DIGIT).pixels[0], None
        assert body.pixels is not None
        pixels = _read_pixels(body.pixels)
        if pixels.shape != DIGIT[1:]:
            raise ValueError(f"a digit must be 28×28, got {pixels.shape[0]}×{pixels.shape[1]}")
        return pixels, None

    @app.get("/api/weights")
    async def weights_list() -> WeightsList:
        """Networks that can be asked, the default first."""
        return WeightsList(weights=[_describe(each) for each in engine.weights.values()])

    @app.get("/api/digits/{index}")
    async def digit(index: int) -> Digit:
        """A digit of the MNIST test set, 28×28."""

        def work() -> Digit:
            pixels, label = engine.test_digit(index)
            return Digit(label=label, image=_picture(pixels[None]))

        return await queue.run(work)

    @app.post("/api/predict")
    async def predict(body: PredictBody) -> Predicted:
        """Lengths and vectors of the class capsules, and the reconstruction of one of them."""

        def work() -> Predicted:
            image, polarity, label = read(body.weights, body.image)
            said = engine.predict(
                body.weights,
                image,
                num_iterations=body.num_iterations,
                reconstruct=body.reconstruct,
            )
            return Predicted(
                classes=list(said.classes),
                lengths=_numbers(said.lengths),
                capsules=[_numbers(capsule) for capsule in said.capsules],
                input=_picture(image),
                polarity=polarity,
                blank=not image.any(),
                label=label,
                reconstructed=said.reconstructed,
                reconstruction=None
                if said.reconstruction is None
                else _picture(said.reconstruction),
            )

        return await queue.run(work)

    @app.post("/api/reconstruct")
    async def reconstruct(body: ReconstructBody) -> Reconstructed:
        """The image that a capsule's vector describes."""

        def work() -> Reconstructed:
            capsule = torch.tensor(body.capsule)
            return Reconstructed(
                image=_picture(engine.reconstruct(body.weights, capsule, number=body.class_))
            )

        return await queue.run(work)

    @app.post("/api/perturb")
    async def perturb(body: PerturbBody) -> Perturbed:
        """Images of a capsule whose dimensions are moved one at a time (Fig. 4)."""

        def work() -> Perturbed:
            images = engine.perturb(
                body.weights,
                torch.tensor(body.capsule),
                number=body.class_,
                dimensions=body.dimensions,
                offsets=body.offsets,
            )
            return Perturbed(images=[[_picture(image) for image in row] for row in images])

        return await queue.run(work)

    @app.post("/api/route")
    async def route(body: RouteBody) -> Routed:
        """Where primary capsules send their output, iteration by iteration."""

        def work() -> Routed:
            image, _, label = read(body.weights, body.image)
            routing = engine.route(body.weights, image, num_iterations=body.num_iterations)
            return Routed(
                iterations=[
                    RoutedIteration(
                        lengths=_numbers(view.lengths),
                        coupling=_maps(view.coupling),
                        agreement=_maps(view.agreement),
                    )
                    for view in routing.iterations
                ],
                parts=[[RoutedPart(**vars(part)) for part in parts] for parts in routing.parts],
                field=routing.field,
                stride=routing.stride,
                start=routing.start,
                input=_picture(image),
                label=label,
            )

        return await queue.run(work)

    @app.post("/api/segment")
    async def segment(body: SegmentBody) -> Segmented:
        """Two digits laid over each other, recognised and taken apart (§6)."""

        def work() -> Segmented:
            sees_digits = engine.find(body.weights).sees_digits
            digits, labels = zip(*(read_digit(each.image) for each in body.digits), strict=True)
            apart, truth = engine.segment(
                body.weights,
                digits,
                shifts=[(each.right, each.down) for each in body.digits],
                classes=body.classes,
            )
            return Segmented(
                input=_picture(apart.image),
                lengths=_numbers(apart.lengths),
                predicted=list(apart.predicted),
                parts=[
                    SegmentedPart(class_=number, image=_picture(image))
                    for number, image in apart.parts
                ],
                truth=[_picture(image) for image in truth],
                labels=list(labels) if sees_digits else [None] * len(labels),
            )

        return await queue.run(work)

    @app.api_route("/api/{name:path}", methods=METHODS, include_in_schema=False)
    async def unknown(request: Request) -> None:
        """Keeps what is no question of the API from being looked up among the page's files."""
        allowed = [
            method
            for route in app.routes
            if isinstance(route, APIRoute) and route.matches(request.scope)[0] is Match.PARTIAL
            for method in route.methods or ()
        ]
        if not allowed:
            raise StarletteHTTPException(404)
        takes = ", ".join(allowed)
        sentence = f"{request.url.path} takes {takes}, got {request.method}"
        raise StarletteHTTPException(405, sentence, {"Allow": takes})

    static = Path(str(resources.files("capsnet.playground"))) / "static"

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(static / "docs.html")

    app.mount("/", StaticFiles(directory=static, html=True), name="page")
    return app


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first mistake in a body, without the value, which JSON may not be able to hold."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # its place is a number of a character, no field
        return JSONResponse({"error": "the body of a request must be JSON"}, 422)
    if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
        return JSONResponse({"error": "the Content-Type must be application/json"}, 415)
    place = ".".join(str(step) for step in first["loc"] if step != "body") or "the body"
    sentence = f"{place}: {str(first['msg']).removeprefix('Value error, ')}"
    return JSONResponse({"error": _printable(sentence)}, 422)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    sentence = str(error.detail)
    if error.status_code == 404:  # of the page's files, too, whose server says no more than that
        sentence = f"there is nothing at {request.url.path}; / is the page, /docs lists the API"
    return JSONResponse({"error": _printable(sentence)}, error.status_code, error.headers)


def _printable(sentence: str) -> str:
    """At most 300 characters, all of which UTF-8 can hold."""
    return sentence[:300].encode("utf-8", "replace").decode()


def _describe(weights: TrainedNetwork) -> WeightsInfo:
    model = weights.capsules
    channels, height, width = model.config.image_shape
    return WeightsInfo(
        name=weights.name,
        classes=list(weights.class_names),
        channels=channels,
        height=height,
        width=width,
        capsule_dim=model.config.output_dim,
        num_primary=model.config.num_primary,
        num_iterations=model.config.num_iterations,
        decoder=model.config.decoder,
        digits=weights.sees_digits,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dataset=weights.dataset,
        error_rate=weights.error_rate,
    )


def _read_pixels(rows: Sequence[Sequence[float]]) -> Float32[np.ndarray, "H W"]:
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("pixels must be rows of one length, of at least one number each")
    return np.array(rows, dtype=np.float32)


def _read_picture(picture: Picture) -> UInt8[np.ndarray, "C H W"]:
    content = np.frombuffer(_decode_base64(picture.data), dtype=np.uint8)
    shape = (picture.channels, picture.height, picture.width)
    if content.size != math.prod(shape):
        raise ValueError(f"data must hold {math.prod(shape)} bytes, got {content.size}")
    return content.reshape(shape)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.partition("base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("an image must be base64") from None


def _picture(pixels: Float32[np.ndarray, "C H W"]) -> Picture:
    channels, height, width = pixels.shape
    data = base64.b64encode(to_bytes(pixels).tobytes()).decode()
    return Picture(channels=channels, height=height, width=width, data=data)


def _numbers(vector: Tensor) -> list[float]:
    return [round(value, 5) for value in vector.tolist()]


def _maps(maps: Tensor) -> list[list[list[float]]]:
    return [[_numbers(row) for row in each] for each in maps]
