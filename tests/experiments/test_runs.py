import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_runs import TINY, write_run
from shipped import require_weights
from torch import Tensor

from capsnet.data import Split
from capsnet.experiments.catalogue import EXPERIMENTS, _is_as_long, find_experiment, reproduce
from capsnet.experiments.claims import _measure_widths
from capsnet.experiments.iterations import routing_convergence
from capsnet.experiments.outcome import Outcome
from capsnet.experiments.report import _machines, write_report
from capsnet.experiments.runs import (
    Need,
    Options,
    _planned,
    _settings,
    are_comparable,
    describe_difference,
    plan,
    train_planned,
)
from capsnet.experiments.tables import TABLE1, describe_budget
from capsnet.experiments.trained import Found, Say, Trained, open_source, recorded_runs
from capsnet.models import CapsNet, CapsNetConfig
from capsnet.models.weights import list_weights, save_weights
from capsnet.training import TrainConfig, configure
from capsnet.training.config import to_dict
from capsnet.training.records import read_json, write_json


def look(runs: Path, *needs: Need, **options: object) -> Found:
    chosen = Options(runs=runs, train=False, **options)  # type: ignore[arg-type]
    return plan(needs, chosen, lambda text: None)


def gather(needs: Sequence[Need], options: Options, say: Say = lambda text: None) -> Found:
    return train_planned(plan(needs, options, say), options, say, None)


def sources(found: Found, role: str) -> list[str]:
    return [Path(run.source).name for run in found[role]]


MNIST = Need("capsnet", "mnist", trials=3)
#: Of another size than the shipped network.
WIDE = Need(
    "capsnet",
    "mnist",
    {"model": {"conv_channels": 512, "primary_types": 64}},
    shipped="mnist",
)


def test_the_longest_runs_are_taken_and_never_the_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mnist", error=0.001, steps=500)
    for seed in (2, 0):
        write_run(tmp_path / f"b{seed}", "mnist", error=0.1, seed=seed)
    found = look(tmp_path, MNIST)
    assert sources(found, "capsnet") == ["b0", "b2"]
    assert sources(look(tmp_path, MNIST, trials=1), "capsnet") == ["b0"]
    with pytest.raises(ValueError, match="there is no finished run of mnist in"):
        look(tmp_path, MNIST, epochs=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"held_out": 5000}},
        {"data": {"num_train": 10_000}},
        {"model": {"num_iterations": 2}},
        {"model": TINY},
        {"num_evaluated": 100},
    ],
    ids=["held out", "part of the data", "other routing", "narrow", "tested on a few"],
)
def test_runs_of_something_else_are_not_taken(tmp_path: Path, changes: dict[str, object]) -> None:
    write_run(tmp_path / "other", "mnist", error=0.1, changes=changes)
    with pytest.raises(ValueError, match="there is no finished run of mnist in"):
        look(tmp_path, MNIST)


def test_trials_share_all_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mnist", error=0.1, changes={"learning_rate": 0.002})
    write_run(tmp_path / "b", "mnist", error=0.1, seed=1)
    write_run(tmp_path / "c", "mnist", error=0.1, seed=2)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["b", "c"]


