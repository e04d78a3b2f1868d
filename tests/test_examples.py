"""examples/ and docs/own-loop.md: each example is short, runs, and is quoted by the page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own-loop.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short_and_quoted_by_the_page_not_copied():
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 80
        assert f'--8<-- "examples/{path.name}"' in PAGE
    quoted = re.findall(r'--8<-- "(.*)"', PAGE)
    assert sorted(quoted) == [f"examples/{path.name}" for path in EXAMPLES]


def test_the_python_of_the_page_runs():
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["transform"](Image.new("RGB", (40, 40), "red")).shape == (3, 32, 32)
    assert names["loss"].requires_grad


@pytest.mark.filterwarnings("ignore")  # lightning's, about its own logs, workers and devices
def test_the_lightning_module_keeps_its_centroids_in_the_checkpoint(tmp_path: Path):
    lightning_module = example("lightning_module")
    module, checkpoint = lightning_module.main(1, str(tmp_path), limit_train_batches=4)
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    criterion = module.objective.criterion
    assert criterion.seen.all()
    assert torch.equal(state["objective.criterion.centroids"], criterion.centroids)
    assert "model.fc.weight" in state  # by the names of the network
    again = lightning_module.Robust(type(module.model.net)([4, 8, 4], [24, 48, 96, 192, 1024], 10),
                                    10, "gaussian:0.1")  # fmt: skip
    again.load_state_dict(state)
    assert torch.equal(again.model.head.weight, module.model.head.weight)


def test_timm_s_pieces_train_a_robust_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, colour in (("bright", 200), ("dark", 40)):
        for k in range(10):
            path = tmp_path / name / f"{k}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (36, 36), (colour + k, colour, colour)).save(path)
    results = example("timm_training").main(str(tmp_path), "test_resnet", 1, pretrained=False)
    assert results["clean"].correct.shape == (1, 4)
    assert capsys.readouterr().out.startswith("clean: ")
