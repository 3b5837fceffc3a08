import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import BreakOff, Listener, RunServer, tiny_config, weights_of
from torch import nn
from torch.testing import assert_close

from capsnet.data import Batch, DataConfig, load_split
from capsnet.models.weights import read_tensors
from capsnet.progress import Reporter
from capsnet.training import (
    TrainConfig,
    TrainingStopped,
    configure,
    load,
    load_model_and_record,
    train,
)
from capsnet.training.config import override
from capsnet.training.loop import Training
from capsnet.training.objective import Losses, compute_losses
from capsnet.training.preparation import prepare
from capsnet.training.processes import Processes
from capsnet.training.records import damaged_files, read_json


def read_log(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def read_metrics(run: Path) -> dict[str, dict[str, object]]:
    metrics = read_json(run / "result.json")["metrics"]
    assert isinstance(metrics, dict)
    return metrics


def train_some_steps(config: TrainConfig, run: Path, num_steps: int) -> None:
    """Begins a run and breaks off after some steps, with a checkpoint there."""
    config = replace(config, checkpoint_minutes=1e-9)
    with pytest.raises(KeyboardInterrupt):
        train(config, run, reporter=BreakOff(num_steps))


def test_finished_run_leaves_exactly_its_four_files(tmp_path: Path) -> None:
    result = train(tiny_config(), tmp_path / "run", reporter=Reporter())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "log.jsonl", "weights.safetensors", "result.json"}
    assert read_json(tmp_path / "run" / "result.json") == result
    assert damaged_files(tmp_path / "run") == {}


def test_result_says_what_was_done_where(tmp_path: Path) -> None:
    result = train(tiny_config(seed=5), tmp_path / "run", reporter=Reporter())
    assert (result["seed"], result["steps"], result["epochs"]) == (5, 32, 4.0)
    assert {"commit", "versions", "hardware", "seconds", "data", "config"} <= set(result)
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["mnist"]["num_examples"] == 70
    assert metrics["mnist"]["split"] == "test"


def test_commit_of_a_result_is_that_of_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CheckOut(Reporter):
        def advance(self, step: int, line: Mapping[str, object] | None) -> None:
            monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "after")

    monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "before")
    assert train(tiny_config(), tmp_path / "run", reporter=CheckOut())["commit"] == "before"


def test_a_run_names_every_commit_that_it_was_trained_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit, stop in (("first", 9), ("second", 17), ("first", 25)):
        monkeypatch.setattr("capsnet.training.records.find_commit", lambda commit=commit: commit)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(), tmp_path, resume=stop > 9, reporter=BreakOff(stop))
    result = train(tiny_config(), tmp_path, resume=True, reporter=Reporter())
    assert (result["commit"], result["commits"]) == ("first", ["first", "second"])


def test_a_run_names_every_machine_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu, stop in (("Abacus", 9), ("Loom", 17), ("Abacus", 25)):
        monkeypatch.setattr("capsnet.training.records._cpu_name", lambda cpu=cpu: cpu)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(), tmp_path, resume=stop > 9, reporter=BreakOff(stop))
    result = train(tiny_config(), tmp_path, resume=True, reporter=Reporter())
    machines = result["machines"]
    assert isinstance(machines, list)
    assert [machine["cpu"] for machine in machines] == ["Abacus", "Loom"]


def test_a_commit_that_only_evaluated_a_run_did_not_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BreakEvaluation(Reporter):
        def evaluated(self, done: int, count: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "first")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), tmp_path, reporter=BreakEvaluation())
    monkeypatch.setattr("capsnet.training.records.find_commit", lambda: "second")
    result = train(tiny_config(), tmp_path, resume=True, reporter=Reporter())
    assert (result["commit"], result["commits"]) == ("second", ["first"])


def test_log_has_a_line_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    train(tiny_config(log_every=5), tmp_path / "run", reporter=Reporter())
    assert [line["step"] for line in read_log(tmp_path / "run")] == [5, 10, 15, 20, 25, 30, 32]