def test_what_is_merely_logged_does_not_divide_trials(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mnist", error=0.1, changes={"evaluate_every": 1, "threads": 1})
    write_run(tmp_path / "b", "mnist", error=0.1, seed=1, changes={"log_every": 7})
    assert sources(look(tmp_path, MNIST), "capsnet") == ["a", "b"]


def test_of_equally_long_runs_the_one_with_the_preset_s_settings_is_taken(tmp_path: Path) -> None:
    wanted = configure("mnist").learning_rate
    for name, rate in (("a", 0.007), ("b", wanted), ("c", 0.009)):
        write_run(tmp_path / name, "mnist", error=0.1, changes={"learning_rate": rate})
    assert sources(look(tmp_path, MNIST), "capsnet") == ["b"]


def test_equally_many_epochs_are_equally_long_whatever_a_batch_leaves_over(tmp_path: Path) -> None:
    smaller: dict[str, object] = {"batch_size": 32}  # 64 images more in an epoch
    write_run(tmp_path / "smaller", "mnist", error=0.1, steps=20 * 1875, changes=smaller)
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", "mnist", error=0.1, seed=seed, steps=20 * 468)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["0", "1"]


def test_the_preset_s_settings_go_before_more_epochs_of_others(tmp_path: Path) -> None:
    other: dict[str, object] = {"batch_size": 64}
    write_run(tmp_path / "other", "mnist", error=0.1, steps=90 * 937, changes=other)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["other"]
    for name, epochs in (("shorter", 3), ("longer", 4)):
        write_run(tmp_path / name, "mnist", error=0.1, steps=epochs * 468)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["longer"]


def test_more_test_examples_than_the_preset_s_are_no_other_settings(tmp_path: Path) -> None:
    need = Need("pairs", "multimnist")
    more: dict[str, object] = {"num_evaluated": 20_000}
    write_run(tmp_path / "a", "multimnist", error=0.1, steps=900)
    write_run(tmp_path / "b", "multimnist", error=0.1, changes=more)
    assert sources(look(tmp_path, need), "pairs") == ["b"]


def test_a_run_in_one_part_goes_before_a_longer_one_in_several(tmp_path: Path) -> None:
    write_part(tmp_path / "on", "mnist", error=0.003)
    write_run(tmp_path / "whole", "mnist", error=0.004, steps=500)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["whole"]


@pytest.mark.parametrize("name", ["fig3", "fig4", "figA1"])
def test_a_figure_of_one_network_names_one(tmp_path: Path, name: str) -> None:
    for seed in (1, 0):
        changes: dict[str, object] = {"evaluate_every": 1}
        write_run(tmp_path / f"{seed}", "mnist", error=0.1, seed=seed, steps=10**6, changes=changes)
    assert sources(look(tmp_path, *find_experiment(name).needs), "capsnet") == ["0"]


def test_a_run_to_compare_with_shares_the_settings_of_the_other(tmp_path: Path) -> None:
    write_run(tmp_path / "three", "cifar10", error=0.3, steps=700)
    one: dict[str, object] = {"num_iterations": 1}
    write_run(tmp_path / "one-longer", "cifar10", error=0.3, steps=900, changes={"model": one})
    write_run(tmp_path / "one-alike", "cifar10", error=0.3, steps=700, changes={"model": one})
    found = look(
        tmp_path,
        Need("3", "cifar10"),
        Need("1", "cifar10", changes={"model": one}, like="3"),
    )
    assert sources(found, "3") == ["three"]
    assert sources(found, "1") == ["one-alike"]


def test_a_damaged_run_is_left_out_aloud(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "mnist", error=0.1)
    write_run(tmp_path / "bad", "mnist", error=0.1, steps=2000)
    record = tmp_path / "bad" / "result.json"
    record.write_text(record.read_text().replace("0.1", "0.2"))
    said: list[str] = []
    needs = (MNIST, Need("baseline", "mnist-cnn"))
    found = plan(needs, Options(runs=tmp_path, train=False), said.append)
    assert sources(found, "capsnet") == ["good"]
    assert len(said) == 1  # not once for each of them
    assert "bad/result.json is damaged" in said[0]


def test_a_run_of_another_version_is_left_out_aloud(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "mnist", error=0.1)
    other = write_run(tmp_path / "other", "mnist", error=0.1, steps=2000) / "result.json"
    record = read_json(other)
    config = record["config"]
    assert isinstance(config, dict)
    write_json(other, {**record, "config": {**config, "momentum": 0.9}})
    said: list[str] = []
    found = plan((MNIST,), Options(runs=tmp_path, train=False), said.append)
    assert sources(found, "capsnet") == ["good"]
    assert "other has settings of another version" in said[0]


def test_table_1_is_the_mean_and_deviation_of_the_runs_there_are(tmp_path: Path) -> None:
    for seed, error in enumerate((0.002, 0.003, 0.004)):
        write_run(tmp_path / "runs" / f"mnist-{seed}", "mnist", error=error, seed=seed)
    write_run(tmp_path / "runs" / "multi", "multimnist", error=0.06)
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    done = reproduce("table1", options)
    assert done.result == tmp_path / "table1.json"
    assert done.record["quick"] is False
    stored = read_json(done.result)["rows"]
    assert isinstance(stored, list)
    rows = {row["label"]: row for row in stored}
    best = rows["MNIST: CapsNet, 3 iterations, reconstruction"]
    assert best["mean"] == pytest.approx(0.003)
    assert best["spread"] == pytest.approx(0.001)
    assert (best["trials"], best["seeds"], best["seconds"]) == (3, [0, 1, 2], 180.0)
    assert (best["paper"], best["paper_spread"]) == (0.0025, 0.00005)
    assert rows["MultiMNIST: CapsNet, 3 iterations, reconstruction"]["mean"] == 0.06
    assert rows["MNIST: CNN baseline"]["mean"] is None
    assert [path.name for path in done.pictures] == ["table1.png"]


def test_a_run_without_a_test_error_is_no_trial(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "kept", "mnist", error=0.002, seed=1)
    bare = write_run(tmp_path / "runs" / "bare", "mnist", error=0.9)
    write_json(bare / "result.json", {**read_json(bare / "result.json"), "metrics": {}})
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    rows = reproduce("table1", options).record["rows"]
    assert isinstance(rows, list)
    row = rows[4]
    assert (row["values"], row["seeds"], row["num_examples"]) == ([0.002], [1], 10_000)


def test_the_paper_s_table_1_is_as_printed() -> None:
    rows = {row.label: (row.paper, row.paper_spread) for row in find_experiment("table1").expected}
    assert rows == {
        "MNIST: CNN baseline": (0.0039, None),
        "MNIST: CapsNet, 1 iteration, no reconstruction": (0.0034, 0.00032),
        "MNIST: CapsNet, 1 iteration, reconstruction": (0.0029, 0.00011),
        "MNIST: CapsNet, 3 iterations, no reconstruction": (0.0035, 0.00036),
        "MNIST: CapsNet, 3 iterations, reconstruction": (0.0025, 0.00005),
        "MultiMNIST: CNN baseline": (0.081, None),
        "MultiMNIST: CapsNet, 1 iteration, reconstruction": (0.075, None),
        "MultiMNIST: CapsNet, 3 iterations, reconstruction": (0.052, None),
    }


def test_shipped_weights_count_only_where_a_run_of_theirs_would(tmp_path: Path) -> None:
    require_weights("mnist")
    with pytest.raises(ValueError, match="there is no finished run of mnist in"):
        look(tmp_path, WIDE)
    digits = find_experiment("fig4").needs
    assert sources(look(tmp_path, *digits), "capsnet") == ["mnist"]
    with pytest.raises(ValueError, match="there is no finished run of mnist in"):
        look(tmp_path, *digits, epochs=1000)
    write_run(tmp_path / "longer", "mnist", error=0.1, steps=21 * 468)
    assert sources(look(tmp_path, *digits), "capsnet") == ["longer"]


def test_a_folder_with_the_name_of_shipped_weights_does_not_stand_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_weights("mnist")
    write_run(tmp_path / "mnist", "mnist", error=0.1, changes={"model": TINY}, with_weights=True)
    monkeypatch.chdir(tmp_path)
    [run] = look(tmp_path / "runs", *find_experiment("fig4").needs)["capsnet"]
    assert run.weights == list_weights()["mnist"]


def test_weights_by_name_are_taken_and_their_difference_is_noted(tmp_path: Path) -> None:
    require_weights("mnist")
    [run] = look(tmp_path, WIDE, weights=("mnist",))["capsnet"]
    note = describe_difference(run, WIDE)
    assert note is not None
    assert note.startswith("mnist is not as the preset mnist has it: ")
    assert "conv_channels 256 instead of 512, primary_types 32 instead of 64." in note
    narrow = write_run(
        tmp_path / "a", "mnist", error=0.1, changes={"model": TINY}, with_weights=True
    )
    options = Options(weights=(str(narrow),), out=tmp_path, num_examples=150)
    done = reproduce("figA1", options)
    notes = done.record["notes"]
    assert isinstance(notes, list)
    assert "conv_channels 4 instead of 256" in notes[-1]


def test_routing_is_measured_on_as_many_examples_as_are_asked_for_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "a", "mnist", error=0.1, changes={"model": TINY}, with_weights=True)
    found = {"capsnet": [open_source(str(run))]}
    seen: list[int] = []

    def changes(model: CapsNet, images: Tensor) -> dict[str, list[float]]:
        seen.append(len(images))
        logits = [float(len(images) + place) for place in range(10)]
        return {"logits": logits, "coupling": [place / 10 for place in range(10)]}

    monkeypatch.setattr("capsnet.experiments.iterations.routing_changes", changes)
    outcome = routing_convergence(found, Options(num_examples=150))
    assert seen == [100, 50]
    assert outcome.rows[0].num_examples == 150
    mean = (100 * 100 + 50 * 50) / 150
    # The second and the fifth iteration.
    assert [row.mean for row in outcome.rows] == pytest.approx([mean + 1, mean + 4, 0.1, 0.4])
    routing_convergence(found, Options(num_examples=10_050))
    assert sum(seen) == 150 + 10_000


