"""The components of one training run and its position: what a checkpoint saves and restores.

Everything random in a step derives from (seed, epoch, step, sample or rank): the loader's order and
views come from the samples' own keys, and torch's global generator (dropout, noise without a
source) is reseeded at every stride. So there is no random state to save, and a resumed run draws
what it would have drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from noiseproof import DiscriminativeLoss, draws
from noiseproof.lab.config import Config
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import Dataset, load_dataset, with_read_size
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.device import environment, precision
from noiseproof.lab.models.classifier import classifier_for, with_input_size
from noiseproof.lab.training.choose_engine import choose_engine, compile_obstacle, make_engine
from noiseproof.lab.training.diagnosis import divergence_message
from noiseproof.lab.training.eager import Engine
from noiseproof.lab.training.errors import Diverged
from noiseproof.lab.training.memory import require_memory
from noiseproof.lab.training.optimizer import learning_rate
from noiseproof.lab.training.split_batchnorm import join_passes
from noiseproof.lab.training.step import TrainStep, count_nonfinite
from noiseproof.objectives import METHODS, Discriminative, Objective, Spheres, Stability
from noiseproof.perturb import parse
from noiseproof.robustness import check_applicable

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_STRIDE = 50  # steps between two reads of the meter and the clock
_DIVERGED = 100  # times the first loss
_TORCH_STREAM = 3  # the seed's stream for torch's generator; the loader uses 1 and 2
_VALIDATION_STREAM = 4  # the split seed's stream for validation noise, the same in every epoch
_VALIDATION_BATCH = 500
_VALIDATION_PIXELS = 500 * 3 * 256 * 256  # in a batch; larger images have smaller batches
# Attributes of a session that a checkpoint holds under their own names
_POSITION = ("epoch", "step", "sums", "first_loss", "seconds", "epoch_seconds", "best")


class Session:
    """Data, model, objective and engine of a run; its epoch and step; its best epoch so far."""

    def __init__(
        self,
        config: Config,
        fabric: Fabric,
        notify: Callable[[str], None] = lambda _: None,
        dataset: Dataset | None = None,
    ):
        """`fabric` must be launched; `notify` is called with a message before a long operation;
        `dataset` is the data, if the caller has loaded it already."""
        began = time.monotonic()
        self.fabric = fabric
        config = config if dataset else with_input_size(config)
        with fabric.rank_zero_first():  # one process downloads, the others find the files
            self.data: Dataset = dataset or load_dataset(config.data)
        self.config = config = replace(config, data=with_read_size(config.data, self.data))
        self.validation_noise = {"val_accuracy": parse("identity")}  # by the name of its metric
        if config.data.val_noise:
            if self.data.validation is None:
                raise ValueError(
                    "--val-noise needs validation images; expected a --val-share above 0"
                )
            self.validation_noise["val_noisy_accuracy"] = parse(config.data.val_noise)
        check_applicable(self.validation_noise.values(), self.data.size)
        torch.manual_seed(config.run.seed)
        model = _make_model(config, self.data, fabric)
        self.memory = require_memory(
            config, self.data, model, device=fabric.device.type, ranks=fabric.world_size
        )
        ranks: Any = {"rank": fabric.global_rank, "world": fabric.world_size}
        self.loader = Loader(
            self.data.train,
            self.data.size,
            batch_size=config.optim.batch_size,
            balance=config.data.balance,
            seed=config.run.seed,
            device=fabric.device,
            augment=config.data.augment,
            augment_second=config.data.noisy_augment,
            workers=config.data.workers,
            dtype=torch.float64 if config.run.amp == "float64" else torch.float32,
            **ranks,
        )
        classes, feature_dim = model.head.weight.shape
        objective = make_objective(config, classes, self.loader.steps, feature_dim)
        self.loader.second = objective.needs_second
        size, workers = self.data.size, config.data.workers
        batch_size = min(_VALIDATION_BATCH, max(1, _VALIDATION_PIXELS // math.prod(size)))
        self.validation = self.data.validation and Batches(
            self.data.validation, size, batch_size, fabric.device, workers=workers, **ranks
        )
        self.engine = self._make_engine(TrainStep(model, objective), notify)
        self.start_seconds = time.monotonic() - began  # until the first step can be executed
        self.model, self.objective = self.engine.step.model, self.engine.step.objective
        self.epoch = self.step = 0
        self.first_loss: float | None = None
        self.seconds = self.epoch_seconds = 0.0  # of training, over all resumed parts
        self.best: dict[str, Any] = {"epoch": 0, "accuracy": -1.0, "weights": None}
        self.sums: dict[str, float] = {}  # of the meter, over this epoch and all ranks

    def _make_engine(self, step: TrainStep, notify: Callable[[str], None]) -> Engine:
        """The engine for `step`; `engine_note` says why it is not the fastest."""
        config, fabric, loader = self.config, self.fabric, self.loader
        name, note = choose_engine(config, fabric, loader)
        if name == "eager" and fabric.device.type == "cpu" and step.objective.passes == 2:
            join_passes(step.model, 2)  # one pass of twice the size costs less than two
        compiled_graph = name == "graph" and not compile_obstacle(config, fabric, loader)
        if name == "compile" or compiled_graph:
            notify("compiling the training step, which can take a minute")
        engine = make_engine(name, fabric, step, loader, config)
        self.engine_note = note or engine.note
        return engine

    # training

    def advance(self) -> dict[str, float]:
        """Trains to the end of the stride; returns the means of the epoch so far.

        Raises `Diverged`. Strides end at the same steps however often a run is resumed. The very
        first is one step long, so that later losses are compared with that of the initial weights.
        """
        began = time.monotonic()
        start, end = self.step, (self.step // _STRIDE + 1) * _STRIDE
        stop = 1 if self.first_loss is None else min(end, self.loader.steps)
        rank = self.fabric.global_rank
        key = draws.keys(self.config.run.seed, _TORCH_STREAM, self.epoch, start, rank)
        torch.manual_seed(int(key))
        self.engine.run(self.epoch, start, stop)
        self.step = stop
        previous, nonfinite = self.sums.get("loss", 0.0), self._read_meter()
        elapsed = time.monotonic() - began
        self.seconds, self.epoch_seconds = self.seconds + elapsed, self.epoch_seconds + elapsed
        loss = (self.sums["loss"] - previous) / ((stop - start) * self.fabric.world_size)
        self.first_loss = first = loss if self.first_loss is None else self.first_loss
        if nonfinite or not math.isfinite(loss) or loss > _DIVERGED * (first + 1):
            raise Diverged(
                divergence_message(self.config, self.epoch + 1, stop, loss, first, nonfinite)
            )
        return self._means()

    def _read_meter(self) -> bool:
        """Reads the meter, summed over ranks, and returns whether a weight is not finite. The only
        place where the host waits for the device."""
        meter, step = self.engine.meter, self.engine.step
        nonfinite = count_nonfinite([*step.parameters(), *step.buffers()])
        values = torch.cat([meter.sums, nonfinite.to(meter.sums)[None]])  # a copy: reduced in place
        *sums, total = self.fabric.all_reduce(values, reduce_op="sum").tolist()  # pyright: ignore[reportAttributeAccessIssue]
        self.sums = dict(zip(meter.names, map(float, sums), strict=True))
        return total > 0

    def _means(self) -> dict[str, float]:
        ranks = self.fabric.world_size
        steps = self.step * ranks
        means = {k: v / steps for k, v in self.sums.items() if k != "hits"}
        accuracy = self.sums["hits"] / (steps * self.loader.unmixed_size)
        return {**means, "train_accuracy": accuracy, "images": steps * self.loader.batch_size}

    def end_epoch(self) -> dict[str, Any]:
        """Validates, keeps the weights if they are the best, moves on to the next epoch; returns
        the metrics of this one."""
        steps, means = self.loader.steps, self._means()
        images = means.pop("images")
        rate = learning_rate(self.config.optim, self.epoch * steps + steps - 1, steps)
        metrics = {"epoch": self.epoch + 1, "lr": rate, **means}
        if accuracies := self.validate():
            metrics |= accuracies
            accuracy = sum(accuracies.values()) / len(accuracies)
            if accuracy >= self.best["accuracy"]:  # among equals the last, which has trained longer
                weights = {k: v.cpu() for k, v in self.weights().items()}
                self.best = {"epoch": self.epoch + 1, "accuracy": accuracy, "weights": weights}
        seconds = self.epoch_seconds
        metrics |= {"seconds": seconds, "images_per_second": images / max(seconds, 1e-9)}
        self.engine.meter.reset()
        self.sums, self.epoch_seconds = {}, 0.0
        self.epoch, self.step = self.epoch + 1, 0
        return metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Accuracy on the validation split, if there is one, clean and, if configured, noisy; ranks
        share the images. The noise of an image is the same in every epoch and for every seed."""
        fabric, model = self.fabric, self.model
        if self.validation is None:
            return {}
        if fabric.world_size > 1:  # DDP synchronises running statistics only before a training step
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        hits = torch.zeros(len(self.validation_noise), device=fabric.device, dtype=torch.int64)
        model.eval()
        with self.engine.average.applied(), fabric.autocast():
            for pixels, labels, index in self.validation:
                keys = draws.keys(self.config.data.split_seed, _VALIDATION_STREAM, index)
                source = draws.PerSample(keys)
                for k, noise in enumerate(self.validation_noise.values()):
                    hits[k] += (model(noise(pixels / 255, source)).argmax(1) == labels).sum()
        model.train()
        totals: Any = fabric.all_reduce(hits, reduce_op="sum")
        shares = [n / self.validation.split.count for n in totals.tolist()]
        return dict(zip(self.validation_noise, shares, strict=True))

    # saving and restoring

    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate: the averaged ones if an average is kept."""
        with self.engine.average.applied():
            return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def info(self) -> dict[str, Any]:
        """What a reader of the run folder needs besides the config."""
        return {
            **dataset_info(self.data),
            "precision": precision(self.config, self.fabric.device.type),
            "engine": self.engine.name,
            "start_seconds": round(self.start_seconds, 1),
            "ranks": self.fabric.world_size,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(self.fabric.device),
        }

    def state(self) -> dict[str, Any]:
        """Everything the rest of the run depends on. The schedule follows from epoch and step."""
        return {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "average": self.engine.average.state(),
            "scaler": self.fabric.strategy.precision.state_dict(),  # of fp16
            **{name: getattr(self, name) for name in _POSITION},
            "threads": torch.get_num_threads(),
            "ranks": self.fabric.world_size,
        }

    def restore(self, state: dict[str, Any], warn: Callable[[str], None]) -> None:
        """Continues from `state`; ValueError if that is of another model. `warn` is called with a
        message if the result will differ in the last bits."""
        try:
            self.model.load_state_dict(state["model"])
            self.objective.load_state_dict(state["objective"])
            self.engine.load_optimizer(state["optimizer"])
            self.engine.average.load(state["average"])
            self.fabric.strategy.precision.load_state_dict(state["scaler"])
            for name in _POSITION:
                setattr(self, name, state[name])
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"the checkpoint is of another model or training ({reason[:200]}); choose another "
                "--name"
            ) from None
        threads, ranks = torch.get_num_threads(), self.fabric.world_size
        before = state.get("ranks", ranks)  # older versions did not save it
        # All but the hits are sums of means over the batch of a rank.
        self.sums = {k: v * (1 if k == "hits" else ranks / before) for k, v in self.sums.items()}
        # The sums are those of all ranks together: the first rank continues them.
        self.engine.meter.load(
            self.sums if self.fabric.is_global_zero else dict.fromkeys(self.sums, 0.0)
        )
        if before != ranks:
            warn(
                f"the run used {before} process{'es' if before > 1 else ''} so far and continues "
                f"with {ranks}: its weights will differ from those of either number alone"
            )
        if state["threads"] != threads:
            warn(
                f"the run used {state['threads']} CPU threads so far and continues with {threads}: "
                "its weights will differ in the last bits"
            )


def dataset_info(dataset: Dataset) -> dict[str, Any]:
    """What a reader of the run folder needs to know about the data."""
    validation = dataset.validation
    return {
        "classes": list(dataset.classes),
        "size": list(dataset.size),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "fingerprint": dataset.fingerprint,
        "samples": {
            "train": dataset.train.count,
            "validation": validation.count if validation else 0,
            "test": dataset.test.count,
        },
    }


def _make_model(config: Config, data: Dataset, fabric: Fabric) -> Any:
    model: Any = classifier_for(config.model, data)
    if fabric.device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    if config.run.sync_bn and fabric.world_size > 1:
        if fabric.device.type == "cpu":
            raise ValueError("--sync-bn needs GPUs: torch supports it on no other device")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def make_objective(
    config: Config, num_classes: int, steps_per_epoch: int, feature_dim: int | None = None
) -> Objective:
    """The objective of the configured method.

    Args:
        config: settings of the run.
        num_classes: number of classes.
        steps_per_epoch: determines the length of a ramp.
        feature_dim: size of the penultimate layer; by default that of the config.
    """
    m = config.method
    objective = METHODS[m.method]
    options: dict[str, Any] = {"noise": parse(m.noise), "views": m.views, "smoothing": m.smoothing}
    if objective.ramped:
        ramp_steps = round(m.ramp_epochs * steps_per_epoch)
        options |= {"ramp_steps": ramp_steps, "batch_norm": m.batch_norm}
    if objective is Stability:
        options["weight"] = m.stability_weight
    if objective is Spheres:
        options["weight"] = m.spheres_weight
    if objective is Discriminative:
        options["noisy_ce_weight"] = m.noisy_ce_weight
    if objective in (Discriminative, Spheres):
        options["criterion"] = DiscriminativeLoss(
            num_classes,
            feature_dim or config.model.feature_dim,
            radius=m.spheres_radius if m.relative else m.radius,
            margin=m.spheres_margin if m.relative else m.margin,
            compact_weight=m.compact_weight,
            margin_weight=m.margin_weight,
            norm_weight=m.norm_weight,
            noisy_weight=m.noisy_weight,
            momentum=m.centroid_momentum,
            centroids=m.centroids,
            margin_over=m.margin_over,
            compact_hinge=m.compact_hinge,
            margin_hinge=m.margin_hinge,
        )
    return objective(**options)
