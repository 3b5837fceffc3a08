import re
from pathlib import Path

import pytest
from made_up_runs import write_run

from capsnet.experiments.catalogue import EXPERIMENTS, reproduce
from capsnet.experiments.report import (
    count_products,
    estimate_cost,
    replace_block,
    show_ours,
    show_row,
    write_report,
)
from capsnet.experiments.runs import Options
from capsnet.models import CNNConfig
from capsnet.training import configure
from capsnet.training.records import read_json, write_json

README = "# Name\n\n<!-- results -->\nold\n<!-- /results -->\n\nThe end.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Table 1 with one cell filled, as a result and as a miniature with another number."""
    write_run(tmp_path / "runs" / "a", "mnist", error=0.0031)
    folder = tmp_path / "results"
    options = Options(runs=tmp_path / "runs", out=folder, train=False)
    result = reproduce("table1", options).result
    record = read_json(result)
    rows = record["rows"]
    assert isinstance(rows, list)
    quick_rows = [row | {"mean": 0.4321 if row["mean"] else None} for row in rows]
    write_json(
        folder / "quick-table1.json", {**record, "quick": True, "rows": quick_rows, "notes": []}
    )
    return folder


def test_the_page_has_every_experiment_with_the_paper_s_numbers(results: Path) -> None:
    docs = results.parent / "docs"
    assert write_report(results, docs, None) == [docs / "results.md"]
    page = (docs / "results.md").read_text()
    for experiment in EXPERIMENTS.values():
        assert f"## {experiment.title}\n" in page
        assert f"`capsnet reproduce {experiment.name}`" in page
        for row in experiment.expected:
            assert f"| {row.label} |" in page
    assert "| MNIST: CapsNet, 3 iterations, reconstruction | 0.25 ± 0.005 % | 0.31 % | 1 |" in page
    assert "| SVHN | 4.3 % | not run yet |" in page
    assert "](../results/table1.png)" in page  # which lies beside its result
    (docs / "images").mkdir()
    (results / "table1.png").rename(docs / "images" / "table1.png")
    write_report(results, docs, None)
    assert "](images/table1.png)" in (docs / "results.md").read_text()


def test_the_page_says_what_is_short_of_the_paper(results: Path) -> None:
    docs = results.parent / "docs"
    record = read_json(results / "table1.json")
    rows = record["rows"]
    assert isinstance(rows, list)
    rows[0] |= {"mean": 0.0038, "images": 3_000_000}  # better than the paper's 0.39 %
    rows[4] |= {"epochs": 0.9, "images": 54_016}
    write_json(results / "table1.json", record)
    affnist = [row.to_dict() for row in EXPERIMENTS["affnist"].expected]
    affnist[2] |= {"mean": 0.70, "images": None}
    affnist[3] |= {"mean": 0.70, "images": 300}  # right, so more is better
    write_json(results / "affnist.json", {**record, "rows": affnist})
    write_report(results, docs, None)
    page = (docs / "results.md").read_text()
    listed = page.partition("## Short of the paper, and why\n\n")[2].partition("\n\n")[2]
    *lines, last = listed.partition("\n\n")[0].splitlines()
    assert lines == [
        "- MNIST: CapsNet, 3 iterations, reconstruction: 0.31 % instead of 0.25 ± 0.005 %, "
        "after 54,016 images",
        "- CapsNet on affNIST, right: 70.00 % instead of 79 %",
    ]
    assert last.startswith("- Not run yet: MNIST: CapsNet, 1 iteration, no reconstruction; MNIST: ")
    assert "SVHN" in last
    assert "CNN on" not in last


def test_the_page_says_what_is_missing_though_all_else_is_better(results: Path) -> None:
    docs = results.parent / "docs"
    record = read_json(results / "table1.json")
    rows = record["rows"]
    assert isinstance(rows, list)
    for row in rows[1:]:
        row |= {"mean": 0.0001} if row["mean"] is not None else {}
    write_json(results / "table1.json", record)
    write_report(results, docs, None)
    page = (docs / "results.md").read_text()
    assert "- Not run yet: MNIST: CNN baseline" in page.partition("## Short of the paper")[2]


def test_every_machine_that_trained_is_named(results: Path) -> None:
    docs, readme = results.parent / "docs", results.parent / "README.md"
    readme.write_text(README)
    record = read_json(results / "table1.json")
    runs = record["runs"]
    assert isinstance(runs, list)
    known = {"cpu": "Abacus", "cores": 2, "gpu": None}
    hardware = [known, known, {**known, "gpu": "Loom"}, None]
    many = [{**runs[0], "hardware": each} for each in hardware]
    many.append({**runs[0], "hardware": known, "machines": [known, {**known, "cpu": "Mill"}]})
    write_json(results / "table1.json", {**record, "runs": many})
    write_report(results, docs, readme)
    machines = "Abacus, 2 cores; Abacus, 2 cores, Loom; unknown; Mill, 2 cores"
    assert f"Trained on {machines}. Details" in readme.read_text()
    assert f" on {machines}. Measured at " in (docs / "results.md").read_text()


