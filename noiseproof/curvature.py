"""Curvature of the loss in input space, one value per sample.

At an image x with label y let l(x) = CE(model(x), y), and H its Hessian with respect to x, with
eigenvalues λ_i. The curvature is

    Λ(x) = Σ_i λ_i² = ‖H‖_F² = E‖Hε‖²,    ε ~ N(0, I),

computed from the loss of each sample alone: no value depends on the batch size.

On networks with kinks (ReLU, max-pooling) the estimators measure two different quantities:

- `hessian_probe` and `exact` differentiate twice. They see the Hessian *almost everywhere*, that of
  the smooth piece that contains x; a kink contributes nothing, however close it is.
- `finite_difference` compares gradients `step` apart, so it also sees the jumps of the gradient at
  kinks in between. Crossing a jump J adds ‖J‖² / step², while the probability of crossing one is
  only proportional to `step`: this part grows without limit as `step` falls.

On smooth networks both agree up to an error of order `step`. On ReLU networks report both.

Curvature depends on the coordinates, too. If normalisation is part of the model, x is in pixels;
with `scale` = s the values are those of u = x / s, where H_u = diag(s) H diag(s), and `step` is a
step in u. `scale=std`, of shape (C, 1, 1), gives normalised coordinates.

Every function puts the model in eval mode and restores the mode of each submodule, differentiates
with respect to the input only (no parameter's `.grad` changes), works under a caller's `no_grad` or
`inference_mode`, and turns off autocast and TF32, since differences of gradients need full
precision. Results are on the device of the model's parameters. Samples must not influence each
other in eval mode, as they do in batch-norm without running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from noiseproof.draws import PerSample, Source, normal, stream
from noiseproof.modes import measuring

__all__ = ["absolute_sum", "exact", "finite_difference", "hessian_probe", "trace"]

Progress = Callable[[int], None]
Scale = float | Tensor | None


def finite_difference(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    probes: int = 20,
    step: float = 1e-2,
    scale: Scale = None,
    generator: Source = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Λ of each sample from gradients: mean over ε of ‖∇l(x + step·ε) − ∇l(x)‖² / step².

    The paper's estimator, with its defaults. Needs first derivatives only, so it works with
    compiled models as well. Costs `probes` + 1 gradients.

    Args:
        model: maps x to logits, B x classes.
        x: inputs, B x ..., float32 or float64.
        y: class indices, B.
        probes: random directions ε per sample.
        step: length of the step along ε, in the coordinates x / scale.
        scale: a number, or a tensor that broadcasts to one input; see the module's docstring.
        generator: None, a `torch.Generator` (directions then depend on the order of samples and on
            `chunk`), or a `PerSample` source, which gives a sample the same directions in any batch
            or chunk.
        chunk: samples per forward pass; by default at most 256, fewer for large images.
        progress: called after each chunk with the number of samples finished so far.
    """
    _need(probes >= 1, f"probes must be at least 1, got {probes}")
    _need(0 < step < math.inf, f"step must be a positive number, got {step}")

    def curvature(loss: SampleLoss) -> Tensor:
        gradient = loss.gradient()
        changes = (loss.gradient(step * v) - gradient for v in loss.normals(probes))
        return torch.stack([_squares(change / step) for change in changes]).mean(0)

    return per_sample(curvature, model, x, y, scale, generator, chunk, progress)


