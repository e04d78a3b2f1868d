"""Which engine executes a training: what is tried first, what replaces it, and why.

`choose_engine` and `compile_obstacle` decide by settings, images and machine before anything is
built. `make_engine` builds, and replaces what then fails: a model may not compile, or its captured
step may be wrong.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any, cast

import torch

from noiseproof.lab.config import Config
from noiseproof.lab.data.loader import Loader
from noiseproof.lab.device import precision
from noiseproof.lab.training.eager import Engine
from noiseproof.lab.training.optimizer import make_optimizer
from noiseproof.lab.training.step import TrainStep
from noiseproof.lab.training.verify_step import StepMismatch
from noiseproof.objectives import METHODS

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# On an H200 compiling a ResNet18 takes 20 to 27 s. That pays off after 2.4 million views in batches
# of 64, and after 3.7 to 5.5 million in larger ones (docs/performance.md). Compiled code is cached:
# a later start takes 9 to 22 s in all. The threshold is a judgement.
_MIN_VIEWS_TO_COMPILE = 2_500_000


def choose_engine(config: Config, fabric: Fabric, loader: Loader) -> tuple[str, str | None]:
    """The engine to try, and a note if that is not the one asked for or, on a GPU, not the fastest.
    On a CPU eager execution is the rule and needs no note."""
    requested, cuda = config.run.engine, fabric.device.type == "cuda"
    if requested == "eager" or (requested == "auto" and not cuda):
        return "eager", None
    distributed = {"several processes train together": fabric.world_size > 1}
    if requested == "compile":
        missing = missing_compiler(fabric.device)
        obstacles = {**distributed, str(missing): missing is not None}
    else:
        obstacles = {
            "there is no GPU": not cuda,
            **distributed,
            "images are streamed from files": not loader.in_memory,
            "fp16 needs a loss scale, which the host adjusts": config.run.amp == "fp16",
        }
    for obstacle, applies in obstacles.items():
        if applies:
            return "eager", f"engine: eager, because {obstacle}"
    return ("compile" if requested == "compile" else "graph"), None


def compile_obstacle(config: Config, fabric: Fabric, loader: Loader) -> str | None:
    """Why the kernels of a graph should not be compiled, or None."""
    steps = loader.steps * config.optim.epochs
    views = steps * loader.batch_size * METHODS[config.method.method].num_views
    if config.run.engine == "auto" and views < _MIN_VIEWS_TO_COMPILE:
        return f"{views:,} views are too few to compile for"
    return missing_compiler(fabric.device)


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks to generate code for `device` here, or None."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "there is no Triton"
        return None if shutil.which("gcc") or shutil.which("clang") else "there is no C compiler"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    available = any(shutil.which(name) for name in compilers if name)
    return None if available else "there is no C++ compiler"


def make_engine(
    name: str, fabric: Fabric, step: TrainStep, loader: Loader, config: Config
) -> Engine:
    """The engine `name` (eager, compile or graph) with module and optimiser on the device. If it
    cannot be built here, it is replaced, and the note of its replacement says why."""
    note, deterministic = None, False
    if name == "graph":
        result = _make_graph_engine(fabric, step, loader, config)
        if isinstance(result, Engine):
            return result
        reason, deterministic = result
        name, note = "eager", f"engine: eager, because {reason}"
    optimizer = make_optimizer(config, step.model)
    module = cast(TrainStep, torch.compile(step)) if name == "compile" else step
    pair: Any = fabric.setup(module, optimizer)
    wrapped, wrapped_optimizer = pair
    float32 = fabric.device.type == "cpu" and precision(config, "cpu") == "no"
    if name == "eager" and float32 and fabric.world_size == 1:
        wrapped = step  # Fabric's wrapper would inspect all inputs and outputs, and change nothing
    engine = Engine(fabric, step, wrapped_optimizer, loader, config, wrapped, deterministic)
    engine.name, engine.note = name, note
    return engine


def _make_graph_engine(
    fabric: Fabric, step: TrainStep, loader: Loader, config: Config
) -> Engine | tuple[str, bool]:
    """The graph engine, with compiled kernels if possible. Otherwise the reason why a graph cannot
    be used, and whether that is a wrong result, so that eager steps should be deterministic."""
    # Imported here: it registers an operator that a CPU does not need.
    from noiseproof.lab.training.cuda_graph import GraphEngine

    uncompiled = compile_obstacle(config, fabric, loader)
    compiled, tuned = uncompiled is None, True
    while True:
        try:
            engine = GraphEngine(fabric, step, loader, config, compiled=compiled, tuned=tuned)
        except Exception as error:  # compilers raise errors of all kinds
            step.zero_grad(set_to_none=True)
            mismatch = isinstance(error, StepMismatch)
            retry = compiled or (mismatch and tuned)
            if not retry and config.run.engine == "graph":
                raise
            if mismatch:
                reason = f"the {'compiled' if compiled else 'captured'} step is wrong: {error}"
            else:
                problem = "does not compile" if compiled else "cannot be captured"
                text = str(error).strip().split("\n")[0].rstrip(". ")[:160]
                reason = f"the step {problem}: {type(error).__name__}: {text}".rstrip(": ")
        else:
            if not compiled:
                engine.note = f"engine: graph of uncompiled kernels, because {uncompiled}"
            return engine
        # Past the handler: the error would keep the memory of the failed engine alive.
        if not retry:
            return reason, mismatch
        uncompiled = reason if compiled else uncompiled
        compiled, tuned = False, tuned and not mismatch
