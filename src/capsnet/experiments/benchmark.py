"""Speed and memory of this package beside plain PyTorch, each in a process of its own.

Both processes of a case stand ready at the same time and take turns, so that whatever else the
machine does meets both alike. Plain PyTorch is `textbook`, with the allocator as it comes.
"""

import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from capsnet.experiments.workloads import IMPLEMENTATIONS, Implementation, Task, prepare
from capsnet.machine import keep_memory, prefer_onednn

Name = TypeVar("Name", bound=str)


class Worker:
    """A process that holds one implementation of a task ready and times it when told to."""

    def __init__(
        self, task: Task, implementation: Implementation, *, threads: int, keep: bool = True
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, task, implementation, threads, keep), daemon=True
        )
        self._process.start()
        theirs.close()
        self.flops = int(self._receive())
        """Arithmetic of the work as this implementation does it."""

    def run(self) -> float:
        """Returns the seconds that the work took, once."""
        self._connection.send("run")
        return self._receive()

    def stop(self) -> float:
        """Ends the process and returns the most megabytes that the work needed."""
        self._connection.send("stop")
        memory = self._receive()
        self._process.join()
        return memory

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> float:
        try:
            return float(self._connection.recv())
        except EOFError:
            self._process.join()
            raise OSError(
                f"a process of the benchmark ended with status {self._process.exitcode}, "
                "perhaps for want of memory"
            ) from None


def _serve(
    connection: Connection, task: Task, implementation: Implementation, threads: int, keep: bool
) -> None:
    """What a worker's process does."""
    torch.set_num_threads(threads)
    if implementation == "capsnet":
        prefer_onednn()
        if keep:
            keep_memory()
    _load_libraries()
    before = _present_memory()
    work = prepare(task, implementation)
    with FlopCounterMode(display=False) as counter:
        work()
    started = time.perf_counter()
    work()
    # Work of milliseconds is repeated, as a single one would measure the clock and the scheduler.
    times = max(1, round(0.1 / (time.perf_counter() - started)))
    connection.send(counter.get_total_flops())
    while connection.recv() == "run":
        started = time.perf_counter()
        for _ in range(times):
            work()
        connection.send((time.perf_counter() - started) / times)
    connection.send(_peak_memory() - before)


def _load_libraries() -> None:
    """Does a little of everything, so that code first used later does not count as memory."""
    features = torch.nn.Parameter(torch.randn(2, 3, 8, 8))
    maps = F.conv2d(features, torch.randn(4, 3, 3, 3, requires_grad=True)).relu()
    torch.einsum("bchw,cd->bd", maps, torch.randn(4, 5)).softmax(dim=-1).square().sum().backward()
    torch.optim.Adam([features]).step()  # imports PyTorch's compiler


def _present_memory() -> float:
    """Megabytes that this process has in memory now, or at most had so far."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return _peak_memory()
    return int(pages.read_text().split()[1]) * mmap.PAGESIZE / 1e6


def _peak_memory() -> float:
    """The most megabytes that this process ever had in memory; not a number on Windows."""
    status = Path("/proc/self/status")
    if status.exists():  # of this program alone; getrusage counts what the parent had at its birth
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024 / 1e6
    if sys.platform == "win32":
        return float("nan")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


@contextmanager
def _workers(
    work: Mapping[Name, tuple[Task, Implementation]], *, threads: int
) -> Iterator[dict[Name, Worker]]:
    """Workers that all stand ready, and are gone afterwards."""
    workers: dict[Name, Worker] = {}
    try:
        for name, (task, implementation) in work.items():
            workers[name] = Worker(task, implementation, threads=threads)
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()


def _take_turns(workers: Mapping[Name, Worker], repeats: int) -> dict[Name, list[float]]:
    """Seconds of every worker's turns."""
    seconds: dict[Name, list[float]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            seconds[name].append(worker.run())
    return seconds


@dataclass(frozen=True)
class Measurement:
    """A task in one implementation."""

    seconds: list[float]
    """Of every repetition."""
    memory_mb: float
    """Most memory of the process beyond that of the imported libraries."""
    flops: int
    """Arithmetic of one repetition."""

    @property
    def median(self) -> float:
        """The middle of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The repetition that was disturbed least."""
        return min(self.seconds)


def measure(task: Task, *, repeats: int, threads: int) -> dict[Implementation, Measurement]:
    """Returns time and memory of a task in both implementations, taken in turns."""
    work = {name: (task, name) for name in IMPLEMENTATIONS}
    with _workers(work, threads=threads) as workers:
        seconds = _take_turns(workers, repeats)
        return {
            name: Measurement(seconds[name], round(worker.stop(), 1), worker.flops)
            for name, worker in workers.items()
        }


def measure_in_turns(tasks: Mapping[str, Task], *, repeats: int, threads: int) -> dict[str, float]:
    """Returns the median seconds of several tasks in this package, by name."""
    work: dict[str, tuple[Task, Implementation]] = {
        name: (task, "capsnet") for name, task in tasks.items()
    }
    with _workers(work, threads=threads) as workers:
        turns = _take_turns(workers, repeats)
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def measure_tensors(task: Task, *, threads: int) -> dict[Implementation, float]:
    """Returns the most megabytes that the tensors of a task need at the same time.

    Slow: every tensor of more than a few pages is mapped anew and given back, so that the memory
    of the process is that of its tensors and nothing else. Needs glibc.
    """
    name = "MALLOC_MMAP_THRESHOLD_"  # read by glibc when a process starts
    before = os.environ.get(name)
    os.environ[name] = str(2**16)
    try:
        workers = {
            each: Worker(task, each, threads=threads, keep=False) for each in IMPLEMENTATIONS
        }
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    return {each: round(worker.stop(), 1) for each, worker in workers.items()}


def measure_peak(*, repeats: int, threads: int) -> float:
    """Returns the most floating-point operations a second that a large matrix product reaches."""
    worker = Worker(Task("matmul"), "capsnet", threads=threads)
    try:
        return worker.flops / min(worker.run() for _ in range(repeats))
    finally:
        worker.kill()
