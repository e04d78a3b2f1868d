"""Robust training with timm's pieces: its network, transforms, optimiser, schedule and average.

    python examples/timm_training.py FOLDER

FOLDER has one folder of images per class. Needs torch, torchvision and timm.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if noiseproof is not installed
from noiseproof import accuracy, objectives, wrap


def main(folder: str, name: str = "resnet18", epochs: int = 10, pretrained: bool = True) -> Any:
    torch.manual_seed(0)
    classes = ImageFolder(folder).classes
    net = timm.create_model(name, pretrained=pretrained, num_classes=len(classes))
    settings = resolve_data_config({}, model=net)
    # `wrap` normalises, after the noise, so the transforms must not: mean 0, std 1.
    plain = {**settings, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    augmented: Any = create_transform(**plain, is_training=True, auto_augment="rand-m9-mstd0.5")
    unchanged: Any = create_transform(**plain)
    fit, test = ImageFolder(folder, augmented), ImageFolder(folder, unchanged)
    order = torch.randperm(len(fit)).tolist()
    held_out = len(order) // 5
    fit, test = Subset(fit, order[held_out:]), Subset(test, order[:held_out])
    model = wrap(net, settings["mean"], settings["std"])
    objective = objectives.Both("gaussian:0..60/255")
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-4, weight_decay=0.05)
    average = ModelEmaV3(model, decay=0.999, use_warmup=True)
    loader = DataLoader(fit, batch_size=min(64, len(fit)), shuffle=True, drop_last=True)
    schedule: Any = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=0, updates_per_epoch=len(loader)
    )[0]
    step = 0
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss = objective(model, objectives.Batch(images, labels)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            average.update(model, step=step)
        schedule.step(epoch + 1)
    results = accuracy(average.module, DataLoader(test, 64), ["clean", "gaussian:40/255"])
    for condition, result in results.items():
        print(f"{condition}: {result}")
    return results


if __name__ == "__main__":
    main(sys.argv[1])
