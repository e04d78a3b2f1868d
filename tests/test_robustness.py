"""`accuracy` of any model under perturbations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from noiseproof import accuracy, perturb
from noiseproof.lab.evaluation.evaluate import evaluate
from noiseproof.lab.evaluation.predictions import predictions
from noiseproof.lab.models.classifier import BACKBONES
from noiseproof.lab.runs import RunFolder
from noiseproof.lab.training.train import train
from noiseproof.robustness import PerturbedClassifier, batch_size_for, predicted_classes
from tests.flat import Flat, digits

SPECS = ["clean", "gaussian:0.3", "uniform:0.4", "occlusion:3x3", "gaussian:0.1..0.5+stripes:1x2"]


class Net(nn.Module):
    """A random network with layers that eval mode changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    images = torch.rand(60, 1, 8, 8)
    return images, Net().eval()(images).argmax(1)  # so that the network is right on clean images


def test_the_numbers_are_those_of_evaluate(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKBONES, "flat", Flat)
    run: RunFolder = train(digits(tmp_path, epochs=2, device="cpu"))
    rows = evaluate(run, SPECS, draws=3, noise_seed=7, device="cpu")
    test = run.dataset().test
    assert test.images is not None
    given = test.images.float() / 255, test.labels
    result = accuracy(run.model(), given, SPECS, draws=3, seed=7, return_classes=True)
    values = [(r["perturbation"], r["draw"], r["value"]) for r in rows]
    assert [(n, i, v) for n, a in result.items() for i, v in enumerate(a.values)] == values
    for name, one in result.items():
        stored = predictions(run, name, noise_seed=7)
        assert stored is not None
        assert one.classes is not None
        assert torch.equal(one.classes, torch.from_numpy(stored.classes).long())
        assert torch.equal(one.correct, one.classes == test.labels)
    assert result["clean"].mean > 0.5


def test_results_do_not_depend_on_batches_or_other_perturbations(data):
    whole = accuracy(Net(), data, SPECS, draws=3)
    assert list(whole) == SPECS
    assert len({a.mean for a in whole.values()}) > 2
    assert whole["clean"].mean == 1
    loader = DataLoader(TensorDataset(*data), batch_size=7)
    pairs = zip(data[0].split(25), data[1].split(25), strict=True)
    others = [
        accuracy(Net(), data, SPECS[::-1], draws=3, batch_size=11),
        accuracy(Net(), loader, SPECS, draws=3),
        accuracy(Net(), pairs, SPECS, draws=3, batch_size=4),  # read once
        {s: accuracy(Net(), data, perturb.parse(s), draws=3)[s] for s in SPECS},
    ]
    for other in others:
        for name in SPECS:
            assert other[name].mean == whole[name].mean
            assert torch.equal(other[name].correct, whole[name].correct)


def test_more_draws_add_to_fewer_and_another_seed_gives_others(data):
    one = accuracy(Net(), data, "gaussian:0.5", draws=5)["gaussian:0.5"]
    assert one.values[:2] == accuracy(Net(), data, "gaussian:0.5", draws=2)["gaussian:0.5"].values
    assert one.mean == pytest.approx(statistics.mean(one.values))
    assert one.std == pytest.approx(statistics.stdev(one.values))
    assert one.std > 0
    assert one.classes is None
    other = accuracy(Net(), data, "gaussian:0.5", draws=5, seed=1)["gaussian:0.5"]
    assert not torch.equal(one.correct, other.correct)


def test_deterministic_perturbations_run_once_and_names_are_canonical(data):
    given = [perturb.Identity(), "identity", "downup:2", perturb.Gaussian(8 / 255), "Gaussian:0"]
    result = accuracy(Net(), data, given, draws=4)
    draws = {name: len(one.values) for name, one in result.items()}
    assert draws == {"clean": 1, "downup:2": 1, "gaussian:8/255": 4, "gaussian:0": 1}
    assert result["clean"].std == 0
    assert str(result["clean"]) == "100.0 %"
    assert " ± " in str(result["gaussian:8/255"])


