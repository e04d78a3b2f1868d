"""A whole training step as one CUDA graph: views, forward, backward, update, meter.

The order of an epoch, its learning rates and the step counter are kept on the device, so that a
replay needs nothing from the host. Forward and backward passes are compiled if a compiler is
available. Warm-up executes real steps; everything they change is restored before training starts. A
replayed step must agree with a plain one (`verify_step`), or the graph is not used.

Convolutions choose their kernels by timing them. If another process did so on the same GPU at the
same time, a slow kernel could be kept for the whole training: a file lock prevents that.
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
from noiseproof.lab.data.loader import Loader, Ticket
from noiseproof.lab.files import process_lock
from noiseproof.lab.training.eager import Engine
from noiseproof.lab.training.optimizer import learning_rate, make_optimizer
from noiseproof.lab.training.split_batchnorm import join_passes
from noiseproof.lab.training.step import TrainStep, counted
from noiseproof.lab.training.verify_step import StepMismatch, StepResult, find_mismatch, step_result
from noiseproof.modes import deterministic
from noiseproof.objectives import Outcome

if TYPE_CHECKING:
    from lightning.fabric import Fabric

TUNE_KERNELS = True  # cuDNN times its convolution kernels and takes the fastest


class GraphEngine(Engine):
    """Replays one captured step. One process, one GPU, images in memory.

    The constructor replaces convolutions and batch-norm layers by equivalent faster ones. It raises
    errors of the compiler or the capture, and `StepMismatch`, and leaves the weights unchanged.
    """

    name = "graph"

    def __init__(
        self,
        fabric: Fabric,
        step: TrainStep,
        loader: Loader,
        config: Config,
        *,
        compiled: bool = True,  # whether forward and backward passes are compiled
        tuned: bool = True,  # whether convolution kernels are timed; if not, deterministic ones
    ):
        step = step.to(fabric.device)
        if config.run.amp == "float64":
            step = step.double()
        if step.objective.passes == 2:
            join_passes(step.model, 2)
        optimizer = make_optimizer(config, step.model, capturable=True)
        super().__init__(fabric, step, optimizer, loader, config)
        device = fabric.device
        self.rate = torch.tensor(config.optim.lr, device=device)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        # Of the loaded epoch: samples of every step, learning rates, random key; and the next step
        self.order = torch.zeros(loader.steps, loader.batch_size, dtype=torch.int64, device=device)
        self.rates = torch.zeros(loader.steps, device=device)
        self.key = torch.zeros((), dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._autocast: Callable[[], Any] = fabric.autocast
        self._load_epoch(0)
        self.step.train()
        self.graph = self._verified_graph(compiled, tuned)

    def run(self, epoch: int, start: int, stop: int) -> None:
        """Replays steps `start` to `stop` of an epoch."""
        self.step.train()
        if self.loaded_epoch != epoch:
            self._load_epoch(epoch)
        self.position.fill_(start)
        for _ in range(start, stop):
            self.graph.replay()

    def _load_epoch(self, epoch: int) -> None:
        steps = self.loader.steps
        rates = [learning_rate(self.config.optim, epoch * steps + k, steps) for k in range(steps)]
        self.order.copy_(self.loader.order(epoch))
        self.rates.copy_(torch.tensor(rates))
        self.key.copy_(self.loader.key(epoch))
        self.loaded_epoch = epoch

    # one step

    def _run_step(self) -> None:
        # index_select: indexing with a one-element tensor would synchronise with the host
        self.rate.copy_(self.rates.index_select(0, self.position)[0])
        ticket = Ticket(self.order.index_select(0, self.position)[0], self.key)
        # The backward pass allocates gradients inside the graph; it never adds to existing ones.
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            outcome, labels = self._forward(ticket)
        outcome.loss.backward()
        self._update()
        self.meter.add(outcome, labels)
        self.position.add_(1)

    def _views_and_loss(self, ticket: Ticket) -> tuple[Outcome, Tensor]:
        batch = self.loader.prepare(ticket)
        return counted(self.step(batch), batch)

    # capture and verification

    def _verified_graph(self, compiled: bool, tuned: bool) -> Any:
        """The graph of a step. Everything that warm-up changes is reset, even after an error."""
        initial = {name: value.clone() for name, value in self.step.state_dict().items()}
        self._forward: Callable[..., Any] = self._views_and_loss
        try:
            references = self._reference_steps(initial)
            self._reset(initial)
            graph = self._capture(compiled, tuned)
            if references is not None:
                fast = self._first_step(initial, graph.replay, seed=0)
                if mismatch := find_mismatch(fast, *references):
                    raise StepMismatch(mismatch)
            return graph
        finally:
            self._reset(initial)

    def _reference_steps(
        self, initial: dict[str, Tensor]
    ) -> tuple[StepResult, StepResult, StepResult] | None:
        """The first step, uncompiled and with deterministic kernels; the same with the batch
        permuted; and that in full precision. None if they do not fit into memory."""
        try:
            with deterministic(), _side_stream(self.fabric.device):
                plain = self._first_step(initial, self._run_step, seed=0)
                permutation = torch.randperm(self.loader.batch_size, device=self.order.device)
                self.order[0] = self.order[0, permutation]
                permuted = self._first_step(initial, self._run_step, seed=1)
                self._autocast = contextlib.nullcontext
                return plain, permuted, self._first_step(initial, self._run_step, seed=1)
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            return None
        finally:
            self._autocast = self.fabric.autocast
            self._load_epoch(0)

    def _first_step(
        self, initial: dict[str, Tensor], run: Callable[[], None], seed: int
    ) -> StepResult:
        """The result of the first step of the training, executed by `run`."""
        self._reset(initial)
        self.position.zero_()
        torch.manual_seed(seed)
        run()
        return step_result(self.meter.sums[0], self.step)

    def _capture(self, compiled: bool, tuned: bool) -> Any:
        """The graph of a step, after warm-up. cuDNN's settings are restored: replays need none, and
        evaluation or another training in this process must not inherit them."""
        device = self.fabric.device
        if compiled:
            self._forward = self._compile(self._views_and_loss)
        with contextlib.ExitStack() as settings:
            with _side_stream(device):
                # The first step runs the compiler, which other processes may do at the same time.
                # cuDNN keeps the first kernel that it used for a convolution, tuned or not, but
                # separately for deterministic ones: after a deterministic step it is still free to
                # choose when it is tuned.
                with deterministic():
                    self._warm_up(1)
                if tuned:
                    before = torch.backends.cudnn.benchmark
                    settings.callback(setattr, torch.backends.cudnn, "benchmark", before)
                    torch.backends.cudnn.benchmark = TUNE_KERNELS
                    with _tuning_lock(device):
                        self._warm_up(2)
                        if device.type == "cuda":
                            torch.cuda.synchronize(device)
            if not tuned:
                settings.enter_context(deterministic())
            self.position.zero_()
            return self._record()

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Combo kernels: small independent operations (casts of weights, running statistics, the
        # second half of a reduction) share a launch.
        return torch.compile(function, fullgraph=True, options={"combo_kernels": True})

    def _record(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run_step()
        return graph

    def _warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.position.zero_()
            self._run_step()

    # state, changed in place: the captured graph refers to these tensors

    @torch.no_grad()
    def _reset(self, initial: dict[str, Tensor]) -> None:
        """Everything is as before the first step, with the `initial` weights and buffers."""
        for name, value in self.step.state_dict().items():
            value.copy_(initial[name])
        self.load_optimizer({"state": {}})
        self.average.reset()
        self.meter.reset()

    @torch.no_grad()
    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restores saved moments in place. Those that were not saved are zero, as before the first
        step (SGD's momentum, Adam's moments and step counts)."""
        for number, parameter in enumerate(self.average.trainable):
            moments = state["state"].get(number, {})
            for name, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    value.copy_(moments[name]) if name in moments else value.zero_()


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Runs on a stream other than the default one, as capturing the same steps later requires."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _tuning_lock(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """One process per GPU at a time."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    name = f"noiseproof-{torch.cuda.get_device_properties(device).uuid}.lock"
    return process_lock(Path(tempfile.gettempdir()) / name)
