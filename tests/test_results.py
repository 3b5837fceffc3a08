"""What is shipped is what its record says, and a recorded run can be repeated."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import BreakOff

from capsnet.cli import main
from capsnet.experiments.report import write_report
from capsnet.experiments.speed import write_page
from capsnet.models.weights import list_weights, load_weights
from capsnet.training import train
from capsnet.training.config import from_dict

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "table1.json"


def test_tables_are_what_the_results_and_presets_say(tmp_path: Path) -> None:
    for name in ("docs", "results"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("quick-*"))
    shutil.copy(ROOT / "README.md", tmp_path)
    write_report(tmp_path / "results", tmp_path / "docs", tmp_path / "README.md")
    write_page(tmp_path / "results", tmp_path / "docs" / "speed.md")
    for name in ("README.md", "docs/results.md", "docs/reproduce.md", "docs/speed.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name


def recorded_metrics(name: str) -> dict[str, dict[str, int]]:
    """What the record of shipped weights says of each dataset."""
    metrics = load_weights(list_weights()[name])[1]["metrics"]
    assert isinstance(metrics, dict)
    return metrics


@pytest.mark.parametrize("name", ["mnist", "mnist-r1", "multimnist"])
def test_shipped_weights_make_the_errors_of_their_record(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["evaluate", name, "--json"])
    assert not exit_status.value.code
    measured = json.loads(capsys.readouterr().out)
    [recorded] = recorded_metrics(name).values()
    assert measured["num_examples"] == recorded["num_examples"] >= 5000
    # Half precision and another machine's rounding may turn an example that stands on the edge.
    assert measured["num_errors"] == pytest.approx(recorded["num_errors"], abs=2)


@pytest.mark.timeout(600)
def test_a_recorded_run_repeated_with_its_seed_has_the_recorded_loss(tmp_path: Path) -> None:
    runs = json.loads(TABLE.read_text())["runs"]
    recorded = next(run for run in runs if run["role"] == "mnist")
    step, loss = next(iter(recorded["losses"].items()))
    with pytest.raises(KeyboardInterrupt):
        train(from_dict(recorded["config"]), tmp_path / "run", reporter=BreakOff(int(step) + 1))
    [line] = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == pytest.approx(loss, rel=1e-3)
