"""Trains candidates for a recipe on part of the training images and tests them on the rest.

    python -m tools.search candidates --data cifar10 --epochs 50

`candidates` is a folder of JSON files. Each holds settings of `noiseproof.lab.config` that differ
from `BASE`, and may hold `spheres`, the arguments of `Spheres` below, a loss on trial:

    {"augment": "crop-flip+trivial+cutmix", "noise": "gaussian:0..0.12", "spheres": {"weight": 0.1}}

A fifth of the training images is held out; the test images are never read. The result of
`a.json` goes to `a.row.json`: accuracy on clean held-out images, under Gaussian noise and under
the 15 corruptions (three severities of each). Several processes can share a folder; each takes the
next file that no other has taken. They wait for new files until there is one called `stop`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch.nn.functional import normalize

from noiseproof import DiscriminativeLoss, accuracy, perturb
from noiseproof.lab.command import command_record
from noiseproof.lab.config import Config, Data, Method, Model, Optim, Run, from_dict, to_dict
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.training import session
from noiseproof.lab.training.train import train
from noiseproof.objectives import Batch
from noiseproof.objectives.base import Constrained, Outcome
from noiseproof.objectives.spheres import LinearHead

HELD_OUT = 0.2  # of the training images
NOISE = ["clean", "gaussian:8/255", "gaussian:16/255", "gaussian:20/255", "gaussian:0.1"]
SEVERITIES = (":1", ":3", ":5")  # of the corruptions

BASE = Config(
    data=Data(val_share=HELD_OUT, augment="crop-flip"),
    model=Model(model="resnet18", feature_dim=128),
    method=Method(
        method="both", noise="gaussian:0..0.1", views="independent", batch_norm="together"
    ),
    optim=Optim(batch_size=128, lr=0.1, sched="onecycle"),
    run=Run(amp="auto", checkpoint_minutes=60),
)


class Spheres(Constrained):
    """Cross-entropy on both views and constraints of weight `weight` on unmixed images.

    Args:
        criterion: the constraints.
        noise: as for `Objective`.
        total_steps: of the training, for `late`.
        weight: of the constraints.
        scale: "absolute" takes features as they are; "relative" divides features and distances to
            boundaries by the root mean square norm of the batch's clean features; "cosine" by their
            own norms, and the rows of W too, without biases.
        late: the weight is 0 for the first half of the training, then rises linearly.
        balanced: the weight is relative to the cross-entropy: constraints ≡ weight · CE in size.
        joint: centroids are means over both views.
        options: as for `Constrained`.
    """

    terms = ("ce", "constraints")

    def __init__(
        self,
        criterion: DiscriminativeLoss,
        noise: perturb.Perturbation | str,
        total_steps: int,
        *,
        weight: float,
        scale: Literal["absolute", "relative", "cosine"] = "absolute",
        late: bool = False,
        balanced: bool = False,
        joint: bool = False,
        **options: Any,
    ):
        super().__init__(noise, **options)
        self.criterion, self.total_steps, self.weight = criterion, total_steps, weight
        self.scale, self.late, self.balanced, self.joint = scale, late, balanced, joint
        if late:
            self.ramp_steps = total_steps

    def forward(self, model: Any, batch: Batch) -> Outcome:
        features = model.features(torch.cat([batch.images, self.noised(batch)]))
        logits = model.head(features)
        ce = self.cross_entropy(logits, batch.labels, batch.mixture)
        clean, noisy = (batch.unmixed(view) for view in features.float().chunk(2))
        constraints = self._constraints(clean, batch.unmixed(batch.labels), noisy, model.head)
        weight = self.ramp(constraints.dtype)
        if self.late:
            weight = torch.relu(2 * weight - 1)  # pyright: ignore[reportArgumentType]
        if self.balanced:
            weight = weight * (ce / constraints.clamp(min=1e-6)).detach()
        loss = ce + self.weight * weight * constraints
        logged = {"ce": ce.detach(), "constraints": constraints.detach()}
        return Outcome(loss, logits[: len(batch.labels)], logged)

    def _constraints(
        self, clean: torch.Tensor, labels: torch.Tensor, noisy: torch.Tensor, head: Any
    ) -> torch.Tensor:
        if self.scale == "relative":
            scale = clean.detach().square().sum(1).mean().sqrt()
            clean, noisy = clean / scale, noisy / scale
            head = LinearHead(head.weight, head.bias / scale)
        elif self.scale == "cosine":
            clean, noisy = normalize(clean), normalize(noisy)
            head = LinearHead(normalize(head.weight.float()), None)
        if self.joint:
            return self.criterion(torch.cat([clean, noisy]), torch.cat([labels, labels]), head)
        return self.criterion(clean, labels, head, noisy)


_make_objective = session.make_objective


def _make_spheres(
    options: dict[str, Any], config: Config, num_classes: int, steps: int, feature_dim: int
) -> Any:
    """The objective on trial, with criterion and ramp as the method `discriminative` has them."""
    method = replace(config.method, method="discriminative")
    usual: Any = _make_objective(replace(config, method=method), num_classes, steps, feature_dim)
    return Spheres(
        usual.criterion,
        usual.noise,
        config.optim.epochs * steps,
        ramp_steps=usual.ramp_steps,
        views=usual.views,
        batch_norm="together",
        smoothing=usual.smoothing,
        **options,
    )


def measure(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Trains one candidate and returns its row.

    Args:
        settings: of the candidate.
        config: to which they are added.
    """
    spheres = settings.pop("spheres", None)
    config = from_dict(settings, config)
    if spheres is not None:
        session.make_objective = lambda *args: _make_spheres(spheres, *args)
    start = time.perf_counter()
    try:
        run = train(config, progress=False)
    finally:
        session.make_objective = _make_objective
    trained = time.perf_counter()
    data, device = run.dataset(), chosen_device(config.run.device)
    held_out = data.validation
    assert held_out is not None
    model = run.model("last", device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    cells = [cell for cell in perturb.CORRUPTIONS if cell.endswith(SEVERITIES)]
    pair = (held_out.pixels.to(device).float() / 255, held_out.labels)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        measured = accuracy(model, pair, [*NOISE, *cells], draws=1, batch_size=1000)
    accuracies = {name: round(100 * value.mean, 2) for name, value in measured.items()}
    return {
        "accuracy": accuracies,
        "corruptions": round(sum(accuracies[cell] for cell in cells) / len(cells), 2),
        "training accuracy": run.metrics()[-1].get("train_accuracy"),
        "seconds": [round(trained - start, 1), round(time.perf_counter() - trained, 1)],
        "info": run.info,
        "spheres": spheres,
        "config": to_dict(config),
        **command_record(),
    }


@dataclass(frozen=True)
class Arguments:
    """Trains candidates for a recipe and tests them on held-out training images."""

    candidates: Annotated[Path, tyro.conf.Positional]
    """Folder of JSON files, one per candidate."""
    data: str = "cifar10"
    """As for `noiseproof train`."""
    data_dir: str = "data"
    """As for `noiseproof train`."""
    epochs: int = 50
    """Length of each training, for candidates that do not have their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As for `noiseproof train`."""


def main(arguments: Arguments) -> None:
    """Takes candidates from the folder until it holds a file called `stop`."""
    folder = arguments.candidates
    settings = {"data": arguments.data, "data_dir": arguments.data_dir, "epochs": arguments.epochs}
    config = from_dict(
        {**settings, "device": arguments.device, "output": str(folder / "runs")}, BASE
    )
    load_dataset(config.data)  # fails early
    while not (folder / "stop").exists():
        waiting = sorted(p for p in folder.glob("*.json") if not p.name.endswith(".row.json"))
        for path in waiting:
            taken = path.with_suffix(".taken")
            try:
                path.rename(taken)
            except FileNotFoundError:
                continue
            try:
                row = measure({"name": path.stem, **json.loads(taken.read_text())}, config)
            except Exception as error:  # the next candidate may be fine
                row = {"error": f"{type(error).__name__}: {error}"}
            path.with_suffix(".row.json").write_text(json.dumps(row, indent=1) + "\n")
            print(path.stem, row.get("error") or _line(row), flush=True)
            break
        else:
            time.sleep(1)


def _line(row: dict[str, Any]) -> str:
    noise = " ".join(f"{row['accuracy'][name]:6.2f}" for name in NOISE)
    return f"{noise}  C {row['corruptions']:.2f}  {row['seconds']} s, {row['info'].get('engine')}"


if __name__ == "__main__":
    main(tyro.cli(Arguments))
