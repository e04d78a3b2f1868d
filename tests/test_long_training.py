"""A long training holds no more memory and no more open files than a short one."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import pytest
import torch

from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits

OPEN = Path("/proc/self/fd")
WARM_UP, EPOCHS = 5, 30


@pytest.mark.skipif(not OPEN.exists(), reason="needs Linux's /proc")
def test_tensors_memory_and_open_files_do_not_grow_with_the_epochs(tmp_path, monkeypatch):
    """`docs/testing.md` has the numbers of 2,000 epochs."""
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    files, tensors, blocks, resident = [], [], [], []

    def count(run, session) -> None:
        files.append(len(list(OPEN.iterdir())))
        if session.epoch in (WARM_UP, WARM_UP + EPOCHS):
            gc.collect()
            tensors.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
            blocks.append(sys.getallocatedblocks())
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * resource.getpagesize() / 2**20)

    config = digits(tmp_path, epochs=WARM_UP + EPOCHS, checkpoint_minutes=0.0)  # after every epoch
    train(config, progress=False, each_epoch=count)
    assert len(files) == WARM_UP + EPOCHS
    assert len(set(files[WARM_UP:])) == 1
    assert tensors[1] <= tensors[0]  # fewer if those of earlier tests are freed
    assert blocks[1] - blocks[0] < 50 * EPOCHS  # of Python's allocator; about 300 were measured
    assert resident[1] - resident[0] < 0.5 * EPOCHS  # MiB, also what other allocators hold
