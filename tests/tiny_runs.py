"""Training runs of a second, and a server that starts them in processes that tests may kill.

Importing torch takes seconds and a fork milliseconds: the server has imported it, reads a JSON
line per request on stdin, forks, answers with the children's ids and then with how they ended.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from capsnet.models.weights import read_tensors
from capsnet.progress import Lines, Reporter
from capsnet.training import TrainConfig, TrainingStopped, configure, train
from capsnet.training.config import from_dict, to_dict

TINY_MODEL: dict[str, object] = {
    "conv_channels": 5,
    "primary_types": 2,
    "primary_dim": 3,
    "output_dim": 4,
    "decoder": False,
}


def tiny_config(
    preset: str = "mnist", *, model: dict[str, object] | None = None, **changes: object
) -> TrainConfig:
    """Settings of a run of half a second: 4 epochs of 8 steps on 128 digits."""
    settings: dict[str, object] = {
        "epochs": 4,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "log_every": 3,
        "num_evaluated": 70,
        "average_decay": 0.9,
        "data": {"num_train": 128},
        "model": TINY_MODEL | (model or {}) if "cnn" not in preset else model or {},
    }
    return configure(preset, settings | changes)


def weights_of(run: Path) -> dict[str, bytes]:
    """The bytes of every trained tensor, to be compared bit by bit."""
    tensors, _ = read_tensors(run / "weights.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


class Listener(Reporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Keeps the message."""
        self.said.append(text)


class BreakOff(Reporter):
    """Breaks a run off in the middle of a step, as Ctrl-C would without our handler."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, step: int, line: Mapping[str, object] | None) -> None:
        """Raises in the chosen step, before it can be saved."""
        if step == self.step:
            raise KeyboardInterrupt


class RunServer:
    """Runs trainings in other processes and sends them signals."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        num_processes: int = 1,
        signal_number: int = signal.SIGKILL,
        after: float | None = None,
        once: Callable[[], bool] = lambda: True,
    ) -> list[int]:
        """Begins or resumes a run; how its processes ended.

        A signal is sent `after` so many seconds, counted from when `once` holds.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        request = {
            "config": to_dict(config),
            "run": str(folder),
            "num_processes": num_processes,
            "port": port,
        }
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        pids = self._receive()
        has_ended = False
        while not (has_ended or once()):
            has_ended = self._has_ended(0.01)
        if not (has_ended or self._has_ended(after)):
            for pid in pids:
                # The id cannot be another's by now: the server starts nothing before the next run.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
        return self._receive()

    def output(self, folder: Path) -> str:
        """What the first process of all calls of a run has said."""
        return Path(f"{folder}.output-0").read_text()

    def close(self) -> None:
        """Ends the server."""
        self._process.communicate(timeout=30)

    def _has_ended(self, seconds: float | None) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _receive(self) -> list[int]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, list)
        return answer


def run_child(request: dict[str, object], rank: int, num_processes: int) -> NoReturn:
    """Trains as process `rank` of a run, then ends without a word to the parent's streams."""
    torch.set_num_threads(1)
    if num_processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(request["port"]),
        }
    config, run = request["config"], request["run"]
    assert isinstance(config, dict)
    assert isinstance(run, str)
    is_begun = (Path(run) / "config.json").exists()
    status = 0
    with Path(f"{run}.output-{rank}").open("a") as output:
        try:
            train(from_dict(config), Path(run), resume=is_begun, reporter=Lines(output))
        except TrainingStopped as stopped:
            status = 128 + stopped.signal_number
        except BaseException:
            traceback.print_exc(file=output)
            status = 1
    os._exit(status)


def serve() -> None:
    """Answers requests until stdin ends."""
    torch.optim.Adam([torch.zeros(1)])  # imports what torch puts off until the first optimiser
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in range(request["num_processes"]):
            pid = os.fork()
            if pid == 0:
                run_child(request, rank, request["num_processes"])
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    serve()
