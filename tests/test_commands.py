"""The commands that README, docs and Makefile show."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from capsnet.cli import app, main
from capsnet.training.records import read_json

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(r"^ *(?:\$ )?capsnet (.+)$|`capsnet ([^`…]+)`", re.MULTILINE)
COMMANDS = sorted(
    {
        re.split(r" {2,}|\s#", block or inline)[0]
        for page in PAGES
        for block, inline in SHOWN.findall(page.read_text())
        if not re.search(r"[A-Z]{3}|\.\.\.", block or inline)  # a pattern, no command
    }
)
SMALL = [
    "--num-train", "64", "--num-evaluated", "200", "--conv-channels", "5", "--primary-types", "2",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_command_line_understands_what_the_docs_show(command: str) -> None:
    app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)


def test_demo_begins_goes_on_and_draws_in_miniature(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    for flag in ("", "--resume"):
        commands = demo_commands(run)
        assert [command[0] for command in commands] == [
            "train",
            "evaluate",
            "reproduce",
            "reproduce",
        ]
        assert ("--resume" in commands[0]) == bool(flag)
        commands[0] += SMALL
        for command in commands:
            with pytest.raises(SystemExit) as ended:
                main(command)
            assert not ended.value.code
    assert read_json(run / "result.json")["epochs"] == 1
    for name in ("fig3.png", "fig4.png"):
        assert (run / name).stat().st_size > 10_000


def demo_commands(run: Path) -> list[list[str]]:
    """What `make demo` would call after its set-up."""
    printed = subprocess.run(
        ["make", "-n", "demo", f"RUN={run}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [
        shlex.split(line)[1:]
        for line in printed.splitlines()
        if line.startswith(".venv/bin/capsnet")
    ]
