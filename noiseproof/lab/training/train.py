"""The training loop. Methods differ in their objective and in nothing here."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from noiseproof.lab.config import Config, run_path
from noiseproof.lab.data.datasets import Dataset, leaks_of
from noiseproof.lab.data.duplicates import Leak, leak_hint
from noiseproof.lab.device import make_fabric, slow_precision
from noiseproof.lab.files import folder_lock, write_atomically
from noiseproof.lab.runs import RunFolder, changed_settings, with_recorded_input
from noiseproof.lab.training import checkpoint
from noiseproof.lab.training.diagnosis import chance_warning
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import StopRequest, uninterrupted
from noiseproof.lab.training.memory import memory_note
from noiseproof.lab.training.progress import Progress, dataset_summary, training_summary
from noiseproof.lab.training.session import Session

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_CHECKPOINT_SHARE = 0.02  # of the time, at most, is spent on checkpoints


def train(
    config: Config,
    *,
    progress: bool | None = None,
    each_epoch: Callable[[RunFolder, Session], None] | None = None,
    dataset: Dataset | None = None,
    leaks: Sequence[Leak] | None = None,
) -> RunFolder:
    """Trains the run that `config` describes, or resumes it; returns its folder.

    Raises `Diverged` if the loss diverges; the last good checkpoint is kept. Ctrl-C and SIGTERM
    raise KeyboardInterrupt once a checkpoint is written, a second signal immediately. ValueError
    names the process if another one is training in the folder. ConnectionError if another process
    of the same training ended.

    Args:
        config: settings of the run.
        progress: None shows a bar on terminals and lines elsewhere, True lines, False nothing.
        each_epoch: called after every epoch, on the first rank, with run folder and session.
        dataset: the run's data, if the caller has loaded it already.
        leaks: what its splits share, if the caller has looked for that and printed it.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with uninterrupted():  # Lightning imports triton
        fabric = make_fabric(config)
    fabric.launch()
    display = Progress(config, enabled=progress, first_rank=fabric.is_global_zero)
    with contextlib.ExitStack() as locks, _lost_ranks_as_connection_errors(fabric.world_size):
        # Only the first rank looks for the folder: the others might already see the new one.
        run = _on_first_rank(fabric, lambda: _open_existing(config, locks))
        if run is not None:
            config = with_recorded_input(config, run.config)
        if run is not None and run.finished:
            display.note(f"{run.path} is already trained: nothing to do")
            return run
        session = Session(config, fabric, display.note, dataset)
        device = fabric.device.type
        data = dataset_summary(session.data)
        memory = memory_note(session.memory)
        training = training_summary(config, [config.method.method])
        display.note(f"{data}; {training}, device {device}{memory}")
        for note in session.data.notes:
            display.note(note)
        if warning := slow_precision(config, device):
            display.warn(warning)
        run, state = _on_first_rank(
            fabric, lambda: _create_or_resume(run, session, display, locks, leaks)
        )
        if state is not None:
            session.restore(state, display.warn)
            display.note(f"resuming at epoch {session.epoch + 1}, step {session.step}")
        if session.engine_note:
            display.note(session.engine_note)
        try:
            _run_epochs(run, session, display, each_epoch)
        except Exception:  # not an interrupt: such a run can be resumed
            # If nothing was trained (the noise may not fit the images), free the folder.
            trained = run.metrics_text() or checkpoint.exists(run.path / "checkpoints")
            if not trained and fabric.is_global_zero:
                (run.path / "config.json").unlink(missing_ok=True)
            raise
        fabric.barrier()
        return run


def _open_existing(config: Config, locks: contextlib.ExitStack) -> RunFolder | None:
    """The run's folder if it exists, locked unless the run is finished."""
    path = run_path(config)
    if not (path / "config.json").exists():
        return None
    run = RunFolder.open(path)
    if not config.run.resume:
        raise ValueError(
            f"{path} already exists: add --resume to continue it, or choose another --name"
        )
    if differences := changed_settings(run.config, config):
        raise ValueError(
            f"{path} has different settings: {'; '.join(differences)}. Choose another --name, "
            "or continue with its own settings: noiseproof train --resume --config "
            + shlex.quote(str(path / "config.json"))
        )
    if not run.finished:
        locks.enter_context(folder_lock(path))
    return run


def _create_or_resume(
    run: RunFolder | None,
    session: Session,
    display: Progress,
    locks: contextlib.ExitStack,
    leaks: Sequence[Leak] | None,
) -> tuple[RunFolder, dict[str, Any] | None]:
    """A new folder for the session, locked, or `run` and the state to resume it from."""
    state = None
    if run is None:
        path = run_path(session.config)
        locks.enter_context(folder_lock(path))
        if (path / "config.json").exists():
            raise ValueError(f"{path} has just been created by another process")
        found = _leaks(session, display) if leaks is None else leaks
        facts = {"leaks": [leak._asdict() for leak in found]} if found else {}
        info = {**session.info(), **facts}
        run = RunFolder.create(session.config, info)
    else:
        run.dataset(session.data)  # raises if the test images differ
        run.remove_temporary_files()
        state = checkpoint.load(run.path / "checkpoints", display.warn)
        if state is None:
            minutes = run.config.run.checkpoint_minutes
            interval = f"{minutes:g} minutes" if minutes else "epoch"
            display.note(
                f"no checkpoint yet, starting from the beginning (one is written every {interval}, "
                "see --checkpoint-minutes, and on Ctrl-C)"
            )
    if state and state.get("metrics"):
        write_atomically(run.path / "metrics.csv", state["metrics"])
    else:  # also for checkpoints of older versions, which do not hold them
        run.truncate_metrics(state["epoch"] if state else 0)
    return run, state


