"""Backbones of other libraries, torchvision's and timm's networks without their classifiers, and
pretrained weights.

The stages of a network are found by passing one black image through it and watching where the
resolution changes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from noiseproof.lab.config import did_you_mean
from noiseproof.lab.files import read_tensors, reason_not_loaded
from noiseproof.lab.models.backbones import Backbone
from noiseproof.modes import evaluating

_RETRIES = "huggingface_hub.utils._http"  # logs two lines for each of twelve attempts

# Mean and standard deviation per channel that weights were trained with
Normalisation = tuple[Sequence[float], Sequence[float]]


class InputSize(NamedTuple):
    """The images that pretrained weights were tested on: height and width, the share of the shorter
    side that the centre crop keeps (None if they are stretched), and how they are resized."""

    size: tuple[int, int]
    crop_share: float | None
    interpolation: str


class PretrainedWeights(NamedTuple):
    """Where a backbone's weights come from: a state dict, or a download. With neither, the network
    is built as for these weights and initialised at random; the caller loads a state dict."""

    source: str  # "imagenet" or a file
    state: Mapping[str, Tensor] | None = None
    download: bool = False


def read_weights(source: str, load: bool) -> PretrainedWeights:
    """The weights that the setting `weights` names.

    Args:
        source: "imagenet", or a file with a state dict, which may be inside a checkpoint.
        load: whether to read or download them.
    """
    if source == "imagenet":
        return PretrainedWeights(source, download=load)
    if not load:
        return PretrainedWeights(source)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"weights must be 'imagenet' or a file, and there is no file {source!r}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # of timm's own training
            state = load_file(path) if _is_safetensors(path) else read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        save = "safetensors.torch.save_file" if path.suffix == ".safetensors" else "torch.save"
        raise ValueError(
            f"{source} cannot be read as weights: {error}; expected a state dict, as written by "
            f"{save}(model.state_dict(), FILE)"
        ) from error
    for wrapper in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        entries = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"{source} does not contain a state dict (names and tensors), got {entries}"
        )
    return PretrainedWeights(source, {str(name): value for name, value in state.items()})


def _is_safetensors(path: Path) -> bool:
    """Whether a file is of this format, by its name or, if that ends otherwise, by its beginning:
    the length of a header in JSON, in 8 bytes, and that header."""
    with path.open("rb") as file:
        beginning = file.read(9)
    length = int.from_bytes(beginning[:8], "little")
    return path.suffix == ".safetensors" or (beginning[8:] == b"{" and length < path.stat().st_size)


def input_size(model: str) -> InputSize:
    """What the pretrained weights of a network expect, by torchvision's and timm's own records.

    Args:
        model: torchvision's name of the network, or timm:NAME.

    >>> input_size("resnet50").size, round(224 / input_size("resnet50").crop_share)
    ((224, 224), 232)
    """
    library, _, name = model.rpartition(":")
    if library == "timm":
        config: Any = _timm_config(_timm(name), name)
        size, mode = tuple(config.input_size[1:]), config.crop_mode
        # timm resizes to the next smaller whole number of pixels
        share = None if mode == "squash" else size[0] / math.floor(size[0] / config.crop_pct)
        return InputSize(size, share, config.interpolation)
    import torchvision.models as tv

    preset: Any = tv.get_model_weights(name).DEFAULT.transforms()  # type: ignore[attr-defined]
    side, shorter = preset.crop_size[0], preset.resize_size[0]
    return InputSize((side, side), side / shorter, preset.interpolation.value)


def weights_for(net: nn.Module, weights: PretrainedWeights) -> PretrainedWeights:
    """The weights by the names of `net`. In files of data-parallel, compiled and Lightning modules
    all names begin with that of the network, and other tensors may stand beside them.
    """
    state, names = weights.state or {}, list(net.state_dict())
    first = names[0] if names else ""
    if not state or first in state:
        return weights
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    complete = [p for p in prefixes if all(f"{p}{name}" in state for name in names)]
    if len(complete) > 1:
        raise ValueError(
            f"{weights.source} has several such networks, with names that begin with "
            f"{' and '.join(complete)}; expected one"
        )
    if not prefixes:
        return weights
    prefix = min(complete or prefixes, key=len)
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return weights._replace(state=own)


def load_weights(
    net: nn.Module, weights: PretrainedWeights | None, ignored: Sequence[str] = ()
) -> None:
    """Loads the state dict of `weights`, if it has one.

    Args:
        net: the network; it must match the state dict except in the ignored modules.
        weights: what to load.
        ignored: paths of modules that are not loaded, such as the classifier.
    """
    if weights is None or weights.state is None:
        return
    source, prefixes = weights.source, tuple(f"{path}." for path in ignored)
    trained = weights_for(net, weights).state or {}
    state = {k: v for k, v in trained.items() if not k.startswith(prefixes)}
    try:
        keys = net.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = str(error).splitlines()[1:] or [str(error)]  # after a heading
        more = f" {len(lines) - 1} more do not fit." if len(lines) > 1 else ""
        raise ValueError(f"{source} does not fit: {lines[0].strip()}{more}") from error
    missing = [k for k in keys.missing_keys if not k.startswith(prefixes)]
    for what, names in (("lacks", missing), ("has unknown", keys.unexpected_keys)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{source} does not fit: it {what} {', '.join(names[:5])}{more}")


class _HookedBackbone(Backbone):
    """A network whose stages are read by forward hooks; `stages` are the paths of the modules that
    end a stage."""

    def __init__(
        self, net: nn.Module, dim: int, channels: int, stages: list[str], channels_last: bool
    ):
        super().__init__(dim, channels)
        self.net, self.stages, self.channels_last = net, stages, channels_last

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1)

    def forward_stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        pooled: dict[str, Tensor] = {}

        def pool(path: str, output: Tensor) -> None:  # immediately: a later layer may overwrite it
            pooled[path] = _pool(output, self.channels_last)

        with _hooks(self.net, self.stages, pool):
            result = self(x)
        return result, [pooled[path] for path in self.stages]


class _TimmBackbone(_HookedBackbone):
    """A timm model that returns its intermediate maps itself, without hooks."""

    net: Any

    def forward_stages(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        last, maps = self.net.forward_intermediates(x, output_fmt="NCHW")
        return self.net.forward_head(last).flatten(1), [_pool(m) for m in maps]


def _pool(output: Tensor, channels_last: bool = False) -> Tensor:
    """Mean over pixels or tokens: B x C x H x W, B x H x W x C or B x tokens x C to B x C."""
    if output.ndim == 4:
        return output.mean((1, 2) if channels_last else (2, 3))
    return output.mean(1) if output.ndim == 3 else output


@contextmanager
def _hooks(
    net: nn.Module, paths: Sequence[str], function: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Inside the block, `function(path, output)` is called whenever a named module has run."""

    def hook(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            function(path, output)

    with ExitStack() as handles:
        for path in paths:
            module = net.get_submodule(path)
            handles.enter_context(module.register_forward_hook(partial(hook, path)))
        yield


def auxiliary_heads(net: nn.Module) -> list[str]:
    """Classifiers that torchvision uses in training only, and that files may lack."""
    return [name for name in ("aux1", "aux2", "AuxLogits") if hasattr(net, name)]


def torchvision_backbone(
    name: str, size: tuple[int, int, int], weights: PretrainedWeights | None
) -> tuple[Backbone, Normalisation | None]:
    """A torchvision network without its classifier, and the normalisation of its weights.

    The last linear layer is removed; the layers before it stay (a dropout, VGG's hidden layers).
    MobileNetV3 loses its hidden layer too, so that its 576 or 960 pooled channels are the output,
    and SqueezeNet, whose classifier is a convolution, returns its pooled channels.

    Args:
        name: torchvision's name of the network.
        size: C, H, W of the images.
        weights: pretrained weights; None to train from scratch.
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
    with _downloading(name, download):
        net = tv.get_model(name, weights=best if download else None, **options)
    whole = name.startswith(("mobilenet_v3", "squeezenet"))
    linear = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
    classifier = "classifier" if whole else linear[-1]
    auxiliary = auxiliary_heads(net)
    load_weights(net, weights, [classifier, *auxiliary])
    for attribute in auxiliary:
        setattr(net, attribute, None)
    if auxiliary:
        net.aux_logits = False  # type: ignore[assignment]  # a plain flag of both networks
    squeeze = name.startswith("squeezenet")
    net.set_submodule(classifier, nn.AdaptiveAvgPool2d(1) if squeeze else nn.Identity())
    channels_last = isinstance(net, tv.SwinTransformer)
    dim, stages = _probe(name, net, (3, *size[1:]), channels_last)
    normalisation = (best.transforms().mean, best.transforms().std) if best else None
    return _HookedBackbone(net, dim, 3, stages, channels_last), normalisation


def timm_backbone(
    name: str, size: tuple[int, int, int], weights: PretrainedWeights | None
) -> tuple[Backbone, Normalisation | None]:
    """A timm model without its classifier, and the normalisation of its weights.

    From scratch it takes the channels of the data; with weights, the three that they were trained
    on.

    Args:
        name: timm's name of the model.
        size: C, H, W of the images.
        weights: pretrained weights; None to train from scratch.
    """
    timm = _timm(name)
    channels = 3 if weights else size[0]
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    expected = _timm_config(timm, name)
    if getattr(expected, "fixed_input_size", False):
        options["img_size"] = size[1:]  # position embeddings belong to one size
    download = weights is not None and weights.download
    with _downloading(f"timm:{name}", download):
        net = timm.create_model(name, pretrained=download, **options)
    config: Mapping[str, Any] = net.pretrained_cfg
    heads = config.get("classifier") or ()
    load_weights(net, weights, [heads] if isinstance(heads, str) else heads)
    dim, stages = _probe(name, net, (channels, *size[1:]), channels_last=False)
    modules = dict(net.named_modules())
    listed = [i["module"] for i in getattr(net, "feature_info", ()) if i["module"] in modules]
    kind = _TimmBackbone if hasattr(net, "forward_intermediates") else _HookedBackbone
    normalisation = (config["mean"], config["std"]) if weights else None
    return kind(net, dim, channels, listed or stages, channels_last=False), normalisation


def _timm(name: str) -> Any:
    """The library, which has a model called `name`."""
    try:
        timm: Any = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise ValueError(f'timm:{name} needs timm: pip install "noiseproof[timm]"') from error
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    return timm


def _timm_config(timm: Any, name: str) -> Any:
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag after the dot
        raise ValueError(f"timm:{name}: {error}") from error


@contextmanager
def _downloading(name: str, download: bool) -> Iterator[None]:
    """If weights are downloaded inside the block, loads tensors alone from them (torchvision would
    unpickle whatever is in its cache), and explains any error."""
    if not download:
        yield
        return
    setting = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(setting)
    os.environ[setting] = "1"
    retries, warnings = logging.getLogger(_RETRIES), itertools.count()

    def is_first(_record: logging.LogRecord) -> bool:  # the failure, and that it is tried again
        return next(warnings) < 2

    retries.addFilter(is_first)
    try:
        yield
    except Exception as error:  # the failures of a hub have no common class
        cache = torch.hub.get_dir()
        if name.startswith("timm:"):
            cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        raise ValueError(
            f"the ImageNet weights of {name} could not be downloaded or read "
            f"({reason_not_loaded(error)}); delete them from {cache} if they are "
            "there; offline, use a local file of them, --weights FILE, or train from scratch, "
            "--weights none"
        ) from error
    finally:
        retries.removeFilter(is_first)
        if before is None:
            del os.environ[setting]
        else:
            os.environ[setting] = before


def _candidates(net: nn.Module) -> tuple[list[str], bool]:
    """Modules that may end a stage, and whether several of them form one stage."""
    children = dict(net.named_children())
    if layers := [name for name in children if re.fullmatch(r"layer\d+", name)]:
        return layers, False
    for path in ("features", "trunk_output", "blocks", "encoder.layers", "layers"):
        if container := dict(net.named_modules()).get(path):
            grouped = path in ("features", "layers")
            return [f"{path}.{name}" for name, _ in container.named_children()], grouped
    ignored = (nn.AdaptiveAvgPool2d, nn.Dropout, nn.Identity)
    return [name for name, child in children.items() if not isinstance(child, ignored)], True


def _probe(
    name: str, net: nn.Module, size: tuple[int, ...], channels_last: bool
) -> tuple[int, list[str]]:
    """(length of the output, paths of the stages) of `net`, from one black image.

    Where several candidates form a stage, it ends with the last module before the resolution
    changes.
    """
    paths, grouped = _candidates(net)
    shapes: dict[str, tuple[int, ...]] = {}  # in the order in which the modules ran

    def record(path: str, output: Tensor) -> None:
        if output.ndim > 2:
            tokens = channels_last or output.ndim == 3
            shapes[path] = tuple(output.shape[1:-1] if tokens else output.shape[2:])

    try:
        with evaluating(net), torch.no_grad(), _hooks(net, paths, record):
            dim = net(torch.zeros(1, *size)).flatten(1).shape[1]
    except (RuntimeError, AssertionError, ValueError) as error:
        shown = " x ".join(map(str, size))
        raise ValueError(f"{name} cannot process {shown} images: {error}") from error
    if not grouped or len(set(shapes.values())) == 1:
        return dim, list(shapes)
    return dim, [list(run)[-1] for _, run in itertools.groupby(shapes, key=lambda p: shapes[p])]
