"""Training, in plain sight: learning rate, loss, gradients, update, log, checkpoint."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from torch import nn

from capsnet.data import Batch, Split, iterate_batches, num_steps
from capsnet.data.order import stream_key
from capsnet.machine import file_digest
from capsnet.models import model_from_config
from capsnet.models.weights import WEIGHTS, config_to_dict, save_weights
from capsnet.progress import Reporter, choose_reporter
from capsnet.training.checkpoint import TrainState, restore_run, save_checkpoint
from capsnet.training.config import TrainConfig, decisive_fields, to_dict, total_steps
from capsnet.training.evaluation import Evaluation, evaluate
from capsnet.training.objective import compute_losses, find_not_finite, learning_rate
from capsnet.training.optimiser import FusedAdam, Muon
from capsnet.training.preparation import Prepared, prepare
from capsnet.training.processes import (
    Processes,
    StopRequest,
    TrainingStopped,
    catch_signals,
    join_processes,
    seed_dropout,
)
from capsnet.training.records import (
    CONFIG,
    LOG,
    RESULT,
    TENSORBOARD,
    RunLog,
    TensorBoard,
    check_run,
    describe_environment,
    list_checkpoints,
    open_run,
    remove_checkpoints,
    write_json,
)


def train(
    config: TrainConfig,
    run: Path | str,
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
    run = Path(run)
    with (
        join_processes(config.device) as processes,
        catch_signals() as stop,
        ExitStack() as opened,
    ):
        if config.threads is not None:
            torch.set_num_threads(max(1, config.threads // processes.local_world_size))
        speaker = (reporter or choose_reporter()) if processes.is_first else Reporter()

        def begin() -> Training:
            if processes.is_first:
                check_run(run, resume=resume, overwrite=overwrite)
            # Settings that cannot work must not cost the run that is there.
            prepared = prepare(config, processes, run=run, resume=resume)
            training = Training(prepared, run, processes=processes, reporter=speaker, stop=stop)
            if processes.is_first:
                opened.enter_context(open_run(run, resume=resume, overwrite=overwrite))
            return training

        try:
            return processes.agree(begin).run()
        except OSError as error:
            if error.filename is not None or error.strerror is None:
                raise
            raise OSError(f"{run} could not be written to ({error.strerror})") from error
        finally:
            speaker.close()


class Training:
    """A run in progress: its data, its model, and what is written about it."""

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        *,
        processes: Processes,
        reporter: Reporter,
        stop: StopRequest,
    ) -> None:
        self.folder, self.processes, self.reporter, self.stop = folder, processes, reporter, stop
        self.config, self.split, self.tests, self.device, earlier = prepared
        config = self.config
        self.steps_per_epoch = num_steps(self.split, config.batch_size)
        self.num_steps = total_steps(config, self.steps_per_epoch)
        torch.manual_seed(config.seed)
        model = model_from_config(config.model).to(self.device)
        optimiser = Muon(model) if config.optimiser == "muon" else FusedAdam(model.parameters())
        average = None
        if config.average_decay:
            average = {name: value.clone() for name, value in model.state_dict().items()}
        self.state = TrainState(model, optimiser, average)
        if earlier is not None:
            self.state.follow(earlier)
        self.forward = cast(nn.Module, torch.compile(model) if config.compile else model)
        self.log = RunLog(folder / LOG)
        # Now: something else may be checked out before the run ends.
        self.environment = describe_environment(device=self.device)
        self.board: TensorBoard | None = None

    def run(self) -> dict[str, object]:
        """Begins or goes on, trains to the end, evaluates, and writes the result."""
        finished = self.processes.agree(self.restore)
        self.processes.compare(
            (finished is None, self.state.step, decisive_fields(self.config)),
            f"the processes found {self.folder} in different states; it must be one they share",
        )
        if finished is not None:
            self.reporter.say(f"{self.folder} is finished already")
            return finished
        commit = self.environment["commit"]
        is_trained = self.state.step == self.num_steps  # and was stopped while it was evaluated
        if isinstance(commit, str) and commit not in self.state.commits and not is_trained:
            self.state.commits.append(commit)
        hardware = self.environment["hardware"]
        if hardware not in self.state.machines and not is_trained:
            self.state.machines.append(hardware)
        if self.state.step > 0:
            self.reporter.say(f"going on after step {self.state.step:,} of {self.num_steps:,}")
        if self.config.tensorboard and self.processes.is_first:
            self.board = TensorBoard(self.folder / TENSORBOARD, self.state.step)
        self.reporter.start(self.state.step, self.num_steps)
        self.forward.train()
        saved = time.monotonic()
        started = saved - self.state.seconds
        for batch in self.batches():
            if self.evaluation_is_due():  # before anything else: a resumed run makes up for it
                paused = time.monotonic()
                self.log_evaluation()
                started += time.monotonic() - paused
            step, first = self.state.step, self.state.first_step
            rate = learning_rate(self.config, step, self.num_steps, first_step=first)
            must_stop = self.update(batch, rate)
            self.state.seconds = time.monotonic() - started
            self.log_step(rate)
            minutes = (time.monotonic() - saved) / 60
            if must_stop or self.checkpoint_is_due(minutes):
                self.save()
                saved = time.monotonic()
            if must_stop:
                raise self.stopped()
        return self.finish()

    def restore(self) -> dict[str, object] | None:
        """Takes up the run where it was left; its result if it is finished already."""
        return restore_run(
            self.folder,
            self.state,
            config=self.config,
            split=self.split,
            log=self.log,
            say=self.reporter.say,
            is_writer=self.processes.is_first,
        )

    def stopped(self) -> TrainingStopped:
        """What ends a run that was asked to stop and has been saved."""
        return TrainingStopped(
            f"stopped after step {self.state.step:,} of {self.num_steps:,}, "
            f"which is saved in {self.folder}",
            self.stop.signal_number or signal.SIGTERM,  # it may have reached another
        )

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
        """One step on the mean loss of the global batch; whether to stop after it."""
        model, optimiser = self.state.model, self.state.optimiser
        batch = Batch(*(part.to(self.device) for part in batch))
        # Dropout, too, is a function of the position, so nothing else must be restored.
        key = stream_key(self.config.seed, "dropout", self.state.step, self.processes.rank)
        seed_dropout(key, self.device)
        reduced = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=reduced):
            losses = compute_losses(self.forward, batch, self.config)
        share = len(batch.images) / self.config.batch_size
        torch.autograd.backward(losses.total * share)
        stop = torch.tensor(float(self.stop.signal_number > 0), device=self.device)
        sums = torch.stack([*(loss.detach() * share for loss in losses[:3]), losses[3], stop])
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        self.processes.add_up(*gradients, sums)  # so far each process had its own
        if (wrong := find_not_finite(float(sums[0]), gradients)) is not None:
            checkpoints = list_checkpoints(self.folder)
            kept = f"{checkpoints[0]} is kept" if checkpoints else "there is no checkpoint yet"
            raise FloatingPointError(
                f"{wrong} in step {self.state.step + 1:,} at learning rate {rate:.3g}, "
                f"before which the run stopped; {kept}"
            )
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.update_average(self.config.average_decay)
        new = [1.0, *sums[:-1].tolist()]
        self.state.window = [a + b for a, b in zip(self.state.window, new, strict=True)]
        return bool(sums[-1] > 0)

    def log_step(self, rate: float) -> None:
        """Adds a line to the log where one is due."""
        config, line = self.config, None
        if self.state.step % config.log_every == 0 or self.state.step == self.num_steps:
            line = self.state.close_window(
                rate, steps_per_epoch=self.steps_per_epoch, batch_size=config.batch_size
            )
            self.write_line(line)
        self.reporter.advance(self.state.step, line)

    def write_line(self, line: dict[str, object]) -> None:
        """Adds a line to the log and to TensorBoard; only the first process writes."""
        if self.processes.is_first:
            self.log.append(line)
        if self.board is not None:
            self.board.add_scalars(line)

    def evaluation_is_due(self) -> bool:
        """Whether the curve gets a point here: what is continued may, the end gets one anyway."""
        every = self.config.evaluate_every
        if self.config.epochs is not None:
            every *= self.steps_per_epoch
        return every > 0 and self.state.step > 0 and self.state.step % every == 0

    def log_evaluation(self) -> None:
        """Evaluates for the curve; nothing is chosen by it."""
        evaluation = self.evaluate(self.tests[0])
        self.reporter.say(f"step {self.state.step:,}: {evaluation.describe()}")
        self.show_reconstructions()
        self.write_line({"step": self.state.step, "evaluation": evaluation.summary()})

    def evaluate(self, split: Split) -> Evaluation:
        """Errors of the model as it would be saved now."""
        return evaluate(
            [self.state.trained_model()],
            split,
            num_examples=self.config.num_evaluated,
            device=str(self.device),
            processes=self.processes,
            watch=self.watch_evaluation,
        )

    def watch_evaluation(self, done: int, count: int) -> None:
        """Tells how far an evaluation is, and stops in its midst if the run was asked to."""
        self.reporter.evaluated(done, count)
        stop = torch.tensor(float(self.stop.signal_number > 0))
        self.processes.add_up(stop)
        if stop > 0:
            self.save()
            raise self.stopped()

    def show_reconstructions(self) -> None:
        """Sends the first images and their reconstructions to TensorBoard."""
        if self.board is not None:
            model = self.state.trained_model()
            self.board.add_reconstructions(model, self.tests[0], self.state.step)

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
            "data": self.split.describe(),
            **({} if self.state.earlier is None else {"earlier": self.state.earlier}),
        }

    def finish(self) -> dict[str, object]:
        """Evaluates the last step's model, writes weights and result, removes checkpoints."""
        evaluations: dict[str, Evaluation] = {}
        for split in self.tests:
            evaluation = self.evaluate(split)
            self.reporter.say(evaluation.describe())
            is_second = split.name in evaluations  # --held-out 5000 --evaluate-on mnist
            evaluations[f"{split.name} {split.split}" if is_second else split.name] = evaluation
        record = {
            **self.describe(),
            "metrics": {name: each.to_dict() for name, each in evaluations.items()},
            **self.environment,
            "commits": self.state.commits,
            "machines": self.state.machines,
        }
        if not self.processes.is_first:
            return record
        brief = {**record, "metrics": {name: each.summary() for name, each in evaluations.items()}}
        save_weights(self.folder / WEIGHTS, self.state.trained_model(), brief)
        record["files"] = {name: file_digest(self.folder / name) for name in (CONFIG, LOG, WEIGHTS)}
        write_json(self.folder / RESULT, record)
        remove_checkpoints(self.folder)
        if self.board is not None:
            final = evaluations[self.tests[0].name].summary()
            self.board.add_scalars({"step": self.state.step, "evaluation": final})
            self.show_reconstructions()
            self.board.close()
        return record
