"""Any classifier as features and head, for pixels: what the loss and the objectives work with.

The head is found by passing random images through the network: it is the layer whose output, as a
linear function of its input, is the network's output. So neither its name nor its place matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseproof.modes import evaluating

# Heights and widths to find the head with; the first that the network accepts
_SIDES = (32, 224, 28, 64, 8, 16, 48, 96, 128, 160, 192, 240, 256, 288, 299, 320, 384, 448, 512)


def wrap(
    model: nn.Module,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    example: Tensor | None = None,
) -> Wrapped:
    """A classifier for pixels in [0, 1] with `features` and a linear `head`, from any network.

    ValueError if the logits are not the output of one linear layer: after a softmax, for instance,
    or if they are a mean over two heads.

    Args:
        model: maps normalised images, B x C x H x W, to logits, B x classes. The last layer is a
            linear layer, or a convolution over its whole input; layers before it may be of any
            kind. It is used as it is, not copied: training the result trains it.
        mean: subtracted from the pixels, one value per channel; [0] if the network takes pixels.
        std: what the difference is divided by, likewise; [1] if the network takes pixels.
        example: some images that the network accepts, only to find the head; by default random
            ones of usual sizes are tried.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> model = wrap(net, mean=[0.5] * 3, std=[0.25] * 3, example=torch.rand(2, 3, 4, 4))
    >>> model.head is net[3], model.features(torch.rand(2, 3, 4, 4)).shape
    (True, torch.Size([2, 8]))
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, Wrapped):
        raise ValueError("the model is wrapped already")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)
    if isinstance(model, parallel) or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"model is a {type(model).__name__}; wrap the network itself, and then compile or "
            "parallelise the result"
        )
    mean, std = (torch.as_tensor(v, dtype=torch.float64).flatten().tolist() for v in (mean, std))
    if not mean or len(mean) != len(std) or min(std) <= 0:
        raise ValueError(f"mean and std must have equal lengths and std > 0; got {mean} and {std}")
    images = _examples(model, len(mean)) if example is None else [example]
    return Wrapped(model, _find_head(model, images), mean, std)


