"""Accuracy of a model under perturbations, with reproducible noise for every image.

The noise of an image is keyed by (seed, perturbation, draw, index of the image in the data). It
does not depend on the batch size, the device, the model or the other perturbations, so two models
can be compared image by image. `noiseproof evaluate` uses this code and reports the same numbers:
on a GPU up to rounding, and under bfloat16 autocast for runs that were trained with it.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from noiseproof import draws as random
from noiseproof.geometry import check_labels
from noiseproof.modes import deterministic, evaluating
from noiseproof.perturb import Own, Perturbation, parse
from noiseproof.perturb.base import check_images, check_range

__all__ = [
    "Accuracy",
    "PerturbedClassifier",
    "accuracy",
    "batch_size_for",
    "by_name",
    "canonical_name",
    "perturb_samples",
    "predicted_classes",
]

Pair = tuple[Tensor, Tensor]
Perturbations = Perturbation | str | Sequence[Perturbation | str]
Named = Perturbation | str | Callable[..., Any]
_CHECKED_DEVICES = ("cuda",)  # types of devices on which predictions are verified
_CHECKED = 32  # images at the end of a batch, and as many spread over it, that are predicted twice


class Accuracy(NamedTuple):
    """The share of images that a model classifies correctly under one perturbation."""

    mean: float  # over draws of the noise
    std: float  # over draws, with n − 1; 0 for a single draw
    values: tuple[float, ...]  # the accuracy of each draw
    correct: Tensor  # draws x images, whether the model was right: for paired tests of two models
    classes: Tensor | None  # draws x images, the predicted classes, if `return_classes`
    not_finite: int = 0  # predictions from logits that are not finite: class -1, always wrong
    probabilities: Tensor | None = None  # draws x images x classes, if `return_probabilities`

    def __str__(self) -> str:
        spread = f" ± {100 * self.std:.1f}" if len(self.values) > 1 else ""
        warning = f" ({self.not_finite:,} predictions not finite)" if self.not_finite else ""
        return f"{100 * self.mean:.1f}{spread} %{warning}"

    def __repr__(self) -> str:  # one line, since people print the whole dict
        count, n = self.correct.shape
        return f"Accuracy({self}, {count} x {n} images)"


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: Pair | Iterable[Sequence[Tensor]],
    perturbations: Named | Sequence[Named] | Mapping[str, Named] = "clean",
    *,
    draws: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    return_classes: bool = False,
    return_probabilities: bool = False,
) -> dict[str, Accuracy]:
    """The accuracy of any classifier under each perturbation, by the perturbation's text.

    The model is evaluated in eval mode, and its modes are restored. It runs on its own device and
    in the precision of the caller's autocast, if any; noise is always drawn in float32.

    Args:
        model: maps pixels in [0, 1], B x C x H x W, to logits, B x classes; a model that was
            trained on normalised images is `nn.Sequential(normalise, net)` here.
        data: a pair of tensors (images, labels), or batches of such pairs, such as a DataLoader
            that does not shuffle, since the index of an image determines its noise. Read once.
        perturbations: one or more texts such as "gaussian:8/255", objects of `noiseproof.perturb`,
            or functions as for `noiseproof.perturb.register`, such as transforms of torchvision,
            which count as random and are named after themselves; or a dictionary of any of these,
            with names for the result.
        draws: noise draws per perturbation; deterministic ones, such as "clean", run once.
        seed: of the noise.
        batch_size: images at a time; by default the batches of a loader, and for tensors as many as
            keep memory small. It does not change the noise, but rounding may flip a near-tie.
        return_classes: also return the predicted classes.
        return_probabilities: also return the probabilities of all classes, the softmax of the
            logits in float32, on the CPU.

    A pixel of 0.4 or 0.6 is on the right side of 0.5 under noise of 0.1 with probability
    Φ(1) = 84.1 %:

    >>> class Bright(nn.Module):
    ...     def forward(self, x):
    ...         return torch.cat([0.5 - x, x - 0.5], 1).flatten(1)
    >>> labels = torch.arange(2000) % 2
    >>> images = (0.4 + 0.2 * labels).view(-1, 1, 1, 1)
    >>> accuracy(Bright(), (images, labels), ["clean", "gaussian:0.1"])
    {'clean': Accuracy(100.0 %, 1 x 2000 images), \
'gaussian:0.1': Accuracy(83.9 ± 0.9 %, 10 x 2000 images)}
    """
    named = _named(perturbations)
    _check_settings(model, named, draws, batch_size)
    classes: dict[str, list[Tensor]] = {name: [] for name in named}
    chances: dict[str, list[Tensor]] = {name: [] for name in named}
    truth: list[Tensor] = []
    start, device = 0, _device(model)
    classifier = PerturbedClassifier(model, seed)
    with evaluating(model):
        for images, labels in _batches(data, batch_size, device):
            x = images.to(device or images.device)
            index = torch.arange(start, start + len(x), device=x.device)
            for name, p in named.items():
                todo = range(1 if p.deterministic else draws)
                logits = [classifier.logits(x, index, p, draw) for draw in todo]
                predicted = [predicted_classes(each).int() for each in logits]
                classes[name].append(torch.stack(predicted))
                if return_probabilities:
                    parts = [each.float().softmax(1).cpu() for each in logits]
                    chances[name].append(torch.stack(parts))
            check_labels(labels.cpu(), classifier.num_classes)
            truth.append(labels.cpu())
            start += len(x)
    if not start:
        raise ValueError("there are no images to test: the data are empty or already consumed")
    results = {}
    for name, batches in classes.items():
        predicted = torch.cat(batches, 1).cpu()
        correct = predicted == torch.cat(truth)
        values = tuple(hits / start for hits in correct.sum(1).tolist())
        mean, std = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        returned = predicted.long() if return_classes else None
        not_finite = int((predicted < 0).sum())
        probabilities = torch.cat(chances[name], 1) if return_probabilities else None
        results[name] = Accuracy(mean, std, values, correct, returned, not_finite, probabilities)
    return results


def _named(
    perturbations: Named | Sequence[Named] | Mapping[str, Named],
) -> dict[str, Perturbation]:
    """Perturbations by the names that a result has; functions become perturbations."""
    if isinstance(perturbations, Mapping):
        return {str(name): _perturbation(p, str(name)) for name, p in perturbations.items()}
    several = perturbations
    if isinstance(several, str) or callable(several):
        several = [several]
    named: dict[str, Perturbation] = {}
    for given in several:
        p = _perturbation(given, getattr(given, "__name__", type(given).__name__))
        name = canonical_name(p)
        if name in named and named[name] != p:
            raise ValueError(
                f"two perturbations are called {name!r}; give them names in a dictionary, such as "
                "{'rain': rain}"
            )
        named[name] = p
    return named


def _perturbation(given: Named, name: str) -> Perturbation:
    if callable(given) and not isinstance(given, Perturbation):
        return Own(name, given)
    return next(iter(by_name([given]).values()))


def canonical_name(perturbation: Perturbation | str) -> str:
    """The canonical text of a perturbation; "clean" for the identity.

    >>> canonical_name("identity"), canonical_name("Gaussian: 40/255")
    ('clean', 'gaussian:40/255')
    """
    text = str(parse(perturbation) if isinstance(perturbation, str) else perturbation)
    return "clean" if text == "identity" else text


def by_name(perturbations: Perturbations) -> dict[str, Perturbation]:
    """Perturbations by their canonical name, without duplicates."""
    several = [perturbations] if isinstance(perturbations, (str, Perturbation)) else perturbations
    for p in several:
        if not isinstance(p, (str, Perturbation)):
            raise ValueError(
                "a perturbation must be text such as 'gaussian:8/255' or one of "
                f"noiseproof.perturb, got {p!r}"
            )
    return {canonical_name(p): parse(p) if isinstance(p, str) else p for p in several}


def perturb_samples(
    x: Tensor, index: Tensor, perturbation: Perturbation, draw: int, seed: int
) -> Tensor:
    """The images `x`, which have the indices `index` in the data, under one draw of the noise."""
    text = zlib.crc32(canonical_name(perturbation).encode())
    return perturbation(x, random.PerSample(random.keys(seed, text, draw, index)))


def check_applicable(perturbations: Iterable[Perturbation], size: Sequence[int]) -> None:
    """ValueError if images of `size`, C x H x W, are too small for one of the perturbations; found
    by perturbing a grey image, so that nothing is measured first."""
    grey, index = torch.full((1, *size), 0.5), torch.zeros(1, dtype=torch.long)
    for perturbation in perturbations:
        perturb_samples(grey, index, perturbation, 0, 0)


class PerturbedClassifier:
    """Predicts images under noise.

    In eval mode the prediction for an image must not depend on the rest of its batch; GPU kernels
    have been seen to skip the last images of a batch. So on GPUs some images of the first batch of
    each size are predicted a second time, in a small batch.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], seed: int):
        """
        Args:
            forward: maps images to logits.
            seed: of the noise.
        """
        self.forward, self.seed = forward, seed
        self.num_classes = 0  # of the last batch
        self._checked_sizes: set[int] = set()

    def logits(self, x: Tensor, index: Tensor, perturbation: Perturbation, draw: int) -> Tensor:
        """Logits, B x classes, of the images with indices `index` in the data under one draw."""
        with torch.autocast(x.device.type, enabled=False):
            noisy = perturb_samples(x, index, perturbation, draw, self.seed)
        return self.checked_logits(noisy)

    def checked_logits(self, images: Tensor) -> Tensor:
        """Logits, B x classes, of images that are perturbed already."""
        logits, n = self.forward(images), len(images)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != n:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"the model must return logits, {n} x classes, got {got}")
        if images.device.type in _CHECKED_DEVICES and n not in self._checked_sizes:
            self._check(images, logits)
        self.num_classes = logits.shape[1]
        return logits

    def _check(self, images: Tensor, logits: Tensor) -> None:
        """Predicts some images again in a small batch with deterministic kernels; RuntimeError if
        many differ."""
        n = len(images)
        self._checked_sizes.add(n)
        if n <= 2 * _CHECKED:
            return
        spread, last = torch.linspace(0, n - 1, _CHECKED).long(), torch.arange(n - _CHECKED, n)
        some = torch.cat([spread, last]).to(images.device)
        with deterministic():
            again = self.forward(images[some])
        difference = again.float().softmax(1) - logits[some].float().softmax(1)
        agree = (difference.abs().amax(1) < 0.5) | ~(_defined(again) | _defined(logits[some]))
        wrong = int((~agree).sum())
        if wrong > _CHECKED // 8:
            raise RuntimeError(
                f"{wrong} of {len(some)} images are classified differently in a batch of {n} than "
                f"in one of {len(some)}: a kernel on {images.device} gives wrong results"
            )


def predicted_classes(logits: Tensor) -> Tensor:
    """The class with the largest logit of each row; -1 where logits are not finite."""
    return torch.where(_defined(logits), logits.argmax(1), -1)


def _defined(logits: Tensor) -> Tensor:
    """Whether each row has a largest logit: none is NaN, and the largest is finite."""
    return logits.amax(1).isfinite()


def batch_size_for(size: Sequence[int], device: torch.device) -> int:
    """A batch of about two million values (32 million on a GPU), from 8 to 1,024 images (4,096).

    A value takes about 40 bytes while its noise is drawn, and several times that in the network.

    Args:
        size: C x H x W of an image.
        device: where the batch is evaluated.
    """
    values, most = (1 << 25, 4096) if device.type == "cuda" else (1 << 21, 1024)
    return max(8, min(most, values // max(1, math.prod(size))))


def _device(model: nn.Module) -> torch.device | None:
    """The device of the model; None if it has no tensors and so runs on that of the images."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else None


def _batches(
    data: Pair | Iterable[Sequence[Tensor]], size: int | None, device: torch.device | None
) -> Iterator[Pair]:
    """Validated batches of at most `size` images."""
    if isinstance(data, Tensor):
        raise ValueError("data must be a pair (images, labels) or batches of such, got one tensor")
    if isinstance(data, DataLoader):
        _check_order(data)
    whole = isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor)
    for batch in [data] if whole else data:
        images, labels = _pair(batch)
        check_images(images)
        check_range(images)
        if labels.ndim != 1 or len(labels) != len(images):
            raise ValueError(
                f"labels must be a vector of {len(images)} class indices, one per image, "
                f"got shape {tuple(labels.shape)}"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be integer class indices, got {labels.dtype}")
        default = batch_size_for(images.shape[1:], device or images.device) if whole else 0
        count = max(1, size or default or len(images))
        yield from zip(images.split(count), labels.split(count), strict=True)


def _check_order(loader: DataLoader[Any]) -> None:
    """ValueError unless the loader gives its images in order, and none twice."""
    why = "the index of an image determines its noise, so that every model sees the same noise"
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:  # each worker iterates over all of it, unless it is written not to
            raise ValueError(f"use num_workers=0 with an iterable dataset: {why}")
        return
    if loader.num_workers and not getattr(loader, "in_order", True):  # torch 2.6 or later
        raise ValueError(f"use in_order=True with workers: {why}")
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)
    in_order = all(type(sampler) is SequentialSampler for sampler in samplers)
    if not in_order or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ValueError(
            f"the loader must go through its dataset in order: {why}. Use shuffle=False and no "
            "sampler; for some of the images, pass a torch.utils.data.Subset"
        )


def _pair(batch: object) -> Pair:
    parts: list[Any] = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        return parts[0], parts[1]
    hint = "; a DataLoader makes batches of single images" if len(parts) == 2 else ""
    types = " and ".join(type(part).__name__ for part in parts)
    raise ValueError(f"a batch must be a pair of tensors, images and labels, got {types}{hint}")


def _check_settings(
    model: nn.Module, named: dict[str, Perturbation], draws: int, batch_size: int | None
) -> None:
    if not isinstance(model, nn.Module):
        hint = "; pass run.model()" if type(model).__name__ == "RunFolder" else ""
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    if not named:
        raise ValueError("perturbations must name at least one, such as 'clean', got none")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