def test_without_training_the_recorded_runs_of_another_machine_count(tmp_path: Path) -> None:
    there, here = Options(runs=tmp_path / "there", out=tmp_path, train=False), tmp_path / "here"
    for seed, error in ((0, 0.002), (1, 0.003)):
        run = write_run(there.runs / f"mnist-{seed}", "mnist", error=error, seed=seed)
        line = {"step": 50, "loss": 0.25, "epoch": 0.1, "error_rate": 0.1}
        (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    reproduce("table1", there)
    shutil.rmtree(there.runs)
    write_run(here / "again", "mnist", error=0.009, seed=1)  # files that are here come first
    write_run(here / "third", "mnist", error=0.004, seed=2)
    record = reproduce("table1", replace(there, runs=here)).record
    rows, runs = record["rows"], record["runs"]
    assert isinstance(rows, list)
    assert isinstance(runs, list)
    assert (rows[4]["values"], rows[4]["seeds"]) == ([0.002, 0.009, 0.004], [0, 1, 2])
    assert [Path(run["source"]).name for run in runs] == ["mnist-0", "again", "third"]
    assert [run["losses"] for run in runs] == [{"50": 0.25}, {}, {}]


def test_a_trial_that_only_the_result_knows_of_is_not_dropped(tmp_path: Path) -> None:
    there = Options(runs=tmp_path / "there", out=tmp_path, train=False)
    for seed in (0, 1):
        write_run(there.runs / f"mnist-{seed}", "mnist", error=0.002, seed=seed)
    first = reproduce("table1", there)
    shutil.rmtree(there.runs)
    longer = replace(there, runs=tmp_path / "here")
    write_run(longer.runs / "longer", "mnist", error=0.001, steps=2000)
    known = first.result.read_bytes()
    for options in (longer, replace(there, trials=1)):
        with pytest.raises(ValueError, match=r"is all that is here of .*mnist-1, which this would"):
            reproduce("table1", options)
    assert first.result.read_bytes() == known
    assert reproduce("table1", replace(longer, overwrite=True)).is_new


def test_training_anew_drops_no_longer_run_that_only_the_result_knows_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def pretend(config: TrainConfig, folder: Path, **options: object) -> None:
        trained.append(folder.name)
        write_run(folder, config.preset, error=0.4, steps=4 * 468, others={"affnist": 0.5})

    monkeypatch.setattr("capsnet.experiments.runs.train", pretend)
    options = Options(runs=tmp_path / "runs", out=tmp_path)
    for preset in ("affnist", "affnist-cnn"):
        write_run(options.runs / preset, preset, error=0.01, steps=2000, others={"affnist": 0.2})
    first = reproduce("affnist", options)
    known = first.result.read_bytes()
    shutil.rmtree(options.runs)
    with pytest.raises(ValueError, match=r"is all that is here of .*affnist, which this would"):
        reproduce("affnist", options)
    assert first.result.read_bytes() == known
    assert trained == []  # no hours for a result that would not be written
    assert reproduce("affnist", replace(options, epochs=5)).is_new
    assert trained == ["affnist-seed0", "affnist-cnn-seed0"]


def test_one_run_does_not_stand_for_the_several_of_a_result(tmp_path: Path) -> None:
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    runs = [
        write_run(options.runs / f"{seed}", "svhn", error=0.3, seed=seed, steps=10**6)
        for seed in (0, 1)
    ]
    recorded = [open_source(str(run)).to_dict("svhn") for run in runs]
    write_json(tmp_path / "svhn.json", {"rows": [], "runs": recorded})
    known = (tmp_path / "svhn.json").read_bytes()
    shutil.rmtree(runs[0])
    with pytest.raises(ValueError, match=r"is all that is here of .*runs/0, which this would"):
        reproduce("svhn", options)
    assert (tmp_path / "svhn.json").read_bytes() == known


def test_a_damaged_result_is_not_replaced_unasked(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "mnist", error=0.002)
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    result = reproduce("table1", options).result
    result.write_text(result.read_text().replace("0.002", "0.001"))
    damaged = result.read_bytes()
    with pytest.raises(ValueError, match=r"table1\.json is damaged: .*; --overwrite replaces it"):
        reproduce("table1", options)
    assert result.read_bytes() == damaged
    assert reproduce("table1", replace(options, overwrite=True)).is_new


def test_no_number_is_replaced_by_none_or_by_that_of_fewer_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "a", "mnist", error=0.002, steps=500)
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    result = reproduce("table1", options).result
    known = result.read_bytes()
    (tmp_path / "table1.png").unlink()  # so that it is measured again
    rows = list(TABLE1)
    for values, count, message in (
        ((), None, "has the number for 'MNIST: CapsNet, 3 iterations, reconstruction', which"),
        ((0.001,), 50, "reconstruction' on 10,000 examples, this would on 50"),
    ):
        rows[4] = replace(TABLE1[4], values=values, num_examples=count)
        outcome = Outcome(tuple(rows), pictures={})
        other = replace(find_experiment("table1"), measure=lambda *_, made=outcome: made)
        monkeypatch.setitem(EXPERIMENTS, "table1", other)
        with pytest.raises(ValueError, match=message):
            reproduce("table1", options)
        assert result.read_bytes() == known


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "svhn"])
def test_shipped_weights_are_the_run_whose_result_is_recorded(name: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for file in (root / f"results/{name}.json", *(root / "docs/images").glob(f"{name}*.png")):
        shutil.copy(file, tmp_path)
    known = read_json(tmp_path / f"{name}.json")
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    done = reproduce(name, options)
    assert not done.is_new
    assert done.record == known
    runs = known["runs"]
    assert isinstance(runs, list)
    other = {**runs[0], "sha256": "0" * 64, "seconds": 1.0}  # another file
    trained = open_source({"svhn": "svhn", "fig5": "multimnist"}.get(name, "mnist"))
    assert trained.is_same_training(Trained.from_result(runs[0]))
    assert not trained.is_same_training(Trained.from_result(other))


def test_a_result_overwritten_by_shipped_weights_is_up_to_date(tmp_path: Path) -> None:
    """Though the run that they were rounded from, which was recorded before, is another file."""
    require_weights("mnist")
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False, overwrite=True)
    first = reproduce("fig3", options)
    [run] = recorded_runs(first.record, print)["capsnet"]
    record = dict(first.record)
    record["runs"] = [{**run.record, "sha256": "0" * 64}]
    record["inputs"] = {**record["inputs"], "networks": {"capsnet": ["0" * 64]}}  # type: ignore[dict-item]
    write_json(first.result, record)
    asked = replace(options, overwrite=False)
    assert not reproduce("fig3", asked).is_new  # of one training
    assert reproduce("fig3", options).is_new
    assert not reproduce("fig3", asked).is_new


