from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_runs import BreakOff, Listener, tiny_config, weights_of
from torch import nn

from capsnet.models import CNN, CNNConfig
from capsnet.models.weights import read_tensors, write_tensors
from capsnet.progress import Reporter
from capsnet.training import load_model_and_record, train
from capsnet.training.checkpoint import (
    TrainState,
    newest_checkpoint,
    save_checkpoint,
)
from capsnet.training.optimiser import FusedAdam
from capsnet.training.records import list_checkpoints, remove_checkpoints

Damage = Callable[[Path], object]


class Permuted(CNN):
    """A network with a weight whose memory order is not that of its axes."""

    def __init__(self) -> None:
        super().__init__(CNNConfig(conv_channels=(2,), conv_kernels=(3,), hidden_sizes=(4,)))
        self.odd = nn.Parameter(torch.randn(3, 4, 5).permute(2, 0, 1))

    def loss(self) -> torch.Tensor:
        logits: torch.Tensor = self(torch.ones(2, 1, 28, 28))
        return (self.odd**3).sum() + logits.square().sum()


def make_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = Permuted()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    return TrainState(model, FusedAdam(model.parameters()), average)


def take_steps(state: TrainState, num_steps: int) -> None:
    assert isinstance(state.model, Permuted)
    state.model.eval()
    for _ in range(num_steps):
        state.optimiser.zero_grad()
        torch.autograd.backward(state.model.loss())
        state.optimiser.step()
        state.step += 1


def test_restored_state_goes_on_bit_by_bit_in_the_same_memory(tmp_path: Path) -> None:
    state, restored = make_state(1), make_state(2)
    take_steps(state, 3)
    save_checkpoint(tmp_path, state, {"note": "here"})
    found = newest_checkpoint(tmp_path, warn=pytest.fail)
    assert found is not None
    assert isinstance(restored.model, Permuted)
    parameter, stride = restored.model.odd, restored.model.odd.stride()
    restored.restore(*found)
    assert (found[1]["step"], found[1]["note"]) == (3, "here")
    assert restored.model.odd is parameter
    assert restored.optimiser.state[parameter]["exp_avg"].stride() == stride == (1, 20, 5)
    take_steps(state, 4)
    take_steps(restored, 4)
    for name, value in state.tensors().items():
        assert torch.equal(value, restored.tensors()[name]), name


def test_model_without_its_tensors_is_not_restored(tmp_path: Path) -> None:
    state = make_state(1)
    with pytest.raises(ValueError, match="stored weights do not fit"):
        state.restore({"model/other": torch.zeros(2)}, state.counts())


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_other_json(path: Path) -> None:
    path.write_text('{"epochs": 3}')


def write_nothing(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Damage] = [truncate, flip_byte, Path.unlink, write_other_json, write_nothing]


