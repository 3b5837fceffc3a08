"""Runs that continue others: what counts on, what begins anew, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_runs import BreakOff, tiny_config, weights_of
from torch import nn
from torch.testing import assert_close

from capsnet.data import Batch
from capsnet.machine import file_digest
from capsnet.models.weights import load_weights, save_weights
from capsnet.progress import Reporter
from capsnet.training import TrainConfig, train
from capsnet.training.checkpoint import TrainState
from capsnet.training.objective import Losses, compute_losses
from capsnet.training.optimiser import FusedAdam

Labels = list[list[int]]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A finished run of 4 epochs of 8 steps."""
    train(tiny_config(average_decay=0.0), tmp_path / "first", reporter=Reporter())
    return tmp_path / "first"


def longer(run: Path, **changes: object) -> TrainConfig:
    """Settings of a run that continues another for 2 epochs more."""
    settings: dict[str, object] = {"epochs": 6, "log_every": 1, "average_decay": 0.0}
    return tiny_config(**(settings | {"continue_from": str(run)} | changes))  # type: ignore[arg-type]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Labels]:
    """Gives the labels of all batches since the last call."""
    seen: Labels = []

    def look(forward: nn.Module, batch: Batch, config: TrainConfig) -> Losses:
        seen.append(batch.labels[:, 0].tolist())
        return compute_losses(forward, batch, config)

    def take() -> Labels:
        taken = seen.copy()
        seen.clear()
        return taken

    monkeypatch.setattr("capsnet.training.loop.compute_losses", look)
    return take