def test_commit_of_a_measurement_is_that_of_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_slowly(*arguments: Any) -> Found:
        monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "after")
        return train_planned(*arguments)

    write_run(tmp_path / "runs" / "a", "mnist", error=0.002)
    monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "before")
    monkeypatch.setattr("capsnet.experiments.catalogue.train_planned", train_slowly)
    done = reproduce("table1", Options(runs=tmp_path / "runs", out=tmp_path, train=False))
    assert done.record["commit"] == "before"


def test_recorded_runs_count_neither_for_training_nor_where_weights_are_needed(
    tmp_path: Path,
) -> None:
    run = read_json(write_run(tmp_path / "a", "mnist", error=0.002) / "result.json")
    said: list[str] = []
    stored = {"runs": [{**run, "role": "capsnet", "source": "elsewhere", "sha256": "0"}]}
    recorded = recorded_runs(stored, said.append)
    assert sources(recorded, "capsnet") == ["elsewhere"]
    shutil.rmtree(tmp_path / "a")

    by_record, idle = replace(MNIST, by_record=True), Options(runs=tmp_path, train=False)
    assert plan([by_record], idle, said.append, recorded) == recorded
    with pytest.raises(ValueError, match="there is no finished run"):
        plan([MNIST], idle, said.append, recorded)

    found = plan([by_record], replace(idle, train=True), said.append, recorded)
    assert sources(found, "capsnet") == ["mnist-seed0", "mnist-seed1", "mnist-seed2"]


