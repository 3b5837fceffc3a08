"""Where a run happens: processes that torchrun started, signals that stop them, devices."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends import mps

Made = TypeVar("Made")


@dataclass(frozen=True)
class Processes:
    """This process's place among those that train together."""

    rank: int = 0
    """Number of this process among all; the first writes the files."""

    world_size: int = 1
    """Number of processes."""

    local_rank: int = 0
    """Number of this process on its machine: which GPU it takes."""

    local_world_size: int = 1
    """Number of processes on this machine: they share its cores."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def slice_of(self, count: int) -> slice:
        """This process's contiguous part of `count` things.

        >>> [Processes(rank=rank, world_size=3).slice_of(8) for rank in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        return slice(
            count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size
        )

    def add_up(self, *tensors: Tensor) -> None:
        """Replaces each tensor, in place, by its sum over the processes.

        All travel as one message, so they must be of one dtype. With each process's loss divided
        by the global batch, the sum of the gradients is the global mean exactly, also where the
        processes have unequal parts.
        """
        if self.world_size == 1:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.reshape(tensor.shape))

    def agree(self, act: Callable[[], Made]) -> Made:
        """What `act` returns, once it has in all processes; a mistake of one ends them all.

        Of those that make the same mistake, only the first speaks.
        """
        if self.world_size == 1:
            return act()
        mistake: OSError | ValueError | None = None
        try:
            made = act()
        except (OSError, ValueError) as error:
            mistake = error
        mistakes = [""] * self.world_size
        dist.all_gather_object(mistakes, repr(mistake) if mistake is not None else "")
        if mistake is not None and repr(mistake) not in mistakes[: self.rank]:
            raise mistake
        if any(mistakes):
            raise SystemExit(2)
        return made

    def compare(self, what: object, sentence: str) -> None:
        """Raises a ValueError with the sentence in the first process, unless all have the same."""
        if self.world_size == 1:
            return
        found = [what] * self.world_size
        dist.all_gather_object(found, what)
        if any(each != found[0] for each in found):
            raise ValueError(sentence) if self.is_first else SystemExit(2)


@contextmanager
def join_processes(device: str = "cpu") -> Iterator[Processes]:
    """Joins the processes that torchrun started; alone if it did not start this one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Processes()
        return
    processes = Processes(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if processes.world_size == 1:
        yield processes
        return
    has_gpu = device.startswith("cuda") and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")  # evaluation adds on CPU
    try:
        yield processes
    finally:
        dist.destroy_process_group()


class TrainingStopped(Exception):  # noqa: N818 (nothing went wrong)
    """A run was asked to stop, and has saved where it was."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@dataclass
class StopRequest:
    """Which signal asked the run to stop, if one did."""

    signal_number: int = 0


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Notes Ctrl-C and SIGTERM instead of dying of them; a second one acts at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python delivers signals to the main thread alone.
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.getsignal(number) for number in signals]

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for each, handler in zip(signals, previous, strict=True):
            signal.signal(each, handler)

    for number in signals:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generator that dropout draws from.

    torch.manual_seed would note the call's traceback for a sleeping CUDA in every step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of that name, "cuda" being this process's own; a ValueError if it is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda, cuda:N or mps, got {name!r}") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": mps.is_available()}
    if not available.get(device.type, False):
        raise ValueError(f"device {name} is not available here")
    if name == "cuda":
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device {device} is not available here: there are {count}")
    return device
