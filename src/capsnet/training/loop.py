"""Training, in plain sight: learning rate, loss, gradients, update, log, checkpoint."""

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from capsnet.data import Batch, DataConfig, Split, iterate_batches, load_split, num_steps
from capsnet.data.order import stream_key
from capsnet.models import CapsNet, Model, model_from_config
from capsnet.models.weights import (
    WEIGHTS,
    config_to_dict,
    copy_tensors,
    save_weights,
)
from capsnet.training.checkpoint import (
    TrainState,
    list_checkpoints,
    remove_checkpoints,
    restore_run,
    save_checkpoint,
)
from capsnet.training.config import (
    TrainConfig,
    to_dict,
    total_steps,
)
from capsnet.training.evaluation import Evaluation, check_fit, evaluate
from capsnet.training.objective import compute_losses, learning_rate
from capsnet.training.optimiser import FusedAdam
from capsnet.training.processes import (
    Processes,
    StopRequest,
    TrainingStopped,
    catch_signals,
    find_device,
    join_processes,
    seed_dropout,
)
from capsnet.training.progress import Reporter, TensorBoard, choose_reporter
from capsnet.training.records import (
    CONFIG,
    LOG,
    RESULT,
    RunLog,
    describe_environment,
    file_digest,
    open_run,
    write_json,
)


