"""`noiseproof tune`: a user's trained classifier, trained to be robust by the usual session."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from noiseproof.__main__ import main
from noiseproof.lab import plugins
from noiseproof.lab.comparison import slurm
from noiseproof.lab.config import Model
from noiseproof.lab.models.own_head import own_classifier
from noiseproof.lab.report import summary
from noiseproof.lab.report.results import gather
from noiseproof.lab.runs import RunFolder
from noiseproof.wrapped import Wrapped

CLASSES = ["blue", "green", "red"]
NETWORK = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                        nn.Linear(72, 12), nn.ReLU(), nn.Linear(12, 3))
    net.load_state_dict(torch.load("trained.pt", weights_only=True))
    return net

def takes(classes):
    return nn.Linear(4, classes)
"""


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Small coloured squares, one colour per class, on a random background."""
    rng = np.random.default_rng(seed)
    images = rng.integers(60, 140, (count, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(count) % 3
    for image, label in zip(images, labels, strict=True):
        image[2:6, 2:6, 2 - label] = 200
    return images, labels


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and with the weights of a network that is accurate on them."""
    folder = tmp_path_factory.mktemp("tune")
    (images, labels), (test, truth) = pictures(96, 0), pictures(60, 1)
    np.savez(
        folder / "squares.npz", train_images=images, train_labels=labels, test_images=test,
        test_labels=truth, classes=CLASSES,
    )  # fmt: skip
    (folder / "network.py").write_text(NETWORK)
    names: dict = {"torch": torch}
    exec(
        NETWORK.replace(
            '    net.load_state_dict(torch.load("trained.pt", weights_only=True))\n', ""
        ),
        names,
    )
    torch.manual_seed(0)
    net = names["make"]()
    x, y = torch.tensor(images).permute(0, 3, 1, 2) / 255 - 0.5, torch.tensor(labels)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(30):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (net.eval()(x).argmax(1) == y).all()
    torch.save(net.state_dict(), folder / "trained.pt")
    return folder


ARGUMENTS = ["--data", "squares.npz", "--epochs", "2", "--device", "cpu", "--noise",
             "gaussian:0..0.2", "--batch-size", "32"]  # fmt: skip
NORMALISED = ["--mean", "0.5", "0.5", "0.5", "--std", "1", "1", "1"]


@pytest.fixture(scope="module")
def tuned(trained: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)
        patch.setattr(plugins, "_loaded", {})
        words = ["tune", "network.py:make", *ARGUMENTS, *NORMALISED, "--method", "discriminative"]
        assert main(words) == 0
    return trained / "runs"


def test_a_network_from_a_function_is_tuned_and_compared_with_itself(tuned: Path):
    before, after = (RunFolder.open(tuned / f"squares-{w}-s0") for w in ("before", "tuned"))
    weights = torch.load(tuned.parent / "trained.pt", weights_only=True)
    kept, changed = (load_file(run.weights_path()) for run in (before, after))
    assert kept.keys() == changed.keys() == weights.keys()  # so they load into the user's network
    assert all(torch.equal(kept[name], weights[name]) for name in weights)
    assert not torch.equal(changed["6.weight"], weights["6.weight"])
    for run in (before, after):
        rows = run.evaluation()
        assert {row["perturbation"] for row in rows} >= {"clean", "gaussian:8/255"}
    assert len(after.metrics()) == 2
    assert before.info["before_tuning"]
    assert after.config.model.model == str(tuned.parent / "network.py:make")
    command = after.info["command"]
    assert command.startswith("noiseproof tune --recipe tune network.py:make")


