"""The loss of each method against its definition."""

from __future__ import annotations

import copy
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from noiseproof import DiscriminativeLoss, perturb
from noiseproof.augment import augmix, mixup
from noiseproof.draws import PerSample, keys
from noiseproof.lab import config
from noiseproof.objectives import (
    METHODS,
    AugMix,
    Batch,
    Both,
    Discriminative,
    Noisy,
    Normal,
    Spheres,
    Stability,
)


class Net(nn.Module):
    """A small net with batch-norm, whose statistics distinguish one pass from two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        self.neck, self.head = nn.Linear(4 * 4, 5), nn.Linear(5, 3)

    def features(self, x):
        return self.neck(self.body(x))

    def forward(self, x):
        return self.head(self.features(x))


NOISE = perturb.Gaussian(0.3)


def batch(second=False):
    g = torch.Generator().manual_seed(1)
    images, other = torch.rand(8, 1, 4, 4, generator=g), torch.rand(8, 1, 4, 4, generator=g)
    labels = torch.arange(8) % 3
    return Batch(images, labels, other if second else None, PerSample(keys(5, torch.arange(8))))


def twin():
    return Net(), Net()


def same_statistics(a, b):
    return all(torch.allclose(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_normal_is_cross_entropy_on_clean_images():
    net, other = twin()
    b = batch()
    outcome = Normal()(net, b)
    logits = other(b.images)
    assert torch.allclose(outcome.loss, cross_entropy(logits, b.labels))
    assert torch.allclose(outcome.logits, logits)


def test_noisy_is_cross_entropy_on_noisy_images():
    net, other = twin()
    b = batch()
    outcome = Noisy(NOISE)(net, b)
    assert torch.allclose(outcome.loss, cross_entropy(other(NOISE(b.images, b.source)), b.labels))


@pytest.mark.parametrize("views", ["paired", "independent"])
def test_both_concatenates_and_batch_norm_sees_the_mixture(views):
    net, other = twin()
    b = batch(second=True)
    outcome = Both(NOISE, views=views)(net, b)
    base = b.images if views == "paired" else b.second
    assert base is not None
    logits = other(torch.cat([b.images, NOISE(base, b.source)]))
    assert torch.allclose(outcome.loss, cross_entropy(logits, b.labels.repeat(2)))
    assert torch.allclose(outcome.logits, logits[:8])
    assert same_statistics(net, other)


@pytest.mark.parametrize("views", ["paired", "independent"])
def test_stability_is_clean_cross_entropy_and_the_mean_distance(views):
    net, other = twin()
    b = batch(second=True)
    outcome = Stability(NOISE, weight=0.7, views=views)(net, b)
    base = b.images if views == "paired" else b.second
    assert base is not None
    clean = other.features(b.images)
    noisy = other.features(NOISE(base, b.source))
    distances = [((clean[i] - noisy[i]) ** 2).sum().sqrt() for i in range(8)]
    expected = cross_entropy(other.head(clean), b.labels) + 0.7 * sum(distances) / 8
    assert torch.allclose(outcome.loss, expected)
    assert same_statistics(net, other)  # two passes, clean first


def test_discriminative_adds_the_criterion_and_the_noisy_cross_entropy():
    net, other = twin()
    b = batch()
    criterion = DiscriminativeLoss(3, 5, margin=2.0)
    objective = Discriminative(copy.deepcopy(criterion), NOISE, noisy_ce_weight=0.5)
    outcome = objective(net, b)
    clean, noisy = other.features(b.images), other.features(NOISE(b.images, b.source))
    expected = (
        cross_entropy(other.head(clean), b.labels)
        + criterion(clean, b.labels, other.head, noisy)
        + 0.5 * cross_entropy(other.head(noisy), b.labels)
    )
    assert torch.allclose(outcome.loss, expected)
    assert set(outcome.terms) == {"ce", "compact", "margin", "norm", "noisy", "noisy_ce"}
    assert not any(t.requires_grad for t in outcome.terms.values())
    assert same_statistics(net, other)


@pytest.mark.parametrize("views", ["paired", "independent"])
def test_batch_norm_together_sends_both_views_as_one_batch(views):
    net, other = twin()
    b = batch(second=True)
    objective = Stability(NOISE, weight=0.7, views=views, batch_norm="together")
    outcome = objective(net, b)
    base = b.images if views == "paired" else b.second
    assert base is not None
    features = other.features(torch.cat([b.images, NOISE(base, b.source)]))
    clean, noisy = features[:8], features[8:]
    distances = [((clean[i] - noisy[i]) ** 2).sum().sqrt() for i in range(8)]
    expected = cross_entropy(other.head(clean), b.labels) + 0.7 * sum(distances) / 8
    assert torch.allclose(outcome.loss, expected)
    assert same_statistics(net, other)


def test_without_constraints_and_together_the_discriminative_objective_is_twice_both():
    net, other = twin()
    b = batch()
    free = DiscriminativeLoss(
        3, 5, compact_weight=0, margin_weight=0, norm_weight=0, noisy_weight=0
    )
    objective = Discriminative(free, NOISE, noisy_ce_weight=1.0, batch_norm="together")
    assert torch.allclose(objective(net, b).loss, 2 * Both(NOISE)(other, b).loss)
    assert same_statistics(net, other)


def test_a_step_takes_two_passes_if_batch_norm_sees_the_views_apart():
    criterion = DiscriminativeLoss(3, 5)
    assert Discriminative(criterion, NOISE).passes == Stability(NOISE).passes == 2
    assert Discriminative(criterion, NOISE, batch_norm="together").passes == 1
    assert Discriminative(DiscriminativeLoss(3, 5, noisy_weight=0), NOISE).passes == 1
    assert Normal().passes == Noisy(NOISE).passes == Both(NOISE).passes == 1


MAKE = {
    "spheres": lambda: Spheres(DiscriminativeLoss(3, 5), NOISE),
    "stability": lambda: Stability(NOISE, ramp_steps=2),
    "discriminative": lambda: Discriminative(DiscriminativeLoss(3, 5), NOISE, noisy_ce_weight=0.5),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_class_attributes_of_a_method_describe_what_it_does(name):
    method = METHODS[name]
    make = MAKE.get(name, lambda: method(NOISE))
    net, objective, images = Net(), make(), []
    net.body.register_forward_pre_hook(lambda _, inputs: images.append(len(inputs[0])))
    outcome = objective(net, batch())
    assert tuple(outcome.terms) == method.terms
    assert sum(images) == 8 * method.num_views
    assert len(images) == objective.passes
    assert method.ramped is hasattr(objective, "ramp_steps")


def mixed_batch():
    b = batch()
    mixture = mixup(b.images, b.labels, PerSample(keys(6, torch.arange(8))))
    return b._replace(images=mixture.images, mixture=mixture)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("method", [Normal, Noisy, Both])
def test_a_mixed_sample_counts_for_both_of_its_labels_by_their_shares(method, smoothing):
    net, b = Net().eval(), mixed_batch()
    assert b.mixture is not None
    assert (b.mixture.share < 1).sum() == 4
    noisy = NOISE(b.images, b.source)
    views = {Normal: [b.images], Noisy: [noisy], Both: [b.images, noisy]}[method]
    terms = []
    for view in views:
        for logits, own, other, share in zip(
            net(view), b.labels, b.mixture.labels, b.mixture.share, strict=True
        ):
            target = torch.full((3,), smoothing / 3)
            target[own] += (1 - smoothing) * share
            target[other] += (1 - smoothing) * (1 - share)
            terms.append(-(target * logits.log_softmax(0)).sum())
    loss = method(NOISE, smoothing=smoothing)(net, b).loss
    assert torch.allclose(loss, torch.stack(terms).mean())


def test_constraints_are_computed_on_unmixed_samples_only():
    net, b = Net().eval(), mixed_batch()
    assert b.mixture is not None
    kept = b.mixture.unmixed
    clean, noisy = net.features(b.images), net.features(NOISE(b.images, b.source))
    ce = Normal()(net, b).loss
    criterion = DiscriminativeLoss(3, 5, radius=0.0, margin=2.0)  # nothing is inside the spheres
    expected = criterion(clean[kept], b.labels[kept], net.head, noisy[kept])
    noisy_ce = Noisy(NOISE)(net, b).loss
    criterion = DiscriminativeLoss(3, 5, radius=0.0, margin=2.0)
    outcome = Discriminative(criterion, NOISE, noisy_ce_weight=0.5)(net, b)
    assert torch.allclose(outcome.loss, ce + expected + 0.5 * noisy_ce)
    assert len(outcome.logits) == 8
    distance = (clean - noisy)[kept].norm(dim=1).mean()
    assert torch.allclose(Stability(NOISE, weight=0.7)(net, b).loss, ce + 0.7 * distance)


def test_constraints_of_a_batch_in_which_all_samples_are_mixed_are_refused():
    b = batch()
    b = b._replace(mixture=mixup(b.images, b.labels, b.source, fraction=1.0))
    assert Both(NOISE)(Net(), b).loss.isfinite()
    for method in (Stability(NOISE), Spheres(DiscriminativeLoss(3, 5), NOISE), AugMix()):
        with pytest.raises(ValueError, match="all 8 samples of the batch are mixed"):
            method(Net(), b)


@pytest.mark.parametrize("mixed", [False, True])
def test_augmix_asks_for_the_same_prediction_for_two_augmented_versions(mixed):
    net, other = (net.double() for net in twin())
    b = mixed_batch() if mixed else batch()
    b = b._replace(images=b.images.double())
    outcome = AugMix(weight=3.0)(net, b)
    assert isinstance(b.source, PerSample)
    versions = [augmix(b.images, b.source.fold(i)) for i in range(2)]
    assert not torch.equal(*versions)
    logits = other(torch.cat([b.images, *versions]))
    predictions = logits.softmax(1).view(3, 8, 3)
    divergences = []
    for i in b.mixture.unmixed.tolist() if b.mixture else range(8):
        mean = predictions[:, i].mean(0)
        divergences.append(sum((p * (p / mean).log()).sum() for p in predictions[:, i]) / 3)
    js = torch.stack(divergences).mean()
    ce = AugMix().cross_entropy(logits[:8], b.labels, b.mixture)
    assert torch.allclose(outcome.loss, ce + 3 * js)
    assert torch.allclose(outcome.logits, logits[:8])
    assert torch.allclose(outcome.terms["js"], js)
    assert same_statistics(net, other)  # one pass
    assert AugMix().weight == 12


@pytest.mark.parametrize("mixed", [False, True])
def test_spheres_adds_constraints_on_features_divided_by_their_norm(mixed):
    net, other = twin()
    b = mixed_batch() if mixed else batch()
    kept = b.mixture.unmixed if b.mixture else torch.arange(8)
    criterion = DiscriminativeLoss(3, 5, radius=0.2, margin=0.5)
    outcome = Spheres(copy.deepcopy(criterion), NOISE, weight=0.7)(net, b)
    features = other.features(torch.cat([b.images, NOISE(b.images, b.source)]))
    ce = Both().cross_entropy(other.head(features), b.labels, b.mixture)
    clean, noisy = (view[kept] for view in features.chunk(2))
    norm = torch.stack([row @ row for row in clean]).mean().sqrt()
    scaled = copy.deepcopy(other.head)
    scaled.bias.data /= norm.detach()  # the same hyperplanes, for features divided by the norm
    constraints = criterion(clean / norm, b.labels[kept], scaled, noisy / norm)
    assert torch.allclose(outcome.loss, ce + 0.7 * constraints)
    assert set(outcome.terms) == {"ce", "compact", "margin", "norm", "noisy"}
    assert len(outcome.logits) == 8
    assert same_statistics(net, other)  # one pass


def test_the_constraints_of_spheres_do_not_depend_on_the_size_of_the_features():
    net, b = Net(), batch()
    terms = []
    for _ in range(2):
        objective = Spheres(DiscriminativeLoss(3, 5, radius=0.2, margin=0.5), NOISE)
        terms.append({k: float(v) for k, v in objective(net, b).terms.items() if k != "ce"})
        for parameter in (*net.neck.parameters(), net.head.bias):
            parameter.data *= 10
    assert terms[0] == pytest.approx(terms[1], rel=1e-4)


def test_spheres_takes_a_head_without_bias_and_features_that_are_all_zero():
    net = Net()
    net.head = nn.Linear(5, 3, bias=False)
    for parameter in net.neck.parameters():
        parameter.data.zero_()
    outcome = Spheres(DiscriminativeLoss(3, 5), NOISE)(net, batch())
    outcome.loss.backward()
    gradients = [p.grad for p in net.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_spheres_keeps_every_centroid_if_a_feature_is_infinite():
    class Overflowing(Net):
        def features(self, x):
            q = super().features(x)
            return torch.cat([q[:1] + torch.inf, q[1:]])

    b, objective = batch(), Spheres(DiscriminativeLoss(3, 5, radius=0.2, margin=0.5), NOISE)
    objective(Net(), b)
    before = objective.criterion.centroids.clone()
    outcome = objective(Overflowing(), b)
    assert outcome.loss.isnan()  # so that a GradScaler skips the step
    assert torch.equal(objective.criterion.centroids, before)


def test_objectives_and_config_have_the_same_methods():
    assert list(METHODS) == list(config.METHODS) == list(get_args(config.MethodName))
    assert {*config.STAGED, *config.PAPER_METHODS, *config.NOISELESS} <= set(METHODS)


@pytest.mark.parametrize("method", [Discriminative, partial(Spheres, weight=1.0)])
def test_the_ramp_raises_the_constraints_over_the_first_training_steps_only(method):
    net, b = Net(), batch()
    objective = method(DiscriminativeLoss(3, 5), NOISE, ramp_steps=4)
    objective.eval()
    objective(net, b)
    assert objective.steps == 0
    objective.train()
    shares = []
    for _ in range(6):
        outcome = objective(net, b)
        terms = outcome.terms
        constraints = terms["compact"] + terms["margin"] + 1e-3 * terms["norm"] + terms["noisy"]
        shares.append(float((outcome.loss.detach() - terms["ce"]) / constraints))
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1], abs=1e-4)


def test_the_ramp_raises_the_stability_weight_over_the_first_training_steps_only():
    net, b = Net(), batch()
    objective = Stability(NOISE, weight=2.0, ramp_steps=4)
    shares = []
    for _ in range(6):
        outcome = objective(net, b)
        pull = outcome.loss.detach() - outcome.terms["ce"]
        shares.append(float(pull / outcome.terms["stability"]))
    assert shares == pytest.approx([0.5, 1, 1.5, 2, 2, 2], abs=1e-4)
    assert objective.steps == 6
    objective.eval()
    objective(net, b)
    assert objective.steps == 6


def test_without_noisy_weights_the_noisy_view_is_not_computed():
    net, b = Net(), batch()
    objective = Discriminative(DiscriminativeLoss(3, 5, noisy_weight=0.0), None)
    assert not objective.needs_second
    objective(net, b)
    assert net.body[1].num_batches_tracked == 1


def test_independent_views_without_a_second_view_raise_an_error():
    with pytest.raises(ValueError, match="no second view"):
        Stability(NOISE, views="independent")(Net(), batch())


def test_noise_is_parsed_from_text_and_required_where_it_is_used():
    assert Noisy("gaussian:0.3").noise == NOISE
    with pytest.raises(ValueError, match="Noisy needs noise"):
        Noisy()(Net(), batch())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Normal(views="both"),  # pyright: ignore[reportArgumentType]
        lambda: Normal(smoothing=1.0),
        lambda: Stability(NOISE, weight=-1.0),
        lambda: AugMix(weight=-1.0),
        lambda: Spheres(DiscriminativeLoss(3, 5), NOISE, weight=-1.0),
        lambda: Discriminative(DiscriminativeLoss(3, 5), NOISE, noisy_ce_weight=-1.0),
        lambda: Stability(NOISE, batch_norm="mixed"),  # pyright: ignore[reportArgumentType]
        lambda: Discriminative(DiscriminativeLoss(3, 5), NOISE, ramp_steps=-1),
        lambda: Stability(NOISE, ramp_steps=-1),
    ],
)
def test_invalid_settings_raise_errors(make):
    with pytest.raises(ValueError, match="must"):
        make()


def test_a_weight_that_is_not_a_number_is_refused_as_such():
    nan, criterion = float("nan"), DiscriminativeLoss(3, 5)
    for make in (
        lambda: Stability(NOISE, weight=nan),
        lambda: AugMix(weight=nan),
        lambda: Spheres(criterion, NOISE, weight=nan),
        lambda: Discriminative(criterion, NOISE, noisy_ce_weight=nan),
        lambda: Stability(NOISE, ramp_steps=nan),  # pyright: ignore[reportArgumentType]
        lambda: DiscriminativeLoss(3, 5, margin_weight=nan),
    ):
        with pytest.raises(ValueError, match="must be a non-negative number, got nan"):
            make()


def test_label_smoothing_reaches_the_cross_entropy():
    net, other = twin()
    b = batch()
    expected = cross_entropy(other(b.images), b.labels, label_smoothing=0.1)
    assert torch.allclose(Normal(smoothing=0.1)(net, b).loss, expected)


def test_the_noisy_view_is_computed_once_its_weight_is_raised():
    criterion = DiscriminativeLoss(3, 5, noisy_weight=0)
    objective = Discriminative(criterion, NOISE)
    assert not objective.two_views
    criterion.noisy_weight = 0.5
    assert objective.two_views
    assert objective(Net(), batch()).terms["noisy"] > 0
