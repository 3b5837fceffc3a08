import resource
import subprocess
import sys
from pathlib import Path

import pytest

from capsnet import allocator

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNT_FAULTS = """
import resource, sys
import torch
if sys.argv[1] == "keep":
    from capsnet.allocator import keep_memory
    assert keep_memory()
for _ in range(30):  # until the heap has found its size
    torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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
    names = "[getattr(capsnet, name) for name in capsnet.__all__ if name != 'keep_memory']"
    script = f"import sys, capsnet; {names}; sys.exit('capsnet.allocator' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    monkeypatch.setattr(sys, "platform", "linux")
    assert not allocator.keep_memory()