def test_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tiny_config(seed=seed), tmp_path / name, reporter=Reporter())
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    assert weights_of(tmp_path / "a") != weights_of(tmp_path / "c")


def test_another_seed_sees_the_digits_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def look(forward: nn.Module, batch: Batch, config: TrainConfig) -> Losses:
        seen.append(batch.labels[:, 0].tolist())
        return compute_losses(forward, batch, config)

    monkeypatch.setattr("capsnet.training.loop.compute_losses", look)
    for seed in (1, 2):
        config = tiny_config(seed=seed, epochs=None, steps=1)
        train(config, tmp_path / f"{seed}", reporter=Reporter())
    assert seen[0] != seen[1]


# Losses of the first ten steps with seed 0. On one machine they repeat bit by bit; another's
# kernels may round otherwise, hence the tolerance, but examples may not change.
GOLDEN = (
    2.7854909896850586, 2.4602766036987305, 2.1958866119384766, 1.9902548789978027,
    1.7741516828536987, 1.7045195102691650, 1.6055092811584473, 1.4941540956497192,
    1.5268743038177490, 1.4259176254272461,
)  # fmt: skip


def test_first_losses_are_the_recorded_ones_and_repeat_exactly(tmp_path: Path) -> None:
    config = tiny_config(epochs=None, steps=10, log_every=1, model={"decoder": True})
    losses = []
    for name in ("first", "second"):
        train(config, tmp_path / name, reporter=Reporter())
        losses.append([line["loss"] for line in read_log(tmp_path / name)])
    assert losses[0] == losses[1]
    assert_close(losses[0], list(GOLDEN), rtol=1e-4, atol=0.0)


def test_dropout_of_a_resumed_baseline_is_that_of_an_unbroken_one(tmp_path: Path) -> None:
    model: dict[str, object] = {
        "conv_channels": [3], "conv_kernels": [5], "hidden_sizes": [6], "pool": 2,
    }  # fmt: skip
    config = tiny_config("mnist-cnn", model=model)
    train(config, tmp_path / "whole", reporter=Reporter())
    train_some_steps(config, tmp_path / "broken", 13)
    train(config, tmp_path / "broken", resume=True, reporter=Reporter())
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "broken")


def test_muon_goes_on_with_its_momentum_and_is_another_optimiser_than_adam(tmp_path: Path) -> None:
    config = tiny_config(optimiser="muon")
    train(config, tmp_path / "whole", reporter=Reporter())
    train(tiny_config(), tmp_path / "adam", reporter=Reporter())
    train_some_steps(config, tmp_path / "broken", 13)
    train(config, tmp_path / "broken", resume=True, reporter=Reporter())
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "broken")
    assert weights_of(tmp_path / "whole") != weights_of(tmp_path / "adam")


def test_log_of_a_resumed_run_has_no_gap_and_no_repetition(tmp_path: Path) -> None:
    config = tiny_config(log_every=3)
    train(config, tmp_path / "whole", reporter=Reporter())
    train_some_steps(config, tmp_path / "broken", 13)
    train(config, tmp_path / "broken", resume=True, reporter=Reporter())
    wanted = ("step", "loss", "error_rate", "learning_rate")
    whole, broken = (
        [[line[name] for name in wanted] for line in read_log(tmp_path / name)]
        for name in ("whole", "broken")
    )
    assert whole == broken


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = train(tiny_config(), tmp_path / "run", reporter=Reporter())
    listener = Listener()
    assert train(tiny_config(), tmp_path / "run", resume=True, reporter=listener) == first
    assert "is finished already" in listener.said[0]


