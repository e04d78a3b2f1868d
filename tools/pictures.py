"""The pictures of docs/how-it-works.md.

    python -m tools.pictures docs/images

`features.png`: two-dimensional features of the digits, trained with cross-entropy alone, on clean
and noisy images, and with the discriminative loss. `perturbations.png`: one photograph under every
perturbation.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor, nn

from noiseproof import DiscriminativeLoss, perturb
from noiseproof.draws import PerSample, keys
from noiseproof.lab.figures.palette import class_colours

NOISE = perturb.Gaussian(0.2)
EPOCHS = 60
SHOWN = {
    "clean": "clean",
    "gaussian:40/255": "gaussian:40/255",
    "uniform:0.3": "uniform:0.3",
    "occlusion:20x24": "occlusion:20x24",
    "stripes:10x3": "stripes:10x3",
    "downup:8": "downup:8",
    "gaussian:40/255+occlusion:20x24": "gaussian:40/255\n+occlusion:20x24",
    "downup:8+stripes:10x3": "downup:8\n+stripes:10x3",
}


class Net(nn.Module):
    """A small network with a penultimate layer of two numbers."""

    def __init__(self, classes: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2),
        )  # fmt: skip
        self.head = nn.Linear(2, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x - 0.3)


def trained(method: str, images: Tensor, labels: Tensor, classes: int) -> Net:
    """The network after training by "normal", "both" or "discriminative"."""
    torch.manual_seed(0)
    net = Net(classes)
    criterion = DiscriminativeLoss(classes, 2, radius=0.5, margin=3.0)
    optimizer = torch.optim.Adam(net.parameters())
    steps = EPOCHS * math.ceil(len(images) / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(images)).split(64):
            x, y = images[index], labels[index]
            z = net.features(x)
            loss = F.cross_entropy(net.head(z), y)
            if method != "normal":
                z_noisy = net.features(NOISE(x))
                if method == "both":
                    loss = (loss + F.cross_entropy(net.head(z_noisy), y)) / 2
                else:
                    loss = loss + criterion(z, y, net.head, z_noisy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def features(classes: int = 5) -> Figure:
    """Where three ways of training put clean and noisy test images."""
    digits = load_digits(n_class=classes)
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)  # pyright: ignore
    labels = torch.tensor(digits.target)  # pyright: ignore
    test = torch.arange(len(images)) % 3 == 0
    noisy = NOISE(images[test], PerSample(keys(0, torch.arange(int(test.sum())))))
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    for ax, (method, title) in zip(
        figure.subplots(1, 3),
        {
            "normal": "cross-entropy on clean images",
            "both": "cross-entropy on clean and noisy images",
            "discriminative": "the discriminative loss",
        }.items(),
        strict=True,
    ):
        net = trained(method, images[~test], labels[~test], classes)
        with torch.no_grad():
            right = net.head(net.features(noisy)).argmax(1) == labels[test]
            clean_z, noisy_z = net.features(images[test]), net.features(noisy)
        _plane(ax, net, clean_z, noisy_z, labels[test], classes)
        ax.set_title(f"{title}\n{100 * right.float().mean():.1f} % right at σ=0.2", fontsize=10)
    return figure


def _plane(ax: Axes, net: Net, clean: Tensor, noisy: Tensor, labels: Tensor, classes: int) -> None:
    """Features on the decision regions of the head."""
    colours = class_colours(classes)
    both = torch.cat([clean, noisy])
    low, high = both.quantile(0.005, 0), both.quantile(0.995, 0)
    middle, half = (low + high) / 2, 0.62 * float((high - low).max())
    x, y = (np.linspace(float(m) - half, float(m) + half, 300) for m in middle)
    grid = torch.tensor(np.stack(np.meshgrid(x, y), -1), dtype=torch.float32).view(-1, 2)
    with torch.no_grad():
        region = net.head(grid).argmax(1).view(300, 300).numpy()
    ax.contourf(x, y, region, np.arange(classes + 1) - 0.5, colors=colours, alpha=0.13)
    for c in range(classes):
        ax.plot(*noisy[labels == c].T, ".", color=colours[c], ms=3, alpha=0.35)
        ax.plot(*clean[labels == c].T, "o", color=colours[c], ms=3.2, mec="white", mew=0.3)
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), xticks=[], yticks=[], aspect="equal")


def perturbations() -> Figure:
    """One photograph under every perturbation, with its text."""
    picture = torch.tensor(load_sample_image("flower.jpg")).permute(2, 0, 1)[None].float() / 255
    image = F.interpolate(picture, size=(160, 240), mode="bilinear", antialias=True).clamp(0, 1)
    figure = Figure(figsize=(10.5, 4.1), layout="constrained")
    for ax, (text, label) in zip(figure.subplots(2, 4).flat, SHOWN.items(), strict=True):
        shown = perturb.parse(text)(image, PerSample(keys(0, torch.arange(1))))
        ax.imshow(shown[0].permute(1, 2, 0).numpy())
        ax.set_title(label, fontsize=9, family="monospace")
        ax.axis("off")
    return figure


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m tools.pictures FOLDER", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the same picture on every machine of a kind
    for name, figure in (("features", features()), ("perturbations", perturbations())):
        figure.savefig(Path(argv[0]) / f"{name}.png", dpi=110, facecolor="white")
        print(Path(argv[0]) / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
