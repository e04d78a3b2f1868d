"""Noise tolerance: bisection against a known threshold and against direct search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from noiseproof import draws
from noiseproof.cli.main import run as main
from noiseproof.lab.evaluation.tolerance import DRAWS, KEPT, STEPS, noise_tolerance
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from tests.flat import Flat, digits


def kept_levels(model, image: Tensor, seed: int) -> list[int]:
    """The levels at which the answer is kept, by testing all of them one by one."""
    source = draws.PerSample(draws.keys(seed, torch.arange(DRAWS)))
    noise = draws.normal((DRAWS, *image.shape), image.new_empty(DRAWS, *image.shape), source)
    answer = model(image[None]).argmax()
    same = [
        model((image + level / STEPS * noise).clamp(0, 1)).argmax(1) == answer
        for level in range(STEPS + 1)
    ]
    return [level for level, each in enumerate(same) if int(each.sum()) >= KEPT]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[RunFolder]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "flat", Flat)
        config = digits(tmp_path_factory.mktemp("runs"), method="both", val_share=0.0)
        yield train(config, progress=False)


def test_a_pixel_at_a_distance_from_the_threshold_has_a_known_tolerance():
    """The answer is lost where the second strongest of the ten draws crosses the threshold."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([0.5 - x[:, 0, 0, 0], x[:, 0, 0, 0] - 0.5], 1)

    distance = torch.tensor([0.0301, 0.1101, 0.2003])
    images = (0.5 - distance).view(-1, 1, 1, 1)
    source = draws.PerSample(draws.keys(3, torch.arange(DRAWS)))
    noise = draws.normal((DRAWS, 1, 1, 1), torch.empty(DRAWS, 1, 1, 1), source).flatten()
    second = noise.sort().values[-2]  # one draw of ten may change the answer
    expected = (STEPS * distance / second).floor() / STEPS
    assert torch.equal(noise_tolerance(model, images, seed=3), expected.clamp(max=1))


def test_a_model_that_never_changes_its_answer_tolerates_all():
    def model(x: Tensor) -> Tensor:
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    assert noise_tolerance(model, torch.rand(3, 1, 4, 4)).tolist() == [1.0] * 3


def test_bisection_agrees_with_direct_search_on_a_trained_model(run: RunFolder):
    model = run.model()
    images = run.dataset().test.pixels[:12].float() / 255
    with torch.no_grad():
        found = (STEPS * noise_tolerance(model, images, seed=5)).round().int().tolist()
        searched = [kept_levels(model, image, seed=5) for image in images]
    for level, kept in zip(found, searched, strict=True):
        assert level in kept
        assert level + 1 not in kept
    assert sum(a == max(b) for a, b in zip(found, searched, strict=True)) >= 11
    assert len(set(found)) > 5
    assert torch.equal(noise_tolerance(model, images[3:4], 5), torch.tensor(found[3:4]) / STEPS)
    assert noise_tolerance(model, images, 6).tolist() != noise_tolerance(model, images, 5).tolist()


def test_the_command_shows_the_tolerance_of_each_photograph(run, tmp_path: Path, capsys):
    pixels, names = run.dataset().test.pixels[:5], []
    for i, image in enumerate(pixels[:, 0]):
        names.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(image.numpy()).save(names[-1])
    out = tmp_path / "answers.csv"
    words = ["predict", str(run.path), *names, "--tolerance", "--noise-seed", "2"]
    assert main([*words, "--out", str(out), "--device", "cpu"]) == 0
    expected = noise_tolerance(run.model(), pixels.float() / 255, seed=2).tolist()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert rows[0] == ["file", "rank", "class", "probability", "tolerance"]
    assert [float(row[4]) for row in rows[1:]] == pytest.approx(expected)
    for line, level in zip(lines, expected, strict=False):
        assert line.endswith(f"up to σ={level:.2f}")