def test_a_recorded_run_of_another_version_is_left_out_aloud(tmp_path: Path) -> None:
    run = read_json(write_run(tmp_path / "a", "mnist", error=0.002) / "result.json")
    config = run["config"]
    assert isinstance(config, dict)
    other = {**run, "role": "mnist", "source": "elsewhere", "sha256": "0"}
    said: list[str] = []
    assert not recorded_runs(
        {"runs": [{**other, "config": {**config, "momentum": 0.9}}]}, said.append
    )
    assert "elsewhere has settings of another version" in said[0]


@pytest.fixture
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsnet.experiments.runs.list_weights", dict)


@pytest.mark.usefixtures("nothing_shipped")
def test_claims_measure_no_other_run_in_the_folder_of_a_recorded_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = Options(runs=runs, out=tmp_path, train=False)
    recorded = write_run(runs / "mnist-seed0", "mnist", error=0.002)
    reproduce("claims", options)
    shutil.rmtree(recorded)
    write_run(recorded, "mnist", error=0.9, steps=10, with_weights=True)
    rows = reproduce("claims", replace(options, overwrite=True)).record["rows"]
    assert isinstance(rows, list)
    assert [row["values"] for row in rows[-2:]] == [[], []]


def test_the_dimension_of_width_is_chosen_on_training_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def correlate(model: CapsNet, split: Split, num_examples: int) -> Tensor:
        follows = torch.tensor([0.1, 0.8, 0.3] if split.split == "train" else [0.9, 0.5, 0.2])
        return follows.repeat(split.num_classes, 1)

    require_weights("mnist")
    monkeypatch.setattr("capsnet.experiments.claims._width_correlations", correlate)
    widths = _measure_widths(open_source("mnist"), Options())
    assert widths.rows[-1].values == pytest.approx((0.5,))
    assert widths.details["correlated_dimensions"] == [1] * 10


@pytest.mark.usefixtures("nothing_shipped")
def test_claims_without_a_run_of_mnist_leave_its_rows_empty(tmp_path: Path) -> None:
    for preset, error in (("mnist-r1", 0.004), ("mnist-r1-norecon", 0.006)):
        write_run(tmp_path / "runs" / preset, preset, error=error)
    done = reproduce("claims", Options(runs=tmp_path / "runs", out=tmp_path, train=False))
    rows = done.record["rows"]
    assert isinstance(rows, list)
    assert [row["mean"] for row in rows] == [None] * 3 + [pytest.approx(-0.002)] + [None] * 3


@pytest.mark.usefixtures("nothing_shipped")
def test_claims_compare_runs_of_the_same_seed_and_length(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed, error in ((0, 0.003), (1, 0.005)):
        write_run(runs / f"r1-{seed}", "mnist-r1", error=error, seed=seed)
    write_run(runs / "norecon", "mnist-r1-norecon", error=0.009, seed=1)
    longer = {"multimnist": 2000, "multimnist-r1": 1000}
    for preset, steps in longer.items():
        write_run(runs / preset, preset, error=0.06, steps=steps)
    done = reproduce("claims", Options(runs=runs, out=tmp_path, train=False))
    rows = done.record["rows"]
    assert isinstance(rows, list)
    assert rows[1]["mean"] is None
    assert (rows[3]["mean"], rows[3]["seeds"]) == (pytest.approx(0.005 - 0.009), [1])
    assert rows[3]["seconds"] == 120  # of both networks


@pytest.mark.usefixtures("nothing_shipped")
def test_claims_compare_runs_that_differ_in_their_network_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "r1", "mnist-r1", error=0.003)
    write_run(runs / "norecon", "mnist-r1-norecon", error=0.009, changes={"learning_rate": 0.001})
    write_run(runs / "pairs", "multimnist", error=0.06)
    write_run(runs / "pairs-r1", "multimnist-r1", error=0.07, changes={"evaluate_every": 100})
    done = reproduce("claims", Options(runs=runs, out=tmp_path, train=False))
    rows = done.record["rows"]
    assert isinstance(rows, list)
    assert rows[3]["mean"] is None
    assert rows[1]["mean"] == pytest.approx(0.06 - 0.07)


def write_part(folder: Path, preset: str, *, error: float, first_rate: float = 0.01) -> None:
    """A run of 1,000 steps that continued one of 350 double ones, which continued one of 200."""
    parts = [
        to_dict(configure(preset, {"steps": steps, **changes}))
        for steps, changes in (
            (200, {"learning_rate": first_rate, "optimiser": "muon", "batch_size": 256}),
            (350, {"schedule": "paper", "batch_size": 256}),
        )
    ]
    first = {"steps": 200, "config": parts[0], "hardware": {"cpu": "Abacus", "cores": 9}}
    second = {"steps": 350, "config": parts[1], "earlier": first}
    earlier = {"first_step": 700, **second}
    changes: dict[str, object] = {"continue_from": str(folder)}
    write_run(folder, preset, error=error, changes=changes, earlier=earlier)


