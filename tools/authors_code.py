"""The authors' public code (github.com/HaiVyNGUYEN/robust_noise) next to ours.

    python -m tools.authors_code steps CHECKOUT cifar10.npz --method normal
    python -m tools.authors_code train CHECKOUT cifar10.npz authors-normal.json --epochs 20

`steps` sends the same weights and the same batches through their training routine and through our
session, and reports how far losses and weights differ. Then it tests the resulting network with
their noise and with ours. `train` runs one of their scripts, shortened, and tests its network under
noise. Nothing of their code is in this repository: CHECKOUT is a clone of theirs.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
import tyro
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from noiseproof import accuracy
from noiseproof.lab.config import Data, from_dict
from noiseproof.lab.data.datasets import Dataset, load_dataset
from noiseproof.lab.device import chosen_device, environment, make_fabric
from noiseproof.lab.files import write_atomically
from noiseproof.lab.recipes import recipe, suite
from noiseproof.lab.training.session import Session
from noiseproof.paper.experiments import EXPERIMENTS

# Our row of table 1, and the authors' routine that trains it.
ROUTINES = {
    "normal": "train_no",
    "both": "train_both",
    "stability": "train_stability",
    "discriminative-code": "train_forcing",
}
# The constants of their transforms.Normalize.
MEAN = (0.49139968, 0.48215841, 0.44653091)
STD = (0.24703223, 0.24348513, 0.26158784)


def steps(
    checkout: tyro.conf.Positional[Path],
    data: tyro.conf.Positional[Path],
    method: Literal["normal", "both", "stability", "discriminative-code"] = "normal",
    count: int = 100,
    batch_size: int = 64,
    precision: Literal["float32", "float64"] = "float32",
    seed: int = 0,
    images: int = 1000,
    draws: int = 5,
) -> None:
    """Trains the same weights on the same batches with both codes, on a CPU, and compares them.

    Args:
        checkout: clone of the authors' repository.
        data: .npz file of CIFAR-10.
        method: row of table 1.
        count: training steps.
        batch_size: images per step; 64 in the paper.
        precision: floating-point type of both.
        seed: seed of weights, order, augmentation and noise.
        images: test images of the comparison under noise, the first ones; 0 for none.
        draws: noise draws per level.
    """
    row = EXPERIMENTS["cifar10"]().rows[method]
    amp = "float64" if precision == "float64" else "no"
    changes = {"data": str(data), "batch_size": batch_size, "seed": seed, "amp": amp}
    config = from_dict(changes | {"device": "cpu", "engine": "eager"}, row)
    fabric = make_fabric(config)
    session = Session(config, fabric)
    theirs = _their_network(checkout)
    theirs.to(session.loader.dtype)
    _copy_weights(session.model, theirs)
    constants = _use_their_constants(session.model)
    start = _vector(session.model)
    began = time.perf_counter()
    their_losses = _train_theirs(checkout, theirs, session, method, count)
    middle = time.perf_counter()
    our_losses = _train_ours(session, count)
    seconds = [round(t, 1) for t in (middle - began, time.perf_counter() - middle)]
    difference = (_vector(session.model) - _vector(theirs)).abs()
    moved = (_vector(session.model) - start).abs()
    gaps = [abs(a - b) for a, b in zip(our_losses, their_losses, strict=True)]
    statistics = (_statistics(session.model) - _statistics(theirs)).abs()
    report = {
        "method": method, "steps": count, "batch": batch_size, "precision": precision,
        "difference of the constants that images are normalised with": constants,
        "loss, first and last": [round(our_losses[0], 6), round(our_losses[-1], 6)],
        "largest difference of a loss": max(gaps),
        "in the first step": gaps[0],
        "largest difference of a weight": difference.max().item(),
        "largest change of a weight in training": moved.max().item(),
        "difference / change, norms": (difference.norm() / moved.norm()).item(),
        "largest difference of a running statistic": statistics.max().item(),
        "seconds, theirs and ours": seconds,
    }  # fmt: skip
    print(json.dumps(report, indent=1), flush=True)
    if images:
        _test_both_ways(checkout, session.model.eval().float(), data, images, draws)


def _module(checkout: Path, name: str) -> Any:
    """A module of the authors' CIFAR-10 folder."""
    folder = str(checkout.resolve() / "cifar10")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _their_network(checkout: Path) -> nn.Module:
    return _module(checkout, "resnet_architecture").ResNet18(num_classes=10, inter_dim=128)


