"""The one training loop. Methods differ in their objective and in nothing here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from noiseproof.lab.config import Config, run_name
from noiseproof.lab.device import make_fabric, slow
from noiseproof.lab.files import Lock
from noiseproof.lab.runs import RunFolder, changed
from noiseproof.lab.training import checkpoint
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.interrupt import Stop
from noiseproof.lab.training.progress import Progress, counted
from noiseproof.lab.training.session import Session
from noiseproof.lab.training.tensorboard import Board

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.fabric import Fabric

__all__ = ["Diverged", "changed", "train"]

_SHARE = 0.02  # of the time, at most, for checkpoints


def train(
    config: Config,
    *,
    progress: bool | None = None,
    each_epoch: Callable[[RunFolder, Session], None] | None = None,
) -> RunFolder:
    """Trains, or goes on with, the run that `config` describes; returns its folder.

    progress: None shows a bar on terminals and lines elsewhere, True lines, False nothing.
    each_epoch: called after every epoch, on the first rank, with the network as it is then.
    Raises `Diverged` where the loss is lost; the last good checkpoint stays. Ctrl-C and SIGTERM
    raise KeyboardInterrupt once a checkpoint is written, a second one at once. While another
    process trains in the folder, ValueError names it.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    fabric = make_fabric(config)
    fabric.launch()
    show = Progress(fabric.is_global_zero, progress, config)
    with Lock() as lock:
        return _trained(config, fabric, show, lock, each_epoch)


def _trained(
    config: Config,
    fabric: Fabric,
    show: Progress,
    lock: Lock,
    each_epoch: Callable[[RunFolder, Session], None] | None,
) -> RunFolder:
    first = fabric.is_global_zero
    run = _existing(config, fabric, lock)
    if run is not None and run.finished:
        show.note(f"{run.path} is finished: nothing to train")
        return run
    session = Session(config, fabric, show.note)
    device = fabric.device.type
    show.note(f"{counted(session.data)}; model {config.model.model}, device {device}")
    if advice := slow(config, device):
        show.warn(advice)
    run = _begun(run, session, show, lock)
    stop = Stop(show.note)
    saver = _Saver(session, run, stop)
    if session.why:
        show.note(session.why)

    board = Board(run.path / "tensorboard", config.run.tensorboard and first, session.epoch)
    with show, board, session.engine, stop, saver:
        while session.epoch < config.optim.epochs:
            while session.step < session.loader.steps:
                try:
                    means = session.advance()
                except Diverged as error:
                    raise Diverged(f"{error}. {saver.what_is_left()}") from None
                show.step(session, means)
                saver.look()
            row = session.end_epoch()
            if first:
                run.append_metrics(row)
                if each_epoch is not None:
                    each_epoch(run, session)
            board.write(row)
            show.epoch(row)
            if lost := session.unmoved(row):
                show.warn(lost)
            saver.end_epoch()
        saver.finish()
    fabric.barrier()
    return run


def _existing(config: Config, fabric: Fabric, lock: Lock) -> RunFolder | None:
    """The run's folder where there is one to go on with, locked. The first rank looks, and what it
    finds holds for all: another might look when it has already been made."""
    path = Path(config.run.output) / run_name(config)
    run, refusal = None, None
    if fabric.is_global_zero and (path / "config.json").exists():
        try:
            run = RunFolder.open(path)
            found = changed(run.config, config)
            if not config.run.resume:
                raise ValueError(
                    f"{path} is there already: add --resume to go on, or give another --name"
                )
            if found:
                raise ValueError(
                    f"{path} was made with other settings: {'; '.join(found)}. Give another --name"
                )
            if not run.finished:
                lock.take(path)
        except (ValueError, OSError) as error:
            refusal = error
    run, refusal = fabric.broadcast((run, refusal))
    if refusal is not None:
        raise refusal
    return run


