"""Perturbations of the user's own: registered, from a file, or passed to `accuracy`."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import v2

from noiseproof import accuracy, draws
from noiseproof.__main__ import main
from noiseproof.draws import PerSample, keys
from noiseproof.lab import plugins
from noiseproof.lab.plugins import load_plugins, loaded_plugins
from noiseproof.perturb import Chain, Own, RandomApply, parse, register
from noiseproof.perturb.text import REGISTERED, family, heading, help_line, read


def images(count: int = 5) -> Tensor:
    return torch.rand(count, 3, 8, 9, generator=torch.Generator().manual_seed(1))


def source(count: int = 5, start: int = 0) -> PerSample:
    return PerSample(keys(7, torch.arange(start, start + count)))


def speckle(image: Tensor, level: float) -> Tensor:
    """Multiplies pixels by noise."""
    assert image.ndim == 3
    return image * (1 + level * torch.randn(image.shape))


def batched(x: Tensor, level: float, source: draws.Source) -> Tensor:
    return x + level * draws.normal(x.shape, x, source)


# Texts


def test_a_registered_function_is_a_perturbation_with_a_text():
    register("speckle", speckle, levels=(0, 2))
    p = parse("Speckle: 0.5")
    assert p == Own("speckle", speckle, 0.5)
    assert str(p) == "speckle:0.5"
    assert not p.deterministic
    assert (heading("speckle:0.5"), family("speckle:0.5")) == ("speckle 0.5", "Speckle")
    assert help_line("speckle") == "Multiplies pixels by noise, level 0 to 2: speckle:2"
    chain = parse("speckle:0.5@0.5+jpeg:2")
    assert isinstance(chain, Chain)
    assert isinstance(chain.members[0], RandomApply)
    assert str(parse(str(chain))) == str(chain)
    assert chain(images(), source()).shape == images().shape


def test_a_function_without_levels_has_its_name_as_text():
    register("flip", lambda image: image.flip(-1), deterministic=True, help="mirrored images.")
    p = parse("flip")
    assert (str(p), p.deterministic) == ("flip", True)
    assert torch.equal(p(images()), images().flip(-1))
    assert help_line("flip") == "mirrored images: flip"
    some = parse("flip@0.5+clean")
    assert some == RandomApply(p, 0.5)
    assert (str(some), heading(str(some))) == ("flip@0.5", "flip (0.5 of images)")
    register("flip", lambda image: image.flip(-2))  # as a cell of a notebook that is run again
    assert torch.equal(parse("flip")(images()), images().flip(-2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "speckle:3",
            r"'speckle:3': the level must be from 0 to 2, got 3 \(Multiplies",
        ),
        ("speckle:-1", "from 0 to 2, got -1"),
        ("speckle", "expected a number such as"),
        ("speckle:much", "got 'much'"),
        ("flip:1", r"it takes no arguments \(mirrored: flip\)"),
        ("speckel:1", r"did you mean 'speckle:1'\?"),
        ("rain:1", r"unknown perturbation 'rain' .* register it, .*--plugin.* Known: .*speckle"),
    ],
)
def test_invalid_texts_raise_errors_with_a_hint(text: str, message: str):
    register("speckle", speckle, levels=(0, 2))
    register("flip", lambda image: image.flip(-1), help="mirrored")
    with pytest.raises(ValueError, match=message):
        read(text)
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gaussian", speckle), "'gaussian' is a perturbation of noiseproof; choose another"),
        (("clean", speckle), "'clean' is a perturbation of noiseproof"),
        (("Rain", speckle), r"of the form \[a-z\].*, got 'Rain'"),
        (("a:b", speckle), "got 'a:b'"),
        (("rain", 3), "function must be callable, got 3"),
        (("rain", speckle, (2, 1)), "the lowest and the highest, got 2.0 > 1.0"),
        (("rain", speckle, (0, math.inf)), "levels must be a finite number, got inf"),
        (("rain", speckle, (1,)), r"the lowest and the highest, got \(1,\)"),
        (("rain", speckle, 5), "the lowest and the highest, got 5"),
        (("rain", speckle), r"of .rain. must take one image, or levels must be given, got \(image"),
        (("rain", batched), r"of .rain. must take one image, or levels must be given, got \(x"),
        (("rain", lambda image: image, (0, 1)), r"an image and a level, got \(image\)"),
    ],
)
def test_invalid_registrations_raise_errors(arguments, message: str):
    name, function, *levels = arguments
    with pytest.raises(ValueError, match=message):
        register(name, function, levels=levels[0] if levels else None)
    assert not REGISTERED


# Random numbers


def test_an_image_gets_the_same_random_numbers_in_any_batch():
    for function in (speckle, batched):
        p = Own("own", function, 0.3)
        together = p(images(), source())
        assert torch.equal(together, p(images(), source()))
        assert torch.equal(together[2:4], p(images()[2:4], source(2, start=2)))
        same = p(images()[:1].expand(5, -1, -1, -1), source())
        assert not torch.equal(same[0], same[1])
        generator = torch.Generator().manual_seed(0)
        first = p(images(), generator)
        assert not torch.equal(first, p(images(), generator))
        assert torch.equal(first, p(images(), torch.Generator().manual_seed(0)))


def test_random_numbers_of_python_and_numpy_belong_to_the_image():
    def chance() -> float:
        return random.random() * np.random.uniform()  # noqa: NPY002 (what users' functions do)

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    seed()
    expected = chance()
    seed()
    p = Own("dim", lambda image: image * chance())
    together = p(images(), source())
    assert chance() == expected
    assert torch.equal(together[2:4], p(images()[2:4], source(2, start=2)))
    assert not torch.allclose(together[0] / images()[0], together[1] / images()[1])
    choice = transforms.RandomChoice([v2.Identity(), v2.RandomInvert(1.0)])  # uses random
    assert torch.equal(Own("c", choice)(images(), source()), Own("c", choice)(images(), source()))


@pytest.mark.parametrize("function", [Tensor.zero_, lambda x, source: x.zero_()])
def test_a_function_that_works_in_place_does_not_change_the_images(function):
    x = images()
    assert Own("black", function)(x, source()).max() == 0
    assert torch.equal(x, images())


def test_torchs_own_random_numbers_are_not_disturbed():
    p = Own("speckle", speckle, 0.3)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    p(images(), source())
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(3)
    first = p(images())  # without a source they are used
    torch.manual_seed(3)
    assert torch.equal(first, p(images()))


def test_a_transform_of_torchvision_is_a_perturbation():
    register("jitter", v2.ColorJitter(brightness=0.8))
    result = parse("jitter")(images(), source())
    assert torch.equal(result, parse("jitter")(images(), source()))
    factors = (result / images().clamp(min=1e-6)).flatten(1).median(1).values
    assert factors.unique().numel() == 5  # one for each image, not for the batch


def test_results_are_clamped_and_have_the_dtype_of_the_images():
    p = Own("bright", lambda image: image.double() + 0.9)
    result = p(images().to(torch.bfloat16))
    assert result.dtype == torch.bfloat16
    assert result.max() == 1
    assert p(images()[:0]).shape == (0, 3, 8, 9)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda image: image[:1], r"\(3, 8, 9\), got \(1, 8, 9\)"),
        (lambda image: 3, "got int"),
        (lambda image: (image * 255).byte(), "got torch.uint8"),
        (lambda image: image * math.nan, "got NaN"),
    ],
)
def test_a_result_that_is_no_image_raises_an_error_with_the_name(function, got: str):
    with pytest.raises(ValueError, match=rf"perturbation wrong must return a tensor .*{got}"):
        Own("wrong", function)(images())


# Accuracy


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3))
        return torch.stack([0.5 - mean, mean - 0.5], 1) * 20


def data() -> tuple[Tensor, Tensor]:
    labels = torch.arange(40) % 2
    return (0.3 + 0.4 * labels).view(-1, 1, 1, 1) + 0.1 * torch.rand(40, 3, 8, 9), labels


def darken(image: Tensor) -> Tensor:
    return image * 0.2


def test_accuracy_takes_functions_transforms_and_names():
    results = accuracy(Net(), data(), ["clean", darken, v2.RandomInvert(1.0)], draws=2)
    assert list(results) == ["clean", "darken", "RandomInvert"]
    assert [result.mean for result in results.values()] == [1.0, 0.5, 0.0]
    assert results["darken"].correct.shape == (2, 40)
    assert accuracy(Net(), data(), darken, draws=1)["darken"].mean == 0.5
    named = {"dark": darken, "noise": "gaussian:0.1", "inverted": lambda image: 1 - image}
    assert list(accuracy(Net(), data(), named, draws=1)) == list(named)
    register("dim", darken)
    assert accuracy(Net(), data(), "dim", draws=1)["dim"].mean == 0.5


def test_two_functions_of_one_name_need_names():
    with pytest.raises(ValueError, match=r"two perturbations are called '<lambda>'; .* dictionary"):
        accuracy(Net(), data(), [lambda image: image, lambda image: 1 - image])
    with pytest.raises(ValueError, match=r"got 0\.1"):
        accuracy(Net(), data(), {"a": 0.1})  # type: ignore[dict-item]


def test_the_noise_of_a_function_depends_on_the_image_alone():
    def noisy(image: Tensor) -> Tensor:
        return image + 0.5 * torch.randn(image.shape)

    x, y = data()
    options = {"return_probabilities": True, "draws": 2}
    whole = accuracy(Net(), (x, y), noisy, batch_size=40, **options)["noisy"]
    parts = accuracy(Net(), (x, y), noisy, batch_size=7, **options)["noisy"]
    assert whole.probabilities is not None
    assert parts.probabilities is not None
    torch.testing.assert_close(whole.probabilities, parts.probabilities)
    assert not torch.equal(whole.probabilities[0], whole.probabilities[1])


def test_probabilities_are_the_softmax_of_the_logits():
    x, y = data()
    results = accuracy(
        Net(), (x, y), ["clean", "gaussian:0.1"], draws=3, batch_size=9,
        return_probabilities=True, return_classes=True,
    )  # fmt: skip
    clean, noisy = results["clean"].probabilities, results["gaussian:0.1"].probabilities
    assert clean is not None
    assert noisy is not None
    torch.testing.assert_close(clean[0], Net()(x).softmax(1))
    assert noisy.shape == (3, 40, 2)
    classes = results["gaussian:0.1"].classes
    assert classes is not None
    assert torch.equal(noisy.argmax(2), classes)
    assert accuracy(Net(), (x, y))["clean"].probabilities is None


# Plugins

PLUGIN = """
import torch
from noiseproof.perturb import register