def test_a_run_folder_never_has_a_file_run(tuned: Path, capsys: pytest.CaptureFixture[str]):
    run = str(tuned / "squares-tuned-s0")
    assert main(["evaluate", run, "--perturb", "gaussian:0.3", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "a file is run only if the command names it: add --plugin" in error
    named = error.split("add --plugin ")[1].split(",")[0]
    assert named == f"{tuned.parent / 'network.py'}:make"


@pytest.mark.long
@pytest.mark.usefixtures("here")
@pytest.mark.skipif(sys.platform == "win32", reason="submitit needs POSIX signals")
def test_a_job_of_a_cluster_does_the_same(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "_CLUSTER", "local")  # submitit's processes in place of SLURM
    monkeypatch.setattr("shutil.which", lambda _: "srun")
    words = ["tune", "network.py:make", *ARGUMENTS, *NORMALISED, "--method", "discriminative"]
    words += ["--launcher", "slurm", "--output", "cluster"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "squares-tuned-s0: submitted as SLURM job" in printed
    assert "squares-before-s0" in printed.partition("done in")[2]  # the table
    for name in ("squares-before-s0", "squares-tuned-s0"):
        run, same = RunFolder.open(f"cluster/{name}"), RunFolder.open(tuned / name)
        assert run.evaluation()[-1]["value"] == same.evaluation()[-1]["value"]
    assert main(words) == 2
    assert "already exists: add --resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "submitted" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("here")
@pytest.mark.skipif(sys.platform == "win32", reason="submitit needs POSIX signals")
def test_what_a_job_refuses_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "_CLUSTER", "local")
    monkeypatch.setattr("shutil.which", lambda _: "srun")
    torch.save({}, "empty.pt")
    words = ["tune", "empty.pt", "--model", "resnet18", *ARGUMENTS, "--output", "refused"]
    assert main([*words, "--launcher", "slurm"]) == 1
    printed = capsys.readouterr().out
    assert "squares-tuned-s0: failed after" in printed
    assert "empty.pt does not fit: it lacks conv1.weight" in printed
    assert not any(Path("refused").glob("*/config.json"))


@pytest.mark.usefixtures("here")
def test_settings_may_come_from_a_file(capsys: pytest.CaptureFixture[str]):
    Path("settings.yaml").write_text("model: timm:resnet\nlr: 0.01\nlauncher: processes\n")
    words = ["trained.pt", "--config", "settings.yaml"]
    assert "timm:resnet: Unknown model" in refusal(words, capsys)
    Path("settings.yaml").write_text("lr: 0.01\n")
    assert "needs --model NAME" in refusal(words, capsys)


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]):
    assert "tune needs a model" in refusal([], capsys)
    assert main(["tune", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: noiseproof tune MODEL [flags]")


def test_it_can_be_tested_and_analysed_like_any_run(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tuned.parent)
    words = ["runs/squares-tuned-s0", "--plugin", "network.py:make", "--device", "cpu"]
    assert main(["evaluate", *words, "--perturb", "gaussian:0.3"]) == 0
    parts = ["--parts", "curvature", "separation", "--samples", "12", "--probes", "2"]
    assert main(["analyse", *words, *parts, "--stages", "all"]) == 0
    model = RunFolder.open(words[0]).model()
    assert isinstance(model, Wrapped)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 3)
    assert "σ=0.3" in capsys.readouterr().out
    assert main(["card", *words[:3]]) == 0
    assert "| σ=0.3 |" in Path(words[0], "README.md").read_text(encoding="utf-8")


def test_its_report_does_not_speak_of_the_model_before_as_trained_here(tuned: Path):
    before, after = (RunFolder.open(tuned / f"squares-{x}-s0") for x in ("before", "tuned"))
    results = gather([before, after])
    assert "trained on them elsewhere is not known" in summary.accuracy_of(results)
    first, *others = summary.paragraph(results)
    assert first.startswith("`tuned` was trained once on squares (")
    assert first.endswith(". `before` was trained elsewhere: the model before tuning.")
    assert not [sentence for sentence in others if "One training took" in sentence]
    assert list(results.training_seconds) == ["tuned"]
    (alone, *_) = summary.paragraph(gather([before]))
    assert "was trained elsewhere, and tested on 60 images of squares" in alone


@pytest.mark.usefixtures("here")
def test_its_model_card_tells_tuning_from_training(tuned: Path):
    cards = {}
    for name in ("before", "tuned"):
        words = ["card", f"runs/squares-{name}-s0", "--plugin", "network.py:make"]
        assert main(words) == 0
        cards[name] = (tuned / f"squares-{name}-s0" / "README.md").read_text()
        assert "An image classifier (network.py:make, 0.00 million parameters)" in cards[name]
        assert str(tuned.parent) not in cards[name]
    assert "parameters), trained elsewhere; these are its\nown weights" in cards["before"]
    assert "trained elsewhere, then tuned on\n" in cards["tuned"]
    assert "epochs" not in cards["before"]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["tune", *words, *ARGUMENTS, "--output", "others"]) == 2
    assert not any(Path("others").glob("*/config.json"))
    return capsys.readouterr().err


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


@pytest.mark.usefixtures("here")
def test_classes_must_be_those_of_the_data(capsys: pytest.CaptureFixture[str]):
    weights = torch.load("trained.pt", weights_only=True)
    order = torch.tensor([1, 0, 2])
    swapped = {k: v[order] if k.startswith("6.") else v for k, v in weights.items()}
    torch.save(swapped, "swapped.pt")
    Path("swapped.py").write_text(NETWORK.replace("trained.pt", "swapped.pt"))
    error = refusal(["swapped.py:make", *NORMALISED], capsys)
    assert "seem to be in another order" in error
    assert "blue as green, green as blue. The classes of squares, in order: blue, green" in error
    Path("more.py").write_text(
        NETWORK.replace("(12, 3)", "(12, 5)").replace("net.load", "if 0: net.load")
    )
    error = refusal(["more.py:make", *NORMALISED], capsys)
    assert "more.py:make has 5 classes, and the data have 3" in error
    Path("random.py").write_text(
        NETWORK.replace("net.load", "net[6].weight.data *= 0; 0 and net.load")
    )
    error = refusal(["random.py:make", *NORMALISED], capsys)
    assert "of the clean test images correctly, and the most frequent class has 33.3%" in error


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["network.py:make"], "needs --mean and --std of its training images"),
        (["network.py:none", *NORMALISED], "network.py:none: the file defines no function 'none'"),
        (["none.py:make"], "none.py:make does not exist; expected a Python file"),
        (["trained.pt"], "needs --model NAME, the network whose weights these are"),
        (["none.pt", "--model", "resnet18"], "none.pt does not exist; expected a file of weights"),
        (["trained.pt", "--model", "resnet18"], "trained.pt does not fit: it lacks "),
        (["trained.pt", "--model", "resnet"], "torchvision has no classifier 'resnet'"),
        (
            ["trained.pt", "--model", "fcn_resnet50"],  # it segments images
            "torchvision has no classifier 'fcn_resnet50' (did you mean 'resnet50'",
        ),
        (
            ["network.py:takes", *NORMALISED],
            "takes is called without arguments: missing a required argument: 'classes'",
        ),
        (["trained.pt", "--model", "timm:resnet"], "timm:resnet: Unknown model"),
        (["network.py:make", "--mean", "0.5"], "--mean and --std must have the same number"),
        (["network.py:make", "--mean", "0", "--std", "0"], "with --std above 0, got 0.0 and 0.0"),
    ],
)
def test_other_models_are_refused(words, message, capsys: pytest.CaptureFixture[str]):
    error = refusal(words, capsys)
    assert message in error
    assert "The classes of" not in error