def test_the_model_runs_in_eval_mode_and_its_modes_are_restored(data):
    net, seen = Net().train(), []
    net.body[1].eval()  # frozen, as in fine-tuning
    net.drop.register_forward_hook(lambda module, *_: seen.append(module.training))
    before = {name: module.training for name, module in net.named_modules()}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    accuracy(net, data, ["clean"])
    assert seen == [False]
    assert {name: module.training for name, module in net.named_modules()} == before
    with pytest.raises(ValueError):
        accuracy(net, (data[0], data[1] + 100))
    assert {name: module.training for name, module in net.named_modules()} == before
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_a_model_can_train_on_what_it_caches_in_a_forward_pass(data):
    class Keeping(Net):
        scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.ones(1, 1, 8, 8) * 2
            return super().forward(x * self.scale)

    net = Keeping()
    accuracy(net, data)
    net(data[0].clone().requires_grad_()).sum().backward()


def test_the_callers_autocast_applies_to_the_model_and_not_to_the_noise(data):
    class Watching(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append((x.clone(), out.dtype))
            return out

    seen: list[tuple[Tensor, torch.dtype]] = []
    accuracy(Watching(), data, ["gaussian:0.3+downup:2"], draws=1)
    with torch.autocast("cpu", torch.bfloat16):
        accuracy(Watching(), data, ["gaussian:0.3+downup:2"], draws=1)
    (x, full), (same, half) = seen
    assert (full, half) == (torch.float32, torch.bfloat16)
    assert torch.equal(x, same)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_numbers_of_a_cpu(data):
    here, there = Net().double(), Net().double().cuda()
    given = data[0].double(), data[1]
    one, other = (accuracy(net, given, SPECS, draws=2) for net in (here, there))
    for name in SPECS:
        assert (one[name].correct != other[name].correct).float().mean() < 0.02


class Pictures:
    """A dataset, as torchvision's are: single images."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.rand(1, 8, 8), 0


def batches(*pairs: Any) -> Iterator[Any]:
    yield from pairs


X, Y = torch.full((6, 1, 8, 8), 0.5), torch.arange(6) % 5


class Endless(IterableDataset):
    """Every worker would iterate over all of it."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


SHUFFLED = BatchSampler(RandomSampler(TensorDataset(X, Y)), 2, False)
DISTRIBUTED = DistributedSampler(TensorDataset(X, Y), num_replicas=1, rank=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((X * 255).byte(), Y), r"floating point in \[0, 1\], got torch.uint8.*/ 255"),
        ((X * 255, Y), "from 128 to 128; divide them by 255"),
        (((X - 0.6) / 0.2, Y), r"from -0.5 to -0.5; .* let the model normalise them"),
        ((X * float("nan"), Y), "got NaN"),
        ((X[0], Y), r"B x C x H x W, got shape \(1, 8, 8\)"),
        ((X, Y[:5]), r"6 class indices, one per image, got shape \(5,\)"),
        ((X, nn.functional.one_hot(Y)), r"vector of 6 class indices.*got shape \(6, 5\)"),
        ((X, Y.float()), "integer class indices, got torch.float32"),
        ((X, Y + 1), r"labels must lie in \[0, 5\).*got 5 at index 4"),
        ((X, Y - 1), "got -1 at index 0"),
        (X, "got one tensor"),
        ((X[:0], Y[:0]), "no images"),
        (batches(), "no images"),
        (batches({"image": X}), "pair of tensors, images and labels, got dict"),
        (batches((X, Y, Y)), "got Tensor and Tensor and Tensor"),
        (Pictures(), "got Tensor and int; a DataLoader makes batches"),
        (DataLoader(TensorDataset(X, Y), shuffle=True), "shuffle=False"),
        (DataLoader(TensorDataset(X, Y), batch_sampler=SHUFFLED), "shuffle=False"),
        (DataLoader(TensorDataset(X, Y), sampler=DISTRIBUTED), "shuffle=False"),
        (DataLoader(TensorDataset(X, Y), sampler=[5, 4, 3, 2, 1, 0]), "torch.utils.data.Subset"),
        (DataLoader(TensorDataset(X, Y), batch_sampler=[[0, 1], [1, 2]]), "in order"),
        (DataLoader(Endless(), num_workers=2), "num_workers=0"),
        (DataLoader(TensorDataset(X, Y), num_workers=2, in_order=False), "in_order=True"),
    ],
)
def test_invalid_data_raise_errors(given: Any, message: str):
    with pytest.raises(ValueError, match=message):
        accuracy(Net(), given, ["clean"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": lambda x: x}, "must be a torch.nn.Module, got function"),
        ({"model": nn.Identity()}, r"logits, 6 x classes, got \(6, 1, 8, 8\)"),
        ({"perturbations": []}, "at least one"),
        ({"perturbations": ["gausian:0.1"]}, "did you mean 'gaussian:0.1'"),
        ({"perturbations": [0.1]}, "'gaussian:8/255' or one of noiseproof.perturb, got 0.1"),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_invalid_settings_raise_errors(change: dict[str, Any], message: str):
    settings: dict[str, Any] = {"model": Net(), "data": (X, Y), "perturbations": "clean"}
    with pytest.raises(ValueError, match=message):
        accuracy(**{**settings, **change})


def test_evaluate_points_to_accuracy_for_other_models(tmp_path):
    with pytest.raises(ValueError, match=r"got Net; noiseproof\.accuracy evaluates a model"):
        evaluate(Net(), ["clean"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got str; RunFolder\.open"):
        evaluate("runs/NAME", ["clean"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got RunFolder; pass run\.model\(\)"):
        accuracy(RunFolder(tmp_path, digits(tmp_path), {}), (X, Y))  # pyright: ignore


def test_batch_sizes_on_a_cpu():
    cpu = torch.device("cpu")
    assert batch_size_for((3, 96, 96), cpu) == 75  # with 18, an image took a fifth longer
    assert batch_size_for((3, 400, 500), cpu) == 8  # at least
    assert batch_size_for((1, 8, 8), cpu) == 1024  # at most


def test_a_model_whose_logits_are_not_finite_is_never_right_and_says_so():
    class Broken(nn.Module):
        def forward(self, x):
            return x.new_full((len(x), 5), torch.nan)

    result = accuracy(Broken(), (X, Y), ["clean"], return_classes=True)["clean"]
    assert result.mean == 0
    assert result.not_finite == len(X)
    assert result.classes is not None
    assert result.classes.unique().tolist() == [-1]
    assert str(result) == "0.0 % (6 predictions not finite)"


def test_a_class_that_is_ruled_out_by_minus_infinity_is_no_fault():
    class Masked(nn.Module):
        def forward(self, x):
            return x.new_tensor([0.0, 1.0, -torch.inf, 0.0, 0.0]).expand(len(x), 5)

    result = accuracy(Masked(), (X, Y), ["clean"])["clean"]
    assert result.not_finite == 0
    assert result.correct.any()


def test_the_check_of_kernels_does_not_blame_them_for_a_broken_model():
    x = torch.rand(200, 1, 2, 2)
    classifier = PerturbedClassifier(lambda images: images.new_full((len(images), 3), torch.nan), 0)
    classifier._check(x, x.new_full((200, 3), torch.nan))  # raises nothing


def test_infinite_logits_predict_a_class_only_if_the_largest_is_finite():
    inf = torch.inf
    logits = torch.tensor([[inf, 0.0], [-inf, -inf], [-inf, 1.0], [torch.nan, 1.0]])
    assert predicted_classes(logits).tolist() == [-1, -1, 1, -1]
