"""Which engine executes a training: what is tried first, what instead, and the line that says why.

`choose` and `uncompiled` go by the settings, the images and the machine, before anything is built.
`make` builds, and replaces what then fails: a model may not compile, or its captured step be wrong.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, cast

import torch

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import Loader, MemoryLoader
from noiseproof.lab.device import precision
from noiseproof.lab.training.eager import Engine, TrainStep
from noiseproof.lab.training.optimizer import make_optimizer

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def choose(config: Config, fabric: Fabric, loader: Loader) -> tuple[str, str | None]:
    """The engine to try, and a line that says why it is not the one asked for, or, where a GPU is
    there, not the fastest. On a CPU eager is the rule, and nothing need be said."""
    wanted, cuda = config.run.engine, fabric.device.type == "cuda"
    if wanted == "eager" or (wanted == "auto" and not cuda):
        return "eager", None
    several = {"several processes train together": fabric.world_size > 1}
    reasons = {
        "there is no GPU": not cuda,
        **several,
        "images stream from files": not isinstance(loader, MemoryLoader),
        "fp16 needs a loss scale that the host looks at": config.run.amp == "fp16",
    }
    missing = no_compiler(fabric.device)
    if wanted == "compile":
        reasons = {**several, str(missing): missing is not None}
    why = next((text for text, holds in reasons.items() if holds), None)
    if why:
        return "eager", f"engine: eager, because {why}"
    return ("compile" if wanted == "compile" else "graph"), None


# On an H200 a ResNet18 takes 27 s longer to start when compiled, and its cheapest step then 1.7
# instead of 2.4 ms: that pays after 38,000 steps (benchmarks/start.py). Compiled code is kept, so a
# later start takes 9 to 22 s in all. The number between is a judgement.
_FEW = 20_000


def uncompiled(config: Config, fabric: Fabric, loader: Loader) -> str | None:
    """Why a graph is not to be made of compiled kernels, or None."""
    steps = loader.steps * config.optim.epochs
    if config.run.engine == "auto" and steps < _FEW:
        return f"{steps:,} steps are too few to compile for"
    return no_compiler(fabric.device)


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot make code for the device here, or None where it can."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "there is no Triton"
        return None if shutil.which("gcc") or shutil.which("clang") else "there is no C compiler"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    found = any(shutil.which(name) for name in compilers if name)
    return None if found else "there is no C++ compiler"


def make(name: str, fabric: Fabric, step: TrainStep, loader: Loader, config: Config) -> Engine:
    """The engine called `name`, with its module and optimiser set up on the device. One that cannot
    be made here, say because a model does not compile, is replaced, and the other's note says why.
    """
    note, deterministic = None, False
    if name == "graph":
        made = _graph(fabric, step, loader, config)
        if isinstance(made, Engine):
            return made
        why, deterministic = made
        name, note = "eager", f"engine: eager, because a step cannot be captured: {why}"
    optimizer = make_optimizer(config, step.model, fabric.device)
    module = cast(TrainStep, torch.compile(step)) if name == "compile" else step
    wrapped, wrapped_optimizer = fabric.setup(module, optimizer)
    plain = fabric.device.type == "cpu" and precision(config, "cpu") == "no"
    if name == "eager" and plain and fabric.world_size == 1:
        wrapped = step  # Fabric would look through all that goes in and comes out, and do nothing
    engine = Engine(
        fabric,
        wrapped,  # pyright: ignore[reportArgumentType]
        step,
        wrapped_optimizer,
        loader,
        config,
        deterministic,
    )
    engine.name, engine.note = name, note
    return engine


def _graph(
    fabric: Fabric, step: TrainStep, loader: Loader, config: Config
) -> Engine | tuple[str, bool]:
    """The graph engine, of compiled kernels or else of others; or what is in the way of both, and
    whether it is wrong results, so that eager steps are to take deterministic kernels."""
    from noiseproof.lab.training.cuda_graph import (  # not on a CPU: it adds an operator
        GraphEngine,
        Wrong,
    )

    if not isinstance(loader, MemoryLoader):
        raise ValueError("the graph engine needs images in memory; these stream from files")
    missing, tuned = uncompiled(config, fabric, loader), True
    if missing is None:
        try:
            return GraphEngine(fabric, step, loader, config)
        except Wrong as error:  # by the compiler's fault or that of a tuned kernel
            missing, tuned = f"the compiled step is wrong: {error}", False
        except Exception as error:  # of any kind: compilers have many
            missing = f"the step does not compile: {_first_line(error)}"
        step.zero_grad(set_to_none=True)
    while True:
        try:
            engine = GraphEngine(fabric, step, loader, config, compiled=False, tuned=tuned)
        except Exception as error:  # not kept: it holds on to the memory of what has failed
            step.zero_grad(set_to_none=True)
            wrong, why = isinstance(error, Wrong), _first_line(error)
            if config.run.engine == "graph" and not (wrong and tuned):
                raise
        else:
            engine.note = f"engine: graph of uncompiled kernels, because {missing}"
            return engine
        if not (wrong and tuned):
            return why, wrong
        tuned = False


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(". ")[:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