def test_a_state_dict_of_timm_is_loaded_with_its_normalisation(tmp_path: Path):
    net: Any = timm.create_model("test_resnet", num_classes=3)
    torch.save({"state_dict": net.state_dict()}, tmp_path / "net.pt")
    config = Model("timm:test_resnet", weights=str(tmp_path / "net.pt"), head="own")
    model = own_classifier(config, num_classes=3, size=(1, 16, 16)).eval()
    assert model.mean.flatten().tolist() == pytest.approx(net.pretrained_cfg["mean"])
    x = torch.rand(2, 1, 16, 16)  # grey, for a network of three channels
    mean, std = (torch.tensor(net.pretrained_cfg[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
    assert torch.equal(model(x), net.eval()((x - mean) / std))
    with pytest.raises(ValueError, match=r"net.pt has 3 classes, and the data have 4"):
        own_classifier(config, num_classes=4, size=(1, 16, 16))


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=3).eval()


def read_own(path: Path) -> Wrapped:
    config = Model("timm:test_resnet", weights=str(path), head="own")
    return own_classifier(config, num_classes=3, size=(3, 16, 16)).eval()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "student.net."])
@pytest.mark.parametrize("entry", ["", "state_dict", "model_state_dict", "net"])
def test_weights_are_found_in_checkpoints_under_any_prefix(
    prefix: str, entry: str, small: Any, tmp_path: Path
):
    state = {f"{prefix}{name}": value for name, value in small.state_dict().items()}
    if prefix:
        state["criterion.centroids"] = torch.zeros(3, 4)  # of a Lightning module
    options = Namespace(lr=0.1)  # of timm's own training
    torch.save({entry: state, "epoch": 3, "args": options} if entry else state, tmp_path / "a.pt")
    model, x = read_own(tmp_path / "a.pt"), torch.rand(2, 3, 16, 16)
    assert torch.equal(model(x), small((x - model.mean) / model.std))


def test_weights_that_are_not_found_are_described(small: Any, tmp_path: Path):
    state, path = small.state_dict(), tmp_path / "a.pt"
    torch.save({"weights": state, "epoch": 3}, path)
    with pytest.raises(ValueError, match=r"contain a state dict .*, got weights, epoch"):
        read_own(path)
    torch.save({f"{part}.{k}": v for part in ("ema", "net") for k, v in state.items()}, path)
    with pytest.raises(ValueError, match=r"several such networks, .* with ema\. and net\."):
        read_own(path)
    other = {k: v[..., None] if k.startswith("layer1") else v for k, v in state.items()}
    torch.save(other, path)
    with pytest.raises(ValueError, match=r"mismatch for layer1.*\d more do not fit\.\Z") as caught:
        read_own(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 5000])
def test_a_file_that_is_cut_off_is_named_as_such(size: int, small: Any, tmp_path: Path):
    torch.save(small.state_dict(), tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:size])
    with pytest.raises(ValueError, match=r"a\.pt cannot be read as weights: it is cut off, or"):
        read_own(tmp_path / "a.pt")


def test_a_wrapped_network_keeps_its_normalisation(tmp_path: Path):
    text = NETWORK.replace("import torch\n", "import torch\nimport noiseproof\n")
    text = text.replace(
        '    net.load_state_dict(torch.load("trained.pt", weights_only=True))\n', ""
    )
    file = tmp_path / "wrapped.py"
    file.write_text(text.replace("return net", "return noiseproof.wrap(net, [0.1] * 3, [2.0] * 3)"))
    plugins.load_plugins([f"{file}:make"])
    model = own_classifier(Model(f"{file}:make", head="own"), num_classes=3, size=(3, 8, 8))
    x: Tensor = torch.rand(2, 3, 8, 8)
    assert torch.equal(model.eval()(x), model.net((x - 0.1) / 2))
