"""A whole training step as one CUDA graph: views, forward, backward, update, meters.

The order of an epoch, its learning rates and the step counter live on the device, so that a replay
needs nothing from the host. Inside, the forward and backward passes are compiled where a compiler
is there. Warm-up runs real steps; what they changed is put back before training begins. A replayed
step must agree with a plain one (`verify`), or the graph is not used.

Convolutions choose their kernels by timing them, which must happen while no other process does the
same on this GPU, or a slow kernel is kept for the whole training: a lock on a file sees to that.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import MemoryLoader, Ticket
from noiseproof.lab.training.eager import Engine, TrainStep
from noiseproof.lab.training.optimizer import learning_rate, make_optimizer
from noiseproof.lab.training.overlapped_conv import overlap
from noiseproof.lab.training.split_batchnorm import join_views
from noiseproof.lab.training.verify_step import Taken, disagreement, taken
from noiseproof.modes import deterministic
from noiseproof.objectives import Outcome

if TYPE_CHECKING:
    from lightning.fabric import Fabric


TUNE = True  # time convolution kernels; otherwise those that cuDNN gives are taken


class Wrong(RuntimeError):
    """A captured step does not do what a plain one does."""


class GraphEngine(Engine):
    """Replays one captured step. One process, one GPU, images in memory.

    An error of the compiler (where `compiled`) or of the capture, or `Wrong`, comes out of the
    constructor, and leaves the weights as they were. Convolutions that are not `tuned` are
    deterministic.
    """

    name = "graph"

    def __init__(
        self, fabric: Fabric, step: TrainStep, loader: MemoryLoader, config: Config,
        compiled: bool = True, tuned: bool = True,
    ):  # fmt: skip
        step = step.to(fabric.device)
        if config.run.amp == "float64":
            step = step.double()
        overlap(step.model)
        if step.objective.passes == 2:
            join_views(step.model, 2)  # two passes' batch-norm at the cost of one
        optimizer = make_optimizer(config, step.model, fabric.device, captured=True)
        super().__init__(fabric, step, step, optimizer, loader, config)
        device = fabric.device
        self.rate = torch.tensor(config.optim.lr, device=device)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        self.memory = loader
        self.order = torch.zeros(loader.steps, loader.batch_size, dtype=torch.int64, device=device)
        self.rates = torch.zeros(loader.steps, device=device)
        self.key = torch.zeros((), dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._autocast: Callable[[], Any] = fabric.autocast
        self._load(0)
        self.step.train()
        self.graph = self._capture(compiled, tuned)

    def run(self, epoch: int, start: int, stop: int) -> None:
        self.step.train()
        if self.loaded != epoch:
            self._load(epoch)
        self.at.fill_(start)
        for _ in range(start, stop):
            self.graph.replay()

    def _load(self, epoch: int) -> None:
        steps = self.memory.steps
        rates = [learning_rate(self.config.optim, epoch * steps + k, steps) for k in range(steps)]
        self.order.copy_(self.memory.order(epoch))
        self.rates.copy_(torch.tensor(rates))
        self.key.copy_(self.memory.key(epoch))
        self.loaded = epoch  # the epoch whose order is on the device

    def _whole_step(self) -> None:
        # index_select, since indexing with a tensor of one number would ask the host for it
        self.rate.copy_(self.rates.index_select(0, self.at)[0])
        ticket = Ticket(self.order.index_select(0, self.at)[0], self.key)
        outcome, labels = self._forward_backward(ticket)
        self._update()
        self.meter.add(outcome, labels)
        self.at.add_(1)

    def _forward_backward(self, ticket: Ticket) -> tuple[Outcome, Tensor]:
        # Gradients are made anew by the backward pass, inside the graph, never added to.
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            outcome, labels = self._compiled(ticket)
        outcome.loss.backward()
        return outcome, labels

    def _views_and_loss(self, ticket: Ticket) -> tuple[Outcome, Tensor]:
        batch = self.memory.prepare(ticket)
        return self.plain(batch), batch.labels

    def _update(self) -> None:
        if self.config.optim.clip_grad:
            torch.nn.utils.clip_grad_norm_(
                self.plain.model.parameters(), self.config.optim.clip_grad, foreach=True
            )
        self.optimizer.step()
        self.average.update()

    def _capture(self, compiled: bool, tuned: bool) -> Any:
        """The graph of a step. All that the warm-up changed is put back, also after an error."""
        kept = self._everything()
        self._compiled = self._views_and_loss
        try:
            plain = self._plainly(kept)
            self._put_back(kept)
            graph = self._captured(compiled, tuned)
            wrong = plain and disagreement(self._taken(kept, graph.replay, 0), *plain)
            if wrong:
                raise Wrong(wrong)
            return graph
        finally:
            self._put_back(kept)

    def _plainly(self, kept: dict[str, Any]) -> tuple[Taken, Taken, Taken] | None:
        """The first step, uncompiled and by deterministic kernels; so with its images in other
        places; and so in full precision. None where memory is too small for that."""
        try:
            with deterministic(), _aside(self.fabric.device):
                step = self._taken(kept, self._whole_step, 0)
                places = torch.randperm(self.memory.batch_size, device=self.order.device)
                self.order[0] = self.order[0, places]
                again = self._taken(kept, self._whole_step, 1)
                self._autocast = contextlib.nullcontext
                return step, again, self._taken(kept, self._whole_step, 1)
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            return None
        finally:
            self._autocast = self.fabric.autocast
            self._load(0)

    def _taken(self, kept: dict[str, Any], run: Callable[[], None], seed: int) -> Taken:
        """What the very first step comes to, when it is run so."""
        self._put_back(kept)
        self.at.zero_()
        torch.manual_seed(seed)
        run()
        return taken(self.meter.sums[0], self.plain)

    def _captured(self, compiled: bool, tuned: bool) -> Any:
        """The graph of a step, after warm-up. cuDNN's settings are put back on the way out: replays
        need none, and evaluation or another training in this process must not inherit them."""
        device = self.fabric.device
        if compiled:
            self._compiled = self._compile(self._views_and_loss)
        with contextlib.ExitStack() as settings:
            with _aside(device):
                # One step, as the compiler works at the first; other processes may do so meanwhile.
                # cuDNN keeps the kernel that it first took for a convolution, tuned or not, but
                # apart for deterministic ones: asked for these now, it is free to choose when it is
                # tuned.
                with deterministic():
                    self._warm_up(1)
                if tuned:
                    settings.enter_context(_benchmark(TUNE))
                    with _alone(device):
                        self._warm_up(2)
                        if device.type == "cuda":
                            torch.cuda.synchronize(device)
            if not tuned:
                settings.enter_context(deterministic())
            self.at.zero_()
            return self._record()

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Combo kernels: what is small and independent (casts of weights, running statistics, the
        # second half of a reduction) shares a launch.
        return torch.compile(function, fullgraph=True, options={"combo_kernels": True})

    def _record(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._whole_step()
        return graph

    def _warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.at.zero_()
            self._whole_step()

    def _everything(self) -> dict[str, Any]:
        return {
            "step": {k: v.clone() for k, v in self.plain.state_dict().items()},
            "optimizer": [
                {k: v.clone() for k, v in self.optimizer.state[p].items() if isinstance(v, Tensor)}
                for p in self.average.live
            ],
            "average": [t.clone() for t in self.average.state()],
            "meter": self.meter.sums.clone(),
        }

    @torch.no_grad()
    def _put_back(self, kept: dict[str, Any]) -> None:
        """In place: the captured graph holds on to these tensors. State that was not there before
        the warm-up began at zero (the momentum of SGD, the moments of Adam)."""
        for name, value in self.plain.state_dict().items():
            value.copy_(kept["step"][name])
        for p, saved in zip(self.average.live, kept["optimizer"], strict=True):
            for name, value in self.optimizer.state[p].items():
                if isinstance(value, Tensor):
                    value.copy_(saved[name]) if name in saved else value.zero_()
        self.average.load(kept["average"])
        if kept["meter"].numel():
            self.meter.sums.copy_(kept["meter"])
        else:
            self.meter.sums.zero_()

    @torch.no_grad()
    def load_optimizer(self, state: dict[str, Any]) -> None:
        """In place, as the graph holds on to the tensors. Moments that are not saved are zero."""
        for number, p in enumerate(self.average.live):
            saved = state["state"].get(number, {})
            for name, value in self.optimizer.state[p].items():
                if isinstance(value, Tensor):
                    value.copy_(saved[name]) if name in saved else value.zero_()


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On another stream than the default one, as steps must be that are to be captured later."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """One process a GPU at a time; where files cannot be locked, all at once."""
    if device.type != "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            name = f"noiseproof-{torch.cuda.get_device_properties(device).uuid}.lock"
            file = stack.enter_context(open(Path(tempfile.gettempdir()) / name, "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _benchmark(on: bool) -> Iterator[None]:
    """cuDNN times its convolution kernels and takes the fastest, inside the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
