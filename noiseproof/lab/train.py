"""The one training loop. Methods differ in their objective and in nothing here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from noiseproof.lab import build, checkpoint, engine, models
from noiseproof.lab.config import Config, run_name, to_dict
from noiseproof.lab.data import Dataset, load
from noiseproof.lab.loader import ordered_batches
from noiseproof.lab.progress import Progress
from noiseproof.lab.runs import RunFolder, environment

_STRIDE = 50  # steps between two looks at the meters and the clock
_EXPLODED = 100  # times the loss of the first steps


class Diverged(RuntimeError):
    """The loss is not finite, or far above where it began."""


class Session:
    """The parts of one run, and where it stands: epoch, step, and the best epoch so far."""

    def __init__(self, config: Config):
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        self.config = config
        self.fabric = build.fabric(config)
        self.fabric.launch()
        self.data: Dataset = load(config.data)
        torch.manual_seed(config.run.seed)
        size, mean, std = self.data.size, self.data.mean, self.data.std
        classes = len(self.data.classes)
        model = models.build(config.model, num_classes=classes, size=size, mean=mean, std=std)
        if self.fabric.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.run.sync_bn and self.fabric.world_size > 1:
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        objective = build.objective(config, classes, 1)
        self.loader = build.loader(config, self.data, objective.needs_second, self.fabric)
        objective = build.objective(config, classes, self.loader.steps)
        step = engine.TrainStep(model, objective)
        name, self.why = engine.choose(config, self.fabric, self.loader)
        self.engine = engine.make(name, self.fabric, step, self.loader, config)
        self.model, self.objective = self.engine.plain.model, self.engine.plain.objective
        self.epoch = self.step = 0
        self.first_loss: float | None = None
        self.seconds = 0.0  # of training, over all resumed parts
        self.best: dict[str, Any] = {"epoch": 0, "accuracy": -1.0, "weights": None}

    def info(self) -> dict[str, Any]:
        """What a reader of the run folder needs besides the config."""
        d = self.data
        return {
            "classes": list(d.classes),
            "size": list(d.size),
            "mean": list(d.mean),
            "std": list(d.std),
            "fingerprint": d.fingerprint,
            "samples": {
                "train": d.train.count,
                "validation": d.validation.count if d.validation else 0,
                "test": d.test.count,
            },
            "precision": build.precision(self.config, self.fabric.device.type),
            "engine": self.engine.name,
            "ranks": self.fabric.world_size,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(self.fabric.device),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights to test: averaged where an average is kept."""
        with self.engine.average.applied():
            return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "average": self.engine.average.mean,
            "meter": self.engine.meter.state(),
            "epoch": self.epoch,
            "step": self.step,
            "first_loss": self.first_loss,
            "seconds": self.seconds,
            "best": self.best,
            "threads": torch.get_num_threads(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def restore(self, state: dict[str, Any], warn: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.engine.load_optimizer(state["optimizer"])
        with torch.no_grad():
            for mine, saved in zip(self.engine.average.mean, state["average"], strict=True):
                mine.copy_(saved)
        self.engine.meter.load(state["meter"])
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
        self.first_loss, self.seconds = state["first_loss"], state["seconds"]
        torch.set_rng_state(state["random"])
        if len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])
        if state["threads"] != torch.get_num_threads():
            warn(
                f"the run had {state['threads']} CPU threads and now has "
                f"{torch.get_num_threads()}: it goes on, but not bit for bit"
            )


def train(config: Config, *, progress: bool | None = None) -> RunFolder:
    """Trains, or goes on with, the run that `config` describes; returns its folder.

    Raises `Diverged` where the loss is lost; the last good checkpoint stays.
    """
    session = Session(config)
    fabric = session.fabric
    show = Progress(fabric.is_global_zero, progress, config)
    run = _open(config, session, show)
    if run.finished:
        show.note(f"{run.path} is finished: nothing to train")
        return run
    folder = run.path / "checkpoints"
    state = checkpoint.load(folder, show.warn) if config.run.resume else None
    if state:
        session.restore(state, show.warn)
        show.note(f"resumed at epoch {session.epoch}, step {session.step}")
    if fabric.is_global_zero:
        run.keep_metrics(session.epoch)
    if session.why:
        show.note(f"engine: eager, because {session.why}")

    saved = time.monotonic()
    with show:
        while session.epoch < config.optim.epochs:
            began = time.monotonic()
            while session.step < session.loader.steps:
                stop = min(session.step + _STRIDE, session.loader.steps)
                session.engine.run(session.epoch, session.step, stop)
                session.step = stop
                totals = _totals(session, config, run)
                show.step(session, totals)
                if session.step < session.loader.steps and _due(saved, config, fabric):
                    session.seconds += time.monotonic() - began
                    _save(session, folder)
                    saved = began = time.monotonic()
            session.seconds += time.monotonic() - began
            row = _end_epoch(session, totals, time.monotonic() - began)
            if fabric.is_global_zero:
                run.append_metrics(row)
            show.epoch(row)
            if config.run.checkpoint_minutes == 0 or _due(saved, config, fabric):
                _save(session, folder)
                saved = time.monotonic()
        _save(session, folder)
        if fabric.is_global_zero:
            run.save_weights("last", session.weights())
            if session.best["weights"]:
                run.save_weights("best", session.best["weights"])
            best = {k: session.best[k] for k in ("epoch", "accuracy")} if session.data.validation else None
            run.finish(seconds=session.seconds, best=best)
    fabric.barrier()
    return run


