"""The public surface: names, signatures, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noiseproof
from noiseproof import DiscriminativeLoss, augment, curvature, geometry, objectives, perturb, theory

ROOT = Path(noiseproof.__file__).resolve().parent
LAB = ("lab", "paper", "cli")  # the part that may need more than torch


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def core_files() -> list[Path]:
    files = [p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in LAB]
    return [p for p in files if p.name != "__main__.py"]  # starts the command line of the lab


def core_modules() -> list[str]:
    names = [".".join(("noiseproof", *p.relative_to(ROOT).with_suffix("").parts))
             for p in core_files()]  # fmt: skip
    return sorted(name.removesuffix(".__init__") for name in names)


PACKAGE = [
    "Accuracy", "DiscriminativeLoss", "LossTerms", "accuracy", "adversarial", "augment",
    "curvature", "draws", "geometry", "load", "objectives", "perturb", "smoothing", "theory",
    "wrap",
]  # fmt: skip


def test_the_package_exports_these_names_and_no_others():
    assert noiseproof.__all__ == PACKAGE
    assert dir(noiseproof) == sorted([*PACKAGE, "__version__"])
    for name in PACKAGE:
        assert getattr(noiseproof, name).__name__.endswith(name)
    with pytest.raises(AttributeError, match="'noiseproof' has no attribute 'Discriminative'"):
        noiseproof.Discriminative  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            perturb,
            "Perturbation Chain RandomApply Identity Gaussian Uniform Occlusion Stripes DownUp "
            "Corruption CORRUPTIONS Sensor Exposure Own register "
            "parse",
        ),
        (
            objectives,
            "METHODS AugMix Batch Both Discriminative Noisy Normal Objective Outcome Spheres "
            "Stability",
        ),
        (
            augment,
            "AUGMENTATIONS MIXINGS Augmentation Mixing Mixture augmix crop cutmix cutout erase "
            "hybrid identity mixup parse parse_with_mixing road trivial",
        ),
        (curvature, "absolute_sum exact finite_difference hessian_probe trace"),
        (
            geometry,
            "PAIR_TOLERANCE Rivals boundary_distances class_dispersion class_margin hardest_rivals",
        ),
        (noiseproof.smoothing, "Certificates certified_accuracy certify largest_radius radius"),
        (noiseproof.adversarial, "Norm pgd"),
        (noiseproof.draws, "PerSample Source fold keys normal poisson uniform"),
        (
            theory,
            "Cases CurvatureBounds DivergenceBound DivergenceEstimate Guarantee InvisibleVariance "
            "LeavingLimits MarginGradients Scaled ScalingReport Separation SoftmaxNull SphereBound "
            "bound_curvature class_radius dispersion_guarantee divergence_bound "
            "estimate_divergence invisible_variance leaving_limits lower_bound lower_limit "
            "margin_gradients margin_guarantee margin_loss null_space pinsker_bound "
            "scale_features scaling_report separation_guarantee sharper_bound "
            "sharper_upper_bound sphere_bound upper_bound upper_limit",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else "",
)
def test_each_module_exports_these_names_and_no_others(module: ModuleType, names: str):
    assert list(module.__all__) == names.split()
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def signature(function: object) -> str:
    """Names and defaults; annotations are left out."""
    full = inspect.signature(function)  # pyright: ignore[reportArgumentType]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in full.parameters.values()]
    return str(full.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            DiscriminativeLoss,
            "(num_classes, feature_dim, *, radius=0.5, margin=5.0, compact_weight=1.0, "
            "margin_weight=1.0, norm_weight=0.001, noisy_weight=1.0, momentum=0.9, "
            "centroids='partial', margin_over='max', compact_hinge='squared', "
            "margin_hinge='plain')",
        ),
        (
            DiscriminativeLoss.forward,
            "(self, features, labels, head, noisy_features=None, *, return_terms=False)",
        ),
        (DiscriminativeLoss.terms, "(self, features, labels, head, noisy_features=None)"),
        (
            noiseproof.accuracy,
            "(model, data, perturbations='clean', *, draws=10, seed=0, batch_size=None, "
            "return_classes=False, return_probabilities=False)",
        ),
        (
            noiseproof.smoothing.certify,
            "(model, images, sigma, *, samples=1000, selection=100, alpha=0.001, seed=0, "
            "index=None, batch_size=None)",
        ),
        (
            noiseproof.adversarial.pgd,
            "(model, images, labels, norm, epsilon, *, steps=20, seed=0, index=None)",
        ),
        (geometry.boundary_distances, "(features, labels, head)"),
        (geometry.class_dispersion, "(features, labels, num_classes)"),
        (geometry.class_margin, "(features, labels, head)"),
        (
            curvature.finite_difference,
            "(model, x, y, *, probes=20, step=0.01, scale=None, generator=None, chunk=None, "
            "progress=None)",
        ),
        (
            curvature.hessian_probe,
            "(model, x, y, *, probes=20, scale=None, generator=None, chunk=None, progress=None)",
        ),
        (
            curvature.trace,
            "(model, x, y, *, probes=20, scale=None, generator=None, chunk=None, progress=None)",
        ),
        (
            curvature.absolute_sum,
            "(model, x, y, *, products=32, scale=None, generator=None, chunk=None, progress=None)",
        ),
        (curvature.exact, "(model, x, y, *, scale=None, chunk=None, progress=None)"),
        (perturb.Gaussian, "(std)"),
        (perturb.Uniform, "(amplitude)"),
        (perturb.Occlusion, "(patches, size)"),
        (perturb.Stripes, "(count, width)"),
        (perturb.DownUp, "(factor)"),
        (perturb.Identity, "()"),
    ],
)
def test_signatures_are_as_published(function: object, expected: str):
    assert signature(function) == expected


def test_the_state_of_the_loss_is_in_the_buffers_centroids_and_seen():
    assert list(DiscriminativeLoss(3, 2).state_dict()) == ["centroids", "seen"]
    assert noiseproof.LossTerms._fields == ("compact", "margin", "norm", "noisy")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, noiseproof, noiseproof.perturb.text; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_core_runs_with_torch_alone():
    blocked = ["torchvision", "lightning", "sklearn", "scipy", "rich", "tyro", "yaml", "PIL",
               "matplotlib", "jinja2", "safetensors", "timm", "noiseproof.lab"]  # fmt: skip
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import importlib, torch
for name in {core_modules()!r}:
    importlib.import_module(name)
from noiseproof import DiscriminativeLoss, perturb
x, y, head = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]), torch.nn.Linear(4, 2)
noisy = perturb.parse("gaussian:0.1+downup:2")(x)
print(bool(DiscriminativeLoss(2, 4)(x.flatten(1), y, head, noisy.flatten(1)) > 0))
"""
    assert python(code) == "True"


