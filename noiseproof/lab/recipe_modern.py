"""A short one-cycle training with the safeguards that larger steps need.

The discriminative loss diverges at learning rates of 0.02 and above unless the gradient is clipped
and the constraint weights rise over the first epochs; with both it trains at 0.05. Every method
gets the same safeguards, so that comparisons stay fair.
"""

from __future__ import annotations

from dataclasses import replace

from noiseproof.lab.config import Config
from noiseproof.lab.recipe_paper import paper


def modern(data: str) -> Config:
    """One-cycle, 30 epochs, lr 0.05, clipped gradients; data, model and noise as in the paper.

    >>> config = modern("cifar10")
    >>> config.optim.sched, config.method.noise
    ('onecycle', 'gaussian:0.06')
    """
    base = paper(data)
    return replace(
        base,
        method=replace(base.method, ramp_epochs=5.0),
        optim=replace(
            base.optim,
            epochs=30,
            opt="sgd",
            lr=0.05,
            momentum=0.9,
            weight_decay=5e-4,
            sched="onecycle",
            decay_milestones=(),
            clip_grad=1.0,
        ),
    )
