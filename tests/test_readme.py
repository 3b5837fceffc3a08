import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_library_example_prints_what_its_comments_say() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    claims = re.findall(r"print\(.*?\)  # (.*?)(?::.*)?\n", code)
    assert printed.getvalue().splitlines() == claims


def test_links_and_pictures_exist() -> None:
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", file.read_text()):
            path = file.parent / target if target else file
            assert path.exists(), f"{file.name}: {target}"
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert not anchor or anchor in anchors, f"{file.name}: {target}#{anchor}"


def test_map_names_every_part() -> None:
    parts = {path.name for path in (ROOT / "src" / "capsnet").iterdir() if path.is_dir()}
    for part in parts - {"__pycache__"}:
        assert f"  {part}/ " in README, part
