"""Tools around the paper's experiments: weights under other names, the authors' script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tools import authors_code, efficientnet_lite0


def test_tensors_are_renamed_in_order_and_checked_by_shape():
    source = {"_stem.weight": torch.ones(2, 3), "_fc.bias": torch.zeros(4)}
    target = {"conv.weight": torch.empty(2, 3), "classifier.bias": torch.empty(4)}
    renamed = efficientnet_lite0.renamed(source, target)
    assert list(renamed) == list(target)
    assert torch.equal(renamed["conv.weight"], source["_stem.weight"])
    with pytest.raises(ValueError, match=r"_fc\.bias in the file has shape \(4,\)"):
        efficientnet_lite0.renamed(source, {**target, "classifier.bias": torch.empty(5)})
    with pytest.raises(ValueError, match="has 2 tensors, expected 1"):
        efficientnet_lite0.renamed(source, {"conv.weight": torch.empty(2, 3)})


ROUTINES = """
def accuracy_evaluation(loader, model, device):
    return sum(len(y) for _, y in loader) / 100
"""
SCRIPT = """
import torch, torchvision
from torchvision import transforms
from training_routines import accuracy_evaluation
train_dataset = torchvision.datasets.CIFAR10('dataset', train=True, download=False)
test_dataset = torchvision.datasets.CIFAR10('dataset', train=False, download=False)
train_dataset.transform = test_dataset.transform = transforms.ToTensor()
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=16, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=16, shuffle=False)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
schedule = dict(milestones=[60, 120, 160])
epochs = 200
for t in range(epochs):
    assert sum(len(y) for _, y in train_loader) == 40
    accuracy_evaluation(test_loader, model, 'cpu')
torch.save(schedule, 'saved')
assert schedule == dict(milestones=[1, 2])
"""


def test_the_authors_script_runs_shortened_and_its_network_is_tested(tmp_path: Path, monkeypatch):
    code = tmp_path / "checkout" / "cifar10"
    code.mkdir(parents=True)
    (code / "normal_training.py").write_text(SCRIPT)
    (code / "training_routines.py").write_text(ROUTINES)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "training_routines", raising=False)
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    data = tmp_path / "cifar10.npz"
    np.savez(data, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    monkeypatch.chdir(tmp_path)
    authors_code.train(
        tmp_path / "checkout", data, Path("new/result.json"), epochs=3, every=2, draws=1, workers=0
    )
    content = json.loads((tmp_path / "new" / "result.json").read_text())
    assert [test["epoch"] for test in content["tests"]] == [1, 2, 3]
    assert [test["clean"] for test in content["tests"]] == [40.0] * 3
    assert ["accuracy" in test for test in content["tests"]] == [False, True, True]
    assert "gaussian:16/255" in content["tests"][-1]["accuracy"]
    assert Path.cwd() == tmp_path
    assert not (tmp_path / "saved").exists()
    monkeypatch.delitem(sys.modules, "training_routines")


def test_length_noise_and_milestones_change_and_a_script_of_another_form_is_refused(tmp_path: Path):
    script = tmp_path / "stability_training.py"
    script.write_text("epochs = 200; milestones=[60, 120, 160]; AddGaussianNoise(0.06)")
    changed = authors_code._changed(script, 20, 0.15, scale_milestones=True)
    assert changed == "epochs = 20; milestones=[6, 12, 16]; AddGaussianNoise(0.15)"
    kept = authors_code._changed(script, 3, 0.06, scale_milestones=False)
    assert kept == "epochs = 3; milestones=[60, 120, 160]; AddGaussianNoise(0.06)"
    script.write_text("epochs = 100")
    with pytest.raises(ValueError, match="0 lines with 'epochs = 200', expected one"):
        authors_code._changed(script, 20, 0.06, scale_milestones=True)