def read_log(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_steps_and_time_count_on_and_the_record_tells_of_the_first_part(first: Path) -> None:
    before = load_weights(first / "weights.safetensors")[1]
    result = train(longer(first, optimiser="muon"), first.parent / "on", reporter=Reporter())
    assert (result["steps"], result["epochs"]) == (48, 6.0)
    assert float(str(result["seconds"])) > float(str(before["seconds"]))
    earlier = result["earlier"]
    assert isinstance(earlier, dict)
    assert earlier["sha256"] == file_digest(first / "weights.safetensors")
    assert (earlier["source"], earlier["steps"]) == (str(first), 32)
    assert earlier["config"]["optimiser"] == "adam"
    assert load_weights(first.parent / "on" / "weights.safetensors")[1]["earlier"] == earlier


def test_first_update_is_made_on_the_weights_that_are_continued(first: Path) -> None:
    config = longer(first, epochs=None, steps=33, learning_rate=1e-30)
    train(config, first.parent / "on", reporter=Reporter())
    assert weights_of(first.parent / "on") == weights_of(first)


def test_examples_are_those_that_an_unbroken_run_would_see(
    first: Path, watch: Callable[[], Labels]
) -> None:
    train(longer(first), first.parent / "on", reporter=Reporter())
    continued = watch()
    train(replace(longer(first), continue_from=None), first.parent / "whole", reporter=Reporter())
    assert continued == watch()[32:]


@pytest.mark.parametrize(("batch_size", "first_step"), [(8, 64), (48, 8), (100, 4)])
def test_another_batch_size_goes_on_with_the_next_epoch_and_counts_steps_of_its_own(
    first: Path, watch: Callable[[], Labels], batch_size: int, first_step: int
) -> None:
    config = longer(first, batch_size=batch_size)
    result = train(config, first.parent / "on", reporter=Reporter())
    continued = watch()
    train(replace(config, continue_from=None), first.parent / "whole", reporter=Reporter())
    assert continued == watch()[first_step:]
    assert (result["steps"], result["epochs"]) == (first_step * 6 // 4, 6.0)
    assert read_log(first.parent / "on")[0]["step"] == first_step + 1


@pytest.mark.parametrize(
    ("steps", "batch_size", "first_image"),
    [(35, 32, 64), (36, 48, 96), (39, 48, 128)],  # 48, 64 and 112 of 128 images were seen
)
def test_another_batch_size_within_an_epoch_sees_no_example_twice(
    first: Path, watch: Callable[[], Labels], steps: int, batch_size: int, first_image: int
) -> None:
    train(longer(first, epochs=None, steps=steps), first.parent / "on", reporter=Reporter())
    watch()
    further = longer(first.parent / "on", batch_size=batch_size)
    train(further, first.parent / "further", reporter=Reporter())
    seen = list(chain(*watch()))
    train(longer(first), first.parent / "whole", reporter=Reporter())
    order = list(chain(*watch()))  # of two epochs
    usable = 128 // batch_size * batch_size
    assert seen == order[first_image:usable] + order[128 : 128 + usable]


def test_a_run_resumed_after_another_batch_size_ends_bit_identically(first: Path) -> None:
    config = longer(first, batch_size=8, average_decay=0.9, checkpoint_minutes=1e-9)
    train(config, first.parent / "whole", reporter=Reporter())
    with pytest.raises(KeyboardInterrupt):
        train(config, first.parent / "broken", reporter=BreakOff(70))
    train(config, first.parent / "broken", resume=True, reporter=Reporter())
    assert weights_of(first.parent / "broken") == weights_of(first.parent / "whole")


def test_an_export_of_an_unfinished_run_can_be_continued_and_has_no_parts(first: Path) -> None:
    model, record = load_weights(first / "weights.safetensors")
    exported = first.parent / "exported.safetensors"
    save_weights(exported, model, {**record, "earlier": None})  # as its checkpoint says
    result = train(longer(exported), first.parent / "on", reporter=Reporter())
    earlier = result["earlier"]
    assert isinstance(earlier, dict)
    assert "earlier" not in earlier


def test_cosine_schedule_begins_anew_and_the_papers_goes_on(first: Path) -> None:
    train(longer(first, warmup_steps=0), first.parent / "on", reporter=Reporter())
    rates = {line["step"]: line["learning_rate"] for line in read_log(first.parent / "on")}
    assert min(rates) == 33
    assert rates[33] == 1e-3
    assert rates[41] == pytest.approx(0.5e-3)  # after half of 16 steps
    paper = longer(first, schedule="paper", decay_steps=32)
    train(paper, first.parent / "paper", reporter=Reporter())
    assert read_log(first.parent / "paper")[0]["learning_rate"] == pytest.approx(0.96e-3)


def test_resumed_run_no_longer_needs_the_one_it_continues(first: Path) -> None:
    config = longer(first, average_decay=0.9, checkpoint_minutes=1e-9)
    train(config, first.parent / "whole", reporter=Reporter())
    with pytest.raises(KeyboardInterrupt):
        train(config, first.parent / "broken", reporter=BreakOff(37))
    shutil.rmtree(first)
    result = train(config, first.parent / "broken", resume=True, reporter=Reporter())
    assert weights_of(first.parent / "broken") == weights_of(first.parent / "whole")
    earlier = result["earlier"]
    assert isinstance(earlier, dict)
    assert earlier["steps"] == 32
    assert train(config, first.parent / "broken", resume=True, reporter=Reporter()) == result


def test_run_killed_before_its_first_checkpoint_begins_again_from_what_it_continues(
    first: Path,
) -> None:
    config = longer(first, checkpoint_epochs=0)
    train(config, first.parent / "whole", reporter=Reporter())
    with pytest.raises(KeyboardInterrupt):
        train(config, first.parent / "broken", reporter=BreakOff(34))
    assert not (first.parent / "broken" / "checkpoints").exists()
    train(config, first.parent / "broken", resume=True, reporter=Reporter())
    assert weights_of(first.parent / "broken") == weights_of(first.parent / "whole")


@pytest.mark.parametrize("source", ["first", "first/weights.safetensors", "link"])
def test_run_never_takes_the_place_of_the_one_it_continues(first: Path, source: str) -> None:
    (first.parent / "link").symlink_to(first)
    before = weights_of(first)
    with pytest.raises(ValueError, match="first holds what the run continues; --out"):
        train(longer(first.parent / source), first, overwrite=True, reporter=Reporter())
    assert weights_of(first) == before


def test_weight_average_forgets_fast_where_a_run_begins(first: Path) -> None:
    model, _ = load_weights(first / "weights.safetensors")
    weights = model.state_dict()
    average = {name: torch.zeros_like(value) for name, value in weights.items()}
    state = TrainState(model, FusedAdam(model.parameters()), average, step=1001)
    state.earlier = {"steps": 1000}
    state.update_average(0.999)
    for name, value in average.items():
        assert_close(value, weights[name] * 9 / 11)  # 1 - (1 + 1) / (10 + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed = 0, got 1; a run continues another with its seed, data"),
        ({"data": {"num_train": 64}}, "data.num_train = 128, got 64"),
        ({"model": {"num_iterations": 1}}, "model.num_iterations = 3, got 1"),
        ({"upper": 0.8}, "upper = 0.9, got 0.8"),
        ({"epochs": 4}, "32 steps of 16 behind it, which count; .* needs more in all, got 32"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    first: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(longer(first, **changes), first.parent / "on", reporter=Reporter())
    assert not (first.parent / "on").exists()


def test_own_images_of_other_classes_are_refused(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (28, 28), 5 * number).save(tmp_path / "pets" / name / f"{number}.png")
    data = {"name": "folder", "data_dir": tmp_path / "pets", "num_train": None}
    train(tiny_config("folder", data=data), tmp_path / "first", reporter=Reporter())
    (tmp_path / "pets" / "dog").rename(tmp_path / "pets" / "wolf")
    config = tiny_config("folder", data=data, epochs=6, continue_from=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"has changed \(classes: cat, dog, now cat, wolf\)"):
        train(config, tmp_path / "on", reporter=Reporter())


@pytest.mark.parametrize("name", ["config", "steps", "seconds", "class_names", "data"])
def test_weights_that_do_not_say_how_they_were_trained_are_refused(first: Path, name: str) -> None:
    model, record = load_weights(first / "weights.safetensors")
    bare = first.parent / "bare.safetensors"
    save_weights(bare, model, {each: record[each] for each in record if each != name})
    with pytest.raises(ValueError, match=f"does not say its {name}, so no run can continue it"):
        train(longer(bare), first.parent / "on", reporter=Reporter())


def test_weights_of_another_version_are_refused_by_name(first: Path) -> None:
    model, record = load_weights(first / "weights.safetensors")
    settings = record["config"]
    assert isinstance(settings, dict)
    old = first.parent / "old.safetensors"
    save_weights(old, model, {**record, "config": {**settings, "colour": "red"}})
    with pytest.raises(ValueError, match=r"old\.safetensors has settings of another version: "):
        train(longer(old), first.parent / "on", reporter=Reporter())


def test_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), tmp_path / "broken", reporter=BreakOff(9))
    with pytest.raises(ValueError, match="is no finished run"):
        train(longer(tmp_path / "broken"), tmp_path / "on", reporter=Reporter())
