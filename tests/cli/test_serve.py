"""`capsnet serve` listens, says where, ends on Ctrl-C, and names each mistake."""

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from shipped import require_weights

from capsnet import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.cli import main
from capsnet.models.weights import save_weights

SMALL = CapsNetConfig(conv_channels=2, primary_types=2, primary_dim=3, output_dim=4)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "mine.safetensors"
    save_weights(path, CapsNet(SMALL), {})
    return path


def fail(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_status:
        main(["serve", *map(str, arguments)])
    return int(exit_status.value.code or 0)


def test_it_serves_the_given_weights_first_until_interrupted(weights: Path, tmp_path: Path) -> None:
    require_weights("multimnist")
    namesake = tmp_path / "multimnist"  # a run here that nobody asks for
    namesake.mkdir()
    save_weights(namesake / "weights.safetensors", CapsNet(SMALL), {})
    other = tmp_path / "mnist.safetensors"  # takes the place of the shipped one of that name
    save_weights(other, CapsNet(SMALL), {})
    command = [sys.executable, "-m", "capsnet", "serve", "--port", "0"]
    command += ["--weights", str(weights), "--weights", str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", said)
        assert found, said
        with httpx2.Client(base_url=found[0]) as client:
            listed = client.get("api/weights").json()["weights"]
            assert [each["name"] for each in listed[:2]] == ["mine", "mnist"]
            dims = {each["name"]: each["capsule_dim"] for each in listed}
            assert (dims["mnist"], dims["multimnist"]) == (SMALL.output_dim, 16)
            assert len({each["name"] for each in listed}) == len(listed)
            assert client.get("").status_code == 200
            assert client.get("", headers={"Host": "evil.example"}).status_code == 400
        port = int(found[0].rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = "POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
            connection.sendall(head.encode())  # the rest never comes
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in (0, 130, -signal.SIGINT)


def test_each_mistake_is_one_sentence(
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CNNConfig(conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(3,))
    save_weights(tmp_path / "cnn.safetensors", CNN(config), {})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistakes: list[tuple[tuple[object, ...], str]] = [
            (("--weights", weights, "--port", taken.getsockname()[1]), "in use"),
            (("--weights", weights, "--port", 70000), "port must be 0 to 65535, got 70000"),
            (("--weights", "nothing"), "unknown weights 'nothing'"),
            (("--weights", tmp_path / "cnn.safetensors"), "are of a baseline"),
        ]
        for arguments, sentence in mistakes:
            assert fail(*arguments) == 2
            assert sentence in capsys.readouterr().err
    monkeypatch.setattr("capsnet.cli.serve.list_weights", dict)
    assert fail() == 2
    assert "there are no weights to show" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert fail("--weights", weights) == 2
    assert "playground needs uvicorn: pip install '.[playground]'" in capsys.readouterr().err
