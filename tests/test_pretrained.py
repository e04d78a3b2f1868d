"""Other libraries' backbones: weights from files and downloads, and timm behind a stand-in."""

from __future__ import annotations

import logging
import re
import sys
import types
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from noiseproof.lab.config import Model
from noiseproof.lab.models import pretrained
from noiseproof.lab.models.classifier import Classifier, build_classifier

DIGITS, COLOUR = (1, 8, 8), (3, 64, 64)
IMAGENET = [0.485, 0.456, 0.406]


def make(
    name: str,
    size: tuple[int, int, int] = COLOUR,
    weights: str | Path | None = None,
    load: bool = True,
) -> Classifier:
    torch.manual_seed(0)
    config = Model(model=name, feature_dim=16, weights=str(weights) if weights else None)
    mean, std = [0.5] * size[0], [1.0] * size[0]
    model = build_classifier(config, num_classes=5, size=size, mean=mean, std=std, load=load)
    assert isinstance(model, Classifier)
    return model


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".safetensors.pt"])
def test_a_file_is_loaded_into_the_backbone_and_may_have_any_classifier(
    tmp_path: Path, suffix: str
):
    torch.manual_seed(1)
    source = torchvision.models.mobilenet_v3_small(num_classes=7)
    path = tmp_path / f"weights{suffix}"
    state = source.state_dict()
    if "safetensors" in suffix:  # by its content, whatever its name
        save_file(state, path)
    else:  # as a data-parallel training script would write it
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, path)
    model = make("mobilenet_v3_small", COLOUR, weights=path)
    ours = model.backbone.get_submodule("net.features").state_dict()
    theirs = source.features.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert model.backbone.dim == 576
    torch.testing.assert_close(model.mean.flatten(), torch.tensor(IMAGENET))


def test_a_file_of_another_network_is_refused_with_the_names(tmp_path: Path):
    path = tmp_path / "other.pth"
    state = torchvision.models.mobilenet_v3_small().state_dict()
    state["features.99.weight"] = state.pop("features.0.0.weight")
    torch.save(state, path)
    with pytest.raises(
        ValueError, match=r"other\.pth does not fit: it lacks features\.0\.0\.weight"
    ):
        make("mobilenet_v3_small", COLOUR, weights=path)
    state["features.0.0.weight"] = torch.zeros(16, 3, 3, 3)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"has unknown features\.99\.weight"):
        make("mobilenet_v3_small", COLOUR, weights=path)


