import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from capsnet.cli.bench import bench
from capsnet.experiments import growth
from capsnet.experiments.benchmark import (
    Measurement,
    Worker,
    measure_in_turns,
    measure_tensors,
)
from capsnet.experiments.growth import Sweep, draw_growth, run_growth
from capsnet.experiments.speed import (
    growth_table,
    measure_parts,
    measure_rounding,
    memory_table,
    parts_table,
    rounding_table,
    run_speed,
    speed_table,
    write_page,
)
from capsnet.experiments.textbook import TextbookCapsNet, TextbookCNN
from capsnet.experiments.workloads import (
    CASES,
    IMPLEMENTATIONS,
    Case,
    Implementation,
    Kind,
    Task,
    prepare,
)
from capsnet.models import CNN, CapsNet, CapsNetConfig, CNNConfig
from capsnet.training.records import read_json, write_json

#: All but those that are larger forms of others.
SMALL_CASES = [case for case in CASES if "cnn" not in case.name and case.name != "multimnist"]


def rows_of(record: Mapping[str, object]) -> list[dict[str, Any]]:
    rows = record["rows"]
    assert isinstance(rows, list)
    return rows


def test_textbook_capsnet_computes_the_same_network() -> None:
    config = CapsNetConfig(
        image_height=17, image_width=19, conv_channels=6, conv_kernel=5, primary_types=3,
        primary_dim=4, primary_kernel=5, output_dim=7, num_classes=8,
    )  # fmt: skip
    ours, plain = CapsNet(config).double(), TextbookCapsNet(config).double()
    plain.load_state_dict(ours.state_dict())
    images, labels = torch.rand(2, 1, 17, 19).double(), torch.tensor([[1, 5], [7, 0]])
    output = ours(images, reconstruct=labels)
    lengths, reconstruction = plain(images, labels)
    assert_close(lengths, output.lengths, rtol=1e-6, atol=1e-6)
    assert_close(reconstruction, output.reconstruction, rtol=1e-6, atol=1e-6)


def test_textbook_baseline_computes_the_same_network() -> None:
    config = CNNConfig(
        image_height=9, image_width=11, conv_channels=(4, 5), conv_kernels=(5, 3), pool=2,
        hidden_sizes=(6, 7),
    )  # fmt: skip
    ours, plain = CNN(config).double().eval(), TextbookCNN(config).double().eval()
    plain.load_state_dict(ours.state_dict())
    images = torch.rand(2, 1, 9, 11).double()
    assert_close(plain(images), ours(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SMALL_CASES, ids=[case.name for case in SMALL_CASES])
def test_every_case_runs_in_both_implementations(
    case: Case, implementation: Implementation
) -> None:
    prepare(replace(case.task, batch=1, size=10, capsules=7), implementation)()


@pytest.mark.parametrize("kind", ["products", "first"])
def test_every_part_runs(kind: Kind) -> None:
    prepare(Task(kind, batch=1, size=10), "capsnet")()


def test_parts_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"products": 0.1, "convolution": 0.3, "routing": 0.2, "first": 0.05, "train": 0.7}
    monkeypatch.setattr(
        "capsnet.experiments.speed.measure_in_turns",
        lambda tasks, **options: {name: seconds[task.kind] for name, task in tasks.items()},
    )
    parts = measure_parts(repeats=1, threads=1)
    assert list(parts.values()) == pytest.approx([0.1, 0.2, 0.2, 0.05, 0.15, 0.7])
    last = parts_table({"parts": parts})[-1]
    assert " ".join(last.split()) == "| step | 0.70 s | 100% |"


def test_tasks_take_turns_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Recorder(Worker):
        def __init__(
            self, task: Task, implementation: Implementation, *, threads: int, keep: bool = True
        ) -> None:
            self.name = f"{task.kind} {implementation} {threads}"
            said.append(f"begin {self.name}")

        def run(self) -> float:
            said.append(self.name)
            return float(said.count(self.name) ** 2)

        def kill(self) -> None:
            said.append(f"end {self.name}")

    monkeypatch.setattr("capsnet.experiments.benchmark.Worker", Recorder)
    tasks = {"a": Task("routing"), "b": Task("first")}
    assert measure_in_turns(tasks, repeats=3, threads=5) == {"a": 4.0, "b": 4.0}
    a, b = "routing capsnet 5", "first capsnet 5"
    assert said == [f"begin {a}", f"begin {b}", *[a, b] * 3, f"end {a}", f"end {b}"]


