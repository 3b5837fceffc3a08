import ast
import subprocess
import sys
from pathlib import Path

import pytest

import capsnet

SOURCE = Path(__file__).parents[1] / "src" / "capsnet"

# What each part may import of the others.
ALLOWED: dict[str, set[str]] = {
    "machine": set(),
    "checks": set(),
    "progress": set(),
    "functional": {"checks"},
    "layers": {"functional", "checks"},
    "models": {"functional", "layers", "machine", "checks"},
    "data": {"machine", "checks", "progress"},
    "training": {"functional", "layers", "models", "data", "machine", "checks", "progress"},
    "experiments": {
        "functional", "layers", "models", "data", "training", "machine", "checks", "progress",
    },
    "playground": {"functional", "layers", "models", "data", "training", "machine", "checks"},
    "cli": {
        "functional", "layers", "models", "data", "training", "experiments", "playground",
        "machine", "checks", "progress",
    },
}  # fmt: skip


def imported_parts(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            module = node.module or ""
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("capsnet.")}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_parts_import_one_way_only(file: Path) -> None:
    part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ("__init__", "__main__"):
        return
    wrong = imported_parts(file) - ALLOWED[part] - {part, "__version__"}
    assert not wrong, f"{part} must not import {wrong}"


def test_the_import_reader_sees_a_forbidden_import(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("def f():\n    from capsnet.cli import main\n")
    assert imported_parts(tmp_path / "file.py") == {"cli"}


def test_the_package_stays_small() -> None:
    assert len(files()) <= 80
    long = {
        file.name: lines for file in files() if (lines := len(file.read_text().splitlines())) > 400
    }
    assert not long


def test_importing_capsnet_loads_no_plotting_server_export_or_terminal_library() -> None:
    heavy = [
        "matplotlib", "fastapi", "uvicorn", "onnx", "onnxruntime", "scipy", "pooch", "cyclopts",
        "rich", "tensorboard", "PIL",
    ]  # fmt: skip
    script = (
        "import sys, capsnet; "
        "[getattr(capsnet, name) for name in capsnet.__all__ if name != 'classify']; "
        f"print([name for name in {heavy} if name in sys.modules]); "
        "capsnet.classify; "  # opens images
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "['PIL']"]


def test_dir_lists_the_public_names_whether_imported_or_not() -> None:
    assert set(dir(capsnet)) == {*capsnet.__all__, "__version__"}