def test_miniatures_stay_out_of_readme_and_are_labelled_elsewhere(results: Path) -> None:
    docs, readme = results.parent / "docs", results.parent / "README.md"
    readme.write_text(README)
    write_report(results, docs, readme)
    text = readme.read_text()
    assert "43.21" not in text
    assert "0.31 %" in text
    assert "old" not in text
    assert text.startswith("# Name\n\n<!-- results -->\n|")
    assert text.endswith("<!-- /results -->\n\nThe end.\n")
    page = (docs / "results.md").read_text()
    assert page.index("43.21") > page.index("## Quick miniatures, not results")


def test_a_miniature_under_a_result_s_name_is_no_result(results: Path) -> None:
    (results / "quick-table1.json").replace(results / "table1.json")
    write_report(results, results.parent / "docs", None)
    assert "43.21" not in (results.parent / "docs" / "results.md").read_text()


def test_missing_results_leave_the_docs_alone(results: Path) -> None:
    docs = results.parent / "docs"
    with pytest.raises(ValueError, match="nowhere must be a folder of results"):
        write_report(results / "nowhere", docs, None)
    for name in ("fig4.json", "quick-fig4.json"):
        (results / name).write_text("garbage")
        with pytest.raises(ValueError, match=f"{name} is damaged: it is not JSON"):
            write_report(results, docs, None)
        (results / name).unlink()
    assert not docs.exists()


def test_a_second_report_changes_nothing(results: Path) -> None:
    docs, readme = results.parent / "docs", results.parent / "README.md"
    readme.write_text(README)
    write_report(results, docs, readme)
    before = readme.read_text(), (docs / "results.md").read_text()
    write_report(results, docs, readme)
    assert (readme.read_text(), (docs / "results.md").read_text()) == before


def test_changed_code_is_marked_at_its_commit(results: Path, tmp_path: Path) -> None:
    record = read_json(results / "table1.json")
    runs = record["runs"]
    assert isinstance(runs, list)
    runs[0]["commit"] = "a" * 40 + "+"
    write_json(results / "table1.json", record | {"commit": None})
    write_report(results, tmp_path / "docs", None)
    page = (tmp_path / "docs" / "results.md").read_text()
    assert re.search(r"trained at aaaaaaaaaa\+ on .+\. Measured at an unknown commit in", page)
    runs[0]["commits"] = ["b" * 40, "a" * 40]
    write_json(results / "table1.json", record)
    write_report(results, tmp_path / "docs", None)
    page = (tmp_path / "docs" / "results.md").read_text()
    assert re.search(r"trained at bbbbbbbbbb, aaaaaaaaaa on .+\. Measured", page)


def test_readme_without_markers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no markers")
    with pytest.raises(ValueError, match="x must hold <!-- results --> and <!-- /results -->"):
        replace_block(tmp_path / "x", "results", [])


def test_costs_follow_the_presets(results: Path) -> None:
    docs = results.parent / "docs"
    docs.mkdir()
    (docs / "reproduce.md").write_text("<!-- costs -->\n<!-- /costs -->\n")
    assert docs / "reproduce.md" in write_report(results, docs, None)
    page = (docs / "reproduce.md").read_text()
    config = configure("mnist")
    steps = config.steps or (config.epochs or 0) * (60_000 // config.batch_size)
    assert f"| `capsnet reproduce fig3` | 1 | {steps:,} |" in page
    one, table = (estimate_cost(EXPERIMENTS[name]) for name in ("fig3", "table1"))
    assert table.num_runs == 5 * 3 + 3
    assert table.cpu_seconds > 15 * one.cpu_seconds


def test_products_of_the_baseline_by_hand() -> None:
    config = CNNConfig(
        image_channels=2, image_height=8, image_width=4, conv_channels=(3, 5), conv_kernels=(3, 1),
        pool=2, hidden_sizes=(7,), num_classes=6,
    )  # fmt: skip
    first, second = 2 * 9 * 3 * 32, 3 * 1 * 5 * 8  # the second sees 4×2 pixels
    assert count_products(config) == first + second + 10 * 7 + 7 * 6


def test_numbers_are_shown_with_their_spread_and_sign() -> None:
    row = {"mean": 0.00253, "spread": 0.00012, "unit": "%", "paper": 0.0025, "paper_spread": None}
    assert show_row(row) == "0.25 ± 0.012 % (paper: 0.25 %)"
    assert show_ours(row | {"mean": -0.0004, "spread": None}) == "−0.04 %"
    assert show_ours(row | {"mean": 0.0123, "spread": None, "unit": ""}) == "0.0123"
    assert show_ours(row | {"mean": None}) == "not run yet"