def train(
    config: TrainConfig,
    run: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, object]:
    """Trains a model in a directory of its own and returns the record that result.json holds.

    Args:
        config: the settings; image shape and number of classes are taken from the data.
        run: the directory; it gets config.json, log.jsonl, weights.safetensors and result.json.
        resume: go on from the newest whole checkpoint; a finished run is left as it is.
        overwrite: remove a run that is there already.
        reporter: where to tell of the progress; default: a bar on a terminal, lines elsewhere.
    """
    with join_processes(config.device) as processes, catch_signals() as stop:
        if config.threads is not None:
            torch.set_num_threads(max(1, config.threads // processes.local_world_size))
        if not processes.is_first:
            processes.wait()  # until the first has prepared the directory
            return Training(config, run, processes=processes, reporter=Reporter(), stop=stop).run()
        reporter = reporter or choose_reporter()
        if overwrite:  # settings that cannot work must not cost the run that is there
            find_device(config.device, processes.local_rank)
            prepare(config)
        with open_run(run, resume=resume, overwrite=overwrite):
            processes.wait()
            try:
                training = Training(config, run, processes=processes, reporter=reporter, stop=stop)
                return training.run()
            except OSError as error:
                if error.filename is not None or error.strerror is None:
                    raise
                raise OSError(f"{run} could not be written to ({error.strerror})") from error
            finally:
                reporter.close()


class Training:
    """A run in progress: its data, its model, and what is written about it."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        processes: Processes,
        reporter: Reporter,
        stop: StopRequest,
    ) -> None:
        self.folder, self.processes, self.reporter, self.stop = folder, processes, reporter, stop
        config, self.split, self.tests = prepare(config)
        self.config = config
        self.steps_per_epoch = num_steps(self.split, config.batch_size)
        self.num_steps = total_steps(config, self.steps_per_epoch)
        self.device = find_device(config.device, processes.local_rank)
        torch.manual_seed(config.seed)
        model = model_from_config(config.model).to(self.device)
        optimiser = FusedAdam(
            model.parameters(), lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8
        )
        average = None
        if config.average_decay:
            average = {name: value.clone() for name, value in model.state_dict().items()}
        self.state = TrainState(model, optimiser, average)
        self.forward: nn.Module = model
        if config.compile:
            self.forward = cast(nn.Module, torch.compile(model))
        self.log = RunLog(folder / LOG)
        self.board: TensorBoard | None = None

    def run(self) -> dict[str, object]:
        """Begins or goes on, trains to the end, evaluates, and writes the result."""
        finished = restore_run(
            self.folder,
            self.state,
            config=self.config,
            log=self.log,
            say=self.reporter.say,
            is_writer=self.processes.is_first,
        )
        if finished is not None:
            self.reporter.say(f"{self.folder} is finished already")
            return finished
        if self.state.step > 0:
            self.reporter.say(f"going on after step {self.state.step:,} of {self.num_steps:,}")
        if self.config.tensorboard and self.processes.is_first:
            self.board = TensorBoard(self.folder / "tensorboard")
        self.reporter.start(self.state.step, self.num_steps)
        self.forward.train()
        saved = time.monotonic()
        started = saved - self.state.seconds
        for batch in self.batches():
            rate = learning_rate(self.config, self.state.step, self.num_steps)
            must_stop = self.update(batch, rate)
            self.state.seconds = time.monotonic() - started
            self.log_step(rate)
            if self.evaluation_is_due():
                self.log_evaluation()
            minutes = (time.monotonic() - saved) / 60
            if must_stop or self.checkpoint_is_due(minutes):
                self.save()
                saved = time.monotonic()
            if must_stop:
                raise TrainingStopped(
                    f"stopped after step {self.state.step:,} of {self.num_steps:,}, "
                    f"which is saved in {self.folder}",
                    self.stop.signal_number or signal.SIGTERM,  # it may have reached another
                )
        return self.finish()

    def batches(self) -> Iterator[Batch]:
        """The batches from where the run stands to its end, of this process."""
        while self.state.step < self.num_steps:
            epoch, start = divmod(self.state.step, self.steps_per_epoch)
            batches = iterate_batches(
                self.split,
                seed=self.config.seed,
                epoch=epoch,
                batch_size=self.config.batch_size,
                start_step=start,
                rank=self.processes.rank,
                world_size=self.processes.world_size,
            )
            yield from islice(batches, self.num_steps - self.state.step)

    def update(self, batch: Batch, rate: float) -> bool:
        """One step of Adam on the mean loss of the global batch; whether to stop after it."""
        model, optimiser = self.state.model, self.state.optimiser
        batch = Batch(*(part.to(self.device) for part in batch))
        # Dropout, too, is a function of the position, so nothing else must be restored.
        key = stream_key(self.config.seed, "dropout", self.state.step, self.processes.rank)
        seed_dropout(key, self.device)
        with self.autocast():
            losses = compute_losses(self.forward, batch, self.config)
        share = len(batch.images) / self.config.batch_size
        torch.autograd.backward(losses.total * share)
        stop = torch.tensor(float(self.stop.signal_number > 0), device=self.device)
        sums = torch.stack([*(loss.detach() * share for loss in losses[:3]), losses[3], stop])
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        self.processes.add_up(*gradients, sums)  # so far each process had its own
        self.check_finite(gradients, float(sums[0]), rate)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.state.step += 1
        self.update_average()
        new = [1.0, *sums[:-1].tolist()]
        self.state.window = [a + b for a, b in zip(self.state.window, new, strict=True)]
        return bool(sums[-1] > 0)

    def check_finite(self, gradients: list[Tensor], loss: float, rate: float) -> None:
        """Stops the run before an update that would ruin the weights."""
        norm = float(torch.nn.utils.get_total_norm(gradients))
        for name, value in (("loss", loss), ("gradient", norm)):
            if not np.isfinite(value):
                checkpoints = list_checkpoints(self.folder)
                kept = f"{checkpoints[0]} is kept" if checkpoints else "there is no checkpoint yet"
                raise FloatingPointError(
                    f"the {name} became {value} in step {self.state.step + 1:,} at learning rate "
                    f"{rate:.3g}, before which the run stopped; {kept}"
                )

    @torch.no_grad()
    def update_average(self) -> None:
        """Moves the weight average, faster in the beginning, when it has seen little."""
        if self.state.average is None:
            return
        step = self.state.step
        decay = min(self.config.average_decay, (1 + step) / (10 + step))
        for name, value in self.state.model.state_dict().items():
            self.state.average[name].lerp_(value, 1 - decay)

    def autocast(self) -> AbstractContextManager[object]:
        """Reduced precision for the network, if the run asks for it."""
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def log_step(self, rate: float) -> None:
        """Adds a line to the log where one is due."""
        state = self.state
        line: dict[str, object] | None = None
        if state.step % self.config.log_every == 0 or state.step == self.num_steps:
            count, total, classification, reconstruction, num_errors = state.window
            num_images = count * self.config.batch_size
            line = {
                "step": state.step,
                "epoch": state.step / self.steps_per_epoch,
                "learning_rate": rate,
                "loss": total / count,
                "classification_loss": classification / count,
                "reconstruction_loss": reconstruction / count,
                "error_rate": num_errors / num_images,
                "seconds": round(state.seconds, 3),
                "images_per_second": round(
                    num_images / max(state.seconds - state.window_began, 1e-9), 1
                ),
            }
            state.window, state.window_began = [0.0] * 5, state.seconds
            self.write_line(line)
        self.reporter.advance(state.step, line)

    def write_line(self, line: dict[str, object]) -> None:
        """Adds a line to the log and to TensorBoard; only the first process writes."""
        if self.processes.is_first:
            self.log.append(line)
        if self.board is not None:
            self.board.add_scalars(line)

    def evaluation_is_due(self) -> bool:
        """Whether the curve gets a point after this step; the end is evaluated anyway."""
        every = self.config.evaluate_every
        if self.config.epochs is not None:
            every *= self.steps_per_epoch
        return every > 0 and self.state.step % every == 0 and self.state.step < self.num_steps

    def log_evaluation(self) -> None:
        """Evaluates for the curve; nothing is chosen by it."""
        evaluation = self.evaluate(self.tests[0])
        self.reporter.say(f"step {self.state.step:,}: {evaluation.describe()}")
        self.show_reconstructions()
        self.write_line({"step": self.state.step, "evaluation": summary(evaluation)})

    def evaluate(self, split: Split) -> Evaluation:
        """Errors of the model as it would be saved now."""
        return evaluate(
            [self.trained_model()],
            split,
            num_examples=self.config.num_evaluated,
            device=str(self.device),
            processes=self.processes,
        )

    def trained_model(self) -> Model:
        """The model, or a copy with the averaged weights."""
        model = self.state.model
        if self.state.average is not None:
            model = model_from_config(self.config.model).to(self.device)
            copy_tensors(model, self.state.average)
        return model

    @torch.no_grad()
    def show_reconstructions(self) -> None:
        """Sends the first images and their reconstructions to TensorBoard."""
        if self.board is None:
            return
        model = self.trained_model()
        if not isinstance(model, CapsNet) or not model.config.decoder:
            return
        images, labels, targets = self.tests[0].test_batch(np.arange(min(16, len(self.tests[0]))))
        decoded = model(images.to(self.device), reconstruct=labels.to(self.device)).reconstruction
        sheets = {"input": images, "target": targets[:, 0], "reconstruction": decoded[:, 0].cpu()}
        for name, sheet in sheets.items():
            self.board.add_images(name, sheet, self.state.step)

    def checkpoint_is_due(self, minutes: float) -> bool:
        """Whether to save after this step: by time, by epoch, and at the end."""
        every = self.config.checkpoint_epochs * self.steps_per_epoch
        return (
            minutes >= self.config.checkpoint_minutes
            or (every > 0 and self.state.step % every == 0)
            or self.state.step == self.num_steps
        )

    def save(self) -> None:
        """Writes a checkpoint; the one before it stays, should this fail."""
        if self.processes.is_first:
            record = {**self.describe(), "log": self.log.position()}
            save_checkpoint(self.folder, self.state, record)

    def describe(self) -> dict[str, object]:
        """What checkpoints, weights and result say about the run."""
        return {
            "preset": self.config.preset,
            "config": to_dict(self.config),
            "model": config_to_dict(self.config.model),
            "seed": self.config.seed,
            "steps": self.state.step,
            "epochs": self.state.step / self.steps_per_epoch,
            "seconds": round(self.state.seconds, 3),
            "averaged": self.state.average is not None,
            "processes": self.processes.world_size,
            "class_names": list(self.split.class_names),
            "data": {"train": self.split.origin, "num_train": len(self.split)},
        }

    def finish(self) -> dict[str, object]:
        """Evaluates the last step's model, writes weights and result, removes checkpoints."""
        evaluations = [self.evaluate(split) for split in self.tests]
        for evaluation in evaluations:
            self.reporter.say(evaluation.describe())
        record = {
            **self.describe(),
            "metrics": {each.dataset: each.to_dict() for each in evaluations},
            **describe_environment(),
        }
        if not self.processes.is_first:
            return record
        if self.board is not None:
            self.show_reconstructions()
            self.board.close()
        brief = {each.dataset: summary(each) for each in evaluations}
        save_weights(self.folder / WEIGHTS, self.trained_model(), {**record, "metrics": brief})
        record["files"] = {name: file_digest(self.folder / name) for name in (CONFIG, LOG, WEIGHTS)}
        write_json(self.folder / RESULT, record)
        remove_checkpoints(self.folder)
        return record


def prepare(config: TrainConfig) -> tuple[TrainConfig, Split, list[Split]]:
    """The settings with the model fitted to the data, the training set, and those evaluated on.

    A missing file or a set that does not fit is noticed here, not after hours of training.
    """
    split = load_split(config.data, "train")
    num_steps(split, config.batch_size)  # refuses a batch that the set cannot fill
    tests = [load_split(config.data, "validation" if config.data.held_out else "test")]
    for name in config.evaluate_on:
        tests.append(load_split(DataConfig(name, data_dir=config.data.data_dir), "test"))
    channels, height, width = split.image_shape
    model = replace(
        config.model,
        image_channels=channels,
        image_height=height,
        image_width=width,
        num_classes=split.num_classes,
    )
    for test in tests:
        check_fit(model, test)
    return replace(config, model=model), split, tests


def summary(evaluation: Evaluation) -> dict[str, object]:
    """An evaluation without its list of wrong examples."""
    return {name: value for name, value in evaluation.to_dict().items() if name != "wrong"}
