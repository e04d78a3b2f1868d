"""The folder of a model that is named as `noiseproof.load` and the commands take it. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from filecmp import cmp
from pathlib import Path
from typing import Any

import noiseproof
from noiseproof.lab.comparison_files import is_comparison, recommended
from noiseproof.lab.config import Run, did_you_mean
from noiseproof.lab.files import write_atomically

HUB = "hf://"
_SHARED = ["config.json", "model.safetensors", "README.md"]  # the files of a shared model
PUBLISHED = Path(noiseproof.__file__).resolve().parents[1] / "weights"
"""Our own trained models, one folder each, in a checkout; a wheel has none."""


def model_folder(path: str | os.PathLike[str]) -> str:
    """The run folder that `path` names; ValueError if there is none.

    Args:
        path: as for `noiseproof.load`.
    """
    text = os.fspath(path)
    if text.startswith(HUB):
        return download(text.removeprefix(HUB))
    if is_comparison(text):
        return str(recommended(text).run)
    if Path(text).is_dir():
        return text
    if Path(text).is_file():
        raise ValueError(
            f"{text} is a file; expected the folder of a run, with config.json and its weights"
        )
    names = published()
    if text in names:
        return str(PUBLISHED / text)
    known = f", or one of {', '.join(names)}" if names else ""
    raise ValueError(
        f"{text} does not exist; expected a run folder, or {HUB}USER/MODEL{known}"
        f"{did_you_mean(text, names)}"
    )


def folder_for_results(path: str) -> str:
    """The run folder that `path` names; of a model that is given by its name, a copy in runs/, so
    that results are not written into a checkout or a cache. ValueError if runs/ has another run of
    that name.

    Args:
        path: as for `noiseproof.load`.
    """
    source = Path(model_folder(path))
    if Path(path).is_dir():
        return str(source)
    copy = Path(Run.output) / Path(path).name
    if not (copy / "config.json").exists():
        for name in reversed(_SHARED):  # config.json last: a folder that has it is complete
            if (source / name).is_file():
                write_atomically(copy / name, (source / name).read_bytes())
    weights = "model.safetensors"
    if not (copy / weights).is_file() or not cmp(source / weights, copy / weights, shallow=False):
        raise ValueError(
            f"{copy} is another run, where the results of {path} would go; rename it, or give the "
            "folder of a run"
        )
    return str(copy)


def refuse_run_folder(run: str | Path, folder: str | Path) -> None:
    """ValueError if writing a shared model to `folder` would overwrite a run.

    Args:
        run: the run folder that the model comes from.
        folder: where the model is to go. An earlier shared model there may be replaced.
    """
    if Path(folder).resolve() == Path(run).resolve():
        raise ValueError(f"{folder} is the run itself; expected another folder to write to")
    config = Path(folder) / "config.json"
    if config.is_file() and b'"weights_note"' not in config.read_bytes():  # as shared models have
        raise ValueError(f"{folder} holds another run or model; expected a new folder")


def download(model: str, **options: Any) -> str:
    """The local folder of a model of the Hugging Face Hub, downloaded unless it is cached.

    Args:
        model: USER/MODEL.
        options: of huggingface_hub's `snapshot_download`, such as `revision` or `token`.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ModuleNotFoundError:
        raise ValueError(
            f'{HUB}{model} needs huggingface_hub: pip install "noiseproof[hub]"'
        ) from None
    try:
        return snapshot_download(model, allow_patterns=_SHARED, **options)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{HUB}{model} cannot be downloaded: {reason}") from error


def published() -> Sequence[str]:
    """The names of our own models, if this is a checkout."""
    return sorted(file.parent.name for file in PUBLISHED.glob("*/config.json"))
