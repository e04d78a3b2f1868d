"""Temperature scaling (Guo et al. 2017): logits divided by one number, fitted on validation images.

The temperature T minimises the negative log-likelihood of softmax(logits / T). The head of a
classifier is linear, so dividing its weights and bias by T divides the logits: the result is an
ordinary run. Predicted classes stay the same up to rounding; only their probabilities change.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noiseproof.lab.data.datasets import Dataset
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.predictions import split_logits
from noiseproof.lab.runs import RunFolder
from noiseproof.perturb import Perturbation
from noiseproof.robustness import by_name

_NOISE_SEED = 0x7E39  # validation images do not get the noise of the tests, whose seed is 0
_RANGE = 1e3  # temperatures from 1/1000 to 1000


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the smallest negative log-likelihood.

    Args:
        logits: n x classes, finite.
        labels: n, the true classes.
    """
    from scipy.optimize import minimize_scalar

    logits = logits.double()
    if bool((logits.argmax(1) == labels).all()):
        raise ValueError(
            f"all {len(labels):,} predictions for validation images are right, so the "
            "likelihood grows as the temperature goes to 0; fit it on noisy images as well, such "
            "as --noise clean gaussian:0.1"
        )

    def nll(log_t: float) -> float:
        return float(nn.functional.cross_entropy(logits / math.exp(log_t), labels))

    limit = math.log(_RANGE)
    found: Any = minimize_scalar(nll, bounds=(-limit, limit), method="bounded")
    if limit - abs(found.x) < 0.01:
        raise ValueError(
            f"no temperature from {1 / _RANGE:g} to {_RANGE:g} fits: on validation images the "
            "probabilities of the model are no better than equal ones"
        )
    return math.exp(found.x)


def calibrate(
    run: RunFolder,
    *,
    noise: Sequence[Perturbation | str] = ("clean",),
    output: str | Path | None = None,
    name: str | None = None,
    device: str = "auto",
    dataset: Dataset | None = None,
) -> RunFolder:
    """Writes a new run folder: the same model with its logits divided by a fitted temperature.

    `calibrated` in the info of the new run records the temperatures of the last and the best epoch,
    and what they were fitted on. The original run is not changed.

    Args:
        run: a trained run that kept validation images.
        noise: perturbations of the validation images; with several, one temperature fits all.
        output: folder of the new run folder; by default that of the run.
        name: name of the new run folder; by default the run's with -calibrated.
        device: "auto", "cpu" or "cuda".
        dataset: the run's data, if the caller has loaded it already.
    """
    new = run.derive("calibrated", output=output, name=name)
    perturbations, target = by_name(noise), chosen_device(device)
    validation = run.dataset(dataset).validation if run.validation_images else None
    if validation is None:
        raise ValueError(
            f"{run.path} kept no validation images to fit a temperature on; expected a run "
            "trained with --val-share 0.1"
        )
    facts = new.info["calibrated"]
    facts.update(noise=list(perturbations), images=validation.count, weights={})
    for weights in run.available_weights:
        logits, labels = split_logits(
            run,
            validation,
            weights=weights,
            device=target,
            perturbations=perturbations.values(),
            seed=_NOISE_SEED,
        )
        temperature = fit_temperature(logits, labels)
        model = run.model(weights)
        with torch.no_grad():
            for parameter in model.head.parameters():
                parameter /= temperature
        new.save_weights(weights, model.state_dict())
        # the hash is that of the original weights
        fitted = {"temperature": temperature, "hash": run.weights_hash(weights)}
        facts["weights"][weights] = fitted
    new.save_config()  # last: a folder that has it is complete
    return new


def calibrate_path(path: str | Path, **options: Any) -> None:
    """Calibrates the run at `path`; prints the temperatures, and where the new run is.

    Args:
        path: the run folder.
        **options: as for `calibrate`.
    """
    run = RunFolder.open(path)
    new = calibrate(run, **options)
    facts = new.info["calibrated"]
    fitted = ", ".join(
        f"{w['temperature']:.3f} ({name} epoch)" for name, w in facts["weights"].items()
    )
    print(
        f"The run is in {shlex.quote(str(new.path))}. Its logits are divided by {fitted}, fitted "
        f"on {facts['images']:,} validation images. To test both:\n"
        f"  noiseproof evaluate {shlex.join([str(run.path), str(new.path)])} --calibration"
    )