def test_load_names_the_extra_that_it_needs():
    code = """
import sys
sys.modules["rich"] = None
import noiseproof
try:
    noiseproof.load
except ModuleNotFoundError as error:
    print(error)
"""
    assert python(code) == "noiseproof.load needs rich: pip install 'noiseproof[lab]'"


def imported(tree: ast.AST) -> set[str]:
    """Every module that a file imports, at any level."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    return names


@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_core_files_import_torch_and_the_standard_library_only(path: Path):
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        first, _, rest = name.partition(".")
        assert first in {"torch", "noiseproof"} or first in sys.stdlib_module_names, name
        if name.startswith("noiseproof.lab.deploy.load") and path == ROOT / "__init__.py":
            continue  # for type checkers; `noiseproof.load` is imported on first use
        if first == "noiseproof":
            assert rest.split(".")[0] not in LAB, f"the core must not import {name}"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_the_two_line_example_is_a_training_loop_that_learns():
    torch.manual_seed(0)
    net = Net()
    y = torch.arange(60) % 3
    x = torch.rand(60, 1, 4, 4) * 0.5 + F.one_hot(y, 4)[:, None, None, :] * 0.5  # a bright column
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    criterion = DiscriminativeLoss(num_classes=3, feature_dim=8)
    noise = perturb.Gaussian(0.06)
    losses = []
    for _ in range(40):
        z, z_noisy = net.features(x), net.features(noise(x))
        loss = F.cross_entropy(net.head(z), y) + criterion(z, y, net.head, z_noisy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert (net.head(net.features(x)).argmax(1) == y).all()
    assert criterion.seen.all()


def test_the_example_loop_runs_and_prints_both_lines(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("sklearn")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    try:
        import own_loop  # pyright: ignore[reportMissingImports]

        result = own_loop.main(epochs=1)
    finally:
        sys.path.pop(0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert list(result) == ["cross-entropy", "with DiscriminativeLoss"]
    for line, (name, (clean, noisy)) in zip(lines[1:], result.items(), strict=True):
        assert line.startswith(name)
        assert line.split()[-2:] == [f"{clean:.1f}", f"{noisy:.1f}"]
    assert result["with DiscriminativeLoss"][0] > 40  # chance is 10; measured: 77