def _begun(run: RunFolder | None, session: Session, show: Progress, lock: Lock) -> RunFolder:
    """The folder and the session, where the run stopped or at its beginning."""
    fabric, state, refusal = session.fabric, None, None
    if fabric.is_global_zero:
        try:
            if run is None:
                path = Path(session.config.run.output) / run_name(session.config)
                lock.take(path)
                if (path / "config.json").exists():
                    raise ValueError(f"{path} has just been made by another process")
                run = RunFolder.create(session.config, session.info())
            else:
                run.dataset(session.data)  # refuses other test images
                run.sweep()
                state = checkpoint.load(run.path / "checkpoints", show.warn)
                if state is None:
                    show.note(f"starting over: there is no checkpoint yet ({_often(run)})")
            run.keep_metrics(state["epoch"] if state else 0)
        except (ValueError, OSError) as error:
            refusal = error
    run, state, refusal = fabric.broadcast((run, state, refusal))
    if refusal is not None:
        raise refusal
    if state is not None:
        session.restore(state, show.warn)
        show.note(f"resumed at epoch {session.epoch + 1}, step {session.step}")
    if run is None:
        raise RuntimeError("the first process has made no run folder")
    return run


def _often(run: RunFolder) -> str:
    minutes = run.config.run.checkpoint_minutes
    when = f"{minutes:g} minutes" if minutes else "epoch"
    return f"one is written every {when}, see --checkpoint-minutes, and one on Ctrl-C"


class _Saver:
    """When a checkpoint is due, and what is written at the end.

    A training that fails inside the block before it has made anything (its noise may not fit the
    images) takes its settings with it, so that they do not stand in the way of better ones.
    """

    def __init__(self, session: Session, run: RunFolder, stop: Stop):
        self.session, self.run, self.fabric, self.stop = session, run, session.fabric, stop
        self.minutes = session.config.run.checkpoint_minutes
        self.last, self.cost = time.monotonic(), 0.0
        self.saved = (-1, -1)  # epoch and step of the newest checkpoint

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)  # a stopped run goes on
        made = self.run.metrics() or checkpoint.exists(self.run.path / "checkpoints")
        if failed and not made and self.fabric.is_global_zero:
            (self.run.path / "config.json").unlink(missing_ok=True)

    def look(self) -> None:
        """Writes one inside an epoch, if it is time; an epoch's end has its own call."""
        if self.session.step < self.session.loader.steps:
            self._perhaps(False)

    def end_epoch(self) -> None:
        self._perhaps(self.minutes == 0)

    def _perhaps(self, always: bool) -> None:
        due, asked = self._wanted()
        if always or due or asked:
            self.save()
        if asked:
            raise KeyboardInterrupt

    def finish(self) -> None:
        session, best = self.session, self.session.best
        if self.saved != (session.epoch, session.step):
            self.save()
        if self.fabric.is_global_zero:
            self.run.save_weights("last", session.weights())
            if best["weights"]:
                self.run.save_weights("best", best["weights"])
            kept: Any = {"epoch": best["epoch"], "accuracy": best["accuracy"]}
            self.run.finish(seconds=session.seconds, best=kept if best["weights"] else None)

    def save(self) -> None:
        began = time.monotonic()
        if self.fabric.is_global_zero:
            checkpoint.save(self.run.path / "checkpoints", self.session.state())
        self.fabric.barrier()
        self.saved = (self.session.epoch, self.session.step)
        self.last = time.monotonic()
        self.cost = self.last - began

    def _wanted(self) -> tuple[bool, bool]:
        """Whether the interval has passed, and so long that checkpoints take no more than their
        share of the time; and whether the training is to stop. The first rank decides."""
        passed = time.monotonic() - self.last
        due = self.minutes > 0 and passed >= max(60 * self.minutes, self.cost / _SHARE)
        found = due, self.stop.asked
        return self.fabric.broadcast(found) if self.fabric.world_size > 1 else found

    def what_is_left(self) -> str:
        folder = self.run.path / "checkpoints"
        if checkpoint.exists(folder):
            return f"The last good checkpoint is in {folder}"
        return "It was too early for a checkpoint"
