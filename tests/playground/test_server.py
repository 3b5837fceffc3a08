"""The API answers well-formed requests, and every other one by a 4xx and a sentence."""

import base64
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import httpx2
import numpy as np
import pytest
import torch
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from capsnet import CapsNet, CapsNetConfig
from capsnet.playground import limits
from capsnet.playground.networks import TrainedNetwork
from capsnet.playground.server import create_app

GOOD = {"weights": "digit", "image": {"test": 5}}


@pytest.fixture(scope="module")
def client(small: list[TrainedNetwork]) -> Iterator[TestClient]:
    with TestClient(create_app(small), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def odd() -> Iterator[TestClient]:
    """Networks of other sizes, classes and data."""
    torch.manual_seed(8)
    networks = [
        TrainedNetwork(
            name, CapsNet(config).eval(), {"config": {"data": {"name": data}}} if data else {}
        )
        for name, (config, data) in ODD.items()
    ]
    with TestClient(create_app(networks), raise_server_exceptions=False) as client:
        yield client


def encode(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_weights_are_listed_with_what_the_page_must_know(client: TestClient) -> None:
    answer = client.get("/api/weights").json()["weights"]
    assert [each["name"] for each in answer] == ["digit", "pair", "blind", "colour"]
    assert answer[2]["decoder"] is False
    assert (answer[3]["channels"], answer[3]["height"], answer[3]["width"]) == (3, 32, 30)
    assert (answer[0]["capsule_dim"], answer[0]["num_primary"]) == (6, 27)


def test_every_form_of_an_image_gives_the_same_answer(client: TestClient) -> None:
    digit = client.get("/api/digits/5").json()
    levels = np.frombuffer(base64.b64decode(digit["image"]["data"]), np.uint8).reshape(28, 28)
    forms = (
        {"test": 5},
        {"picture": digit["image"]},
        {"pixels": (levels / 255).tolist()},
        {"file": encode(Image.fromarray(levels))},
        {"file": "data:image/png;base64," + encode(Image.fromarray(levels))},
        {"file": encode(Image.fromarray(255 - levels))},
    )
    answers = [
        client.post("/api/predict", json={"weights": "digit", "image": form}).json()
        for form in forms
    ]
    assert answers[0]["label"] == digit["label"] == 1
    assert answers[-1]["polarity"] == "dark on light"
    for answer in answers[1:]:
        assert answer["input"] == answers[0]["input"]
        assert answer["lengths"] == pytest.approx(answers[0]["lengths"], abs=1e-4)


def test_an_answer_says_whether_the_image_is_blank(client: TestClient) -> None:
    white = Image.new("L", (40, 30), 255)
    dotted = white.copy()
    dotted.paste(0, (10, 5, 14, 25))
    for image, is_blank in ((white, True), (dotted, False)):
        body = {"weights": "digit", "image": {"file": encode(image)}}
        assert client.post("/api/predict", json=body).json()["blank"] is is_blank


def test_the_slider_redraws_what_predict_drew(client: TestClient) -> None:
    said = client.post("/api/predict", json={**GOOD, "reconstruct": 4}).json()
    body = {"weights": "digit", "class": 4, "capsule": said["capsules"][4]}
    drawn = client.post("/api/reconstruct", json=body).json()["image"]
    ours, theirs = (
        np.frombuffer(base64.b64decode(picture["data"]), np.uint8).astype(int)
        for picture in (drawn, said["reconstruction"])
    )
    assert np.abs(ours - theirs).max() <= 1
    strip = client.post("/api/perturb", json={**body, "dimensions": [2], "offsets": [0.0, 0.5]})
    assert strip.json()["images"][0][0] == drawn


def test_routing_and_segmentation_are_answered(client: TestClient) -> None:
    routed = client.post("/api/route", json={**GOOD, "num_iterations": 2}).json()
    assert np.shape([each["coupling"] for each in routed["iterations"]]) == (2, 10, 3, 3)
    digits = [{"image": {"test": 0}, "right": -3}, {"image": {"test": 2}, "right": 3, "down": 1}]
    parted = client.post("/api/segment", json={"weights": "pair", "digits": digits}).json()
    assert parted["labels"] == [7, 1]
    assert len(parted["parts"]) == len(parted["truth"]) == 2
    assert parted["input"]["height"] == 36


def test_colour_networks_and_networks_without_decoder_answer(client: TestClient) -> None:
    body = {"weights": "colour", "image": {"file": encode(Image.new("RGB", (9, 7), "red"))}}
    assert client.post("/api/predict", json=body).json()["input"]["channels"] == 3
    said = client.post("/api/predict", json={**GOOD, "weights": "blind"}).json()
    assert said["reconstruction"] is None


SMALL = CapsNetConfig(conv_channels=4, primary_types=3, primary_dim=5, output_dim=6)
ODD = {
    "tiny": (replace(SMALL, image_height=20, image_width=23), "mnist"),
    "clothes": (SMALL, "fashion-mnist"),
    "two": (replace(SMALL, num_classes=2), "mnist"),
    "layers": (replace(SMALL, image_channels=5), None),
}


@pytest.mark.parametrize(("name", "label"), [("tiny", 1), ("clothes", None), ("two", 1)])
def test_a_test_digit_fits_every_network_and_has_a_label_where_it_sees_digits(
    odd: TestClient, name: str, label: int | None
) -> None:
    body = {"weights": name, "image": {"test": 5}}
    said = odd.post("/api/predict", json=body).json()
    assert said["label"] == odd.post("/api/route", json=body).json()["label"] == label
    config, _ = ODD[name]
    assert (said["input"]["height"], said["input"]["width"]) == config.image_shape[1:]
    digits = [{"image": {"test": 0}}, {"image": {"test": 2}}]  # 7 and 1
    if name != "tiny":
        parted = odd.post("/api/segment", json={"weights": name, "digits": digits}).json()
        assert parted["labels"] == ([None, None] if label is None else [7, 1])
    assert odd.post("/api/predict", json=body | {"image": {"test": 0}}).json()["label"] in (
        (None,) if name != "tiny" else (7,)
    )


def test_networks_of_many_channels_answer(odd: TestClient) -> None:
    said = odd.post("/api/predict", json={"weights": "layers", "image": {"test": 5}}).json()
    assert said["input"]["channels"] == 5
    again = odd.post(
        "/api/predict", json={"weights": "layers", "image": {"picture": said["input"]}}
    )
    assert again.json()["lengths"] == pytest.approx(said["lengths"], abs=1e-3)
    listed = odd.get("/api/weights").json()["weights"]
    assert [each["digits"] for each in listed] == [True, False, True, False]


def test_the_page_and_its_documentation_come_from_here(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert "http" not in page.text.replace("http-equiv", "")  # nothing is fetched from elsewhere
    for name in ("/docs", "/style.css", "/main.js", "/favicon.svg", "/openapi.json"):
        assert client.get(name).status_code == 200


PNG = encode(Image.new("L", (5, 5)))
BAD = [
    ("predict", {**GOOD, "weights": "nets"}, "unknown weights 'nets'"),
    ("predict", {**GOOD, "weights": "../../etc/passwd"}, "unknown weights"),
    ("predict", {**GOOD, "weights": "x" * 300}, "at most 200 characters"),
    ("predict", {**GOOD, "colour": 1}, "Extra inputs are not permitted"),
    ("predict", {**GOOD, "num_iterations": 0}, "greater than or equal to 1"),
    ("predict", {**GOOD, "reconstruct": 10}, "classes are 0 to 9"),
    ("predict", {"weights": "digit"}, "image: Field required"),
    ("predict", {"weights": "digit", "image": {}}, "exactly one of test, file"),
    ("predict", {"weights": "digit", "image": {"test": True}}, "test: Input should be a valid int"),
    ("predict", {"weights": "digit", "image": {"test": "7"}}, "test: Input should be a valid int"),
    ("predict", {"weights": "digit", "image": {"test": 1, "file": PNG}}, "exactly one of"),
    ("predict", {"weights": "digit", "image": {"test": 10_000}}, "less than 10000"),
    ("predict", {"weights": "digit", "image": {"file": "no image"}}, "must be base64"),
    ("predict", {"weights": "digit", "image": {"file": "aGVsbG8="}}, "must be one of PNG"),
    ("predict", {"weights": "digit", "image": {"pixels": [[0.5]]}}, "must be 28×28"),
    ("predict", {"weights": "digit", "image": {"pixels": [[0.5], [1, 0]]}}, "rows of one length"),
    ("predict", {"weights": "digit", "image": {"pixels": [[2.0]]}}, "less than or equal to 1"),
    ("predict", {"weights": "digit", "image": {"pixels": []}}, "rows of one length"),
    (
        "predict",
        {
            "weights": "digit",
            "image": {"picture": {"channels": 1, "height": 3, "width": 3, "data": PNG}},
        },
        "data must hold 9 bytes",
    ),
    (
        "predict",
        {
            "weights": "digit",
            "image": {"picture": {"channels": "1", "height": 1, "width": 1, "data": "AA=="}},
        },
        "channels: Input should be a valid int",
    ),
    ("reconstruct", {"weights": "digit", "class": 1, "capsule": [0.0]}, "must have 6 numbers"),
    ("reconstruct", {"weights": "blind", "class": 1, "capsule": [0.0] * 6}, "has no decoder"),
    (
        "perturb",
        {"weights": "digit", "class": 1, "capsule": [0] * 6, "dimensions": [7], "offsets": [0]},
        "dimensions are 0 to 5",
    ),
    ("segment", {"weights": "pair", "digits": [{"image": {"test": 1}}]}, "at least 2 items"),
    (
        "segment",
        {"weights": "digit", "digits": [{"image": {"test": 1}, "right": 1}] * 2},
        "must stay inside the 28×28",
    ),
    (
        "segment",
        {"weights": "pair", "digits": [{"image": {"pixels": [[0.0]]}}] * 2},
        "a digit must be 28×28",
    ),
]


@pytest.mark.parametrize(("path", "body", "sentence"), BAD)
def test_each_mistake_gets_a_sentence(
    client: TestClient, path: str, body: dict[str, object], sentence: str
) -> None:
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]
    assert "Value error" not in answer.json()["error"]


def test_garbage_is_said_not_to_be_json(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/api/predict", content=b"{garbage", headers=headers)
    assert answer.json() == {"error": "the body of a request must be JSON"}
    empty = client.post("/api/predict", headers=headers)
    assert empty.json() == {"error": "the body: Field required"}
    text = client.post("/api/predict", content=json.dumps(GOOD), headers={"Content-Type": "text/x"})
    assert text.status_code == 415
    assert text.json() == {"error": "the Content-Type must be application/json"}
    untyped = client.post("/api/predict", content=json.dumps(GOOD))
    assert (untyped.status_code, untyped.json()) == (415, text.json())


def test_the_page_s_files_have_heads(client: TestClient) -> None:
    for path in ("/", "/main.js", "/docs"):
        assert client.head(path).status_code == 200


@pytest.mark.parametrize("given", ["bytes=0-9", "bytes=9-1", "bytes=99999999-", "pages=1"])
def test_a_file_is_sent_whole_whatever_the_range(client: TestClient, given: str) -> None:
    answer = client.get("/main.js", headers={"Range": given})
    assert (answer.status_code, answer.text) == (200, client.get("/main.js").text)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'"\\ud800"',
        b'{"weights": "\\ud800", "image": {"test": 1}}',
        b'{"weights": "digit", "image": {"pixels": [[NaN]]}}',
        b'{"weights": "digit", "image": {"test": 1e999}}',
        b'{"weights": "digit", "image": {"test": ' + b"9" * 5000 + b"}}",
        b'{"weights": "digit", "class": 1, "capsule": [Infinity, NaN, 1, 1, 1, 1]}',
    ],
)
@pytest.mark.parametrize("path", ["predict", "reconstruct"])
def test_what_is_no_json_or_no_number_gets_a_sentence(
    client: TestClient, path: str, content: bytes
) -> None:
    answer = client.post(
        f"/api/{path}", content=content, headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]


def test_a_huge_image_is_refused_before_it_is_decoded(client: TestClient) -> None:
    body = {"weights": "digit", "image": {"file": encode(Image.new("1", (10_000, 10_000)))}}
    answer = client.post("/api/predict", json=body)
    assert answer.status_code == 422
    assert "at most 4096×4096 pixels" in answer.json()["error"]


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (
            {"pixels": [[2] * 500] * 500},
            "image.pixels.0.0: Input should be less than or equal to 1",
        ),
        ({"pixels": [[0] * 513]}, "image.pixels.0: List should have at most 512 items"),
        ({str(number): 0 for number in range(1000)}, "image: there must be at most 20 fields"),
    ],
)
def test_of_many_mistakes_only_the_first_is_looked_at(
    image: dict[str, object],
    sentence: str,
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def count(error: RequestValidationError) -> Sequence[object]:
        counts.append(len(error._errors))
        return error._errors

    monkeypatch.setattr(RequestValidationError, "errors", count)
    answer = client.post("/api/predict", json={"weights": "digit", "image": image})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(sentence)
    assert counts == [1]


def test_a_body_in_many_parts_is_read_as_one(client: TestClient) -> None:
    content = json.dumps(GOOD).encode()
    answer = client.post(
        "/api/predict",
        content=(content[place : place + 1] for place in range(len(content))),
        headers={"Content-Type": "application/json"},
    )
    assert answer.json() == client.post("/api/predict", json=GOOD).json()


def test_a_huge_body_is_refused_even_if_its_size_is_not_announced(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(6):
            yield b" " * 2**20

    for content in (b" " * (limits.MAX_BODY + 1), chunks()):
        answer = client.post(
            "/api/predict", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 413
        assert answer.json()["error"] == "a request must have at most 4 MiB"


def test_a_body_that_announces_too_much_is_refused_before_it_is_sent(
    small: list[TrainedNetwork],
    background: Callable[[list[TrainedNetwork]], AbstractContextManager[str]],
) -> None:
    head = f"POST /api/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {limits.MAX_BODY + 1}\r\n\r\n"
    with background(small) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.create_connection(place, timeout=30) as connection:
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/%00"]
)
def test_no_path_leads_out_of_the_page(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404)
    assert "import" not in answer.text


def test_unknown_paths_methods_and_digits_are_answered_by_a_sentence(client: TestClient) -> None:
    for path in ("/api/none", "/none.html"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.json() == {
            "error": f"there is nothing at {path}; / is the page, /docs lists the API"
        }
    for method, path, takes in (
        ("GET", "predict", "POST"), ("PUT", "weights", "GET"), ("OPTIONS", "digits/3", "GET"),
    ):  # fmt: skip
        answer = client.request(method, f"/api/{path}")
        assert answer.status_code == 405
        assert answer.headers["Allow"] == takes
        assert answer.json() == {"error": f"/api/{path} takes {takes}, got {method}"}
    assert client.head("/api/predict").status_code == 405
    assert "test digits are 0 to 9999" in client.get("/api/digits/-1").json()["error"]
    assert "valid integer" in client.get("/api/digits/one").json()["error"]


def test_a_foreign_name_of_the_server_is_refused(small: list[TrainedNetwork]) -> None:
    """Otherwise a page elsewhere could reach it by a name that it points to 127.0.0.1."""
    with TestClient(create_app(small, hosts=("127.0.0.1",))) as client:
        for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1:80:80", "[::1", ""):
            refused = client.get("/", headers={"Host": host})
            assert refused.status_code == 400
            assert refused.json() == {"error": "the host must be 127.0.0.1"}
        assert client.get("/", headers={"Host": "127.0.0.1:8000"}).status_code == 200


def test_more_requests_than_the_queue_holds_are_told_to_come_back(
    small: list[TrainedNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUE", 0)
    with TestClient(create_app(small)) as client:
        answer = client.post("/api/predict", json=GOOD)
        assert answer.status_code == 429
        assert "try again" in answer.json()["error"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["digit", "pair", "blind", "colour", "../x", PNG, PNG[:30], "", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["test", "file", "pixels", "picture", "image", "right", "data"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
FIELDS = {
    "weights": st.sampled_from(["digit", "pair", "blind", "colour"]),
    "image": st.fixed_dictionaries({"test": st.integers(-1, 10_001)}),
    "class": st.integers(-1, 11),
    "capsule": st.lists(st.floats(-2, 2), min_size=6, max_size=7),
    "dimensions": st.lists(st.integers(0, 6), max_size=3),
    "offsets": st.lists(st.floats(-1, 1) | st.floats(), max_size=3),
    "num_iterations": st.integers(-1, 12) | VALUES,
    "digits": st.lists(
        st.fixed_dictionaries(
            {"image": st.fixed_dictionaries({"test": st.integers(0, 9999)})},
            optional={"right": st.integers(-5, 5), "down": st.integers(-5, 5) | VALUES},
        ),
        min_size=2,
        max_size=3,
    ),
}
NEEDED = {
    "predict": ["weights", "image"],
    "route": ["weights", "image"],
    "reconstruct": ["weights", "class", "capsule"],
    "perturb": ["weights", "class", "capsule", "dimensions", "offsets"],
    "segment": ["weights", "digits"],
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path with a body that is nearly right, of the wrong form, or no JSON at all."""
    path = draw(st.sampled_from(sorted(NEEDED)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=40))
    wrong = draw(st.sampled_from([None, *NEEDED[path]]))
    body = {name: draw(VALUES if name == wrong else FIELDS[name]) for name in NEEDED[path]}
    if draw(st.integers(0, 4)) == 0:
        body["num_iterations"] = draw(FIELDS["num_iterations"])
    if draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    return path, json.dumps(body).encode("utf-8", "surrogatepass")


def test_two_thousand_hostile_requests_get_no_5xx_and_no_memory(client: TestClient) -> None:
    counts: dict[int, int] = {}
    sizes: list[int] = []

    @settings(
        max_examples=2000,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def bombard(request: tuple[str, bytes]) -> None:
        path, body = request
        answer = client.post(
            f"/api/{path}", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        sizes.append(_resident_bytes())

    bombard()
    assert sum(counts.values()) >= 2000
    assert counts[200] >= 100, counts  # hostile, but not so blunt that nothing gets through
    assert client.post("/api/predict", json=GOOD).status_code == 200
    assert sizes[-1] - sizes[len(sizes) // 4] < 50e6


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123, a name without meaning elsewhere
        return int(file.read().split()[1]) * 4096


def test_sixteen_clients_at_once_all_get_the_same_right_answer(
    small: list[TrainedNetwork],
    background: Callable[[list[TrainedNetwork]], AbstractContextManager[str]],
) -> None:
    answers: list[list[float]] = []
    mistakes: list[int] = []

    def visit(address: str) -> None:
        with httpx2.Client(base_url=address, timeout=60) as client:
            for number in range(12):
                if number % 4 == 3:
                    headers = {"Content-Type": "application/json"}
                    answer = client.post("/api/predict", content=b"{", headers=headers)
                    mistakes.append(answer.status_code)
                answer = client.post("/api/predict", json=GOOD)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json()["lengths"])

    with background(small) as address:
        threads = [threading.Thread(target=visit, args=(address,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 16 * 12
    assert all(answer == answers[0] for answer in answers)
    assert set(mistakes) == {422}