def test_frequency_form_rounds_no_more_at_full_size() -> None:
    errors = measure_rounding(batch=16)
    for name, error in errors["frequency"].items():
        assert 0 < error <= errors["direct"][name]
    assert rounding_table({"rounding": errors})[0].startswith("| form")


def test_bench_measures_one_case_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("routing", quick=True, repeats=1, threads=1, out=tmp_path, json=True) == 0
    record = read_json(tmp_path / "quick-bench-routing.json")
    assert json.loads(capsys.readouterr().out) == {"speed": record}
    assert record["quick"]
    (row,) = rows_of(record)
    assert (row["name"], row["batch"]) == ("routing", 4)
    for name in IMPLEMENTATIONS:
        assert row[name]["seconds"] > 0
        assert row[name]["memory_mb"] > 0


def test_unknown_case_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown case 'rooting'; did you mean 'routing'\? \(known"
    ):
        bench("rooting")


def test_at_least_one_turn_and_one_thread_are_asked_for() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        bench(repeats=0)
    with pytest.raises(ValueError, match="threads must be at least 1, got -1"):
        bench(threads=-1)


def test_death_of_a_process_is_reported() -> None:
    with pytest.raises(OSError, match="a process of the benchmark ended with status 1"):
        Worker(Task("train", model="no such model"), "capsnet", threads=1)


def measured(seconds: float, memory: float) -> Measurement:
    return Measurement([seconds * 1.5, seconds, seconds * 1.1], memory, flops=10**9)


def test_ratios_are_of_medians_and_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "capsnet.experiments.speed"
    done = {"capsnet": measured(0.1, 50.0), "textbook": measured(0.4, 200.0)}
    monkeypatch.setattr(f"{module}.measure", lambda task, **options: done)
    monkeypatch.setattr(f"{module}.measure_peak", lambda **options: 2e10)
    record = run_speed(CASES[:2], repeats=3, threads=2)
    first, second = rows_of(record)
    assert (first["ratio"], first["memory_ratio"], second["ratio"]) == (4.0, 0.25, 4.0)
    assert first["capsnet"]["seconds"] == 0.11
    assert first["capsnet"]["share_of_peak"] == 0.455
    table = speed_table(record)
    assert len(table) == 4
    assert "4.0 × (4)" in table[2]


def test_memory_of_tensors_stands_beside_that_of_the_process() -> None:
    task = Task("train", batch=2)
    needed = measure_tensors(task, threads=1)
    for megabytes in needed.values():  # weights, gradients, two moments, and little more
        assert 4 * 4 * 8.2 < megabytes < 300
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ
    *_, row = memory_table({"tensors_mb": {"mnist": {"textbook": 500.0, "capsnet": 200.0}}})
    assert row.replace("|", "").split() == ["mnist", "500", "200", "0.40"]


def test_growth_is_fitted_drawn_and_put_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: Task, **options: int) -> dict[Implementation, Measurement]:
        return {
            "capsnet": measured(task.batch * 0.01, 10.0),
            "textbook": measured(task.batch**2 * 0.01, task.batch * 3.0),
        }

    monkeypatch.setattr(growth, "measure", measure)
    sweep = Sweep("batch", "images", Task("routing"), "batch", (2, 4, 8), 1.1)
    record = run_growth([sweep], repeats=3, threads=2)
    (row,) = rows_of(record)
    assert row["capsnet"]["exponent"] == 1.0
    assert row["textbook"]["exponent"] == 2.0
    assert row["capsnet"]["memory_exponent"] == 0.0
    assert "1.00 (at most 1.1)" in growth_table(record)[2]

    draw_growth(record, tmp_path / "images" / "growth.png")
    assert (tmp_path / "images" / "growth.png").stat().st_size > 1000

    write_json(tmp_path / "bench-growth.json", record)
    page = tmp_path / "speed.md"
    assert write_page(tmp_path, page) == []
    page.write_text("before\n<!-- growth -->\nold\n<!-- /growth -->\nafter\n<!-- speed -->\nkept\n")
    assert write_page(tmp_path, page) == [page]
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- growth -->\nFrom `results/bench-growth.json`")
    assert text.endswith("<!-- /growth -->\nafter\n<!-- speed -->\nkept\n")
