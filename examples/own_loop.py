"""The discriminative loss in your own training loop: scikit-learn's digits, a small network.

    python examples/own_loop.py

Trains the same network twice, with cross-entropy alone and with the loss added, and prints the
accuracy of both on clean and on noisy test images. Needs torch and scikit-learn.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if noiseproof is not installed
from noiseproof import DiscriminativeLoss, accuracy, perturb, wrap
from noiseproof.wrapped import Wrapped


def network() -> Wrapped:
    """Takes pixels, and gives access to its penultimate layer: `features`, then `head`."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.Linear(64, 10),
    )  # fmt: skip
    return wrap(net, mean=[0.3], std=[1.0])


def train(images: Tensor, labels: Tensor, *, ours: bool, epochs: int) -> Wrapped:
    torch.manual_seed(0)
    net = network()
    criterion = DiscriminativeLoss(num_classes=10, feature_dim=64)
    noise = perturb.Gaussian(0.2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    steps = epochs * math.ceil(len(images) / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            x, y = images[batch], labels[batch]
            z = net.features(x)
            loss = F.cross_entropy(net.head(z), y)
            if ours:
                loss = loss + criterion(z, y, net.head, net.features(noise(x)))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)  # needed at this learning rate
            optimizer.step()
            schedule.step()
    return net


def main(epochs: int = 16) -> dict[str, tuple[float, float]]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    fit, test = order[540:], order[:540]
    results = {}
    print(f"{'accuracy in %':32} {'clean':>6} {'σ = 0.3':>8}")
    for name, ours in (("cross-entropy", False), ("with DiscriminativeLoss", True)):
        net = train(images[fit], labels[fit], ours=ours, epochs=epochs)
        accuracies = accuracy(net, (images[test], labels[test]), ["clean", "gaussian:0.3"])
        clean, noisy = (100 * a.mean for a in accuracies.values())
        results[name] = (clean, noisy)
        print(f"{name:32} {clean:6.1f} {noisy:8.1f}")
    return results


if __name__ == "__main__":
    main()