def test_existing_run_is_refused_resumed_or_overwritten_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"there is no run in .*run to resume"):
        train(tiny_config(), run, resume=True, reporter=Reporter())
    assert not run.exists()
    train(tiny_config(), run, reporter=Reporter())
    with pytest.raises(ValueError, match=r"exists already: --resume goes on .* --overwrite"):
        train(tiny_config(), run, reporter=Reporter())
    with pytest.raises(ValueError, match="either resumed or overwritten, not both"):
        train(tiny_config(), run, resume=True, overwrite=True, reporter=Reporter())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for bad in (
        tiny_config(device="cuda:9"),
        tiny_config(evaluate_on=("emnist",)),
        tiny_config(tensorboard=True),
    ):
        with pytest.raises(ValueError, match=r"cuda|emnist|tensorboard"):
            train(bad, run, overwrite=True, reporter=Reporter())
        assert (run / "result.json").exists()
    assert train(tiny_config(seed=3), run, overwrite=True, reporter=Reporter())["seed"] == 3


def test_half_written_file_of_a_killed_beginning_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.json", "weights.safetensors", "result.json"):
        (tmp_path / "run" / f".{name}.123-abc.partial").write_text("{")
    assert train(tiny_config(epochs=1), f"{tmp_path}/run", reporter=Reporter())["steps"] == 8
    assert not list((tmp_path / "run").glob(".*"))


