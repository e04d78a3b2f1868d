"""Models on the Hugging Face Hub, through huggingface_hub's mixin.

    model = HubClassifier.from_pretrained("runs/NAME")  # a folder, or USER/MODEL of the Hub
    model.push_to_hub("USER/MODEL")

`noiseproof.load("hf://USER/MODEL")` downloads one without naming this class. Both need
huggingface_hub: pip install "noiseproof[hub]".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from noiseproof.lab.deploy.load import PixelClassifier
from noiseproof.lab.deploy.model_folders import download, refuse_run_folder
from noiseproof.lab.deploy.share import save_folder
from noiseproof.lab.runs import RunFolder

# With the errors of the library that it connects with, which differs between its versions.
_ERRORS: Any = (*HfHubHTTPError.__bases__, OSError, HFValidationError)


class HubClassifier(PixelClassifier, PyTorchModelHubMixin):
    """A `PixelClassifier` with `from_pretrained`, `save_pretrained` and `push_to_hub`."""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        refuse_run_folder(self.run.path, save_directory)  # the mixin deletes config.json first
        return super().save_pretrained(save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        if not options.get("token") and get_token() is None:
            raise ValueError(
                f"pushing to {repo_id} needs a token of the Hugging Face Hub that may write: run "
                "`hf auth login`, set HF_TOKEN, or pass token="
            )
        try:
            return super().push_to_hub(repo_id, **options)
        except _ERRORS as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"pushing to {repo_id} failed: {reason}") from None

    def _save_pretrained(self, save_directory: Path) -> None:
        save_folder(self, save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubClassifier:
        folder = model_id if os.path.isdir(model_id) else download(model_id, **options)
        return cls(RunFolder.open(folder))
