"""Backbones of other libraries: torchvision's and timm's networks without their classifiers.

The stages are found by running one black image through the network and watching the resolution.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from noiseproof.lab.models.backbones import Backbone

__all__ = ["Adapted", "Weights", "fill", "from_timm", "from_torchvision"]


class Weights(NamedTuple):
    """Where a backbone's weights come from: a state dict that was read, or a download. With
    neither, the network is built as for them and left at random, to be filled by the caller."""

    label: str
    state: Mapping[str, Tensor] | None = None
    download: bool = False


class Adapted(NamedTuple):
    """A backbone, and the normalisation that its weights expect (None: that of the data)."""

    backbone: Backbone
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class _Hooked(Backbone):
    """Another library's network; `stages` are the paths of the modules that end a stage."""

    def __init__(
        self,
        net: nn.Module,
        dim: int,
        channels: int,
        stages: list[str],
        channels_last: bool = False,
    ):
        super().__init__(dim, channels)
        self.net = net
        self.stages = stages
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1)

    def staged(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        pooled: dict[str, Tensor] = {}

        def keep(path: str, out: Tensor) -> None:
            pooled[path] = _pool(out, self.channels_last)  # now: a later layer may overwrite `out`

        with _watching(self.net, self.stages, keep):
            result = self(x)
        return result, [pooled[path] for path in self.stages]


class _Timm(Backbone):
    """A timm model without its classifier, where it tells its intermediate maps itself."""

    def __init__(self, net: Any, dim: int, channels: int):
        super().__init__(dim, channels)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1)

    def staged(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        last, maps = self.net.forward_intermediates(x, output_fmt="NCHW")
        return self.net.forward_head(last).flatten(1), [_pool(m) for m in maps]


def _pool(out: Tensor, channels_last: bool = False) -> Tensor:
    """Mean over pixels or tokens: B x C x H x W, B x H x W x C or B x tokens x C to B x C."""
    if out.ndim == 4:
        return out.mean((1, 2) if channels_last else (2, 3))
    return out.mean(1) if out.ndim == 3 else out


@contextmanager
def _watching(
    net: nn.Module, paths: Sequence[str], keep: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """While open, `keep(path, output)` is called whenever one of the named modules has run."""

    def hook(path: str) -> Callable[..., None]:
        return lambda _module, _inputs, out: keep(path, out) if isinstance(out, Tensor) else None

    handles = [net.get_submodule(path).register_forward_hook(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def from_torchvision(name: str, size: tuple[int, int, int], weights: Weights | None) -> Adapted:
    """torchvision's `name` for images of `size` (C, H, W), without its classifier.

    The last linear layer goes; what stands before it stays (a dropout, VGG's hidden layers).
    MobileNetV3 loses its hidden layer too, so that the 576 or 960 pooled channels come out, and
    SqueezeNet, whose classifier is a convolution, gives its pooled channels.
    """
    import torchvision.models as tv

    best: Any = tv.get_model_weights(name).DEFAULT if weights else None  # type: ignore[attr-defined]
    download = weights is not None and weights.download
    options: dict[str, Any] = {}
    if name.startswith("vit_") and not download:
        options["image_size"] = best.meta["min_size"][0] if best else size[1]
    elif name.startswith("maxvit") and not weights:
        options["input_size"] = size[1:]
    elif name in ("googlenet", "inception_v3") and not download:
        options = {"init_weights": weights is None, "transform_input": weights is not None}
    try:
        net = tv.get_model(name, weights=best if download else None, **options)
    except (OSError, RuntimeError) as error:
        if not download:
            raise
        raise ValueError(_no_download(name, error)) from error
    whole = name.startswith(("mobilenet_v3", "squeezenet"))
    linear = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
    classifier = "classifier" if whole else linear[-1]
    auxiliary = [a for a in ("aux1", "aux2", "AuxLogits") if hasattr(net, a)]
    if weights and weights.state is not None:
        fill(net, weights.state, weights.label, [classifier, *auxiliary])
    for attribute in auxiliary:
        setattr(net, attribute, None)
    if auxiliary:
        net.aux_logits = False  # type: ignore[assignment]  # a plain flag of both networks
    squeeze = name.startswith("squeezenet")
    net.set_submodule(classifier, nn.AdaptiveAvgPool2d(1) if squeeze else nn.Identity())
    last = isinstance(net, tv.SwinTransformer)
    dim, stages = _explored(name, net, (3, *size[1:]), last)
    backbone = _Hooked(net, dim, 3, stages, last)
    if best is None:
        return Adapted(backbone)
    return Adapted(backbone, tuple(best.transforms().mean), tuple(best.transforms().std))


def from_timm(name: str, size: tuple[int, int, int], weights: Weights | None) -> Adapted:
    """timm's `name` for images of `size` (C, H, W), without its classifier.

    From scratch it takes the data's channels; with weights, the three that they were trained on.
    """
    try:
        timm: Any = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise ValueError(f"timm:{name} needs timm: pip install timm") from error
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        hint = f"; near it: {', '.join('timm:' + n for n in near)}" if near else ""
        raise ValueError(f"timm has no model {name!r}{hint}")
    channels = 3 if weights else size[0]
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    try:
        about = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag after the dot
        raise ValueError(f"timm:{name}: {error}") from error
    if getattr(about, "fixed_input_size", False):
        options["img_size"] = size[1:]  # position embeddings belong to one size
    download = weights is not None and weights.download
    try:
        net = timm.create_model(name, pretrained=download, **options)
    except Exception as error:  # a hub's failures have no common class
        if not download:
            raise
        raise ValueError(_no_download(f"timm:{name}", error)) from error
    told: Mapping[str, Any] = net.pretrained_cfg
    if weights and weights.state is not None:
        names = told.get("classifier") or ()
        fill(net, weights.state, weights.label, [names] if isinstance(names, str) else list(names))
    dim, stages = _explored(name, net, (channels, *size[1:]))
    if hasattr(net, "forward_intermediates"):
        backbone: Backbone = _Timm(net, dim, channels)
    else:
        known = dict(net.named_modules())
        listed = [i["module"] for i in getattr(net, "feature_info", ()) if i["module"] in known]
        backbone = _Hooked(net, dim, channels, listed or stages)
    return (
        Adapted(backbone, tuple(told["mean"]), tuple(told["std"])) if weights else Adapted(backbone)
    )


def _no_download(name: str, error: Exception) -> str:
    return (
        f"the ImageNet weights of {name} could not be downloaded ({error}); "
        "without a network, give a local file of them, --weights FILE, or train from scratch, "
        "--weights none"
    )


def fill(
    net: nn.Module, state: Mapping[str, Tensor], label: str, classifier: Sequence[str] = ()
) -> None:
    """Load `state` into `net`, which must match it in all but the modules named `classifier`."""
    heads = tuple(f"{path}." for path in classifier)
    try:
        found = net.load_state_dict(
            {k: v for k, v in state.items() if not k.startswith(heads)}, strict=False
        )
    except RuntimeError as error:
        raise ValueError(f"{label} does not fit: {error}") from error
    missing = [k for k in found.missing_keys if not k.startswith(heads)]
    for what, names in (("lacks", missing), ("has unknown", found.unexpected_keys)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{label} does not fit: it {what} {', '.join(names[:5])}{more}")


def _candidates(net: nn.Module) -> tuple[list[str], bool]:
    """Modules that may end a stage, and whether several of them make one stage."""
    children = dict(net.named_children())
    if layers := [name for name in children if re.fullmatch(r"layer\d+", name)]:
        return layers, False
    for path, grouped in (
        ("features", True),
        ("trunk_output", False),
        ("blocks", False),
        ("encoder.layers", False),
        ("layers", True),
    ):
        if inside := dict(net.named_modules()).get(path):
            return [f"{path}.{name}" for name, _ in inside.named_children()], grouped
    idle = (nn.AdaptiveAvgPool2d, nn.Dropout, nn.Identity)
    return [name for name, child in children.items() if not isinstance(child, idle)], True


def _explored(
    name: str, net: nn.Module, size: tuple[int, ...], channels_last: bool = False
) -> tuple[int, list[str]]:
    """(length of the output, stages) of `net`, from one black image.

    Where `_candidates` groups, a stage ends where the resolution changes: the last module before.
    """
    paths, grouped = _candidates(net)
    seen: dict[str, tuple[int, ...]] = {}  # in the order in which they ran

    def keep(path: str, out: Tensor) -> None:
        if out.ndim > 2:
            seen[path] = tuple(out.shape[1:-1] if channels_last or out.ndim == 3 else out.shape[2:])

    training = net.training
    net.eval()
    try:
        with torch.no_grad(), _watching(net, paths, keep):
            dim = net(torch.zeros(1, *size)).flatten(1).shape[1]
    except (RuntimeError, AssertionError, ValueError) as error:
        shown = " x ".join(map(str, size))
        raise ValueError(f"{name} cannot take {shown} images: {error}") from error
    net.train(training)
    if not grouped or len(set(seen.values())) == 1:
        return dim, list(seen)
    return dim, [list(run)[-1] for _, run in itertools.groupby(seen, key=lambda path: seen[path])]
