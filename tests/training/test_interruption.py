"""A run may be killed at any instant and still comes to the same weights, bit by bit."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import RunServer, tiny_config, weights_of

# Ways to interrupt: processes, signal, how often. The whole file takes about a minute.
WAYS = [
    pytest.param(1, signal.SIGKILL, 30, id="kill"),
    pytest.param(1, signal.SIGTERM, 8, id="term"),
    pytest.param(2, signal.SIGKILL, 6, id="kill-two-processes"),
    pytest.param(2, signal.SIGTERM, 3, id="term-two-processes"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunServer]:
    server = RunServer()
    yield server
    server.close()


@pytest.mark.parametrize(("num_processes", "signal_number", "num_signals"), WAYS)
def test_interrupted_run_ends_with_the_same_weights(
    server: RunServer,
    tmp_path: Path,
    num_processes: int,
    signal_number: signal.Signals,
    num_signals: int,
) -> None:
    config = tiny_config()
    undisturbed = tmp_path / "undisturbed"
    server.run(config, tmp_path / "warm-up", num_processes=num_processes)
    started = time.monotonic()
    assert server.run(config, undisturbed, num_processes=num_processes) == [0] * num_processes
    duration = time.monotonic() - started
    instants = random.Random(20171026)
    interrupted = 0
    for number in range(4 * num_signals):
        run = tmp_path / f"run-{number}"
        for attempt in range(20):
            started = time.monotonic()
            ends = server.run(
                config,
                run,
                num_processes=num_processes,
                signal_number=signal_number,
                after=instants.uniform(0, duration),
            )
            if not any(ends):
                if attempt == 0:  # a whole run: the machine is less busy than it was
                    duration = min(duration, time.monotonic() - started)
                break
            expected = {-signal_number, 128 + signal_number, 0}
            if -signal_number in ends and num_processes > 1:
                expected.add(1)  # the other lost its partner
            assert set(ends) <= expected, server.output(run)
            interrupted += 1
        else:
            assert server.run(config, run, num_processes=num_processes) == [0] * num_processes
        assert weights_of(run) == weights_of(undisturbed)
        if interrupted >= num_signals:
            return
    pytest.fail(f"only {interrupted} of {num_signals} runs were caught in time")


def test_sigterm_saves_before_it_stops(server: RunServer, tmp_path: Path) -> None:
    config = tiny_config(epochs=4000)
    run = tmp_path / "run"

    def stop_once_it_says(text: str) -> list[int]:
        def has_said() -> bool:
            return Path(f"{run}.output-0").exists() and text in server.output(run)

        return server.run(config, run, signal_number=signal.SIGTERM, after=0.2, once=has_said)

    assert stop_once_it_says("step 3/32,000") == [128 + signal.SIGTERM]
    step = int(max((run / "checkpoints").iterdir()).stem.removeprefix("step-"))
    assert step >= 3
    assert stop_once_it_says(f"going on after step {step:,} of 32,000") == [128 + signal.SIGTERM]