def test_every_flipped_byte_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    write_tensors(path, {"a": torch.arange(5.0), "b": torch.ones(2, 3)}, {"step": 7})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"small.safetensors (is damaged|was not written by)"):
            read_tensors(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was broken off, and with its twin that was not."""
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_config(), folder / "whole", reporter=Reporter())
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), folder / "broken", reporter=BreakOff(20))
    return folder


def copy_run(source: Path, target: Path) -> None:
    (target / "checkpoints").mkdir(parents=True, exist_ok=True)
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "newest checkpoint"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_file_of_a_broken_run_is_named_and_the_run_goes_on(
    runs: Path, tmp_path: Path, name: str, damage: Damage
) -> None:
    run, listener = tmp_path / "run", Listener()
    copy_run(runs / "broken", run)
    path = list_checkpoints(run)[0] if name == "newest checkpoint" else run / name
    damage(path)
    train(tiny_config(), run, resume=True, reporter=listener)
    if not (name == "newest checkpoint" and damage is Path.unlink):
        assert f"{path} is " in listener.said[0]
    assert weights_of(run) == weights_of(runs / "whole")


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(
    runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copy_run(runs / "broken", run)
    newest, whole = list_checkpoints(run)
    flip_byte(newest)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), run, resume=True, reporter=BreakOff(10))
    assert list_checkpoints(run) == [whole]


def test_run_that_lost_its_checkpoints_says_so_and_keeps_its_log(
    runs: Path, tmp_path: Path
) -> None:
    run, listener = tmp_path / "run", Listener()
    copy_run(runs / "broken", run)
    log = (run / "log.jsonl").read_bytes()
    for path in list_checkpoints(run):
        path.unlink()
    train(tiny_config(), run, resume=True, reporter=listener)
    assert listener.said[0].endswith("begins at step 0; its log so far is kept as log.old-1.jsonl")
    assert (run / "log.old-1.jsonl").read_bytes() == log
    assert weights_of(run) == weights_of(runs / "whole")


def test_finished_run_without_its_result_is_not_trained_again(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_run(runs / "whole", run)
    (run / "result.json").unlink()
    with pytest.raises(ValueError, match=r"result.json is missing, though the run was finished"):
        train(tiny_config(), run, resume=True, reporter=Reporter())
    assert (run / "log.jsonl").stat().st_size
    copy_run(runs / "broken", run)  # a kill between weights and result leaves checkpoints
    train(tiny_config(), run, resume=True, reporter=Reporter())
    assert weights_of(run) == weights_of(runs / "whole")


def test_resumed_finished_run_names_its_damaged_file(runs: Path, tmp_path: Path) -> None:
    run, listener = tmp_path / "run", Listener()
    copy_run(runs / "whole", run)
    flip_byte(run / "log.jsonl")
    train(tiny_config(), run, resume=True, reporter=listener)
    assert "log.jsonl is damaged" in listener.said[0]


def test_finished_run_without_its_weights_is_no_success(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_run(runs / "whole", run)
    flip_byte(run / "weights.safetensors")
    with pytest.raises(ValueError, match=r"weights.safetensors is damaged: .*; --overwrite trains"):
        train(tiny_config(), run, resume=True, reporter=Reporter())
    (run / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights.safetensors is missing; --overwrite trains"):
        train(tiny_config(), run, resume=True, reporter=Reporter())
    with pytest.raises(ValueError, match=r"weights.safetensors is missing, though the run was fin"):
        load_model_and_record(run)


def test_checkpoints_of_a_finished_run_go_only_if_its_files_are_whole(
    runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copy_run(runs / "broken" / "checkpoints", run / "checkpoints")
    kept = list_checkpoints(run)
    copy_run(runs / "whole", run)
    flip_byte(run / "weights.safetensors")
    with pytest.raises(ValueError, match=r"weights.safetensors is damaged"):
        train(tiny_config(), run, resume=True, reporter=Reporter())
    assert list_checkpoints(run) == kept != []
    copy_run(runs / "whole", run)
    train(tiny_config(), run, resume=True, reporter=Reporter())
    assert list_checkpoints(run) == []


@pytest.mark.parametrize("change", ["class", "image"])
def test_run_does_not_go_on_with_other_data(tmp_path: Path, change: str) -> None:
    for number in range(24):
        path = tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), 10 * number).save(path)
    data = {"data_dir": str(tmp_path / "pets"), "image_size": 28}
    config = tiny_config("folder", batch_size=4, checkpoint_minutes=1e-9, data=data)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", reporter=BreakOff(3))
    if change == "class":
        (tmp_path / "pets" / "dog").rename(tmp_path / "pets" / "wolf")
        message = r"has changed \(classes: cat, dog, now cat, wolf\)"
    else:
        for number in (0, 2, 4, 6, 8):
            (tmp_path / "pets" / "cat" / f"{number}.png").unlink()
        message = r"has changed \(number of training images: 20, now 16\)"
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run", resume=True, reporter=Reporter())


def test_unfinished_run_is_evaluated_by_its_newest_whole_checkpoint(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    copy_run(runs / "broken", run)
    newest, older = list_checkpoints(run)
    flip_byte(newest)
    assert load_model_and_record(run)[1]["step"] == int(older.stem.removeprefix("step-"))
    assert f"{newest} is damaged" in caplog.text


def test_run_that_is_finished_while_it_is_read_gives_its_weights(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    copy_run(runs / "broken", run)

    def list_then_finish(folder: Path) -> list[Path]:
        paths = list_checkpoints(folder)
        copy_run(runs / "whole", run)
        remove_checkpoints(run)
        return paths

    monkeypatch.setattr("capsnet.training.checkpoint.list_checkpoints", list_then_finish)
    assert load_model_and_record(run)[1]["steps"] == 32


def test_half_written_checkpoint_goes_with_the_next(tmp_path: Path) -> None:
    stale = tmp_path / "checkpoints" / ".step-000000001.safetensors.partial"
    stale.parent.mkdir()
    stale.write_bytes(b"{")
    save_checkpoint(tmp_path, make_state(1), {})
    assert not stale.exists()


def test_run_without_a_whole_checkpoint_says_so(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copy_run(runs / "broken", run)
    complaints: list[str] = []
    for path in list_checkpoints(run):
        flip_byte(path)
    with pytest.raises(ValueError, match=r"no checkpoint in .*checkpoints is whole"):
        newest_checkpoint(run, complaints.append)
    assert len(complaints) == 2
