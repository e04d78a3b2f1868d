"""A model to give away: a folder with its weights, settings and model card, which `noiseproof.load`
opens on any machine. It is a run folder without what only the lab needs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from noiseproof.lab.config import Config
from noiseproof.lab.deploy.card import card, data_name, robustness
from noiseproof.lab.deploy.load import PixelClassifier
from noiseproof.lab.deploy.model_folders import refuse_run_folder
from noiseproof.lab.files import write_atomically
from noiseproof.lab.runs import RunFolder

_FACTS = ("classes", "size", "mean", "std", "fingerprint", "samples", "finished", "best", "seconds")


def save_folder(model: PixelClassifier, folder: str | Path, *, half: bool = False) -> Path:
    """Writes config.json, model.safetensors and README.md; returns the folder.

    Nothing in them names this machine: data and pretrained weights lose their paths, and the
    environment and the command line are left out.

    Args:
        model: a loaded model.
        folder: where to write; created if need be.
        half: store the weights of layers in 16 bits, which halves the file. Vectors, such as
            biases and batch-norm statistics, stay in 32 bits; `load` computes in 32 bits.
    """
    refuse_run_folder(model.run.path, folder)
    if ".py:" in (network := model.run.config.model.model):
        raise ValueError(
            f"only {os.path.basename(network)} can build the network of {model.run.name}, which a "
            "shared folder does not hold; export it with --format onnx or torch-export"
        )
    folder, run = Path(os.path.abspath(folder)), model.run
    facts = {name: run.info[name] for name in _FACTS if name in run.info}
    facts |= {"robustness": robustness(run, model.weights), "weights_note": model.note}
    shared = RunFolder(folder, _without_paths(run, folder.name), facts)
    state = model.classifier.state_dict()
    shared.save_weights("last", {k: _halved(v) for k, v in state.items()} if half else state)
    shared.save_config()
    write_atomically(folder / "README.md", card(model, folder.name))
    return folder


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() and tensor.squeeze().ndim > 1 else tensor


def _without_paths(run: RunFolder, name: str) -> Config:
    config = run.config
    weights = config.model.weights  # their normalisation is in the state dict
    return replace(
        config,
        data=replace(config.data, data=data_name(run), data_dir="data"),
        model=replace(config.model, weights=weights and os.path.basename(weights)),
        run=replace(config.run, output="runs", name=name, resume=False),
    )
