"""Time and memory of the discriminative loss, compared with a loop over classes and with
cross-entropy alone.

    python benchmarks/loss.py [--threads N] [--json FILE]

All figures are forward + backward in float32, eager: the loss with noisy features, the same loss as
a Python loop over the classes of the batch (vectorised over the samples of a class and over the
other classes), and linear + cross-entropy. The loop must reproduce the value of the loss before it
is timed. Calls are interleaved, so that whatever else the machine does affects all of them; the
median is shown. Memory is the peak beyond what was allocated before and beyond W's own gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it can be run by its path
import noiseproof
from noiseproof import DiscriminativeLoss

SHAPES = [  # classes, batch, feature dimension
    (10, 64, 128),
    (10, 512, 128),
    (100, 64, 128),
    (100, 512, 128),
    (1000, 512, 128),
    (10_000, 256, 512),
]
LOOP_LIMIT = 1 << 28  # B x C x D above which the loop's graph would fill the memory


class Problem(NamedTuple):
    """Inputs of one step: leaves that take a gradient, and labels."""

    features: Tensor
    noisy: Tensor
    labels: Tensor
    head: nn.Linear

    @classmethod
    def make(cls, classes: int, batch: int, dim: int, device: str) -> Problem:
        torch.manual_seed(0)
        features, noisy = (torch.randn(batch, dim, device=device).requires_grad_() for _ in "12")
        labels = torch.randint(classes, (batch,), device=device)
        return cls(features, noisy, labels, nn.Linear(dim, classes, device=device))

    def clear(self) -> None:
        for leaf in (self.features, self.noisy, *self.head.parameters()):
            leaf.grad = None


class LoopLoss(nn.Module):
    """The loss with its default settings, one class of the batch after the other."""

    def __init__(self, num_classes: int, feature_dim: int):
        super().__init__()
        self.centroids = nn.Buffer(torch.zeros(num_classes, feature_dim))
        self.seen = [False] * num_classes

    def forward(self, features: Tensor, labels: Tensor, head: nn.Linear, noisy: Tensor) -> Tensor:
        present = labels.unique().tolist()
        total = features.new_zeros(())
        for c in present:
            members = labels == c
            current = features[members].mean(0)
            steady = 0.9 * self.centroids[c] + 0.1 * current if self.seen[c] else current
            compact, aligned = (
                (torch.linalg.vector_norm(view[members] - steady, dim=1) - 0.5)
                .relu()
                .square()
                .mean()
                for view in (features, noisy)
            )
            others = torch.arange(head.out_features, device=labels.device) != c
            difference = head.weight[others] - head.weight[c]
            rise = difference @ current + head.bias[others] - head.bias[c]
            margin = (5.0 + rise / torch.linalg.vector_norm(difference, dim=1)).relu().max()
            norm = torch.linalg.vector_norm(steady)
            total = total + compact + margin + 1e-3 * norm + aligned
            self.centroids[c] = steady.detach()
            self.seen[c] = True
        return total / len(present)


def candidates(problem: Problem, loop: bool = True) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name; the loop only if its graph fits, and after its value is checked."""
    features, noisy, labels, head = problem
    sizes = head.out_features, head.in_features
    device = features.device
    loss = DiscriminativeLoss(*sizes).to(device)
    timed: dict[str, Callable[[], Tensor]] = {
        "loss": lambda: loss(features, labels, head, noisy),
        "linear + ce": lambda: F.cross_entropy(head(features), labels),
    }
    if loop and len(labels) * head.weight.numel() <= LOOP_LIMIT:
        looped = LoopLoss(*sizes).to(device)
        fresh = DiscriminativeLoss(*sizes).to(device)
        for _ in range(2):  # the second time with momentum
            value = looped(features, labels, head, noisy)
            expected = fresh(features, labels, head, noisy)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
        timed["loop"] = lambda: looped(features, labels, head, noisy)
    return timed