def test_training_in_parts_is_noted_with_all_its_machines(tmp_path: Path) -> None:
    write_part(tmp_path / "runs" / "on", "mnist", error=0.003)
    done = reproduce("table1", Options(runs=tmp_path / "runs", out=tmp_path, train=False))
    notes, trained = done.record["notes"], done.record["runs"]
    assert isinstance(notes, list)
    assert isinstance(trained, list)
    assert notes[-1] == (
        f"{tmp_path / 'runs' / 'on'} was trained in parts: 200 steps of 256 with muon at 0.01, "
        "then 150 steps of 256 with adam at 0.001, paper schedule, "
        "then 300 steps of 128 with adam at 0.004. "
        "Its curves show the last part."
    )
    assert trained[0]["earlier"]["earlier"]["steps"] == 200
    assert "Abacus, 9 cores" in _machines(trained)


def test_runs_of_other_parts_are_no_trials_of_one_experiment(tmp_path: Path) -> None:
    write_part(tmp_path / "on", "mnist", error=0.003)
    write_run(tmp_path / "whole", "mnist", error=0.004, seed=1)
    assert sources(look(tmp_path, MNIST), "capsnet") == ["whole"]


def test_runs_of_equal_parts_are_compared_and_others_are_not(tmp_path: Path) -> None:
    write_part(tmp_path / "mnist", "mnist", error=0.003)
    write_part(tmp_path / "r1", "mnist-r1", error=0.004)
    write_part(tmp_path / "norecon", "mnist-norecon", error=0.004, first_rate=0.02)
    mnist, r1, norecon = (open_source(str(tmp_path / name)) for name in ("mnist", "r1", "norecon"))
    assert are_comparable(mnist, r1)
    assert not are_comparable(mnist, norecon)


def test_no_trial_is_trained_to_stand_beside_a_run_in_parts(tmp_path: Path) -> None:
    write_part(tmp_path / "on", "mnist", error=0.003)
    said: list[str] = []
    found = plan([MNIST], Options(runs=tmp_path), said.append)
    assert sources(found, "capsnet") == ["on"]
    assert said == [f"capsnet is not trained: {tmp_path / 'on'} was trained in parts"]


def test_a_run_in_parts_is_no_pattern_for_others_to_be_compared_with(tmp_path: Path) -> None:
    write_part(tmp_path / "on", "mnist", error=0.003)
    needs = Need("mnist", "mnist"), Need("r1", "mnist-r1", like="mnist")
    found = plan(needs, Options(runs=tmp_path), lambda text: None)
    assert [sources(found, role) for role in found] == [["mnist-seed0"], ["mnist-r1-seed0"]]
    assert sources(look(tmp_path, *needs), "mnist") == ["on"]  # the only one there is
    write_run(tmp_path / "whole", "mnist", error=0.004, steps=500)
    assert sources(look(tmp_path, *needs), "mnist") == ["whole"]


def test_a_length_in_epochs_leaves_runs_given_in_steps_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "pairs", "multimnist", error=0.06)
    need = Need("pairs", "multimnist")
    assert sources(look(tmp_path, need, epochs=20), "pairs") == ["pairs"]
    with pytest.raises(ValueError, match="there is no finished run"):
        look(tmp_path, need, steps=20)


def test_missing_trials_are_trained_as_those_found_but_with_the_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old: dict[str, object] = {"data": {"data_dir": "old"}, "threads": 64}
    write_run(tmp_path / "a", "svhn", error=0.1, changes=old)
    trained: list[TrainConfig] = []

    def pretend(config: TrainConfig, folder: Path, **options: object) -> None:
        trained.append(config)
        write_run(folder, "svhn", error=0.1, seed=config.seed)

    monkeypatch.setattr("capsnet.experiments.runs.train", pretend)
    options = Options(runs=tmp_path, trials=2, data_dir=Path("new"), threads=1)
    gather([Need("svhn", "svhn")], options)
    more = replace(options, trials=3, threads=None)
    gather([Need("svhn", "svhn", curve="kept")], more)
    settings = [
        (each.steps, each.data.data_dir, each.threads, each.evaluate_every) for each in trained
    ]
    assert settings == [(1000, Path("new"), 1, 0), (1000, Path("new"), None, 200)]


def test_a_finished_run_that_lost_its_weights_is_trained_again_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    def pretend(config: TrainConfig, folder: Path, **options: object) -> None:
        folders.append(folder.name)
        if not folder.exists():
            write_run(folder, "svhn", error=0.1, changes={"epochs": None})
            write_json(folder / "config.json", to_dict(config))

    monkeypatch.setattr("capsnet.experiments.runs.train", pretend)
    options = Options(runs=tmp_path, steps=1000)
    gather([Need("svhn", "svhn")], options)
    (tmp_path / "svhn-seed0" / "weights.safetensors").unlink()
    gather([Need("svhn", "svhn")], options)
    assert folders == ["svhn-seed0", "svhn-2-seed0"]


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mnist", error=0.1)
    (run / "log.jsonl").write_text('{"step": 50, "lo')
    with pytest.raises(ValueError, match=r"a/log\.jsonl is damaged"):
        open_source(str(run)).log()