class Wrapped(nn.Module):
    """head(features(x)) = net((x − mean) / std), where features are the input of the last layer.

    `forward` gives the network's own result. The state dict is the network's, name by name, so
    either loads that of the other; in `named_parameters` the names begin with "net.".

    Args:
        net: the network.
        head: path of its last layer, which must run once per pass.
        mean: subtracted from the pixels, one value per channel.
        std: what the difference is divided by, likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, head: str, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.net, self.head_path = net, head
        self.channels = len(mean)
        layer: Any = net.get_submodule(head)
        for name, values in (("mean", mean), ("std", std)):
            value = torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
            self.register_buffer(name, value.to(layer.weight), persistent=False)
        if _keep_input not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_keep_input, with_kwargs=True)
        layer.noiseproof_kept = None

    @property
    def head(self) -> nn.Linear:
        """The last layer. Of a convolution, the linear layer with the same weights."""
        layer = self.net.get_submodule(self.head_path)
        return layer if isinstance(layer, nn.Linear) else cast(nn.Linear, ConvolutionHead(layer))

    def normalise(self, x: Tensor) -> Tensor:
        """The input of the network for pixels `x`, B x C x H x W in [0, 1]; a grey image gets the
        channels of the network."""
        if x.ndim != 4 or (x.shape[1] not in (1, self.channels) and self.channels > 1):
            raise ValueError(f"images must be B x {self.channels} x H x W, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(
                f"images must be floating point in [0, 1], got {x.dtype}; "
                "convert bytes with x.float() / 255"
            )
        return (x - self.mean) / self.std

    def features(self, x: Tensor) -> Tensor:
        """The input of the last layer for pixels `x`, B x D."""
        layer: Any = self.net.get_submodule(self.head_path)
        kept: list[Tensor] = []
        layer.noiseproof_kept = kept
        try:
            self.net(self.normalise(x))
        finally:
            layer.noiseproof_kept = None
        if len(kept) != 1:
            raise RuntimeError(f"{self.head_path} ran {len(kept)} times in a pass; expected once")
        features = kept[0].flatten(1)
        if features.shape[1] != layer.weight[0].numel():
            shape = " x ".join(map(str, kept[0].shape[1:]))
            raise RuntimeError(
                f"{self.head_path} is applied at several places of its input, {shape} for each of "
                "these images, so it is not a linear layer on top of one vector of features"
            )
        return features

    def forward(self, x: Tensor) -> Any:
        """The network's result for pixels `x`: logits, B x classes."""
        return self.net(self.normalise(x))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.net.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.net.load_state_dict(*args, **options)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **options: Any
    ) -> None:
        """As a part of another module."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}net.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


class ConvolutionHead(nn.Module):
    """A convolution over its whole input, as the linear layer that it is.

    Args:
        layer: the convolution.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight.flatten(1)

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    @property
    def in_features(self) -> int:
        return self.layer.weight[0].numel()

    @property
    def out_features(self) -> int:
        return len(self.layer.weight)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def _keep_input(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """A hook of the last layer: adds its input to the list that `Wrapped.features` sets."""
    if layer.noiseproof_kept is not None:
        layer.noiseproof_kept.append(args[0] if args else options["input"])


class _Pass(NamedTuple):
    """One call of a layer: what it took, one vector per image, and what it gave."""

    path: str
    layer: Any
    features: Tensor
    outputs: Tensor


def _examples(net: nn.Module, channels: int) -> Iterator[Tensor]:
    """Batches of random images of usual sizes, the same in every call."""
    like = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    for side in _SIDES:
        for c in (channels,) if channels > 1 else (1, 3):
            yield torch.randn(max(2, 256 // side), c, side, side, generator=generator).to(like)


def _find_head(net: nn.Module, examples: Iterator[Tensor] | list[Tensor]) -> str:
    """The path of the layer whose output is the network's."""
    error: Exception | None = None
    for images in examples:
        calls: list[_Pass] = []
        counts: dict[str, int] = {}
        with evaluating(net), torch.no_grad(), ExitStack() as hooks:
            for path, layer in net.named_modules():
                if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                    hook = partial(_record, calls, counts, path)
                    hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            try:
                logits = net(images)
            except Exception as caught:  # networks refuse a size in many ways
                error = caught
                continue
        if isinstance(logits, Tensor) and not logits.isfinite().all():
            error = ValueError("the output is not finite")
            continue
        return _head_of(calls, counts, logits)
    reason = f"({type(error).__name__}: {error})"
    if isinstance(examples, list):
        shapes = " and ".join(" x ".join(map(str, images.shape)) for images in examples)
        raise ValueError(f"the network fails for images of {shapes} {reason}") from error
    raise ValueError(
        f"the network fails for random images of usual sizes {reason}; pass some that it accepts "
        "as example"
    ) from error


def _record(
    calls: list[_Pass],
    counts: dict[str, int],
    path: str,
    layer: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    output: Tensor,
) -> None:
    """Adds a call of a layer that is applied once per image, not at every pixel or token."""
    counts[path] = counts.get(path, 0) + 1
    features = (args[0] if args else options["input"]).flatten(1)
    if features.shape[1] == layer.weight[0].numel():
        calls.append(_Pass(path, layer, features, output.flatten(1)))


def _head_of(calls: list[_Pass], counts: dict[str, int], logits: Any) -> str:
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the network must return logits, B x classes, got {got}")
    final = [call for call in calls if call.outputs.shape == logits.shape]
    for call in reversed(final):
        weight, bias = call.layer.weight.flatten(1), call.layer.bias
        if _close(F.linear(call.features, weight, bias), logits):
            if counts[call.path] > 1:
                raise ValueError(
                    f"{call.path} runs {counts[call.path]} times per pass, so its input is not one "
                    "vector of features per image; expected a last layer that runs once"
                )
            return call.path
    if final and _close(final[-1].outputs.softmax(1), logits):
        raise ValueError(
            f"the network ends in a softmax after {final[-1].path}; expected logits, which "
            "cross-entropy needs: leave the softmax out"
        )
    paths = ", ".join(dict.fromkeys(call.path for call in final)) or "none"
    raise ValueError(
        "the logits are not the output of one linear layer, so there is no head on top of features "
        f"(layers with {logits.shape[1]} outputs per image: {paths}); expected a network that ends "
        "in one linear layer"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, relative to the largest value."""
    tolerance = 1e-3 if b.itemsize >= 4 else 3e-2
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
