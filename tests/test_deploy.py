"""A run outside the lab: loaded, described, shared, exported. Nothing here uses a network."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import noiseproof
from noiseproof.__main__ import main
from noiseproof.lab.config import Config, Method, Model, Optim, Run
from noiseproof.lab.deploy import export as exporting
from noiseproof.lab.deploy import model_folders
from noiseproof.lab.deploy.card import card, robustness
from noiseproof.lab.deploy.load import PixelClassifier
from noiseproof.lab.deploy.share import save_folder
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.predict import pixels_of
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.smoothing import certify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    config = Config(
        model=Model(feature_dim=16),
        method=Method("both", noise="gaussian:0.3"),
        optim=Optim(epochs=2, batch_size=32),
        run=Run(output=str(tmp_path_factory.mktemp("deploy")), name="both-s0", device="cpu"),
    )
    trained = train(config, progress=False)
    trained.info["classes"][:2] = ["<b>zero</b>", "a|b"]
    trained.save_config()
    evaluate(trained, ["clean", "gaussian:0.2"], draws=2, device="cpu", progress=False)
    return trained


@pytest.fixture(scope="module")
def test_pixels(run: RunFolder) -> torch.Tensor:
    return run.dataset().test.pixels


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_SECONDS", 0.0)


def test_a_loaded_run_maps_bytes_and_floats_of_any_size_to_logits(run, test_pixels):
    model = noiseproof.load(run.path)
    assert isinstance(model, nn.Module)
    assert not any(module.training for module in model.modules())
    expected = run.model("last")(test_pixels / 255)
    assert torch.equal(model(test_pixels), expected)
    assert torch.equal(model(test_pixels.double() / 255), expected)
    assert torch.equal(model.head(model.features(test_pixels)), expected)
    larger = test_pixels[:60].repeat_interleave(3, 2).repeat_interleave(2, 3)
    assert (model(larger).argmax(1) == expected[:60].argmax(1)).float().mean() > 0.9
    with pytest.raises(ValueError, match="bytes, or floats"):
        model(test_pixels.long())
    with pytest.raises(ValueError, match="B x C x H x W"):
        model(test_pixels[0])
    with pytest.raises(ValueError, match=r"in \[0, 1\], got values .* divide them by 255"):
        model(test_pixels.float())
    certify(model, test_pixels[:9] / 255, 2.0, samples=9)  # its noise is not clipped


def test_pixels_of_another_size_become_what_files_of_that_size_do(run):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (31, 22), dtype=np.uint8))
    expected = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)) / 255
    given = torch.from_numpy(np.array(image)[None, None])
    got = noiseproof.load(run.path).pixels(given)[0, 0].numpy()
    assert np.abs(got - expected).max() < 1.01 / 255  # Pillow rounds twice


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(31, 22), (20, 47), (9, 9), (8, 8)])
def test_pixels_are_cropped_as_files_are(run, tmp_path, shape, interpolation):
    copy = RunFolder.open(shutil.copytree(run.path, tmp_path / "copy"))
    data = replace(copy.config.data, crop_share=0.75, interpolation=interpolation)
    copy.config = replace(copy.config, data=data)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    image.save(tmp_path / "image.png")
    given = torch.from_numpy(np.array(image)[None, None])
    got = PixelClassifier(copy).pixels(given)
    if shape == (8, 8):  # already as the network takes it
        assert torch.equal(got, given / 255)
    else:
        tolerance = 2 / 255  # Pillow rounds after each of two passes
        assert (got - pixels_of(copy, [tmp_path / "image.png"])).abs().max() < tolerance


def test_the_epoch_is_chosen_by_the_one_rule_and_said(run, tmp_path):
    copy = RunFolder.open(shutil.copytree(run.path, tmp_path / "copy"))
    assert noiseproof.load(copy.path).weights == "last"
    copy.info["samples"]["validation"] = 1000
    copy.save_config()
    model = noiseproof.load(copy.path)
    assert model.weights == "best"
    shared = noiseproof.load(save_folder(model, tmp_path / "shared"))
    assert shared.note == model.note == copy.weights_note("best")


def test_a_shared_folder_loads_without_its_run_and_names_no_path(run, tmp_path, test_pixels):
    model = noiseproof.load(run.path)
    folder = save_folder(model, tmp_path / "mine", half=True)
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "model.safetensors", "README.md",
    }  # fmt: skip
    text = (folder / "config.json").read_text() + (folder / "README.md").read_text()
    for secret in (str(run.path.parent), "environment", "platform"):
        assert secret not in text
    size = (folder / "model.safetensors").stat().st_size
    assert size < 0.65 * run.weights_path("last").stat().st_size
    shared = noiseproof.load(folder)
    assert next(shared.parameters()).dtype == torch.float32
    assert (shared(test_pixels) - model(test_pixels)).abs().max() < 0.05
    again = save_folder(shared, tmp_path / "again")  # the table survives
    assert "| σ=0.2 |" in (again / "README.md").read_text()
    with pytest.raises(ValueError, match="is the run itself"):
        save_folder(model, run.path)
    with pytest.raises(ValueError, match="holds another run"):
        save_folder(shared, run.path)


def test_a_network_of_a_file_of_the_users_own_is_not_shared(run, tmp_path):
    model = noiseproof.load(run.path)
    network = replace(run.config.model, model="/home/me/net.py:build")
    model.run.config = replace(run.config, model=network)
    with pytest.raises(ValueError, match=r"only net.py:build can build .*--format onnx"):
        save_folder(model, tmp_path / "mine")
    assert not list(tmp_path.iterdir())


def test_the_card_has_the_measured_robustness_and_escapes_names(run):
    text = card(model := noiseproof.load(run.path))
    model.run.config = replace(run.config, optim=replace(run.config.optim, epochs=1))
    assert "for 1 epoch,\n" in card(model)
    rows = [row for row in run.evaluation() if row["perturbation"] == "clean"]
    assert f"| clean | {100 * rows[0]['value']:.1f} |" in text
    assert "over 2 noise draws" in text
    assert "&lt;b&gt;zero&lt;/b&gt;, a\\|b" in text
    assert "under the noise `gaussian:0.3`" in text


def test_the_card_of_unbalanced_test_images_has_macro_f1_and_recall(run, tmp_path):
    copy = RunFolder.open(shutil.copytree(run.path, tmp_path / "copy"))
    assert "macro-F1" not in card(noiseproof.load(copy.path))
    rows = copy.evaluation()
    for number, row in enumerate(rows):
        recall = {"a|b": 1.0, "rare": [0.25, 0.5][number % 2]}
        row["class_scores"] = {"macro_f1": 0.75, "recall": recall}
    lines = [json.dumps(row) for row in rows]
    (copy.path / "evaluation.jsonl").write_text("\n".join(lines) + "\n")
    model = noiseproof.load(copy.path)
    scores = "macro-F1 is 75.0 %, and the recall of each class, lowest first: "
    assert f"{scores}rare 25.0 %, a\\|b 100.0 %." in card(model)
    noisy = robustness(copy, "last")[1]
    assert noisy["macro_f1"] == 0.75
    assert noisy["recall"] == {"a|b": 1.0, "rare": 0.375}


def test_the_card_of_other_weights_than_the_evaluated_ones_has_no_table(run):
    assert "Not evaluated yet" in card(noiseproof.load(run.path, weights="best"))


def test_the_command_writes_a_card(run, tmp_path, capsys):
    copy = shutil.copytree(run.path, tmp_path / "copy")
    assert main(["card", str(copy)]) == 0
    assert (copy / "README.md").read_text().startswith("---\nlibrary_name: noiseproof\n")


def test_a_model_in_weights_is_found_by_name(run, tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.setattr(model_folders, "PUBLISHED", tmp_path)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    save_folder(noiseproof.load(run.path), tmp_path / "robust-digits")
    assert noiseproof.load("robust-digits").classes[2] == "2"
    with pytest.raises(ValueError, match=r"robust-digit does not exist.*did you mean 'robust-d"):
        noiseproof.load("robust-digit")
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        noiseproof.load(tmp_path / "robust-digits" / "config.json")
    image = tmp_path / "black.png"
    Image.new("L", (8, 8)).save(image)
    assert main(["predict", "robust-digits", str(image), "--device", "cpu"]) == 0
    assert str(image) in capsys.readouterr().out
    assert main(["evaluate", "robust-digits", "--perturb", "clean", "--device", "cpu"]) == 0
    assert "The results of robust-digits go to runs/robust-digits." in capsys.readouterr().err
    assert Path("runs/robust-digits/evaluation.jsonl").exists()
    for verb in ("certify --sigma 0.1 --every 500", "card", "export --format torch-export"):
        name, *flags = verb.split()
        assert main([name, "robust-digits", *flags]) == 0
    assert Path("runs/robust-digits/export/robust-digits.pt2").exists()
    published = {file.name for file in (tmp_path / "robust-digits").iterdir()}
    assert published == {"config.json", "model.safetensors", "README.md"}
    Path("runs/robust-digits/model.safetensors").write_bytes(b"other")
    assert main(["card", "robust-digits"]) == 2
    assert "runs/robust-digits is another run" in capsys.readouterr().err
    for verb in ("predict", "evaluate", "certify", "report", "export", "demo", "card"):
        flags = {"predict": [str(image)], "certify": ["--sigma", "0.1"]}.get(verb, [])
        assert main([verb, "robust-digit", *flags]) == 2
        assert "robust-digit does not exist; expected a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", model_folders.published() or [pytest.param("", marks=pytest.mark.skip)]
)
def test_published_weights_are_small_and_described(name: str):
    folder = model_folders.PUBLISHED / name
    assert (folder / "model.safetensors").stat().st_size <= 25e6
    assert "| clean |" in (folder / "README.md").read_text()
    model = noiseproof.load(name)
    assert model(torch.rand(1, *model.size)).shape == (1, len(model.classes))


class StubbedApi:
    """Keeps what would be uploaded."""

    def __init__(self, **_: Any):
        pass

    def create_repo(self, repo_id: str, **_: Any) -> StubbedApi:
        self.repo_id = repo_id
        return self

    def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
        shutil.copytree(folder_path, StubbedApi.store / repo_id)
        return f"https://example.org/{repo_id}"

    store: Path


def test_a_model_goes_to_the_hub_and_comes_back(run, tmp_path, monkeypatch, test_pixels):
    from huggingface_hub import hub_mixin

    from noiseproof.lab.deploy import hub

    monkeypatch.setattr(hub_mixin, "HfApi", StubbedApi)
    StubbedApi.store = tmp_path / "hub"
    model = hub.HubClassifier.from_pretrained(str(run.path))
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="someone/digits needs a token of the Hugging Face Hub"):
        model.push_to_hub("someone/digits")
    monkeypatch.setattr(hub, "get_token", lambda: "secret")
    assert model.push_to_hub("someone/digits") == "https://example.org/someone/digits"
    stored = StubbedApi.store / "someone" / "digits"
    assert "| σ=0.2 |" in (stored / "README.md").read_text()
    fetch = lambda name, **_: str(StubbedApi.store / name)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    fetched = noiseproof.load("hf://someone/digits")
    assert torch.equal(fetched(test_pixels), model(test_pixels))
    assert isinstance(hub.HubClassifier.from_pretrained(stored), PixelClassifier)
    config = (run.path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="is the run itself"):
        model.save_pretrained(run.path)
    assert (run.path / "config.json").read_bytes() == config


def test_a_hub_that_cannot_be_reached_is_one_sentence(run, monkeypatch):
    from huggingface_hub import HfApi, hub_mixin

    from noiseproof.lab.deploy.hub import HubClassifier

    unreachable = functools.partial(HfApi, endpoint="http://127.0.0.1:1")
    monkeypatch.setattr(hub_mixin, "HfApi", unreachable)
    model = HubClassifier.from_pretrained(str(run.path))
    with pytest.raises(ValueError, match=r"^pushing to me/digits failed: .*refused\Z"):
        model.push_to_hub("me/digits", token="secret")
    with pytest.raises(ValueError, match=r"^pushing to a/b/c failed: Repo id must be"):
        model.push_to_hub("a/b/c", token="secret")


@pytest.mark.parametrize(
    ("kind", "resize"),
    [("bytes", True), pytest.param("float", False, marks=pytest.mark.long)],
)
def test_an_onnx_file_takes_pixels_and_agrees_with_torch(
    run, tmp_path, capsys, test_pixels, kind, resize
):
    import onnx
    import onnxruntime

    path = tmp_path / "digits.onnx"
    if resize:  # as with pretrained weights
        run = RunFolder.open(shutil.copytree(run.path, tmp_path / "run"))
        run.config = replace(run.config, data=replace(run.config.data, crop_share=0.8))
        run.save_config()
    flags = ["--input", kind, "--size", "any" if resize else "fixed", "--output", str(path)]
    assert main(["export", str(run.path), *flags]) == 0
    printed = capsys.readouterr().out
    assert "Weights of the last epoch" in printed
    assert "on 108 test images" in printed
    assert printed.count("100.0 % of the classes agree") == 3 + resize
    assert "images per second" in printed
    assert {file.name for file in tmp_path.iterdir()} <= {"digits.onnx", "run"}  # one file

    session = onnxruntime.InferenceSession(path)
    given = test_pixels[:7].numpy() if kind == "bytes" else (test_pixels[:7] / 255).numpy()
    (logits,) = session.run(None, {"images": given})
    model = noiseproof.load(run.path)
    assert np.abs(logits - model(test_pixels[:7]).detach().numpy()).max() < 1e-4
    if resize:
        larger = test_pixels[:1].repeat_interleave(2, 2).repeat_interleave(3, 3)
        (logits,) = session.run(None, {"images": larger.numpy()})
        assert np.abs(logits - model(larger).detach().numpy()).max() < 1e-4
    facts = {
        p.key: json.loads(p.value) for p in onnx.load(path).metadata_props if p.value[:1] in '["{n'
    }
    assert facts["classes"] == run.info["classes"]
    assert facts["training_noise"] == "gaussian:0.3"
    assert facts["robustness"][0]["perturbation"] == "clean"
    sides = ["height", "width"] if resize else [8, 8]
    assert facts["input"]["shape"] == ["batch", 1, *sides] == session.get_inputs()[0].shape
    assert session.get_outputs()[0].shape == ["batch", 10]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, when loading
def test_a_torch_export_file_needs_torch_alone(run, tmp_path, test_pixels):
    path = tmp_path / "digits.pt2"
    exported = exporting.export(noiseproof.load(run.path), path, format="torch-export")
    assert [check.agreement for check in exported.checks] == [1.0] * 3
    extra = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    for batch in (test_pixels[:1] / 255, test_pixels[:9] / 255):
        assert torch.allclose(program(batch), run.model("last")(batch), atol=1e-5)
    assert json.loads(extra["metadata.json"])["classes"] == run.info["classes"]


def test_a_torch_export_file_resizes_and_crops(run, tmp_path, test_pixels):
    run = RunFolder.open(shutil.copytree(run.path, tmp_path / "run"))
    run.config = replace(run.config, data=replace(run.config.data, crop_share=0.8))
    run.save_config()
    model = noiseproof.load(run.path)
    program = exporting.trace(model, as_bytes=False, resize=True)
    loaded = exporting.write_program(program, tmp_path / "digits.pt2", {})
    pixels = test_pixels[:3] / 255
    for size in ((8, 8), (16, 24), (8, 11), (5, 8), (10, 10)):
        given = torch.nn.functional.interpolate(pixels, size)
        assert np.allclose(loaded(given.numpy()), model(given).detach(), rtol=0, atol=1e-5), size


def test_a_signal_waits_for_the_end_of_the_export(run, tmp_path, monkeypatch):
    traced = []

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        traced.append("with triton")

    monkeypatch.setattr(torch.export, "export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(noiseproof.load(run.path), tmp_path / "model.pt2", format="torch-export")
    assert traced == ["with triton"]
    assert not (tmp_path / "model.pt2").exists()


def test_a_model_whose_data_are_gone_is_checked_on_random_images(run, tmp_path):
    folder = save_folder(noiseproof.load(run.path), tmp_path / "shared")
    shared = noiseproof.load(folder)
    shared.run.config = Config(model=run.config.model)
    shared.run.info["fingerprint"] = "of other images"
    exported = exporting.export(shared, tmp_path / "copy", format="safetensors")
    assert exported.images.startswith("128 random images, since the test images of digits")


def test_an_export_that_differs_from_torch_is_refused_and_leaves_no_file(
    run, tmp_path, monkeypatch
):
    def off(*arguments: Any) -> Any:
        arguments[1].write_text("a model")
        return lambda images: np.zeros((len(images), 10), np.float32)

    monkeypatch.setattr(exporting, "write_program", off)
    with pytest.raises(ValueError, match="differs from torch by up to"):
        exporting.export(noiseproof.load(run.path), tmp_path / "x.pt2", format="torch-export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "needs", "extra"),
    [
        ("export", "--format onnx needs onnxscript", "export"),
        ("export", "--format onnx needs onnx", "export"),
        ("export", "--format onnx needs onnxruntime", "export"),
        ("demo", "demo needs gradio", "demo"),
    ],
)
def test_a_missing_library_is_reported_before_the_model_is_read(
    run, capsys, monkeypatch, command: str, needs: str, extra: str
):
    monkeypatch.setitem(sys.modules, needs.split()[-1], None)
    monkeypatch.delattr(RunFolder, "model")
    assert main([command, str(run.path)]) == 2
    expected = f'noiseproof: {needs}: pip install "noiseproof[{extra}]"\n'
    assert capsys.readouterr() == ("", expected)


def test_the_library_of_a_format_is_checked_in_python_too(run, tmp_path, monkeypatch):
    model = noiseproof.load(run.path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.delattr(exporting, "trace")
    with pytest.raises(ValueError, match="--format onnx needs onnxscript"):
        exporting.export(model, tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--half"], "--half is for --format safetensors, got onnx"),
        (["--format", "safetensors", "--input", "bytes"], "are for graphs"),
        (["--output", "x.pb"], "--output must end in .onnx, got x.pb"),
    ],
)
def test_flags_that_do_not_fit_are_refused(run, capsys, flags: list[str], message: str):
    assert main(["export", str(run.path), *flags]) == 2
    assert message in capsys.readouterr().err