def milliseconds(problem: Problem, seconds: float) -> dict[str, float]:
    """Median time of forward + backward of each candidate; candidates take turns."""
    timed = candidates(problem)
    cuda = problem.features.device.type == "cuda"
    times: dict[str, list[float]] = {name: [] for name in timed}
    for warm in (True, False):
        stop, rounds = time.perf_counter() + (seconds / 4 if warm else seconds), 0
        while rounds < 3 or (time.perf_counter() < stop and rounds < 500):
            rounds += 1
            for name, call in timed.items():
                problem.clear()
                if cuda:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                call().backward()
                if cuda:
                    torch.cuda.synchronize()
                if not warm:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in times.items()}


def extra_memory(name: str, shape: tuple[int, int, int], device: str) -> float | None:
    """Peak MB of one forward + backward beyond inputs and W's gradient; None if unknown."""
    if device == "cpu":  # in a separate process, whose peak nothing else has raised
        code = f"import loss; print(loss.cpu_peak({name!r}, {shape!r}))"
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).resolve().parent,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return None if result.stdout.strip() == "None" else float(result.stdout)
    problem = Problem.make(*shape, device)
    call = candidates(problem, loop=False)[name]
    call().backward()  # allocates the libraries' workspaces
    problem.clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call().backward()
    gradient = 4 * problem.head.weight.numel()
    return (torch.cuda.max_memory_allocated() - before - gradient) / 1e6


def cpu_peak(name: str, shape: tuple[int, int, int]) -> float | None:
    """The result of `extra_memory` in a fresh process: the kernel's peak, which Linux can reset."""
    small = Problem.make(1000, 64, 64, "cpu")
    candidates(small, loop=False)[name]().backward()  # allocates the libraries' workspaces
    problem = Problem.make(*shape, "cpu")
    call = candidates(problem, loop=False)[name]
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call().backward()
        return (_resident("VmHWM") - before - 4 * problem.head.weight.numel()) / 1e6
    except OSError:
        return None


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def environment(device: str) -> dict[str, Any]:
    """Machine, versions and commit; fewer if only torch is installed."""
    try:
        from noiseproof.lab.device import environment as lab_environment

        return lab_environment(device)
    except ImportError:
        cuda = device == "cuda"
        return {
            "noiseproof": noiseproof.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }


def measure(device: str, seconds: float) -> dict[str, Any]:
    """Prints the table of one device and returns its content."""
    facts = environment(device)
    print(
        f"\n{device}: {facts['device']}, {facts['cores']} cores, {facts['threads']} threads, "
        f"torch {facts['torch']}\n\n"
        "     C    B    D    loss ms    loop ms   lin+ce ms   loop/loss   loss/lin+ce"
    )
    rows = []
    for shape in SHAPES:
        ms = milliseconds(Problem.make(*shape, device), seconds)
        loop = ms.get("loop")
        loop_text, gain = (
            ("-", "-") if loop is None else (f"{loop:.3f}", f"{loop / ms['loss']:.1f}")
        )
        print(
            f"{shape[0]:6} {shape[1]:4} {shape[2]:4} {ms['loss']:10.3f} {loop_text:>10} "
            f"{ms['linear + ce']:11.3f} {gain:>11} {ms['loss'] / ms['linear + ce']:13.2f}",
            flush=True,
        )
        rows.append({"classes": shape[0], "batch": shape[1], "dim": shape[2], "ms": ms})
    memory = {name: extra_memory(name, SHAPES[-1], device) for name in ("loss", "linear + ce")}
    listed = ", ".join(
        f"{name} {'not measured' if mb is None else f'{mb:.0f} MB'}" for name, mb in memory.items()
    )
    print(f"\nPeak memory beyond inputs and W's gradient at C = {SHAPES[-1][0]:,}: {listed}")
    return {"environment": facts, "times": rows, "extra_memory_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of the discriminative loss.")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per problem size")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    results = {device: measure(device, chosen.seconds) for device in devices}
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