@torch.no_grad()
def _copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Both networks hold the same tensors in the same order, under other names."""
    own = [t for name, t in ours.state_dict().items() if name not in ("mean", "std")]
    other = list(theirs.state_dict().values())
    if [t.shape for t in own] != [t.shape for t in other]:
        raise ValueError("the two networks have different tensors")
    for source, target in zip(own, other, strict=True):
        target.copy_(source)


def _use_their_constants(ours: Any) -> float:
    """Normalises by the authors' constants, rounded to eight digits, instead of the data's own;
    returns the largest difference between the two."""
    largest = 0.0
    for buffer, values in ((ours.mean, MEAN), (ours.std, STD)):
        theirs = torch.tensor(values, dtype=buffer.dtype).view_as(buffer)
        largest = max(largest, (buffer - theirs).abs().max().item())
        buffer.copy_(theirs)
    return largest


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _statistics(model: nn.Module) -> Tensor:
    """The running means and variances of all batch-norms."""
    buffers = [b for name, b in model.named_buffers() if "running" in name]
    return torch.cat([b.double().flatten() for b in buffers])


def _train_ours(session: Session, count: int) -> list[float]:
    """The loss of each of the first steps."""
    losses: list[float] = []
    for step in range(count):
        session.engine.run(0, step, step + 1)
        losses.append(session.engine.meter.sums[0].item() - sum(losses))
    return losses


def _train_theirs(
    checkout: Path, network: nn.Module, session: Session, method: str, count: int
) -> list[float]:
    """The same with the authors' routine, on the session's batches."""
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.001, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    routine = getattr(_module(checkout, "training_routines"), ROUTINES[method])
    batches = _batches(session, count)
    options: dict[str, Any] = {"device": "cpu"}
    if method == "discriminative-code":
        kind = _module(checkout, "discriminative_loss_function").DiscriminativeLoss_forcing
        loss = kind(num_classes=10, dim=128, delta_var=0.5, delta_dist=5.0)
        loss.mean_before = loss.mean_before.to(session.loader.dtype)
        options["loss_dis"] = loss
    with contextlib.redirect_stdout(io.StringIO()):
        losses, _ = routine(batches, network, nn.CrossEntropyLoss(), optimizer, **options)
    return list(losses.values())


def _batches(session: Session, count: int) -> Iterator[tuple[Tensor, ...]]:
    """The session's first batches as the authors' loaders give them: normalised by their constants,
    with the noisy view if the method has one."""
    mean, std = (torch.tensor(v, dtype=session.loader.dtype).view(3, 1, 1) for v in (MEAN, STD))
    for ticket, _ in zip(session.loader.tickets(0), range(count), strict=False):
        batch = session.loader.prepare(ticket)
        views = [batch.images]
        if session.objective.two_views:
            views.append(session.objective.noised(batch))
        yield *((view - mean) / std for view in views), batch.labels


def _test_both_ways(checkout: Path, model: nn.Module, data: Path, images: int, draws: int) -> None:
    """Tests one network with the authors' noise, added per image before their normalisation, and
    with ours."""
    dataset = load_dataset(Data(str(data), val_share=0.0))
    pixels, labels = dataset.test.pixels[:images], dataset.test.labels[:images]
    theirs = _their_network(checkout).eval()
    _copy_weights(model, theirs)
    normalise = transforms.Normalize(MEAN, STD)
    add_noise = _their_noise(checkout)
    torch.manual_seed(0)
    specs = suite("cifar10")
    ours = accuracy(model, (pixels.float() / 255, labels), specs, draws=draws)
    for spec in specs:
        level = spec.partition(":")[2]
        std = int(level.partition("/")[0]) / 255 if level else 0.0
        values = []
        for _ in range(draws if level else 1):
            noisy = [add_noise(std)(image) if level else image for image in pixels.float() / 255]
            with torch.no_grad():
                parts = [theirs(normalise(x)) for x in torch.stack(noisy).split(250)]
            values.append((torch.cat(parts).argmax(1) == labels).double().mean().item())
        mean = sum(values) / len(values)
        print(
            f"{spec:16} theirs {100 * mean:.2f} %  ours {100 * ours[spec].mean:.2f} %", flush=True
        )


def _their_noise(checkout: Path) -> Callable[[float], Callable[[Tensor], Tensor]]:
    """The class that adds Gaussian noise in their table of perturbations. The file itself cannot be
    imported, because it imports a module that does not exist."""
    text = (checkout / "perturbations" / "perturbation_input_tensor.py").read_text()
    body = ast.parse(text).body
    chosen = [n for n in body if isinstance(n, ast.ClassDef) and n.name == "AddGaussianNoise"]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([*chosen], []), "perturbation_input_tensor.py", "exec"), names)
    return names["AddGaussianNoise"]


def train(
    checkout: tyro.conf.Positional[Path],
    data: tyro.conf.Positional[Path],
    file: tyro.conf.Positional[Path],
    method: Literal["normal", "noisy", "both", "stability", "discriminative"] = "normal",
    epochs: int = 20,
    noise: float = 0.06,
    scale_milestones: bool = True,
    seed: int = 0,
    every: int = 5,
    draws: int = 3,
    workers: int = 12,
    images: int = 10_000,
) -> None:
    """Runs the authors' training script of a method and tests its network under noise.

    The script runs as it is, on a GPU if there is one, except that the data come from a .npz file,
    worker processes load them, length and noise can be others, and the network is also tested under
    noise. The file is written after every epoch.

    Args:
        checkout: clone of the authors' repository.
        data: .npz file of CIFAR-10, or of other images of 32 x 32 in ten classes.
        file: JSON file to write.
        method: which script.
        epochs: length of the training; 200 in the script.
        noise: standard deviation of the training noise; 0.06 in the scripts.
        scale_milestones: whether the milestones move with the length of the training.
        seed: seed of torch; the authors set none.
        every: epochs between tests under noise.
        draws: noise draws of each test.
        workers: processes that load images.
        images: test images under noise, the first ones.
    """
    dataset = load_dataset(Data(str(data), val_share=0.0))
    device, file, here = chosen_device("auto"), file.absolute(), Path.cwd()
    labels = dataset.test.labels[:images].to(device)
    pixels = dataset.test.pixels[:images].to(device).float() / 255
    routines = _module(checkout, "training_routines")
    evaluate_clean, tests = routines.accuracy_evaluation, []
    began = time.perf_counter()

    def evaluate(loader: Any, model: nn.Module, device: Any = "cuda") -> float:
        """Their test on clean images, and ours under noise."""
        clean = evaluate_clean(loader, model, device)
        test: dict[str, Any] = {"epoch": len(tests) + 1, "clean": round(100 * clean, 4)}
        if test["epoch"] % every == 0 or test["epoch"] == epochs:
            network = nn.Sequential(transforms.Normalize(MEAN, STD), model)
            results = accuracy(network, (pixels, labels), suite(str(data)), draws=draws)
            test["accuracy"] = {k: round(100 * a.mean, 4) for k, a in results.items()}
        test["seconds"] = round(time.perf_counter() - began, 1)
        tests.append(test)
        content = {
            "schema": 1, "code": "authors", "data": dataset.name, "method": method,
            "epochs": epochs, "noise": noise, "scale_milestones": scale_milestones, "seed": seed,
            "draws": draws, "images": len(labels), "environment": environment(labels.device),
            "tests": tests,
        }  # fmt: skip
        write_atomically(file, json.dumps(content, indent=1) + "\n")
        return clean

    script = checkout / "cifar10" / f"{'our' if method == 'discriminative' else method}_training.py"
    program = compile(_changed(script, epochs, noise, scale_milestones), script.name, "exec")
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        os.chdir(folder)  # where the script saves its weights
        patches.callback(os.chdir, here)
        for owner, name, value in (
            (torchvision.datasets, "CIFAR10", lambda _, train, download: _Pictures(dataset, train)),
            (torch.utils.data, "DataLoader", _loader_with(workers)),
            (routines, "accuracy_evaluation", evaluate),
        ):
            patches.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        exec(program, {"__name__": "__main__"})


def _changed(script: Path, epochs: int, noise: float, scale_milestones: bool) -> str:
    """The script with another number of epochs, and with other noise and milestones if asked."""
    milestones = list(recipe("paper", "cifar10", epochs).optim.decay_milestones)
    changes = {"epochs = 200": f"epochs = {epochs}"}
    if scale_milestones:
        changes["milestones=[60, 120, 160]"] = f"milestones={milestones}"
    if noise != 0.06:
        changes["AddGaussianNoise(0.06)"] = f"AddGaussianNoise({noise})"
    text = script.read_text()
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{script} has {text.count(old)} lines with {old!r}, expected one")
        text = text.replace(old, new)
    return text


class _Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """Images as torchvision's CIFAR10 gives them: PIL images, then `transform`."""

    def __init__(self, dataset: Dataset, train: bool):
        split = dataset.train if train else dataset.test
        self.pixels = split.pixels.permute(0, 2, 3, 1).numpy()
        self.labels = split.labels.tolist()
        self.transform: Callable[[Any], Any] = lambda image: image

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def _loader_with(workers: int) -> Callable[..., Any]:
    loader = torch.utils.data.DataLoader
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    return lambda *args, **kwargs: loader(*args, **options, **kwargs)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"steps": steps, "train": train}, args=sys.argv[1:])
