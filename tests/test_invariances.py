"""What must not change the loss, the distances and the perturbations, for any shape and data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noiseproof import DiscriminativeLoss
from noiseproof.draws import PerSample, keys
from noiseproof.geometry import boundary_distances, class_dispersion, class_margin
from noiseproof.loss import LossTerms
from noiseproof.perturb import Chain, DownUp, Gaussian, Occlusion, Perturbation, Stripes, Uniform


class Problem(NamedTuple):
    """Two batches, so that running centroids take part, and a head."""

    features: Tensor  # 2 x B x D
    noisy: Tensor  # 2 x B x D
    labels: Tensor  # 2 x B
    weight: Tensor  # C x D
    bias: Tensor  # C
    options: dict[str, Any]

    @property
    def head(self) -> nn.Linear:
        head = nn.Linear(self.weight.shape[1], len(self.weight), dtype=torch.float64)
        head.weight.data, head.bias.data = self.weight, self.bias
        return head


@st.composite
def problems(draw) -> Problem:
    classes, dim, batch = (draw(st.integers(*limits)) for limits in ((2, 9), (1, 6), (1, 12)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return Problem(
        features=2 * random(2, batch, dim),
        noisy=2 * random(2, batch, dim),
        labels=torch.randint(classes, (2, batch), generator=g),
        weight=random(classes, dim),
        bias=random(classes),
        options=dict(
            radius=draw(st.sampled_from([0.0, 0.5])),
            margin=draw(st.sampled_from([0.5, 5.0])),
            centroids=draw(st.sampled_from(["partial", "naive", "momentum"])),
            margin_over=draw(st.sampled_from(["max", "mean"])),
        ),
    )


def evaluate(p: Problem) -> tuple[DiscriminativeLoss, LossTerms, Tensor]:
    """The loss after both batches, the terms of the second, and their gradient by the features."""
    loss = DiscriminativeLoss(*p.weight.shape, **p.options).double()
    loss(p.features[0], p.labels[0], p.head, p.noisy[0])
    features = p.features[1].clone().requires_grad_()
    total, terms = loss(features, p.labels[1], p.head, p.noisy[1], return_terms=True)
    (gradient,) = torch.autograd.grad(total, features)
    return loss, terms, gradient


def rotation(p: Problem) -> Tensor:
    g = torch.Generator().manual_seed(1)
    dim = p.weight.shape[1]
    return torch.linalg.qr(torch.randn(dim, dim, generator=g, dtype=torch.float64)).Q


any_problem = given(problems())
some = settings(max_examples=25, deadline=None)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# The loss


@some
@any_problem
def test_a_translation_of_features_with_its_bias_changes_the_norm_alone(p: Problem):
    shift = torch.linspace(-3, 2, p.weight.shape[1], dtype=torch.float64)
    moved = p._replace(
        features=p.features + shift, noisy=p.noisy + shift, bias=p.bias - p.weight @ shift
    )
    (loss, terms, _), (moved_loss, moved_terms, _) = evaluate(p), evaluate(moved)
    close(moved_terms._replace(norm=terms.norm), terms)
    close(moved_loss.centroids, loss.centroids + shift * loss.seen[:, None])


@some
@any_problem
def test_a_rotation_of_features_and_rows_changes_no_term(p: Problem):
    q = rotation(p)
    turned = p._replace(features=p.features @ q, noisy=p.noisy @ q, weight=p.weight @ q)
    (_, terms, gradient), (_, turned_terms, turned_gradient) = evaluate(p), evaluate(turned)
    close(turned_terms, terms)
    close(turned_gradient, gradient @ q)


@some
@any_problem
def test_renamed_classes_change_no_term_and_rename_the_centroids(p: Problem):
    g = torch.Generator().manual_seed(2)
    old = torch.randperm(len(p.bias), generator=g)  # new class k is the old class old[k]
    renamed = p._replace(labels=old.argsort()[p.labels], weight=p.weight[old], bias=p.bias[old])
    (loss, terms, gradient), (other, other_terms, other_gradient) = evaluate(p), evaluate(renamed)
    close(other_terms, terms)
    close(other_gradient, gradient)
    close(other.centroids, loss.centroids[old])
    assert torch.equal(other.seen, loss.seen[old])


@some
@any_problem
def test_the_order_of_a_batch_does_not_matter(p: Problem):
    order = torch.randperm(p.labels.shape[1], generator=torch.Generator().manual_seed(3))
    shuffled = p._replace(
        features=p.features[:, order], noisy=p.noisy[:, order], labels=p.labels[:, order]
    )
    (loss, terms, gradient), (other, other_terms, other_gradient) = evaluate(p), evaluate(shuffled)
    close(other_terms, terms)
    close(other_gradient, gradient[order])
    close(other.centroids, loss.centroids)


@some
@any_problem
def test_a_batch_in_which_each_sample_occurs_twice_has_the_same_terms(p: Problem):
    twice = p._replace(
        features=p.features.repeat(1, 2, 1),
        noisy=p.noisy.repeat(1, 2, 1),
        labels=p.labels.repeat(1, 2),
    )
    (loss, terms, gradient), (other, other_terms, other_gradient) = evaluate(p), evaluate(twice)
    close(other_terms, terms)
    close(other_gradient, gradient.repeat(2, 1) / 2)
    close(other.centroids, loss.centroids)


@some
@any_problem
def test_in_eval_mode_parts_with_equal_class_counts_average_to_the_whole(p: Problem):
    """Without it, the loss is not additive: centroids are means over the batch."""
    loss = evaluate(p)[0].eval()
    labels, head = p.labels[1], p.head
    parts = [loss.terms(f, labels, head, n) for f, n in zip(p.features, p.noisy, strict=True)]
    whole = loss.terms(p.features.flatten(0, 1), labels.repeat(2), head, p.noisy.flatten(0, 1))
    close(whole, LossTerms(*((a + b) / 2 for a, b in zip(*parts, strict=True))))


@some
@given(problems(), st.sampled_from([0.01, 3.0, 100.0]))
def test_units_of_the_features_scale_lengths_and_squared_lengths(p: Problem, unit: float):
    lengths = {name: unit * p.options[name] for name in ("radius", "margin")}
    scaled = p._replace(
        features=unit * p.features,
        noisy=unit * p.noisy,
        bias=unit * p.bias,
        options={**p.options, **lengths},
    )
    terms, scaled_terms = evaluate(p)[1], evaluate(scaled)[1]
    powers = LossTerms(unit**2, unit, unit, unit**2)  # type: ignore[arg-type]
    close(scaled_terms, LossTerms(*(f * t for f, t in zip(powers, terms, strict=True))))


@some
@given(problems(), st.sampled_from([0.01, 3.0, 100.0]))
def test_a_head_times_a_constant_has_the_same_boundaries(p: Problem, factor: float):
    scaled = p._replace(weight=factor * p.weight, bias=factor * p.bias)
    close(evaluate(scaled)[1:], evaluate(p)[1:])


# Distances to boundaries


@some
@any_problem
def test_distances_and_margins_move_with_features_and_head(p: Problem):
    features, labels, head = p.features[0], p.labels[0], p.head
    shift, q = torch.ones(p.weight.shape[1], dtype=torch.float64), rotation(p)
    distances, margins = (f(features, labels, head) for f in (boundary_distances, class_margin))
    moved = p._replace(weight=3 * p.weight @ q, bias=3 * (p.bias - p.weight @ shift)).head
    close(boundary_distances((features + shift) @ q, labels, moved), distances)
    close(class_margin((features + shift) @ q, labels, moved), margins)
    dispersion = class_dispersion(features, labels, len(p.bias))
    close(class_dispersion(5 * (features + shift) @ q, labels, len(p.bias)), 5 * dispersion)


# Perturbations

PERTURBATIONS: list[Perturbation] = [
    Gaussian(0.1),
    Gaussian((0.05, 0.3)),
    Uniform(0.2),
    Occlusion(2, (3, 2)),
    Stripes(2, 1),
    DownUp(2),
    Chain(Gaussian(0.1), Occlusion(1, 3), DownUp(1.5)),
]
perturbations = st.sampled_from(PERTURBATIONS)


def images(batch: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 2, 6, 7, generator=g, dtype=torch.float64)


@some
@given(perturbations, st.integers(1, 6), st.integers(0, 6), st.integers(0, 2**31))
def test_a_split_batch_is_perturbed_like_the_whole(p: Perturbation, batch: int, at: int, seed: int):
    x, sample = images(batch, seed), keys(seed, torch.arange(batch))
    whole = p(x, PerSample(sample))
    parts = [p(x[part], PerSample(sample[part])) for part in (slice(at), slice(at, None))]
    close(torch.cat(parts), whole)


@some
@given(st.sampled_from([Gaussian(0.01), Gaussian((0, 0.01)), Uniform(0.1)]), st.integers(0, 2**31))
def test_noise_does_not_depend_on_the_image(p: Perturbation, seed: int):
    x, source = 0.4 + 0.1 * images(3, seed), PerSample(keys(seed, torch.arange(3)))
    grey = torch.full_like(x, 0.5)  # the noise reaches neither 0 nor 1
    close(p(x, source) - x, p(grey, source) - grey)


@some
@given(st.sampled_from([Occlusion(2, 3), Stripes(1, 2), DownUp(2)]), st.integers(0, 2**31))
def test_masks_and_resampling_are_linear_in_the_image(p: Perturbation, seed: int):
    x, y, source = images(3, seed), images(3, seed + 1), PerSample(keys(seed, torch.arange(3)))
    close(p(0.3 * x + 0.7 * y, source), 0.3 * p(x, source) + 0.7 * p(y, source))