def hessian_probe(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    probes: int = 20,
    scale: Scale = None,
    generator: Source = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Λ from Hessian-vector products: mean over ε of ‖Hε‖². Unbiased; no step to choose.

    Needs second derivatives of the model, which compiled models do not support. With the same
    `PerSample` source, ε is that of `finite_difference`. Arguments as for `finite_difference`.
    """
    _need(probes >= 1, f"probes must be at least 1, got {probes}")

    def curvature(loss: SampleLoss) -> Tensor:
        return torch.stack([_squares(hv) for _, hv in loss.products(loss.normals(probes))]).mean(0)

    return per_sample(curvature, model, x, y, scale, generator, chunk, progress)


def trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    probes: int = 20,
    scale: Scale = None,
    generator: Source = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Hutchinson's estimator of tr H = Σλ_i: mean over random signs v of vᵀHv. Unbiased.

    With entries ±1 its variance, 2 Σ_{i≠j} H_ij², is below that of normal ones. Arguments as for
    `finite_difference`.
    """
    _need(probes >= 1, f"probes must be at least 1, got {probes}")

    def estimate(loss: SampleLoss) -> Tensor:
        signs = (torch.ones_like(v).copysign(v) for v in loss.normals(probes))
        products = loss.products(signs)
        return torch.stack([(v * hv).flatten(1).sum(1) for v, hv in products]).mean(0)

    return per_sample(estimate, model, x, y, scale, generator, chunk, progress)


def absolute_sum(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    products: int = 32,
    scale: Scale = None,
    generator: Source = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Σ|λ_i| from the eigenvalues of H on a Krylov space: those of span(v, Hv, H²v, ...).

    Never above Σ|λ_i|, up to rounding. Equal to it if the nonzero eigenvalues of H are fewer than
    `products` and differ, as they do between the kinks of a ReLU network with up to `products`
    classes. Otherwise the largest |λ_i| are found first, and equal ones count once.

    Args:
        model: maps x to logits, B x classes.
        x: inputs, B x ..., float32 or float64.
        y: class indices, B.
        products: the most dimensions of the space, each at one Hessian-vector product.
        scale: as for `finite_difference`.
        generator: of the normal direction v, as for `finite_difference`.
        chunk: as for `finite_difference`.
        progress: as for `finite_difference`.
    """
    _need(products >= 1, f"products must be at least 1, got {products}")

    def estimate(loss: SampleLoss) -> Tensor:
        return krylov_eigenvalues(loss, next(loss.normals(1)), products).abs().sum(1)

    return per_sample(estimate, model, x, y, scale, generator, chunk, progress)


def krylov_eigenvalues(loss: SampleLoss, start: Tensor, products: int = 32) -> Tensor:
    """Eigenvalues of H on span(v, Hv, H²v, ...) with v = `start`: B x at most `products`.

    Lanczos' iteration, with every vector made orthogonal to all before it. Once the space is
    exhausted, vectors and eigenvalues are 0.

    Args:
        loss: of a chunk of samples.
        start: v, of the shape of the inputs.
        products: the most dimensions of the space.
    """
    vectors = [start / start.flatten(1).norm(dim=1).view(-1, *[1] * (start.ndim - 1))]
    basis: list[Tensor] = []  # B x D each
    images: list[Tensor] = []  # of the basis under H
    for v, product in loss.products(vectors):  # grows while it is iterated
        basis.append(v.flatten(1))
        images.append(product.flatten(1))
        rest, space = images[-1], torch.stack(basis, 1)  # B x n x D
        for _ in range(2):  # the second pass removes the rounding error of the first
            rest = rest - ((space @ rest[:, :, None]).mT @ space)[:, 0]
        size = rest.norm(dim=1, keepdim=True)
        found = size > 1e3 * torch.finfo(rest.dtype).eps * images[-1].norm(dim=1, keepdim=True)
        if len(basis) == min(products, rest.shape[1]) or not found.any():
            break
        vectors.append(torch.where(found, rest / size, 0).view_as(start))
    matrix = torch.stack(basis, 1).double() @ torch.stack(images, 2).double()
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2).to(start.dtype)


def exact(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    scale: Scale = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Λ = Σ_ij H_ij², one column of H at a time: for small inputs, at one product per pixel.

    Arguments as for `finite_difference`. With logits (a·x, 0) the second derivative at 0 is a² / 4,
    so a = 2 gives 1:

    >>> net = nn.Linear(1, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.tensor([[2.0], [0.0]]))
    >>> exact(net, torch.zeros(1, 1), torch.tensor([0]))
    tensor([1.])
    """

    def curvature(loss: SampleLoss) -> Tensor:
        eye = torch.eye(loss.x[0].numel(), dtype=x.dtype, device=loss.x.device)
        units = (row.view(x.shape[1:]).expand_as(loss.x) for row in eye)
        return torch.stack([_squares(column) for _, column in loss.products(units)]).sum(0)

    return per_sample(curvature, model, x, y, scale, None, chunk, progress)


@dataclass
class SampleLoss:
    """The loss of each sample of a chunk, as a function of u = x / scale."""

    forward: Callable[[Tensor], Tensor]  # inputs to logits
    x: Tensor
    y: Tensor
    scale: float | Tensor
    source: Source

    def normals(self, count: int) -> Iterator[Tensor]:
        """Standard normal directions of the shape of x."""
        for i in range(count):
            yield normal(self.x.shape, self.x, stream(self.source, i))

    def gradient(self, offset: Tensor | None = None) -> Tensor:
        """∇l at u, or at u + offset."""
        x = self.x if offset is None else self.x.detach() + self.scale * offset
        return self.scale * self._gradient(x.requires_grad_(), twice=False)

    def products(self, vectors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(v, Hv) for each v; all products share one graph."""
        x = self.x.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            gradient = self._gradient(x, twice=True)
        for v in vectors:
            (product,) = torch.autograd.grad(
                gradient, x, self.scale * v, retain_graph=True, materialize_grads=True
            )
            yield v, self.scale * product

    def _gradient(self, x: Tensor, twice: bool) -> Tensor:
        """∂l/∂x, differentiable again if `twice`."""
        logits = self.forward(x)
        fits = logits.ndim == 2 and len(logits) == len(x)
        _need(fits, f"logits must have shape ({len(x)}, classes), got {tuple(logits.shape)}")
        _need(logits.requires_grad, "the model's logits carry no gradient")
        # Summed, not averaged: the gradient of a sample is then that of its own loss.
        loss = F.cross_entropy(logits, self.y, reduction="sum")
        return torch.autograd.grad(loss, x, create_graph=twice, materialize_grads=True)[0]


def per_sample(
    estimate: Callable[[SampleLoss], Tensor],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    scale: Scale,
    source: Source,
    chunk: int | None,
    progress: Progress | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`estimate` of all samples, chunk by chunk, with the model in eval mode and full precision.

    `forward` replaces a call of the model; the other arguments are those of `finite_difference`.
    """
    _check(x, y, scale, source, chunk)
    if chunk is None:
        chunk = min(256, 1 + (1 << 22) // math.prod(x.shape[1:]))  # 28 images of 3 x 224 x 224
    device = next((p.device for p in model.parameters()), x.device)
    results = []
    with measuring(model, device):
        unit = scale.detach().to(device, x.dtype) if isinstance(scale, Tensor) else scale or 1.0
        keys = source.keys.to(device) if isinstance(source, PerSample) else None
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            # Clones, because autograd cannot save tensors that were created in inference mode.
            inputs = x[part].detach().to(device).clone()
            labels = y[part].to(device, torch.int64).clone()
            own = source if keys is None else PerSample(keys[part])
            loss = SampleLoss(forward or model, inputs, labels, unit, own)
            results.append(estimate(loss).detach())
            if progress is not None:
                progress(min(start + chunk, len(x)))
        return torch.cat(results) if results else x.new_empty(0, device=device)


def _squares(x: Tensor) -> Tensor:
    """Sum of squares over all axes but the first."""
    return x.flatten(1).square().sum(1)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check(x: Tensor, y: Tensor, scale: Scale, source: Source, chunk: int | None) -> None:
    fits = x.dtype in (torch.float32, torch.float64) and x.ndim >= 2 and 0 not in x.shape[1:]
    got = f"shape {tuple(x.shape)} of {x.dtype}"
    _need(fits, f"x must be a batch of inputs, B x ..., in float32 or float64, got {got}")
    integers = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    got = f"shape {tuple(y.shape)} of {y.dtype}"
    _need(integers and y.shape == x.shape[:1], f"y must be {len(x)} class indices, got {got}")
    if isinstance(scale, Tensor):
        shape = tuple(x.shape[1:])
        pairs = zip(reversed(scale.shape), reversed(shape), strict=False)
        fits = scale.ndim <= len(shape) and all(own in (1, size) for own, size in pairs)
        _need(fits, f"scale must broadcast to one input, {shape}, got shape {tuple(scale.shape)}")
    elif scale is not None:
        _need(0 < scale < math.inf, f"scale must be a positive number, got {scale}")
    if isinstance(source, PerSample):
        count = len(source.keys)
        _need(count == len(x), f"generator has keys for {count} samples, x has {len(x)}")
    _need(chunk is None or chunk >= 1, f"chunk must be at least 1, got {chunk}")
