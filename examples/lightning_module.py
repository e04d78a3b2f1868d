"""The discriminative loss in a LightningModule: digits, a network of torchvision.

    python examples/lightning_module.py

Needs torch, torchvision, lightning and scikit-learn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if noiseproof is not installed
from noiseproof import DiscriminativeLoss, accuracy, objectives, wrap


class Robust(lightning.LightningModule):
    """Any classifier. The centroids of the loss are buffers of this module, so checkpoints hold
    them; with several processes, centroids and gradients are those of the global batch."""

    def __init__(self, net: torch.nn.Module, num_classes: int, noise: str):
        super().__init__()
        self.model = wrap(net, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        feature_dim = self.model.head.weight.shape[1]
        criterion = DiscriminativeLoss(num_classes, feature_dim, radius=0.2, margin=0.5)
        self.objective = objectives.Spheres(criterion, noise)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch  # pixels in [0, 1]
        outcome = self.objective(self.model, objectives.Batch(images, labels))
        self.log_dict(outcome.terms)
        return outcome.loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    data: Any = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    images = torch.nn.functional.interpolate(images, (16, 16))
    labels = torch.tensor(data.target)
    return TensorDataset(images[400:], labels[400:]), (images[:400], labels[:400])


def main(epochs: int = 10, folder: str = "logs", **options: Any) -> tuple[Robust, str]:
    lightning.seed_everything(0, verbose=False)
    fit, test = digits()
    net = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    module = Robust(net, num_classes=10, noise="gaussian:0..0.3")
    trainer = lightning.Trainer(max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(fit, batch_size=64, shuffle=True, drop_last=True))
    for name, result in accuracy(module.model, test, ["clean", "gaussian:0.3"]).items():
        print(f"{name}: {result}")
    checkpoint = f"{folder}/robust.ckpt"
    trainer.save_checkpoint(checkpoint)
    return module, checkpoint


if __name__ == "__main__":
    main()