def _open(config: Config, session: Session, show: Progress) -> RunFolder:
    """The run's folder: new, or the one that --resume continues."""
    path = Path(config.run.output) / run_name(config)
    if not (path / "config.json").exists():
        if session.fabric.is_global_zero:
            RunFolder.create(config, session.info())
        session.fabric.barrier()
        return RunFolder.open(path)
    if not config.run.resume:
        raise ValueError(f"{path} is there already: add --resume to go on, or choose another --name")
    run = RunFolder.open(path)
    differences = changed(run.config, config)
    if differences:
        raise ValueError(f"{path} was made with other settings: {'; '.join(differences)}")
    if run.info["fingerprint"] != session.data.fingerprint:
        raise ValueError(f"{path} was trained on other data: the test images have changed since")
    return run


def changed(old: Config, new: Config) -> list[str]:
    """The settings that differ between two configs, apart from where and how fast they run."""
    free = {"output", "name", "resume", "threads", "checkpoint_minutes", "tensorboard", "workers",
            "device", "data_dir", "download", "engine"}  # fmt: skip
    pairs = [
        (f"{name} was {was!r}, is now {now[name]!r}")
        for group, values in to_dict(old).items()
        for now in [to_dict(new)[group]]
        for name, was in values.items()
        if name not in free and was != now[name]
    ]
    return pairs


def _totals(session: Session, config: Config, run: RunFolder) -> dict[str, float]:
    """Means of this epoch so far, over ranks; stops a run whose loss is lost."""
    meter = session.engine.meter
    sums = session.fabric.all_reduce(meter.sums, reduce_op="sum")
    values = dict(zip(meter.names, sums.tolist(), strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    images = values.pop("images")
    hits = values.pop("hits")
    steps = session.step * session.fabric.world_size
    totals = {name: value / steps for name, value in values.items()}
    if session.first_loss is None:
        session.first_loss = totals["loss"]
    lost = not torch.isfinite(torch.tensor(totals["loss"])).item()
    if lost or totals["loss"] > _EXPLODED * (session.first_loss + 1):
        raise Diverged(
            f"the loss is {totals['loss']:.3g} in epoch {session.epoch + 1}, step {session.step} "
            f"(it began at {session.first_loss:.3g}). Try a lower --lr (now {config.optim.lr}), "
            f"--clip-grad 1.0 (now {config.optim.clip_grad}), or --ramp-epochs 5 (now "
            f"{config.method.ramp_epochs}). The last good checkpoint is in {run.path}/checkpoints"
        )
    return {**totals, "train_accuracy": hits / images, "images": images}


def _end_epoch(session: Session, totals: dict[str, float], seconds: float) -> dict[str, Any]:
    """Validates, remembers the best weights, moves to the next epoch; returns the metrics' row."""
    from noiseproof.lab.schedule import learning_rate

    steps = session.loader.steps
    rate = learning_rate(session.config.optim, session.epoch * steps + steps - 1, steps)
    images = totals.pop("images")
    row = {"epoch": session.epoch + 1, "lr": rate, **totals}
    if session.data.validation is not None:
        row["val_accuracy"] = accuracy = validate(session)
        if accuracy > session.best["accuracy"]:
            weights = {k: v.cpu() for k, v in session.weights().items()}
            session.best = {"epoch": session.epoch + 1, "accuracy": accuracy, "weights": weights}
    row |= {"seconds": seconds, "images_per_second": images / seconds}
    session.engine.meter.reset()
    session.epoch, session.step = session.epoch + 1, 0
    return row


@torch.no_grad()
def validate(session: Session) -> float:
    """Accuracy on the validation split, clean; every rank takes a part."""
    split, fabric, model = session.data.validation, session.fabric, session.model
    if split is None:
        raise ValueError("there is no validation split")
    hits = torch.zeros((), device=fabric.device, dtype=torch.int64)
    model.eval()
    with session.engine.average.applied(), fabric.autocast():
        for pixels, labels, _ in ordered_batches(
            split, session.data.size, 500, fabric.device, session.config.data.workers,
            fabric.global_rank, fabric.world_size,
        ):  # fmt: skip
            hits += (model(pixels / 255).argmax(1) == labels).sum()
    model.train()
    total = fabric.all_reduce(hits, reduce_op="sum")
    return float(total) / split.count  # pyright: ignore[reportArgumentType]


def _due(saved: float, config: Config, fabric: Any) -> bool:
    """Whether the time for a checkpoint has come, as rank 0's clock says."""
    minutes = config.run.checkpoint_minutes
    due = minutes > 0 and time.monotonic() - saved >= 60 * minutes
    return bool(fabric.broadcast(due)) if fabric.world_size > 1 else due


def _save(session: Session, folder: Path) -> None:
    if session.fabric.is_global_zero:
        checkpoint.save(folder, session.state())
    session.fabric.barrier()
