"""The recipes have the paper's values, and the suites its noise levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from noiseproof.lab.config import NAMED, Config, Data, from_dict, to_dict
from noiseproof.lab.data.counts import TRAINING_IMAGES
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.data.splits import Split
from noiseproof.lab.recipes import (
    DEFAULT,
    RECIPES,
    kind,
    recipe,
    recipe_help,
    robust_epochs,
    suite,
)
from noiseproof.lab.training.session import make_objective
from noiseproof.paper.experiments import EXPERIMENTS
from noiseproof.perturb.text import read


@pytest.mark.parametrize(("data", "noise"), [("cifar10", "0.06"), ("svhn", "0.15")])
def test_the_paper_recipe_for_small_images_has_the_papers_values(data: str, noise: str) -> None:
    config = recipe("paper", data)
    optim, method = config.optim, config.method
    assert (config.data.data, config.data.augment, config.data.val_share) == (data, "crop-flip", 0)
    assert (config.model.model, config.model.feature_dim) == ("resnet18", 128)
    assert config.model.weights is None
    assert (optim.opt, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 1e-3, 0.9, 5e-4)
    assert (optim.epochs, optim.batch_size) == (200, 64)
    assert (optim.sched, optim.decay_milestones, optim.decay_rate) == (
        "multistep",
        (60, 120, 160),
        0.2,
    )
    assert (method.noise, method.views) == (f"gaussian:{noise}", "independent")
    assert (method.radius, method.margin, method.centroid_momentum) == (0.5, 5.0, 0.9)
    assert (method.compact_weight, method.margin_weight, method.noisy_weight) == (1, 1, 1)
    assert (method.norm_weight, method.noisy_ce_weight, method.centroids) == (1e-3, 0, "partial")
    # Nothing that the paper does not do.
    assert (optim.clip_grad, optim.ema_decay, optim.warmup_epochs) == (0, 0, 0)
    assert (method.ramp_epochs, method.smoothing) == (0, 0)


def test_the_paper_recipe_for_a_folder_is_the_one_for_road_images() -> None:
    config = recipe("paper", "photos/")
    optim = config.optim
    assert (config.data.augment, config.data.val_share, config.data.test_share) == (
        "road",
        0.1,
        0.2,
    )
    assert config.model.model.startswith("mobilenet_v3")
    assert config.model.weights == "imagenet"
    assert (optim.opt, optim.lr, optim.epochs) == ("adam", 1e-4, 70)
    assert (optim.sched, optim.decay_milestones, optim.decay_rate) == ("multistep", (50,), 0.1)
    assert (config.method.noise, config.method.margin) == ("gaussian:40/255", 3.0)


@pytest.mark.parametrize("name", RECIPES)
def test_validation_images_are_held_out_alike_of_own_folders_and_arrays(name: str) -> None:
    assert recipe(name, "mine.npz").data.val_share == recipe(name, "photos/").data.val_share == 0.1
    assert recipe(name, "cifar10").data.val_share == 0  # as in the paper


def test_the_digits_have_the_default_values() -> None:
    assert recipe("paper", "digits") == recipe("robust", "digits") == Config()
    assert DEFAULT == "robust"


def test_the_robust_recipe_is_the_one_that_was_chosen() -> None:
    config = recipe("robust", "cifar10")
    assert (config.optim.epochs, config.optim.batch_size, config.optim.lr) == (100, 128, 0.1)
    assert (config.optim.sched, config.optim.ema_decay) == ("onecycle", 0.999)
    assert (config.method.method, config.method.batch_norm) == ("spheres", "together")
    assert (
        recipe("robust", "photos/").method.method == "both"
    )  # on photographs, spheres is not measured
    assert (config.method.noise, config.method.views) == ("gaussian:0..0.12", "independent")
    assert (config.data.augment, config.data.noisy_augment) == (
        "crop-flip+trivial",
        "crop-flip+trivial+hybrid",
    )
    svhn, photos = recipe("robust", "svhn"), recipe("robust", "photos/")
    assert svhn.data.noisy_augment == "crop+trivial+hybrid"  # digits are not mirrored
    assert (svhn.method.noise, photos.method.noise) == ("gaussian:0..0.3", "gaussian:0..80/255")
    paper = recipe("paper", "photos/")
    assert (photos.model, photos.data.val_share) == (paper.model, paper.data.val_share)
    assert replace(photos.optim, ema_decay=0.0) == paper.optim


@pytest.mark.parametrize("data", TRAINING_IMAGES)
def test_the_robust_recipe_has_its_100_epochs_on_all_images_of_a_named_dataset(data: str) -> None:
    optim = recipe("robust", data).optim
    assert robust_epochs(TRAINING_IMAGES[data]) == optim.epochs == 100


@pytest.mark.parametrize("images", [1280, 3839, 3840, 5000, 9000, 10_000])
def test_the_robust_recipe_has_the_fewest_epochs_with_enough_steps(images: int) -> None:
    split = Split(torch.zeros(images, 1, 1, 1, dtype=torch.uint8), None, torch.zeros(images).long())
    batch_size = recipe("robust", "cifar10").optim.batch_size
    cpu = torch.device("cpu")
    steps = Loader(split, (1, 1, 1), batch_size=batch_size, seed=0, device=cpu).steps
    epochs = robust_epochs(images)
    assert epochs * steps >= 7_300
    assert epochs == 100 or (epochs - 1) * steps < 7_300


@pytest.mark.parametrize("data", ["digits", "cifar10", "svhn", "photos/"])
def test_the_modern_recipe_changes_the_schedule_and_adds_safeguards(data: str) -> None:
    config, paper = recipe("modern", data), recipe("paper", data)
    optim = config.optim
    assert (optim.sched, optim.opt, optim.lr, optim.epochs) == ("onecycle", "sgd", 0.05, 30)
    assert (optim.clip_grad, config.method.ramp_epochs) == (1.0, 5.0)
    assert config.run.amp == "auto"
    assert (config.data, config.model) == (paper.data, paper.model)
    assert config.method == replace(paper.method, ramp_epochs=5.0)


def test_an_array_file_takes_the_noise_of_the_dataset_it_is_named_after() -> None:
    assert {kind(name) for name in NAMED} == {"digits", "cifar10", "svhn"}
    files = ["cifar.npz", "SVHN-small.npz", "svhn/cifar10.npz", "cifar/svhn.npz", "mine.NPZ"]
    assert [kind(f) for f in files] == ["cifar10", "svhn", "cifar10", "svhn", "cifar10"]
    assert recipe("paper", "svhn.npz") == replace(
        recipe("paper", "svhn"),
        data=replace(recipe("paper", "svhn").data, data="svhn.npz", val_share=0.1),
    )
    assert recipe("paper", "mine.npz").method.noise == "gaussian:0.06"


def test_every_recipe_keeps_the_data_and_has_help() -> None:
    for name in RECIPES:
        for data in ["digits", "cifar10", "svhn", "photos/", "x.npz"]:
            assert recipe(name, data).data == replace(recipe(name, data).data, data=data)
    assert list(recipe_help()) == list(RECIPES)
    assert all(text and "\n" not in text for text in recipe_help().values())
    assert Data().data == "digits"


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"there is no recipe 'moderm'.*did you mean 'modern'"):
        recipe("moderm", "digits")


@pytest.mark.parametrize(
    ("data", "levels"),
    [("cifar10", [2, 4, 8, 16, 20]), ("svhn", [5, 10, 20, 36, 42])],
)
def test_the_suites_of_small_images_are_the_papers_levels(data: str, levels: list[int]) -> None:
    assert suite(data, (3, 32, 32)) == ["clean", *(f"gaussian:{k}/255" for k in levels)]


def test_the_suite_of_a_folder_is_the_papers_at_the_papers_size() -> None:
    papers = [
        "clean",
        "gaussian:10/255",
        "gaussian:30/255",
        "gaussian:40/255",
        "gaussian:60/255",
        "occlusion:20x70",
        "gaussian:40/255+occlusion:20x70",
        "downup:3",
        "downup:3+occlusion:20x70",
        "stripes:10x6",
        "downup:3+stripes:10x6",
    ]
    assert suite("photos/", (3, 400, 500)) == suite("photos/") == papers


def test_masks_cover_the_same_share_of_an_image_of_another_size() -> None:
    specs = suite("photos/", (3, 800, 1000))
    assert {"occlusion:20x140", "stripes:10x12"} <= set(specs)
    # 250 x 250: 70 * sqrt(62500 / 200000) = 39.1 and 6 * 250 / 500 = 3.
    assert {"occlusion:20x39", "stripes:10x3"} <= set(suite("photos/", (250, 250)))


@pytest.mark.parametrize("size", [(1, 1), (3, 8, 8), (3, 10, 1000), (3, 4000, 3000)])
def test_every_perturbation_of_a_suite_is_valid_and_fits_the_image(size: tuple[int, ...]) -> None:
    specs = suite("photos/", size)
    for spec in [*specs, *suite("digits", size), *suite("cifar10", size)]:
        read(spec)
    side = int(specs[5].partition("20x")[2])
    width = int(specs[9].partition("10x")[2])
    assert 1 <= side <= min(size[-2:])
    assert 1 <= width <= size[-1]


def test_the_ramp_of_a_row_reaches_its_objective():
    rows = EXPERIMENTS["svhn"]().rows
    made = {name: make_objective(rows[name], 10, 100) for name in ("stability", "stability-ramp")}
    assert [getattr(x, "ramp_steps", None) for x in made.values()] == [0, 500]


def test_the_hinges_of_an_ablation_reach_the_loss_and_older_configs_mean_the_papers():
    old = to_dict(Config())
    del old["method"]["compact_hinge"], old["method"]["margin_hinge"]
    turned = from_dict({"compact_hinge": "plain", "margin_hinge": "squared"})
    for config, hinges in ((from_dict(old), ("squared", "plain")), (turned, ("plain", "squared"))):
        criterion: Any = make_objective(config, 10, 100).criterion
        assert (criterion.compact_hinge, criterion.margin_hinge) == hinges


@pytest.mark.parametrize("name", RECIPES)
def test_traffic_signs_are_never_mirrored(name: str):
    for data in ("gtsrb", "sets/GTSRB-48.npz"):
        assert "flip" not in recipe(name, data).data.augment
    for data in ("cifar100", "gtsrb/photos.npz"):  # a folder's name does not count
        assert "flip" in recipe(name, data).data.augment or name == "tune"  # no augmentation
