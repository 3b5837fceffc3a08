import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capsnet import machine
from capsnet.machine import (
    avoid_broken_tiles,
    describe_processor,
    prefer_onednn,
    write_atomically,
)

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNT_FAULTS = """
import resource, sys
import torch
if sys.argv[1] == "keep":
    from capsnet.machine import keep_memory
    assert keep_memory()
for _ in range(30):  # until the heap has found its size
    torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
MULTIPLY = """
import capsnet
import torch
product = torch.full((512, 512), 0.5, dtype=torch.bfloat16) @ torch.ones(512, 512).bfloat16()
assert (product == 256).all()
"""


def count_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_kept_memory_is_touched_without_page_faults() -> None:
    assert count_faults("keep") < 100
    pages = 40_000_000 // resource.getpagesize()
    if "[always]" not in HUGE_PAGES.read_text():
        assert count_faults("default") > pages  # at least a fifth of what five times touch


def test_import_of_the_package_leaves_the_allocator_alone() -> None:
    names = "[getattr(capsnet, name) for name in capsnet.__all__]"
    script = (
        "import ctypes; library, ctypes.CDLL = ctypes.CDLL, None; import capsnet.machine; "
        f"ctypes.CDLL = library; capsnet.machine.keep_memory = None; {names}"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not machine.keep_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    monkeypatch.setattr(sys, "platform", "linux")
    assert not machine.keep_memory()


def write_cpuinfo(path: Path, *, flags: str, level: str = "16", vendor: str = "") -> Path:
    one = f"vendor_id\t: {vendor}\ncpuid level\t: {level}\nwp\t\t: yes\nflags\t\t: {flags}\n\n"
    path.write_text(one * 2)
    return path


@pytest.mark.parametrize(
    ("level", "flags", "broken"),
    [
        ("28", "fpu avx512f amx_bf16 amx_tile", True),
        ("29", "fpu avx512f amx_bf16 amx_tile", False),
        ("32", "fpu avx512f amx_bf16 amx_tile", False),
        ("28", "fpu avx512f avx512_bf16", False),
        ("unknown", "fpu amx_tile", False),
    ],
)
def test_tiles_are_avoided_where_their_layout_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, flags: str, broken: bool
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert avoid_broken_tiles(write_cpuinfo(tmp_path / "info", level=level, flags=flags)) is broken
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) is broken


def test_a_limit_of_ones_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert avoid_broken_tiles(write_cpuinfo(tmp_path / "info", level="28", flags="amx_tile"))
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_products_in_bfloat16_survive_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert subprocess.run([sys.executable, "-c", MULTIPLY]).returncode == 0


@pytest.fixture
def products() -> Iterator[Any]:
    """PyTorch's setting of float32 products in oneDNN, as PyTorch has it and put back."""
    setting = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009, untyped
    before, setting.fp32_precision = setting.fp32_precision, "none"
    yield setting
    setting.fp32_precision = before


@pytest.mark.parametrize(
    ("vendor", "flags"),
    [
        ("GenuineIntel", "fpu avx512f"),  # MKL is at home there
        ("AuthenticAMD", "fpu avx2"),
        ("AuthenticAMD", "fpu avx512f amx_tile"),  # would round to bfloat16
    ],
)
def test_other_processors_keep_their_products(
    tmp_path: Path, products: Any, vendor: str, flags: str
) -> None:
    assert not prefer_onednn(write_cpuinfo(tmp_path / "info", vendor=vendor, flags=flags))
    assert products.fp32_precision == "none"


def test_products_of_onednn_are_those_of_float32(tmp_path: Path, products: Any) -> None:
    amd = write_cpuinfo(tmp_path / "info", vendor="AuthenticAMD", flags="avx512f")
    chosen = prefer_onednn(amd)
    assert products.fp32_precision == ("bf16" if chosen else "none")
    if not describe_processor().get("flags", "amx_tile").count("amx_tile"):
        assert chosen  # there is nothing here that rounds
    torch.manual_seed(0)
    left, right = torch.randn(5, 70, 300), torch.randn(5, 300, 90)
    exact = (left.double() @ right.double()).float()
    torch.testing.assert_close(left @ right, exact, rtol=0, atol=1e-4)  # bfloat16: 0.1
    torch.testing.assert_close(left[0] @ right[0], exact[0], rtol=0, atol=1e-4)


def test_products_that_round_are_not_preferred(
    tmp_path: Path, products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = torch.eye(64) * (1 - 2**-9)
    monkeypatch.setattr(torch, "eye", lambda size, **options: rounded)
    amd = write_cpuinfo(tmp_path / "info", vendor="AuthenticAMD", flags="avx512f")
    assert not prefer_onednn(amd)
    assert products.fp32_precision == "none"


def test_a_killed_writer_leaves_the_good_file_in_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"good")
    code = (
        "import os, sys, time; from pathlib import Path; from capsnet import machine; "
        "os.fsync = lambda number: (print('written', flush=True), time.sleep(60)); "
        "machine.write_atomically(Path(sys.argv[1]), b'new' * 100_000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert path.read_bytes() == b"good"
    write_atomically(path, b"newer ", b"still")
    assert path.read_bytes() == b"newer still"


def test_a_file_is_safe_under_its_name_and_not_only_under_that_of_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", []

    def note(number: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(number).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(path, b"data")
    assert synced == [(False, False), (True, True)]


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []
