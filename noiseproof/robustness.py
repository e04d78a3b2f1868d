"""How often a model is right under perturbations, with noise that belongs to an image.

The noise of an image is keyed by (seed, perturbation, draw, place of the image in the data). It is
the same whatever the batch size, the device, the model and the other perturbations that are asked
for, so that two models can be compared image by image. `noiseproof evaluate` tests its runs with
this code too, and reports the same numbers; on a GPU, to rounding, and under autocast to bfloat16
where a run was trained so.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from noiseproof import draws as random
from noiseproof.geometry import check_labels
from noiseproof.modes import deterministic, evaluating
from noiseproof.perturb import Perturbation, parse
from noiseproof.perturb.base import check_images, check_range

__all__ = [
    "Accuracy",
    "PerturbedClassifier",
    "accuracy",
    "batch_size_for",
    "by_name",
    "canonical_name",
    "perturb_samples",
]

Pair = tuple[Tensor, Tensor]
Perturbations = Perturbation | str | Sequence[Perturbation | str]
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ROUNDING = 1e-3  # how far outside [0, 1] an image may lie
_AGAIN = 32  # images at the end of a batch, and as many all over it, that are looked at twice


class Accuracy(NamedTuple):
    """The share of images that a model gets right under one perturbation.

    mean, std: over draws of the noise; std is the sample's (n − 1), and 0 where there is one draw.
    values: the accuracy of every draw.
    correct: draws x images, True where the model was right: what paired tests of two models need.
    classes: draws x images, the classes predicted; None unless they were asked for.
    """

    mean: float
    std: float
    values: tuple[float, ...]
    correct: Tensor
    classes: Tensor | None

    def __str__(self) -> str:
        spread = f" ± {100 * self.std:.1f}" if len(self.values) > 1 else ""
        return f"{100 * self.mean:.1f}{spread} %"

    def __repr__(self) -> str:  # one line, since people print the whole dict
        count, n = self.correct.shape
        return f"Accuracy({self}, {count} x {n} images)"


@torch.no_grad()
def accuracy(
    model: nn.Module,
    data: Pair | Iterable[Sequence[Tensor]],
    perturbations: Perturbations = "clean",
    *,
    draws: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    return_classes: bool = False,
) -> dict[str, Accuracy]:
    """The accuracy of any classifier under each perturbation, by the perturbation's text.

    A perturbation that draws nothing, such as "clean", is run once. The model is put into eval mode
    and gets its modes back. It runs on the device that it is on, and in the precision of the
    caller's autocast, if there is one; noise is drawn in float32 in any case.

    Args:
        model: maps pixels in [0, 1], B x C x H x W, to logits, B x classes; a model that was
            trained on normalised images is `nn.Sequential(normalise, net)` here.
        data: a pair (images, labels) of tensors, or batches of such pairs, such as a DataLoader
            that does not shuffle: the place of an image decides its noise. It is read once.
        perturbations: text such as "gaussian:8/255" or objects of `noiseproof.perturb`, or one.
        draws: draws of the noise of each perturbation that draws.
        batch_size: images at a time; by default a loader's batches, and of tensors as many as keep
            memory small. It changes no noise, but rounding may turn a near-tie.
        return_classes: also give the classes that were predicted.

    A pixel of 0.4 or 0.6 is told from 0.5 under noise of 0.1 with probability Φ(1) = 84.1 %:

    >>> class Bright(nn.Module):
    ...     def forward(self, x):
    ...         return torch.cat([0.5 - x, x - 0.5], 1).flatten(1)
    >>> labels = torch.arange(2000) % 2
    >>> images = (0.4 + 0.2 * labels).view(-1, 1, 1, 1)
    >>> found = accuracy(Bright(), (images, labels), ["clean", "gaussian:0.1"])
    >>> found
    {'clean': Accuracy(100.0 %, 1 x 2000 images), \
'gaussian:0.1': Accuracy(83.9 ± 0.9 %, 10 x 2000 images)}
    """
    asked = by_name(perturbations)
    _check_settings(model, asked, draws, batch_size)
    todo = {name: range(1 if p.deterministic else draws) for name, p in asked.items()}
    found: dict[str, list[Tensor]] = {name: [] for name in asked}
    truth: list[Tensor] = []
    place, home = 0, _device(model)
    asking = PerturbedClassifier(model, seed)
    with evaluating(model):
        for images, labels in _batches(data, batch_size, home):
            x = images.to(home or images.device)
            index = torch.arange(place, place + len(x), device=x.device)
            for name, perturbation in asked.items():
                found[name].append(asking(x, index, perturbation, todo[name]))
            check_labels(labels.cpu(), asking.num_classes)
            truth.append(labels.cpu())
            place += len(x)
    if not place:
        raise ValueError(
            "there are no images to test the model on: the data are empty, or were read to the end"
        )
    labels = torch.cat(truth)
    return {n: _accuracy(torch.cat(c, 1).cpu(), labels, return_classes) for n, c in found.items()}


def _accuracy(classes: Tensor, labels: Tensor, keep: bool) -> Accuracy:
    correct = classes == labels
    values = tuple(hits / len(labels) for hits in correct.sum(1).tolist())
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return Accuracy(
        statistics.fmean(values), spread, values, correct, classes.long() if keep else None
    )


def canonical_name(perturbation: Perturbation | str) -> str:
    """The canonical text of a perturbation, "clean" for none.

    >>> canonical_name("identity"), canonical_name("Gaussian: 40/255")
    ('clean', 'gaussian:40/255')
    """
    text = str(parse(perturbation) if isinstance(perturbation, str) else perturbation)
    return "clean" if text == "identity" else text


def by_name(perturbations: Perturbations) -> dict[str, Perturbation]:
    """Each perturbation once, by its canonical text."""
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
    """The images at the places `index` of the data under one draw of the noise."""
    spec = zlib.crc32(canonical_name(perturbation).encode())
    return perturbation(x, random.PerSample(random.keys(seed, spec, draw, index)))


class PerturbedClassifier:
    """Asks one model, through `forward`, for the classes of noisy images.

    A network in eval mode must say the same of an image in whatever company; a GPU's kernels have
    been seen to leave out the last images of a batch. So the first batch of each size is looked at
    twice there, for some images.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        seed: int,
        doubted: Sequence[str] = ("cuda",),
    ):
        self.forward, self.seed, self.doubted = forward, seed, doubted
        self.num_classes = 0  # of the last answer
        self._trusted: set[int] = set()  # sizes of batches that have been checked

    def __call__(
        self, x: Tensor, index: Tensor, perturbation: Perturbation, draws: Sequence[int]
    ) -> Tensor:
        """Classes, draws x B, int32, of the images at the places `index` of the data."""
        found = torch.empty(len(draws), len(x), dtype=torch.int32, device=x.device)
        for i, draw in enumerate(draws):
            with torch.autocast(x.device.type, enabled=False):
                noisy = perturb_samples(x, index, perturbation, draw, self.seed)
            logits = self.forward(noisy)
            if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
                got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise ValueError(f"the model must give logits, {len(x)} x classes, got {got}")
            if x.device.type in self.doubted and len(x) not in self._trusted:
                self._check(noisy, logits)
            self.num_classes = logits.shape[1]
            found[i] = logits.argmax(1)
        return found

    def _check(self, images: Tensor, logits: Tensor) -> None:
        """Some images of the batch once more in a small one, by deterministic kernels. Raises
        RuntimeError."""
        n = len(images)
        self._trusted.add(n)
        if n <= 2 * _AGAIN:
            return
        some = torch.cat([torch.linspace(0, n - 1, _AGAIN).long(), torch.arange(n - _AGAIN, n)])
        some = some.to(images.device)
        with deterministic():
            again = self.forward(images[some])
        apart = (again.float().softmax(1) - logits[some].float().softmax(1)).abs().amax(1)
        wrong = int((~(apart < 0.5)).sum())
        if wrong > _AGAIN // 8:
            raise RuntimeError(
                f"{wrong} of {len(some)} images are something else to the network in a batch of "
                f"{n} than in one of {len(some)}: a kernel on {images.device} gives wrong results"
            )


def batch_size_for(size: Sequence[int], device: torch.device) -> int:
    """As many images of C x H x W as make two million values (on a GPU, 32 million), within
    bounds. A value costs some 40 bytes while its noise is drawn, and several times that in the
    network."""
    values, most = (1 << 25, 4096) if device.type == "cuda" else (1 << 21, 1024)
    return max(8, min(most, values // max(1, math.prod(size))))


def _device(model: nn.Module) -> torch.device | None:
    """Where the model is; None where it has no tensors, and so goes where the images are."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else None


def _batches(
    data: Pair | Iterable[Sequence[Tensor]], size: int | None, home: torch.device | None
) -> Iterator[Pair]:
    """Checked batches of at most `size` images."""
    if isinstance(data, Tensor):
        raise ValueError("data must be a pair (images, labels) or batches of such, got one tensor")
    if isinstance(data, DataLoader) and _shuffles(data):
        raise ValueError(
            "the loader shuffles, and the place of an image decides its noise: give one with "
            "shuffle=False, so that every model is tested under the same noise"
        )
    whole = isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor)
    for batch in [data] if whole else data:
        images, labels = _pair(batch)
        check_images(images)
        check_range(images, _ROUNDING)
        if labels.ndim != 1 or len(labels) != len(images):
            raise ValueError(
                f"labels must be a vector of class ids, {len(images)} for as many images, "
                f"got shape {tuple(labels.shape)}"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, the ids of classes, got {labels.dtype}")
        default = batch_size_for(images.shape[1:], home or images.device) if whole else len(images)
        each = max(1, size or default)
        yield from zip(images.split(each), labels.split(each), strict=True)


def _shuffles(loader: DataLoader[Any]) -> bool:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(s, _SHUFFLING) or getattr(s, "shuffle", False) is True for s in samplers)


def _pair(batch: object) -> Pair:
    parts: list[Any] = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        return parts[0], parts[1]
    hint = "; a DataLoader makes batches of single images" if len(parts) == 2 else ""
    raise ValueError(
        "a batch must be a pair of tensors, images and labels, got "
        + " and ".join(type(part).__name__ for part in parts)
        + hint
    )


def _check_settings(
    model: nn.Module, asked: dict[str, Perturbation], draws: int, batch_size: int | None
) -> None:
    if not isinstance(model, nn.Module):
        hint = "; of a run it is run.model()" if type(model).__name__ == "RunFolder" else ""
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    if not asked:
        raise ValueError("perturbations must name at least one, such as 'clean', got none")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