def _leaks(session: Session, display: Progress) -> list[Leak]:
    """What the splits of a folder share, which is printed; see `data.duplicates`."""
    leaks = leaks_of(session.data, session.config.data)
    for leak in leaks:
        display.warn(str(leak))
    if leaks:
        display.note(leak_hint(session.config.data.group))
    return leaks


@contextlib.contextmanager
def _lost_ranks_as_connection_errors(ranks: int) -> Iterator[None]:
    """Inside the block, what torch raises when another rank has ended becomes a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        if ranks == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise ConnectionError(
            "the connection to another process of this training is lost: it has probably ended, "
            "see what it printed"
        ) from error


def _on_first_rank(fabric: Fabric, action: Callable[[], Any]) -> Any:
    """The result of `action` on the first rank, or its error, for all ranks."""
    result, error = None, None
    if fabric.is_global_zero:
        try:
            result = action()
        except (ValueError, OSError) as caught:
            error = caught
    result, error = fabric.broadcast((result, error))
    if error is not None:
        raise error
    return result


def _run_epochs(
    run: RunFolder,
    session: Session,
    display: Progress,
    each_epoch: Callable[[RunFolder, Session], None] | None,
) -> None:
    """Trains from the session's position to the end, and writes weights and metrics."""
    config, first = session.config, session.fabric.is_global_zero
    stop = StopRequest(display.note)
    saver = _Saver(session, run, stop)
    logged = config.run.tensorboard and first
    board = _tensorboard(run, session.epoch) if logged else contextlib.nullcontext()
    with display, board as writer, session.engine, stop:
        while session.epoch < config.optim.epochs:
            try:
                means = session.advance()
            except Diverged as error:
                saved = f"The last good checkpoint is in {saver.folder}"
                missing = "No checkpoint had been written yet"
                hint = saved if checkpoint.exists(saver.folder) else missing
                raise Diverged(f"{error}. {hint}") from None
            display.step(session, means)
            if session.step == session.loader.steps:
                metrics = session.end_epoch()
                if first:
                    run.append_metrics(metrics)
                    if each_epoch is not None:
                        each_epoch(run, session)
                if writer is not None:
                    for name, value in metrics.items():
                        if name != "epoch":
                            writer.add_scalar(name, value, metrics["epoch"])
                    writer.flush()
                display.epoch(metrics)
                if warning := chance_warning(config, session.data, metrics):
                    display.warn(warning)
            saver.save_if_due()
        saver.finish()
    if stop.received:  # too late to stop the training, but not what the caller does next
        raise KeyboardInterrupt


def _tensorboard(run: RunFolder, epochs: int) -> Any:
    """A writer of TensorBoard scalars; what a killed run wrote after `epochs` epochs is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"--tensorboard needs the package tensorboard ({error})") from None
    return SummaryWriter(str(run.path / "tensorboard"), purge_step=epochs + 1)


class _Saver:
    """Writes checkpoints when they are due, and the weights at the end."""

    def __init__(self, session: Session, run: RunFolder, stop: StopRequest):
        self.session, self.run, self.fabric, self.stop = session, run, session.fabric, stop
        self.folder = run.path / "checkpoints"
        self.saved_at, self.cost = time.monotonic(), 0.0  # of the last checkpoint, in seconds
        self.saved_position = (-1, -1)  # its epoch and step

    def save_if_due(self) -> None:
        """Saves if the interval has passed, and long enough for checkpoints to take no more than
        their share of the time; without an interval, after each epoch. Also saves, and then raises
        KeyboardInterrupt, if the training is to stop. The first rank decides."""
        minutes = self.session.config.run.checkpoint_minutes
        interval = max(60 * minutes, self.cost / _CHECKPOINT_SHARE)
        elapsed = time.monotonic() - self.saved_at
        due = elapsed >= interval if minutes else self.session.step == 0
        stopping = self.stop.received
        if self.fabric.world_size > 1:
            due, stopping = self.fabric.broadcast((due, stopping))
        if due or stopping:
            self._save()
        if stopping:
            raise KeyboardInterrupt

    def _save(self) -> None:
        began = time.monotonic()
        if self.fabric.is_global_zero:
            state = {**self.session.state(), "metrics": self.run.metrics_text()}
            checkpoint.save(self.folder, state)
        self.fabric.barrier()
        self.saved_position = (self.session.epoch, self.session.step)
        self.saved_at = time.monotonic()
        self.cost = self.saved_at - began

    def finish(self) -> None:
        """Writes the last checkpoint and the weights, and marks the run as finished."""
        session, best = self.session, self.session.best
        if self.saved_position != (session.epoch, session.step):
            self._save()
        if self.fabric.is_global_zero:
            self.run.save_weights("last", session.weights())
            if best["weights"]:
                self.run.save_weights("best", best["weights"])
            summary = {"epoch": best["epoch"], "accuracy": best["accuracy"]}
            self.run.finish(seconds=session.seconds, best=summary if best["weights"] else None)