def test_files_without_weights_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no file"):
        make("mobilenet_v3_small", COLOUR, weights=tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("not weights")
    with pytest.raises(ValueError, match=r"text\.pth cannot be read"):
        make("mobilenet_v3_small", COLOUR, weights=tmp_path / "text.pth")
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(ValueError, match=r"as written by safetensors\.torch\.save_file\("):
        make("mobilenet_v3_small", COLOUR, weights=tmp_path / "text.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth does not contain a state dict"):
        make("mobilenet_v3_small", COLOUR, weights=tmp_path / "list.pth")


def test_imagenet_weights_come_with_their_normalisation(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(2)
    state = torchvision.models.mobilenet_v3_small().state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: dict(state)
    )
    model = make("mobilenet_v3_small", (1, 64, 64), weights="imagenet").eval()
    torch.testing.assert_close(model.mean.flatten(), torch.tensor(IMAGENET))
    first = model.backbone.get_submodule("net.features.0.0")
    assert torch.equal(first.state_dict()["weight"], state["features.0.0.weight"])
    x = torch.rand(2, 1, 64, 64)
    means, stds = torch.tensor(IMAGENET), torch.tensor([0.229, 0.224, 0.225])
    seen = (x - means[:, None, None]) / stds[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(model.features(x), model.neck(model.backbone(seen)))


def test_a_failed_download_is_reported_with_the_ways_out(monkeypatch: pytest.MonkeyPatch):
    def offline(*_: object, **__: object) -> None:
        raise URLError("unreachable")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(
        ValueError, match=r"could not be downloaded .*unreachable.*--weights FILE"
    ) as caught:
        make("mobilenet_v3_small", COLOUR, weights="imagenet")
    assert "--weights none" in str(caught.value)  # from scratch is a way out too
    empty = make("mobilenet_v3_small", (1, 64, 64), weights="imagenet", load=False)
    assert empty.mean.shape == (1, 3, 1, 1)  # as trained, so that a run's state dict fits


def test_retries_of_a_download_are_logged_once_and_the_error_names_the_cache_of_timm(
    caplog: pytest.LogCaptureFixture,
):
    constants = pytest.importorskip("huggingface_hub.constants")
    logger = logging.getLogger("huggingface_hub.utils._http")

    def fail() -> None:
        for attempt in range(6):
            logger.warning("not found")
            logger.warning("Retrying [Retry %d/5].", attempt + 1)
        raise OSError("offline")

    with (
        pytest.raises(ValueError, match=re.escape(f"from {constants.HF_HUB_CACHE} if")),
        pretrained._downloading("timm:some", download=True),
    ):
        fail()
    assert caplog.messages == ["not found", "Retrying [Retry 1/5]."]
    with pytest.raises(OSError, match="offline"):
        fail()
    assert len(caplog.messages) == 14  # of other code: as they are


class FakeTimm(nn.Module):
    """What noiseproof uses of a timm model created with num_classes=0."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3)
        self.pretrained_cfg = {
            "mean": (0.1, 0.2, 0.3),
            "std": (1.0, 2.0, 3.0),
            "classifier": "fc",
        }
        self.feature_info = [{"num_chs": 6, "reduction": 1, "module": "conv"}]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.conv(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class FakeTimmWithMaps(FakeTimm):
    def forward_intermediates(self, x: Tensor, output_fmt: str = "") -> tuple[Tensor, list[Tensor]]:
        assert output_fmt == "NCHW"
        out = self.conv(x)
        return out, [out[:, :2], out]


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """A stand-in for timm; holds the arguments of each create_model."""
    calls: list[dict] = []
    kinds = {"plain": FakeTimm, "maps": FakeTimmWithMaps, "fixed": FakeTimm}
    module = types.ModuleType("timm")

    def create_model(name: str, **options: object) -> nn.Module:
        calls.append({"name": name, **options})
        channels = options["in_chans"]
        assert isinstance(channels, int)
        return kinds[name](channels)

    def get_pretrained_cfg(name: str) -> object:
        return types.SimpleNamespace(fixed_input_size=name == "fixed")

    module.__dict__.update(
        is_model=kinds.__contains__,
        list_models=lambda: list(kinds),
        get_pretrained_cfg=get_pretrained_cfg,
        create_model=create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    return calls


@pytest.mark.parametrize(("name", "widths"), [("plain", [6, 16]), ("maps", [2, 6, 16])])
def test_a_timm_model_takes_the_channels_of_the_data(
    timm: list[dict], name: str, widths: list[int]
):
    model = make(f"timm:{name}", DIGITS)
    expected = {"name": name, "pretrained": False, "num_classes": 0, "in_chans": 1}
    assert timm == [expected]
    x = torch.rand(2, *DIGITS)
    blocks = model.blocks(x)
    assert [b.shape[1] for b in blocks.values()] == widths
    assert torch.equal(blocks["features"], model.features(x))


def test_timm_weights_come_with_three_channels_and_their_normalisation(
    timm: list[dict], tmp_path: Path
):
    model = make("timm:plain", DIGITS, weights="imagenet")
    assert timm[0]["pretrained"] is True
    assert timm[0]["in_chans"] == 3
    torch.testing.assert_close(model.std.flatten(), torch.tensor([1.0, 2.0, 3.0]))
    state = {**FakeTimm(3).state_dict(), "fc.weight": torch.zeros(9, 6)}
    torch.save(state, tmp_path / "w.pt")
    filled = make("timm:plain", DIGITS, weights=tmp_path / "w.pt")
    assert torch.equal(filled.backbone.state_dict()["net.conv.weight"], state["conv.weight"])
    assert timm[1]["pretrained"] is False


def test_a_timm_model_of_fixed_size_is_built_for_the_size_of_the_images(timm: list[dict]):
    make("timm:fixed", (3, 12, 10))
    assert timm[0]["img_size"] == (12, 10)


def test_timm_names_are_checked_and_a_missing_timm_is_reported(
    timm: list[dict], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"timm has no model 'plane' \(did you mean 'plain'"):
        make("timm:plane")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r'needs timm: pip install "noiseproof\[timm\]"'):
        make("timm:plain")
