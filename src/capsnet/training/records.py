"""What a run writes down: checked JSON, the log, versions and hardware, TensorBoard."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import count
from pathlib import Path

import numpy as np
import torch

from capsnet import __version__
from capsnet.checks import missing_library
from capsnet.data import Split
from capsnet.machine import SUFFIX, describe_processor, file_digest, write_atomically
from capsnet.models import CapsNet, Model
from capsnet.models.weights import CHECKPOINTS, WEIGHTS

CONFIG, LOG, RESULT = "config.json", "log.jsonl", "result.json"
TENSORBOARD = "tensorboard"


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Writes a record as JSON that carries its own SHA-256, whole or not at all."""
    checked = {**record, "sha256": _json_digest(record)}
    write_atomically(path, (json.dumps(checked, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, object]:
    """Reads what `write_json` wrote; a ValueError names a file that is damaged."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(record, dict) or record.pop("sha256", None) != _json_digest(record):
        raise ValueError(f"{path} is damaged: its content does not fit its SHA-256")
    return record


class RunLog:
    """Appends JSON lines to log.jsonl, and can go back to where a checkpoint was taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0

    def start(self) -> Path | None:
        """Begins an empty log; returns where the lines of an older one are kept, if it has any."""
        kept = None
        if self.path.exists() and self.path.stat().st_size:
            names = (self.path.with_name(f"log.old-{number}.jsonl") for number in count(1))
            kept = self.path.replace(next(path for path in names if not path.exists()))
        self._digest, self._size = hashlib.sha256(), 0
        self.path.write_bytes(b"")
        return kept

    def rewind(self, position: Mapping[str, object]) -> str | None:
        """Cuts the log back to `position`; what was wrong with it, if something was.

        A log that does not begin with the lines of that time is kept under another name.
        """
        size = position["size"]
        assert isinstance(size, int)
        content = self.path.read_bytes()[:size] if self.path.exists() else b""
        digest = hashlib.sha256(content)
        if digest.hexdigest() == position["sha256"]:
            self._digest, self._size = digest, size
            with self.path.open("ab") as file:
                file.truncate(size)
            return None
        kept = self.start()
        if kept is None:
            return f"{self.path} is missing or empty; a new one begins here"
        return f"{self.path} is damaged; it was renamed to {kept.name} and a new one begins here"

    def append(self, line: Mapping[str, object]) -> None:
        """Adds one line."""
        content = (json.dumps(line) + "\n").encode()
        with self.path.open("ab") as file:
            file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def position(self) -> dict[str, object]:
        """Where the log ends now, once it is on the disk: for `rewind`."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, the newest first."""
    return sorted((run / CHECKPOINTS).glob("step-*.safetensors"), reverse=True)


def has_begun(run: Path) -> bool:
    """Whether a run has a checkpoint or is finished."""
    return bool(list_checkpoints(run)) or (run / RESULT).exists()


def remove_checkpoints(run: Path) -> None:
    """Removes the checkpoints of a run, as a finished one does not need them."""
    _remove(run / CHECKPOINTS, "step-*.safetensors", f".step-*{SUFFIX}")


def _remove(folder: Path, *patterns: str) -> None:
    """Removes a folder's files of these names, and the folder unless it holds others."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _is_run(run: Path) -> bool:
    """Whether a directory holds checkpoints, settings or a result of ours."""
    for name in (CONFIG, RESULT):
        with suppress(OSError, ValueError):
            read_json(run / name)
            return True
    return bool(list_checkpoints(run))


def check_run(run: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises a ValueError when there is a run already and nobody said what to do with it."""
    # A kill in its first moments may have left a file half written, which is no run yet.
    exists = run.is_dir() and any(path.suffix != SUFFIX for path in run.iterdir())
    is_run = _is_run(run)
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run} is a file, but a run needs a directory of its own")
    if resume and overwrite:
        raise ValueError("a run is either resumed or overwritten, not both")
    if resume and not is_run:
        raise ValueError(f"there is no run in {run} to resume")
    if exists and not is_run:
        raise ValueError(f"{run} holds something else than a run, which is not overwritten")
    if exists and not resume and not overwrite:
        raise ValueError(f"{run} exists already: --resume goes on with it, --overwrite begins anew")
    there = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(f"{run} cannot be written: {there} is read-only or no folder")


@contextmanager
def open_run(run: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Holds a run's directory for this process: made, found or emptied, as was asked."""
    check_run(run, resume=resume, overwrite=overwrite)
    run.mkdir(parents=True, exist_ok=True)
    with _locked(run):
        for name in (CONFIG, WEIGHTS, RESULT):
            for draft in run.glob(f".{name}.*{SUFFIX}"):  # of a kill in the middle of writing
                draft.unlink(missing_ok=True)
        if overwrite:
            remove_checkpoints(run)
            _remove(run / TENSORBOARD, "events.out.tfevents.*")
            for path in (
                run / RESULT,
                run / WEIGHTS,
                run / LOG,
                *run.glob("log.old-*.jsonl"),
                run / CONFIG,
            ):
                path.unlink(missing_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                run.rmdir()  # where nothing was written, nothing is left


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Keeps a second process from writing to the run; a killed one lets go by itself."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {run}") from None
        except OSError:
            pass  # some network file systems cannot lock
        yield
    finally:
        os.close(descriptor)


def damaged_files(run: Path) -> dict[str, str]:
    """What is wrong with the files of a finished run: a sentence for the name of each."""
    try:
        files = read_json(run / RESULT)["files"]
    except OSError:
        return {RESULT: f"{run / RESULT} is missing"}
    except ValueError as error:
        return {RESULT: str(error)}
    assert isinstance(files, dict)
    complaints = {}
    for name, digest in files.items():
        if not (run / name).exists():
            complaints[name] = f"{run / name} is missing"
        elif file_digest(run / name) != digest:
            complaints[name] = f"{run / name} is damaged: it does not fit its SHA-256 in {RESULT}"
    return complaints


def describe_environment(
    threads: int | None = None, device: torch.device | None = None
) -> dict[str, object]:
    """Commit, versions and hardware that a result was obtained with.

    Args:
        threads: CPU threads of other processes that it was obtained by; None for this one's.
        device: Where it was computed, if not on the CPU.
    """
    has_gpu = device is not None and device.type == "cuda"
    return {
        "commit": find_commit(),
        "versions": {
            "python": platform.python_version(),
            "capsnet": __version__,
            **{name: metadata.version(name) for name in ("torch", "numpy")},
        },
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": threads or torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(device) if has_gpu else None,
        },
    }


def find_commit() -> str | None:
    """Commit of the checkout that the package runs from, with + if files differ from it."""
    folder = Path(__file__).resolve().parents[1]  # the whole package
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # this repository is ours
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    return describe_processor().get("model name") or platform.processor() or platform.machine()


def _json_digest(record: Mapping[str, object]) -> str:
    canonical = json.dumps(record, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_tensorboard() -> None:
    """Raises a ValueError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise missing_library("--tensorboard", "tensorboard", "tensorboard") from None


class TensorBoard:
    """Numbers of every log line, and reconstructions, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run wrote after the step that it goes on from comes again.
        self._writer: SummaryWriter = SummaryWriter(str(folder), purge_step=step + 1)

    def add_scalars(self, line: Mapping[str, object]) -> None:
        """Writes the numbers of a log line."""
        step = line["step"]
        if isinstance(evaluation := line.get("evaluation"), dict):
            self._writer.add_scalar(
                f"{evaluation['split']}/error_rate", evaluation["error_rate"], step
            )
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self._writer.add_scalar(name, value, step)

    @torch.no_grad()
    def add_reconstructions(self, model: Model, split: Split, step: int) -> None:
        """Writes the first images and what the model reconstructs of them, if it does."""
        if not isinstance(model, CapsNet) or not model.config.decoder:
            return
        device = next(model.parameters()).device
        images, labels, targets = split.test_batch(np.arange(min(16, len(split))))
        decoded = model(images.to(device), reconstruct=labels.to(device)).reconstruction
        sheets = {"input": images, "target": targets[:, 0], "reconstruction": decoded[:, 0].cpu()}
        for name, sheet in sheets.items():
            shown = sheet if sheet.shape[1] == 3 else sheet[:, :1]  # of a stereo pair the left
            self._writer.add_images(name, shown.clamp(0, 1), step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