def rain(image, level):
    \"\"\"Rain on a window\"\"\"
    return image * (1 - level * torch.rand(1))

register("rain", rain, levels=(0, 1))
"""


def plugin(folder: Path, text: str = PLUGIN) -> str:
    (folder / "rain.py").write_text(text)
    return str(folder / "rain.py")


def test_a_plugin_is_run_once_and_registers_its_perturbation(tmp_path):
    file = plugin(tmp_path)
    load_plugins([file])
    assert parse("rain:0.5")(images(), source()).shape == images().shape
    assert loaded_plugins() == (str(tmp_path / "rain.py"),)
    Path(file).write_text("raise RuntimeError")
    load_plugins([file])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it", "rain.py raised ModuleNotFoundError: No module named"),
        ("def (", "rain.py raised SyntaxError"),
        ("x = 3", "rain.py registers no perturbation; expected a call of noiseproof.perturb.regis"),
    ],
)
def test_a_plugin_that_fails_is_one_line(tmp_path, capsys, text: str, message: str):
    assert main(["list", "perturbations", "--plugin", plugin(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert main(["list", "--plugin", "none.py"]) == 2
    assert "--plugin none.py does not exist; expected a Python file" in capsys.readouterr().err
    assert main(["list", "--plugin", str(tmp_path)]) == 2
    assert f"--plugin {tmp_path} is not a .py file" in capsys.readouterr().err


def test_commands_know_the_perturbations_of_a_plugin(tmp_path, capsys, monkeypatch):
    file, calls = plugin(tmp_path), []
    monkeypatch.setattr(
        "noiseproof.lab.evaluation.evaluate.evaluate_runs",
        lambda *_, **options: calls.append(options),
    )
    assert main(["evaluate", ".", "--perturb", "rain:0.5"]) == 2
    assert "If it is your own, register it, in a command with --plugin" in capsys.readouterr().err
    assert main(["evaluate", ".", "--perturb", "rain:0.5", "--plugin", file]) == 0
    assert calls[0]["perturb"] == ("rain:0.5",)
    assert main(["evaluate", ".", "--perturb", "rain:7", "--plugin", file]) == 2
    assert "the level must be from 0 to 1, got 7" in capsys.readouterr().err
    assert main(["list", "perturbations"]) == 0
    assert "Rain on a window, level 0 to 1: rain:1" in capsys.readouterr().out


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str, module: str) -> None:
    """A distribution rainy 1.0 with these entry points, and its module, on sys.path."""
    (folder / "rainy_1.py").write_text(module)
    (folder / "rainy-1.0.dist-info").mkdir()
    (folder / "rainy-1.0.dist-info" / "METADATA").write_text("Name: rainy\nVersion: 1.0\n")
    text = f"[{plugins.GROUP}]\n{entries}\n"
    (folder / "rainy-1.0.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "rainy_1", raising=False)


@pytest.mark.parametrize(
    ("entries", "module"),
    [
        ("rain = rainy_1", PLUGIN),
        ("rain = rainy_1:add", PLUGIN.replace("\nregister(", "\ndef add(): register(")),
    ],
)
def test_commands_know_the_perturbations_of_installed_packages(
    tmp_path, capsys, monkeypatch, entries: str, module: str
):
    installed(tmp_path, monkeypatch, entries, module)
    for _ in range(2):
        assert main(["list", "perturbations"]) == 0
        assert "Rain on a window, level 0 to 1: rain:1" in capsys.readouterr().out
    assert parse("rain:0.5")(images(), source()).shape == images().shape
    assert loaded_plugins() == ()  # a worker process finds them by itself


def test_an_installed_package_that_fails_is_named_and_left_out(tmp_path, capsys, monkeypatch):
    installed(tmp_path, monkeypatch, "rain = rainy_1", "raise RuntimeError('no\\nclouds')")
    assert main(["list", "perturbations"]) == 0
    error = capsys.readouterr().err
    assert "installed package rainy are left out: rainy_1 raised RuntimeError: no clouds" in error
    assert error.count("\n") == 1
    assert not REGISTERED


def test_a_file_of_settings_cannot_have_a_plugin_run(tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(f"plugin: [{plugin(tmp_path)}]\n")
    assert main(["train", "--config", str(tmp_path / "settings.yaml")]) == 2
    assert "there is no setting 'plugin'" in capsys.readouterr().err
    assert not REGISTERED


def test_a_run_is_trained_and_resumed_with_a_perturbation_of_a_plugin(tmp_path, capsys):
    words = ["train", "--method", "both", "--noise", "rain:0.5", "--plugin", plugin(tmp_path)]
    words += ["--recipe", "paper", "--epochs", "1", "--output", str(tmp_path), "--name", "wet"]
    words += ["--device", "cpu", "--batch-size", "256"]
    assert main(words) == 0
    assert main([*words, "--resume"]) == 0
    words = ["evaluate", str(tmp_path / "wet"), "--perturb", "rain:0.5", "--draws", "1"]
    assert main([*words, "--weights", "last"]) == 0
    assert "rain 0.5" in capsys.readouterr().out


def test_an_error_in_a_function_of_a_plugin_names_its_file_line_and_function(tmp_path, capsys):
    plugin = tmp_path / "fails.py"
    plugin.write_text(
        "from noiseproof.perturb import register\n\n\n"
        "def shade(image, level):\n"
        "    return image / {}[level]\n\n\n"
        'register("failing_shade", shade, levels=(0, 1))\n'
    )
    command = ["train", "--data", "digits", "--epochs", "1", "--device", "cpu"]
    command += ["--output", str(tmp_path), "--plugin", str(plugin), "--noise", "failing_shade:0.5"]
    assert main([*command, "--method", "noisy"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "raised" in x]
    assert line == f"noiseproof: shade in {plugin}, line 5, raised KeyError: 0.5"
