"""The parts of one training run and where it stands: what a checkpoint holds, and what it is for.

Everything random in a step derives from (seed, epoch, step, sample or rank): the loader's order and
views from the samples' own keys, and torch's global generator (dropout, noise without a source) is
seeded anew at every stride. So there is no random state to save, and a resumed run draws what it
would have drawn.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from noiseproof import DiscriminativeLoss, draws
from noiseproof.lab.config import Config, Method
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.data.loader import (
    Loader,
    MemoryLoader,
    OrderedBatches,
    StreamLoader,
    global_batch_size,
)
from noiseproof.lab.device import environment, precision
from noiseproof.lab.models.classifier import build_classifier
from noiseproof.lab.training import choose_engine as choice
from noiseproof.lab.training.eager import TrainStep
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.optimizer import learning_rate
from noiseproof.lab.training.split_batchnorm import join_views
from noiseproof.objectives import METHODS, Discriminative, Objective, Stability
from noiseproof.perturb import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.fabric import Fabric

_STRIDE = 50  # steps between two looks at the meters and the clock
_EXPLODED = 100  # times the loss of the first step
_EARLY = 3  # the epoch after which a network that has learned nothing is spoken of
_TORCH = 3  # the stream of the seed that torch's generator follows; the loader has 1 and 2
_VALIDATION = 4  # the stream of the split's seed for validation noise, the same in every epoch


class Session:
    """Data, model, objective, engine; epoch and step; the best epoch so far.

    say: told what takes long before it begins.
    """

    def __init__(self, config: Config, fabric: Fabric, say: Callable[[str], None] = lambda _: None):
        began = time.monotonic()
        self.config, self.fabric = config, fabric
        with fabric.rank_zero_first():  # one process downloads, the others find it there
            self.data: Dataset = load_dataset(config.data)
        if config.data.val_noise and self.data.validation is None:
            raise ValueError("--val-noise needs validation images: --val-share keeps none")
        self.looks = {"val_accuracy": parse("identity")}  # at the validation images
        if config.data.val_noise:
            self.looks["val_noisy_accuracy"] = parse(config.data.val_noise)
        torch.manual_seed(config.run.seed)
        size, mean, std = self.data.size, self.data.mean, self.data.std
        classes = len(self.data.classes)
        model = build_classifier(config.model, num_classes=classes, size=size, mean=mean, std=std)
        if fabric.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.run.sync_bn and fabric.world_size > 1:
            if fabric.device.type == "cpu":
                raise ValueError("--sync-bn needs GPUs: torch has it for no other device")
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        count = self.data.train.count
        steps = count // global_batch_size(count, config.optim.batch_size, fabric.world_size)
        objective = make_objective(config, classes, steps)
        self.loader = make_loader(config, self.data, objective.needs_second, fabric)
        self.validation = self.data.validation and OrderedBatches(
            self.data.validation, size, 500, fabric.device, config.data.workers,
            fabric.global_rank, fabric.world_size,
        )  # fmt: skip
        step = TrainStep(model, objective)
        name, why = choice.choose(config, fabric, self.loader)
        if name == "eager" and fabric.device.type == "cpu" and objective.passes == 2:
            join_views(model, 2)  # one pass of twice the size costs less than two
        if name == "compile" or (
            name == "graph" and not choice.uncompiled(config, fabric, self.loader)
        ):
            say("compiling the training step, which can take a minute")
        self.engine = choice.make(name, fabric, step, self.loader, config)
        self.start_seconds = time.monotonic() - began  # until the first step can be taken
        self.why = why or self.engine.note
        self.model, self.objective = self.engine.plain.model, self.engine.plain.objective
        self.epoch = self.step = 0
        self.first_loss: float | None = None
        self.seconds = self.epoch_seconds = 0.0  # of training, over all resumed parts
        self.best: dict[str, Any] = {"epoch": 0, "accuracy": -1.0, "weights": None}
        self.sums: dict[str, float] = {}  # of the meter over this epoch and all ranks

    # training

    def advance(self) -> dict[str, float]:
        """Trains to the next stride's end; means of the epoch so far. Raises `Diverged`.

        Strides end at the same steps however often a run is resumed. The very first is one step
        long, so that the loss to compare with is that of the untouched weights.
        """
        began = time.monotonic()
        start, end = self.step, (self.step // _STRIDE + 1) * _STRIDE
        stop = 1 if self.first_loss is None else min(end, self.loader.steps)
        key = draws.keys(self.config.run.seed, _TORCH, self.epoch, start, self.fabric.global_rank)
        torch.manual_seed(int(key))
        self.engine.run(self.epoch, start, stop)
        self.step = stop
        before, bad = self.sums.get("loss", 0.0), self._look()
        passed = time.monotonic() - began
        self.seconds, self.epoch_seconds = self.seconds + passed, self.epoch_seconds + passed
        recent = (self.sums["loss"] - before) / ((stop - start) * self.fabric.world_size)
        self.first_loss = first = recent if self.first_loss is None else self.first_loss
        if bad or not math.isfinite(recent) or recent > _EXPLODED * (first + 1):
            raise Diverged(self._advice(recent, bad))
        return self._means()

    def _look(self) -> bool:
        """Reads the meter, summed over ranks; whether a weight is not finite. The one place where
        the host waits for the device."""
        meter = self.engine.meter
        ill = _not_finite([*self.engine.plain.parameters(), *self.engine.plain.buffers()])
        both = torch.cat([meter.sums, ill.to(meter.sums)[None]])  # a copy: it is reduced in place
        *sums, bad = self.fabric.all_reduce(both, reduce_op="sum").tolist()  # pyright: ignore[reportAttributeAccessIssue]
        self.sums = {name: float(v) for name, v in zip(meter.names, sums, strict=True)}
        return bad > 0

    def _means(self) -> dict[str, float]:
        ranks = self.fabric.world_size
        images = self.step * self.loader.batch_size * ranks
        means = {k: v / (self.step * ranks) for k, v in self.sums.items() if k != "hits"}
        return {**means, "train_accuracy": self.sums["hits"] / images, "images": images}

    def _advice(self, loss: float, bad: bool) -> str:
        optim = self.config.optim
        advice = [f"a lower --lr (now {optim.lr:g})", f"--clip-grad 1.0 (now {optim.clip_grad:g})"]
        advice += _ramp(self.config.method)
        return (
            f"training diverged in epoch {self.epoch + 1}, at step {self.step}: the loss is "
            f"{loss:.3g}, from {self.first_loss:.3g} at first"
            + (", and some weights are not finite" if bad else "")
            + f". Try {', '.join(advice[:-1])} or {advice[-1]}"
        )

    def end_epoch(self) -> dict[str, Any]:
        """Validates, remembers the best weights, moves to the next epoch; the row of metrics."""
        steps, means = self.loader.steps, self._means()
        images = means.pop("images")
        rate = learning_rate(self.config.optim, self.epoch * steps + steps - 1, steps)
        row = {"epoch": self.epoch + 1, "lr": rate, **means}
        if self.data.validation is not None:
            found = self.validate()
            row |= found
            accuracy = sum(found.values()) / len(found)
            if accuracy >= self.best["accuracy"]:  # of equals the last: it has trained longer
                weights = {k: v.cpu() for k, v in self.weights().items()}
                self.best = {"epoch": self.epoch + 1, "accuracy": accuracy, "weights": weights}
        seconds = self.epoch_seconds
        row |= {"seconds": seconds, "images_per_second": images / max(seconds, 1e-9)}
        self.engine.meter.reset()
        self.sums, self.epoch_seconds = {}, 0.0
        self.epoch, self.step = self.epoch + 1, 0
        return row

    def unmoved(self, row: dict[str, Any]) -> str | None:
        """At the end of an early epoch, a line where the network answers as if it saw no image:
        it guesses, and its cross-entropy is the entropy of the class frequencies."""
        if row["epoch"] != _EARLY:
            return None
        method, classes = self.config.method, len(self.data.classes)
        share = torch.bincount(self.data.train.labels, minlength=classes).double()
        share = (1 - method.smoothing) * share / share.sum() + method.smoothing / classes
        blind = float(torch.special.entr(share).sum())
        guessing = row["train_accuracy"] < float(share.max()) + 0.05
        if classes == 1 or not guessing or row["ce"] < 0.99 * blind:
            return None
        advice = [f"another --lr (now {self.config.optim.lr:g})", *_ramp(method)]
        return (
            f"after {_EARLY} epochs the network has learned nothing from the images: its "
            f"cross-entropy is {row['ce']:.3f}, and the class frequencies alone give {blind:.3f}. "
            f"Try {' or '.join(advice)}"
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Accuracy on the validation split, clean and under its noise, where it has one; every rank
        takes a part. The noise of an image is the same in every epoch and for every seed."""
        split, fabric, model = self.data.validation, self.fabric, self.model
        seed = self.config.data.split_seed
        if split is None or self.validation is None:
            raise ValueError("there is no validation split")
        if fabric.world_size > 1:  # DDP evens out running statistics only before a training step
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        hits = torch.zeros(len(self.looks), device=fabric.device, dtype=torch.int64)
        model.eval()
        with self.engine.average.applied(), fabric.autocast():
            for pixels, labels, place in self.validation:
                source = draws.PerSample(draws.keys(seed, _VALIDATION, place))
                for k, noise in enumerate(self.looks.values()):
                    hits[k] += (model(noise(pixels / 255, source)).argmax(1) == labels).sum()
        model.train()
        total: Any = fabric.all_reduce(hits, reduce_op="sum")
        return {name: n / split.count for name, n in zip(self.looks, total.tolist(), strict=True)}

    # what is kept

    def weights(self) -> dict[str, Tensor]:
        """The weights to test: averaged where an average is kept."""
        with self.engine.average.applied():
            return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

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
            "precision": precision(self.config, self.fabric.device.type),
            "engine": self.engine.name,
            "start_seconds": round(self.start_seconds, 1),
            "ranks": self.fabric.world_size,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(self.fabric.device),
        }

    def state(self) -> dict[str, Any]:
        """All that the run's future depends on. The schedule is a function of epoch and step."""
        return {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "average": self.engine.average.state(),
            "scaler": self.fabric.strategy.precision.state_dict(),  # of fp16
            "epoch": self.epoch,
            "step": self.step,
            "sums": self.sums,
            "first_loss": self.first_loss,
            "seconds": self.seconds,
            "epoch_seconds": self.epoch_seconds,
            "best": self.best,
            "threads": torch.get_num_threads(),
        }

    def restore(self, state: dict[str, Any], warn: Callable[[str], None]) -> None:
        """Goes to where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.engine.load_optimizer(state["optimizer"])
        self.engine.average.load(state["average"])
        self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self.epoch, self.step, self.best = state["epoch"], state["step"], state["best"]
        self.first_loss, self.seconds = state["first_loss"], state["seconds"]
        self.sums, self.epoch_seconds = state["sums"], state["epoch_seconds"]
        # The sums are those of all ranks together: one carries them on.
        self.engine.meter.load(
            self.sums if self.fabric.is_global_zero else dict.fromkeys(self.sums, 0.0)
        )
        threads = torch.get_num_threads()
        if state["threads"] != threads:
            warn(
                f"the run had {state['threads']} CPU threads and now has {threads}: "
                "it goes on, but its weights will differ in the last bits"
            )


def _ramp(method: Method) -> list[str]:
    """A ramp, as advice, where the method has one and it is not long already."""
    ramped = METHODS[method.method].ramped and method.ramp_epochs < 5
    return [f"--ramp-epochs 5 (now {method.ramp_epochs:g})"] if ramped else []


@torch.no_grad()
def _not_finite(tensors: list[Tensor]) -> Tensor:
    """How many of the tensors hold a number that is not finite: their largest one then is none."""
    floats = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    largest = torch._foreach_norm(floats, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    return (~torch.stack([n.float() for n in largest]).isfinite()).sum()


def make_objective(config: Config, num_classes: int, steps_per_epoch: int) -> Objective:
    """The objective of the configured method."""
    m = config.method
    objective = METHODS[m.method]
    options: dict[str, Any] = {"noise": parse(m.noise), "views": m.views, "smoothing": m.smoothing}
    if objective.ramped:
        options |= {
            "ramp_steps": round(m.ramp_epochs * steps_per_epoch),
            "batch_norm": m.batch_norm,
        }
    if objective is Stability:
        options["weight"] = m.stability_weight
    if objective is Discriminative:
        options["noisy_ce_weight"] = m.noisy_ce_weight
        options["criterion"] = DiscriminativeLoss(
            num_classes,
            config.model.feature_dim,
            radius=m.radius,
            margin=m.margin,
            compact_weight=m.compact_weight,
            margin_weight=m.margin_weight,
            norm_weight=m.norm_weight,
            noisy_weight=m.noisy_weight,
            momentum=m.centroid_momentum,
            centroids=m.centroids,
            margin_over=m.margin_over,
        )
    return objective(**options)


def make_loader(config: Config, dataset: Dataset, second: bool, fabric: Fabric) -> Loader:
    """Batches of this rank, from memory or from files."""
    options: dict[str, Any] = dict(
        batch_size=config.optim.batch_size,
        seed=config.run.seed,
        device=fabric.device,
        augment=config.data.augment,
        second=second,
        rank=fabric.global_rank,
        world=fabric.world_size,
        dtype=torch.float64 if config.run.amp == "float64" else torch.float32,
    )
    if dataset.in_memory:
        return MemoryLoader(dataset.train, **options)
    return StreamLoader(dataset, workers=config.data.workers, **options)