def test_only_runs_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "config.json").write_text('{"kind": "thesis"}')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("weeks of work")
    for overwrite in (True, False):  # no advice that would be refused
        with pytest.raises(ValueError, match="holds something else than a run"):
            train(tiny_config(), tmp_path, overwrite=overwrite, reporter=Reporter())
    with pytest.raises(ValueError, match="is a file, but a run needs a directory"):
        train(tiny_config(), tmp_path / "thesis.tex", reporter=Reporter())
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_overwritten_run_loses_its_own_files_alone(tmp_path: Path) -> None:
    train_some_steps(tiny_config(), tmp_path, 9)
    (tmp_path / "checkpoints" / "best.pt").write_text("weeks of work")
    (tmp_path / "tensorboard").mkdir()
    for name in ("log.old-1.jsonl", "tensorboard/events.out.tfevents.1.a.2.0"):
        (tmp_path / name).write_text("old")
    train(tiny_config(seed=3), tmp_path, overwrite=True, reporter=Reporter())
    names = {"config.json", "log.jsonl", "weights.safetensors", "result.json", "checkpoints"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["best.pt"]


def test_second_process_cannot_train_in_the_same_run(tmp_path: Path) -> None:
    class Second(Reporter):
        def advance(self, step: int, line: Mapping[str, object] | None) -> None:
            train(tiny_config(), tmp_path / "run", resume=True, reporter=Reporter())

    with pytest.raises(ValueError, match="another process is training in"):
        train(tiny_config(), tmp_path / "run", reporter=Second())


def test_run_goes_on_only_with_its_own_settings(tmp_path: Path) -> None:
    train_some_steps(tiny_config(), tmp_path / "run", 9)
    changed = tiny_config(epochs=6)
    with pytest.raises(ValueError, match="began with epochs = 4, got 6; a run goes on with"):
        train(changed, tmp_path / "run", resume=True, reporter=Reporter())
    deeper = override(tiny_config(), {"model": {"num_iterations": 2}})
    with pytest.raises(ValueError, match=r"began with model.num_iterations = 3, got 2"):
        train(deeper, tmp_path / "run", resume=True, reporter=Reporter())


def test_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    train_some_steps(tiny_config(), tmp_path / "run", 9)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000000007.safetensors", "step-000000008.safetensors"]


@pytest.mark.parametrize("culprit", ["loss", "gradient"])
def test_not_a_number_stops_the_run_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    calls = 0

    def spoil(forward: torch.nn.Module, batch: Batch, config: TrainConfig) -> Losses:
        nonlocal calls
        calls += 1
        losses = compute_losses(forward, batch, config)
        if calls < 12:
            return losses
        if culprit == "loss":
            return losses._replace(total=losses.total * math.nan)
        return losses._replace(total=losses.total + (losses.total - losses.total.detach()).sqrt())

    monkeypatch.setattr("capsnet.training.loop.compute_losses", spoil)
    message = f"the {culprit} became (nan|inf) in step 12 at learning rate 0.000.*000008.* is kept"
    with pytest.raises(FloatingPointError, match=message):
        train(tiny_config(), tmp_path / "run", reporter=Reporter())
    tensors, record = read_tensors(tmp_path / "run" / "checkpoints" / "step-000000008.safetensors")
    assert record["step"] == 8
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_averaged_weights_are_what_is_saved(tmp_path: Path) -> None:
    plain, averaged = tiny_config(average_decay=0.0), tiny_config(average_decay=0.9)
    train(plain, tmp_path / "plain", reporter=Reporter())
    train(averaged, tmp_path / "averaged", reporter=Reporter())
    assert weights_of(tmp_path / "plain") != weights_of(tmp_path / "averaged")
    assert load_model_and_record(tmp_path / "averaged")[1]["averaged"] is True


@pytest.mark.parametrize(
    ("highest", "decay"),
    [(0.9, 3 / 12), (0.2, 0.2)],  # (1 + 2) / (10 + 2) is less than 0.9 so early, but not than 0.2
)
def test_weight_average_follows_its_recurrence(
    tmp_path: Path, highest: float, decay: float
) -> None:
    train_some_steps(tiny_config(average_decay=highest), tmp_path / "run", 3)
    folder = tmp_path / "run" / "checkpoints"
    before, _ = read_tensors(folder / "step-000000001.safetensors")
    after, _ = read_tensors(folder / "step-000000002.safetensors")
    for name in (name.removeprefix("model/") for name in after if name.startswith("model/")):
        expected = decay * before[f"average/{name}"] + (1 - decay) * after[f"model/{name}"]
        assert_close(after[f"average/{name}"], expected)


def test_held_out_digits_are_evaluated_in_place_of_the_test_set(tmp_path: Path) -> None:
    config = tiny_config(data={"num_train": 128, "held_out": 50}, num_evaluated=None)
    metrics = train(config, tmp_path / "run", reporter=Reporter())["metrics"]
    assert isinstance(metrics, dict)
    assert (metrics["mnist"]["split"], metrics["mnist"]["num_examples"]) == ("validation", 50)


def test_two_parts_of_a_dataset_are_evaluated_side_by_side(tmp_path: Path) -> None:
    data = {"num_train": 128, "held_out": 50}
    config = tiny_config(epochs=1, data=data, evaluate_on=("mnist",))
    result = train(config, tmp_path / "run", reporter=Reporter())
    for metrics in (result["metrics"], load_model_and_record(tmp_path / "run")[1]["metrics"]):
        assert isinstance(metrics, dict)
        splits = {name: each["split"] for name, each in metrics.items()}
        assert splits == {"mnist": "validation", "mnist test": "test"}
    with pytest.raises(ValueError, match="mnist would be evaluated twice"):
        train(tiny_config(evaluate_on=("mnist",)), tmp_path / "twice", reporter=Reporter())


@pytest.mark.parametrize(
    ("preset", "name"), [("multimnist", "multimnist"), ("affnist", "mnist-40")]
)
def test_a_further_test_set_of_the_same_task_has_the_shift_of_the_training(
    preset: str, name: str
) -> None:
    data = {"num_train": 128, "held_out": 5000, "shift": 1}
    config = tiny_config(preset, data=data, evaluate_on=(name,))
    test = prepare(config, Processes()).tests[-1]
    assert (test.name, test.split) == (name, "test")
    some = np.arange(20)
    shifted, usual = (load_split(DataConfig(name, shift=shift), "test") for shift in (1, None))
    assert torch.equal(test.test_batch(some).images, shifted.test_batch(some).images)
    assert not torch.equal(test.test_batch(some).images, usual.test_batch(some).images)


def test_further_test_sets_are_made_with_the_seed_of_the_data() -> None:
    seeded = tiny_config("affnist", data={"generation_seed": 5})
    tests = [prepare(config, Processes()).tests[1] for config in (tiny_config("affnist"), seeded)]
    first, other = (test.test_batch(np.arange(3)).images for test in tests)
    assert not torch.equal(first, other)


class StopInEvaluation(Reporter):
    """Sends this process SIGTERM when so many examples are evaluated."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def evaluated(self, done: int, count: int) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("call", "step"), [(1, 16), (3, 32)], ids=["curve", "end"])
def test_run_that_is_stopped_in_an_evaluation_makes_up_for_it(
    tmp_path: Path, call: int, step: int
) -> None:
    config = tiny_config(evaluate_every=2, checkpoint_epochs=0)
    train(config, tmp_path / "whole", reporter=Reporter())
    with pytest.raises(TrainingStopped, match=f"stopped after step {step} of 32, which is saved"):
        train(config, tmp_path / "broken", reporter=StopInEvaluation(call))
    train(config, tmp_path / "broken", resume=True, reporter=Reporter())
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "broken")
    steps = [[line["step"] for line in read_log(tmp_path / name)] for name in ("whole", "broken")]
    assert steps[0] == steps[1]


def test_curve_is_logged_and_does_not_change_the_result(tmp_path: Path) -> None:
    train(tiny_config(), tmp_path / "without", reporter=Reporter())
    listener = Listener()
    train(tiny_config(evaluate_every=2), tmp_path / "with", reporter=listener)
    assert weights_of(tmp_path / "with") == weights_of(tmp_path / "without")
    points = [line for line in read_log(tmp_path / "with") if "evaluation" in line]
    assert [point["step"] for point in points] == [16]
    assert listener.said[0].startswith("step 16: mnist test:")


def test_time_of_training_is_without_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def evaluate_long(self: Training) -> None:
        clock[0] += 1000

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr(Training, "log_evaluation", evaluate_long)
    monkeypatch.setattr("capsnet.training.loop.time", SimpleNamespace(monotonic=tick))
    result = train(tiny_config(evaluate_every=1), tmp_path / "run", reporter=Reporter())
    assert 0 < float(str(result["seconds"])) < 1000 < clock[0]


def test_a_line_of_the_log_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    for name, every in (("each", 1), ("whole", 8)):
        config = tiny_config(epochs=1, log_every=every, model={"decoder": True})
        train(config, tmp_path / name, reporter=Reporter())
    each, [whole] = read_log(tmp_path / "each"), read_log(tmp_path / "whole")
    for key in ("loss", "classification_loss", "reconstruction_loss", "error_rate"):
        assert whole[key] == pytest.approx(sum(line[key] for line in each) / 8)
    assert whole["loss"] == pytest.approx(
        whole["classification_loss"] + 0.01 * whole["reconstruction_loss"]
    )


def test_threads_and_compilation_are_those_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.nn.Module] = []
    counts: list[int] = []

    def compile(model: torch.nn.Module) -> torch.nn.Module:
        compiled.append(model)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    config = tiny_config(epochs=1, compile=True, threads=3)
    train(config, tmp_path / "run", reporter=Reporter())
    assert (len(compiled), counts) == (1, [3])


def test_model_takes_image_shape_and_classes_from_the_data(tmp_path: Path) -> None:
    config = tiny_config(epochs=1, data={"name": "mnist-40", "num_train": 32})
    train(config, tmp_path / "run", reporter=Reporter())
    assert load(tmp_path / "run").config.image_shape == (1, 40, 40)


def test_two_digits_train_by_steps(tmp_path: Path) -> None:
    config = tiny_config(
        "multimnist", epochs=None, steps=3, data={}, model={"decoder": True}, evaluate_every=2
    )
    result = train(config, tmp_path / "run", reporter=Reporter())
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    assert result["steps"] == 3
    assert metrics["multimnist"]["num_available"] == 10_000_000
    assert metrics["multimnist"]["label_error_rate"] <= metrics["multimnist"]["error_rate"]


@pytest.mark.parametrize(("average_decay", "group"), [(0.0, "model"), (0.9, "average")])
def test_unfinished_run_gives_the_model_of_its_newest_checkpoint(
    tmp_path: Path, average_decay: float, group: str
) -> None:
    train_some_steps(tiny_config(average_decay=average_decay), tmp_path / "run", 9)
    model, record = load_model_and_record(tmp_path / "run")
    tensors, _ = read_tensors(tmp_path / "run" / "checkpoints" / "step-000000008.safetensors")
    assert record["step"] == 8
    for name, value in model.state_dict().items():
        assert_close(value, tensors[f"{group}/{name}"])


@pytest.mark.parametrize(("device", "message"), [("cuda", "not available"), ("tpux", "must be")])
def test_missing_device_is_one_sentence(tmp_path: Path, device: str, message: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=f"device .*{message}"):
        train(tiny_config(device=device), tmp_path / "run", reporter=Reporter())


def test_reduced_precision_trains_nearly_alike(tmp_path: Path) -> None:
    losses = []
    for precision in ("float32", "bfloat16"):
        config = tiny_config(epochs=1, precision=precision, model={"decoder": True})
        train(config, tmp_path / precision, reporter=Reporter())
        losses.append(read_log(tmp_path / precision)[-1]["loss"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


def test_two_processes_train_the_model_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RunServer()
    config = tiny_config(epochs=2, model={"decoder": True})
    assert server.run(config, tmp_path / "two", num_processes=2) == [0, 0]
    assert server.run(config, tmp_path / "one") == [0]
    longer = tiny_config(epochs=500, model={"decoder": True}, checkpoint_epochs=0)

    def has_begun() -> bool:
        output = Path(f"{tmp_path / 'handover'}.output-0")
        return output.exists() and "step 3/" in output.read_text()

    ends = server.run(
        longer,
        tmp_path / "handover",
        num_processes=2,
        signal_number=signal.SIGTERM,
        after=0.2,
        once=has_begun,
    )
    odd = tiny_config(batch_size=15)
    assert server.run(odd, tmp_path / "odd", num_processes=2) == [1, 1]
    assert "batch_size must be a multiple of the 2 processes, got 15" in server.output(
        tmp_path / "odd"
    )
    assert "SystemExit: 2" in Path(f"{tmp_path / 'odd'}.output-1").read_text()
    assert not (tmp_path / "odd").exists()
    server.close()
    one, _ = read_tensors(tmp_path / "one" / "weights.safetensors")
    two, _ = read_tensors(tmp_path / "two" / "weights.safetensors")
    for name, value in one.items():
        assert_close(two[name], value, rtol=1e-5, atol=1e-5)
    logs = [read_log(tmp_path / name) for name in ("one", "two")]
    for line_of_one, line_of_two in zip(*logs, strict=True):
        assert_close(line_of_two["loss"], line_of_one["loss"], rtol=1e-5, atol=1e-5)
        assert line_of_two["error_rate"] == line_of_one["error_rate"]
    first, second = (read_metrics(tmp_path / name)["mnist"] for name in ("one", "two"))
    changes = [metric["routing_changes"] for metric in (first, second)]
    assert_close(*changes, rtol=1e-4, atol=1e-7)
    for name in ("num_examples", "num_errors", "error_rate", "wrong"):
        assert first[name] == second[name]
    assert second["reconstruction_error"] == pytest.approx(first["reconstruction_error"])
    assert ends == [143, 143]
    (checkpoint,) = (tmp_path / "handover" / "checkpoints").iterdir()
    step = int(checkpoint.stem.removeprefix("step-"))

    listener = Listener()
    monkeypatch.setattr(listener, "advance", BreakOff(step + 3).advance)
    with pytest.raises(KeyboardInterrupt):
        train(longer, tmp_path / "handover", resume=True, reporter=listener)
    assert listener.said == [f"going on after step {step:,} of 4,000"]


def test_capsnet_learns_two_thousand_digits(tmp_path: Path) -> None:
    config = configure(
        "mnist",
        {
            "epochs": 3,
            "batch_size": 20,
            "learning_rate": 4e-3,
            "num_evaluated": 2000,
            "data": {"num_train": 2000},
            "model": {"conv_channels": 16, "primary_types": 8},
        },
    )
    metrics = train(config, tmp_path / "run", reporter=Reporter())["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["mnist"]["error_rate"] < 0.10