@pytest.mark.parametrize("source", ["shipped", "file"])
def test_a_result_finds_the_weights_it_names(source: str, tmp_path: Path) -> None:
    require_weights("mnist")
    path = list_weights()["mnist"]
    name = "mnist" if source == "shipped" else str(path)
    opened = open_source(name)
    again = Trained.from_result(opened.to_dict("capsnet"))
    assert (again.source, again.weights) == (name, path)


def test_each_network_on_each_set_of_section_5_2_has_its_row(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "affnist", error=0.01, others={"affnist": 0.2})
    write_run(tmp_path / "runs" / "b", "affnist-cnn", error=0.02, others={"affnist": 0.3})
    done = reproduce("affnist", Options(runs=tmp_path / "runs", out=tmp_path, train=False))
    rows = done.record["rows"]
    assert isinstance(rows, list)
    assert {row["label"].partition(",")[0]: row["mean"] for row in rows} == {
        "CapsNet on the expanded MNIST test set": pytest.approx(0.99),
        "CNN on the expanded MNIST test set": pytest.approx(0.98),
        "CapsNet on affNIST (regenerated)": pytest.approx(0.8),
        "CNN on affNIST (regenerated)": pytest.approx(0.7),
    }
    notes = done.record["notes"]
    assert isinstance(notes, list)
    assert "On affNIST CapsNet is +10.00 points from the CNN (paper: +13)." in notes
    write_run(tmp_path / "runs" / "c", "affnist-cnn", error=0.001, seed=1, others={"affnist": 0.1})
    (tmp_path / "runs" / "b" / "result.json").unlink()
    done = reproduce(
        "affnist", Options(runs=tmp_path / "runs", out=tmp_path / "turned", train=False)
    )
    notes = done.record["notes"]
    assert isinstance(notes, list)
    assert notes[-1].endswith(
        "−10.00 points from the CNN (paper: +13): the paper's order is turned round."
    )
    assert "turned" not in notes[-2]


def test_an_error_on_other_files_of_affnist_is_measured_anew(tmp_path: Path) -> None:
    for name, preset in (("a", "affnist"), ("b", "affnist-cnn")):
        run = write_run(
            tmp_path / "runs" / name, preset, error=0.01, others={"affnist": 0.2}, with_weights=True
        )
        record = read_json(run / "result.json")
        metrics = record["metrics"]
        assert isinstance(metrics, dict)
        metrics["affnist"]["origin"] = "affNIST, its author's files"  # which are not here now
        write_json(run / "result.json", record)
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False, num_examples=20)
    rows = reproduce("affnist", options).record["rows"]
    assert isinstance(rows, list)
    assert [row["num_examples"] for row in rows] == [10_000, 10_000, 20, 20]


def test_a_result_on_affnist_is_made_anew_when_its_author_s_files_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, preset in (("a", "affnist"), ("b", "affnist-cnn")):
        write_run(tmp_path / "runs" / name, preset, error=0.01, others={"affnist": 0.2})
    options = Options(runs=tmp_path / "runs", out=tmp_path, train=False)
    assert reproduce("affnist", options).is_new
    assert not reproduce("affnist", options).is_new
    monkeypatch.setattr(
        "capsnet.experiments.catalogue.load_split",
        lambda data, split: SimpleNamespace(origin="affNIST, its author's files"),
    )
    assert reproduce("affnist", options).is_new


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [
        ("svhn", {"steps": 5}, "steps"),
        ("fig5", {"epochs": 5}, "epochs"),
        ("fig3", {"digits": (3,)}, "digits"),
        ("fig3", {"quick": True, "epochs": 5}, "epochs"),
        ("fig4", {"trials": 2}, "trials"),
        *(("fig3", {"weights": ("mnist",), name: 2}, name) for name in ("epochs", "trials")),
        ("fig5", {"weights": ("multimnist",), "steps": 2}, "steps"),
        *(
            (name, {"num_examples": 5}, "num-examples")
            for name in ("table1", "fig3", "fig4", "figA2", "svhn")
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(ValueError, match=f"--{option} makes no difference to .*{name}"):
        reproduce(name, Options(runs=tmp_path, out=tmp_path, **options))


def test_a_shorter_run_of_smaller_batches_is_no_longer_one(tmp_path: Path) -> None:
    """Neither once it is there nor before it is trained, though it has more steps."""
    need = find_experiment("table1").needs[-1]
    small: dict[str, object] = {"batch_size": 32}
    write_run(tmp_path / "large", need.preset, error=0.05, steps=24_000)
    write_run(tmp_path / "small", need.preset, error=0.08, steps=40_000, changes=small)
    large_run, small_run = (open_source(str(tmp_path / name)) for name in ("large", "small"))
    planned, longer = (
        _planned(configure(need.preset, {**small, "steps": steps})) for steps in (40_000, 96_000)
    )
    assert not _is_as_long(small_run, large_run)
    assert not _is_as_long(planned, large_run)
    assert _is_as_long(large_run, small_run)
    assert _is_as_long(longer, large_run)


def test_networks_of_unknown_length_have_a_budget_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mnist", error=0.1, with_weights=True)
    (run / "result.json").unlink()
    found = {"mnist": [open_source(str(run))]}
    assert describe_budget(found) == "One trial of unknown length"


def test_table_1_keeps_the_course_of_training_and_fig_a1_needs_it(tmp_path: Path) -> None:
    [table] = [need for need in find_experiment("table1").needs if need.preset == "mnist"]
    [figure] = find_experiment("figA1").needs
    write_run(tmp_path / "a", "mnist", error=0.1)
    assert sources(look(tmp_path, table), "mnist") == ["a"]
    with pytest.raises(ValueError, match="there is no finished run of mnist in"):
        look(tmp_path, figure)
    write_run(tmp_path / "b", "mnist", error=0.1, changes={"evaluate_every": 1})
    assert sources(look(tmp_path, figure), "capsnet") == ["b"]
    assert _settings(table, Options(), {}).evaluate_every == 1


def test_table_1_warns_of_networks_that_were_not_trained_equally_long(tmp_path: Path) -> None:
    for preset, steps in (("mnist", 1000), ("mnist-cnn", 1000), ("multimnist", 1500)):
        write_run(tmp_path / preset, preset, error=0.1, steps=steps)
    options = Options(runs=tmp_path, out=tmp_path / "out", train=False)
    notes = reproduce("table1", options).record["notes"]
    assert "tells of the length" not in str(notes)
    write_run(tmp_path / "multimnist-cnn", "multimnist-cnn", error=0.1, steps=500)
    notes = reproduce("table1", replace(options, overwrite=True)).record["notes"]
    between = "trained for 64,000 images to 192,000 images, so their order tells"
    assert f"'MultiMNIST: the networks were {between}" in str(notes)
    assert (
        "MNIST: the networks' settings differ, at last adam at 0.001 in batches of 128 "
        "(CNN baseline); adam at 0.004 in batches of 128 (CapsNet, 3 iterations, reconstruction)."
    ) in notes  # type: ignore[operator]
    assert "'MNIST: the networks were" not in str(notes)


def test_weights_must_be_as_many_as_the_networks(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", "mnist", error=0.1))
    with pytest.raises(ValueError, match=r"needs 2 --weights \(CapsNet, CNN\), got 1"):
        reproduce("affnist", Options(weights=(run,), out=tmp_path))


def test_networks_that_cannot_show_what_is_asked_are_refused(tmp_path: Path) -> None:
    model = {**TINY, "decoder": False}
    plain = write_run(
        tmp_path / "a", "mnist", error=0.1, changes={"model": model}, with_weights=True
    )
    with pytest.raises(ValueError, match="has no decoder"):
        reproduce("fig3", Options(weights=(str(plain),), out=tmp_path))
    pairs = write_run(
        tmp_path / "b", "mnist", error=0.1, changes={"model": TINY}, with_weights=True
    )
    with pytest.raises(ValueError, match="fig5 needs a network trained on multimnist"):
        reproduce("fig5", Options(weights=(str(pairs),), out=tmp_path))
    baseline: dict[str, object] = {"conv_channels": (4, 3, 2), "hidden_sizes": (5,)}
    cnn = write_run(
        tmp_path / "c", "mnist-cnn", error=0.1, changes={"model": baseline}, with_weights=True
    )
    with pytest.raises(ValueError, match="has no capsules"):
        reproduce("figA1", Options(weights=(str(cnn),), out=tmp_path))


def test_a_figure_of_a_network_without_a_test_error_can_be_reported(tmp_path: Path) -> None:
    changes = {"model": TINY, "data": {"held_out": 5000}}
    run = write_run(tmp_path / "a", "mnist", error=0.1, changes=changes, with_weights=True)
    reproduce("fig3", Options(weights=(str(run),), out=tmp_path / "out"))
    write_report(results=tmp_path / "out", docs=tmp_path / "docs", readme=None)
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| test error of the network shown | 0.25 % | not run yet |" in page


def test_weights_that_say_nothing_of_their_training_can_be_shown(tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_weights(bare, CapsNet(CapsNetConfig(**TINY)), {})  # type: ignore[arg-type]
    done = reproduce("fig3", Options(weights=(str(bare),), out=tmp_path / "out"))
    assert done.result.exists()


def test_network_of_other_data_is_refused_by_name(tmp_path: Path) -> None:
    changes = {"model": TINY, "data": {"data_dir": "photos"}}
    run = write_run(tmp_path / "a", "folder", error=0.1, changes=changes, with_weights=True)
    with pytest.raises(ValueError, match=r"fig4 needs a network trained on mnist, but .*/a was"):
        reproduce("fig4", Options(weights=(str(run),), out=tmp_path))


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="trials must be at least 1, got 0"):
        Options(trials=0)
    with pytest.raises(ValueError, match="digits must be 0 to 9, got 12"):
        Options(digits=(3, 12))


def test_a_wrong_name_gets_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown experiment 'tabel1'; did you mean 'table1'\?"):
        find_experiment("tabel1")


def test_results_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, but results and pictures need a folder"):
        Options(out=tmp_path / "file")
