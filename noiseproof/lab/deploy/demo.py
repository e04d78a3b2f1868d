"""Trained runs on a local web page: choose an image and a perturbation, and slide its level.

The page is served on the loopback address alone, and neither it nor the server contacts anything
else. All numbers are means over a few draws of the noise, the same for all models.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader
from markupsafe import escape
from torch import Tensor

from noiseproof.lab.console import printable
from noiseproof.lab.data.batches import Batches
from noiseproof.lab.data.datasets import load_dataset
from noiseproof.lab.deploy.card import data_name
from noiseproof.lab.deploy.load import PixelClassifier, find_run
from noiseproof.lab.device import chosen_device
from noiseproof.lab.evaluation.abstention import threshold_text
from noiseproof.lab.evaluation.predict import abstention_line, abstention_threshold, pixels_of
from noiseproof.lab.evaluation.suites import suite
from noiseproof.lab.evaluation.tolerance import noise_tolerance, tolerance_text
from noiseproof.lab.figures.palette import colour, line_style
from noiseproof.lab.report.gallery import choose, image_uri
from noiseproof.lab.report.results import without_shared_words
from noiseproof.perturb import parse
from noiseproof.perturb.text import (
    CORRUPTION_FAMILIES,
    REGISTERED,
    family,
    heading,
    noise_levels,
    strength,
)
from noiseproof.robustness import batch_size_for, perturb_samples

DRAWS = 8
IMAGES = 12
_STEPS = 12  # levels of noise
_TOP = 3  # classes shown for each model
_LARGEST = "64mb"  # uploaded file
_TEMPLATES = Path(__file__).parent / "templates"


def levels(data: str, size: Sequence[int]) -> dict[str, list[str]]:
    """Perturbation texts of rising strength, "clean" first, by kind. Noise goes half as far again
    as in the evaluation.

    Args:
        data: a dataset's name, a folder or a .npz file.
        size: C, H, W of the images.
    """
    strongest = max(max(noise_levels(text), default=0.0) for text in suite("noise", data, size))
    step = 1.5 * strongest / _STEPS
    step = round(step, 1 - math.floor(math.log10(step)))  # two digits
    noise = [f"{k * step:.4g}" for k in range(1, _STEPS + 1)]
    side = max(1, min(size[1:]) // 8)
    kinds = [
        [f"gaussian:{level}" for level in noise],
        [f"uniform:{level}" for level in noise],
        [f"sensor:iso{iso}" for iso in (100, 200, 400, 800, 1600, 3200, 6400)],
        [f"exposure:-{stops}" for stops in range(1, 7)],
        [f"occlusion:{count}x{side}" for count in (1, 2, 4, 6, 8, 12, 16)],
        [f"stripes:{count}x{side}" for count in range(1, 7)],
        [f"downup:{factor}" for factor in (1.5, 2, 3, 4, 6, 8)],
        *([f"{name}:{severity}" for severity in range(1, 6)] for name in CORRUPTION_FAMILIES),
    ]
    for name, own in REGISTERED.items():
        low, high = own.levels or (0.0, 0.0)
        values = [low + (high - low) * k / _STEPS for k in range(_STEPS + 1)]
        kinds.append([f"{name}:{value:.4g}" for value in values] if own.levels else [name])
    return {family(texts[0]): ["clean", *texts] for texts in kinds}


@dataclass(frozen=True)
class Contestant:
    """A model on the page.

    Attributes:
        label: its name.
        model: the model.
        lowest: the lowest probability that it answers with; 0 answers always.
    """

    label: str
    model: PixelClassifier
    lowest: float


class Shown(NamedTuple):
    """The image on the page: bytes, C x H x W, and its class if that is known."""

    image: bytes
    truth: int | None


class Demo:
    """What the page shows, without the page.

    Args:
        paths: runs, as `noiseproof.load` takes them; they must have the same classes and size.
        abstain: the share of wrong answers to allow; models abstain where they would exceed it.
            None lets them always answer.
        device: "auto", "cpu" or "cuda".
    """

    def __init__(self, paths: Sequence[str], abstain: float | None = None, device: str = "auto"):
        self.device = chosen_device(device)
        models = [PixelClassifier(find_run(path)).to(self.device) for path in paths]
        names = [printable(model.run.name) for model in models]
        self.contestants = []
        for name, label, model in zip(names, without_shared_words(names), models, strict=True):
            if (model.classes, model.size) != (models[0].classes, models[0].size):
                raise ValueError(
                    "the models of a demo must have the same classes and image size; "
                    f"those of {name} differ from those of {names[0]}"
                )
            print(f"{name}: {model.note}")
            lowest = 0.0
            if abstain is not None:
                fitted, checked = abstention_threshold(
                    model.run, abstain, weights=model.weights, device=device
                )
                print(f"{name}: {abstention_line(fitted, checked)}")
                lowest = fitted.score
            self.contestants.append(Contestant(label, model, lowest))
        self.first = models[0]
        self.classes = [printable(name) for name in self.first.classes]
        self.levels = levels(self.first.run.config.data.data, self.first.size)
        self.examples = self._examples()
        jinja = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True)
        self._template = jinja.get_template("demo.html.j2")
        self.probabilities = functools.lru_cache(maxsize=256)(self._probabilities)
        self.tolerances = functools.lru_cache(maxsize=256)(self._tolerances)

    def _examples(self) -> list[Shown]:
        """Test images, chosen by class; none if they are not available."""
        run = self.first.run
        try:
            dataset = run.dataset(load_dataset(replace(run.config.data, download=False)))
        except ValueError as error:
            print(f"No test images to choose from: {error}")
            return []
        index = choose(dataset.test.labels, IMAGES)
        batches = Batches(dataset.test, dataset.size, len(index), torch.device("cpu"), index=index)
        batch = next(iter(batches))
        images = [image.contiguous().numpy().tobytes() for image in batch.pixels]
        return [Shown(*pair) for pair in zip(images, batch.labels.tolist(), strict=True)]

    def upload(self, path: str) -> Shown:
        """An image file, read as in training; ValueError says what is wrong with it."""
        try:
            pixels = pixels_of(self.first.run, [path])[0]
        except ValueError as error:  # the message names a temporary file
            raise ValueError(str(error).replace(path, os.path.basename(path))) from None
        return Shown((pixels * 255).round().byte().numpy().tobytes(), None)

    def pixels(self, image: bytes) -> Tensor:
        """C x H x W in [0, 1]."""
        return torch.frombuffer(bytearray(image), dtype=torch.uint8).view(self.first.size) / 255

    def _perturbed(self, image: bytes, text: str, draws: int) -> Tensor:
        perturbation = parse(text)
        index = torch.arange(1 if perturbation.deterministic else draws)
        x = self.pixels(image).to(self.device).expand(len(index), -1, -1, -1)
        return perturb_samples(x, index, perturbation, 0, 0)

    @torch.inference_mode()
    def _probabilities(self, image: bytes, kind: str) -> list[Tensor]:
        """Of each model, levels x classes: means over the draws."""
        batches = [self._perturbed(image, text, DRAWS) for text in self.levels[kind]]
        lengths = [len(batch) for batch in batches]
        images = torch.cat(batches).split(batch_size_for(self.first.size, self.device))
        result = []
        for contestant in self.contestants:
            chances = torch.cat([contestant.model(x).float().softmax(1) for x in images]).cpu()
            result.append(torch.stack([part.mean(0) for part in chances.split(lengths)]))
        return result

    def _tolerances(self, image: bytes) -> list[str]:
        """The noise tolerance of each model, in words."""
        x = self.pixels(image).to(self.device)[None]
        return [tolerance_text(noise_tolerance(c.model, x).item()) for c in self.contestants]

    def page(self, shown: Shown, kind: str, level: int) -> str:
        """The perturbed image, the answers and the curves, as HTML.

        Args:
            shown: the image.
            kind: one of `levels`.
            level: a position in its texts.
        """
        texts = self.levels[kind]
        probabilities = self.probabilities(shown.image, kind)
        rows = [
            {**self._row(contestant, chances, shown.truth, level), "tolerance": tolerance}
            for contestant, chances, tolerance in zip(
                self.contestants, probabilities, self.tolerances(shown.image), strict=True
            )
        ]
        ticks = [0, (len(texts) - 1) // 2, len(texts) - 1]
        return self._template.render(
            image=image_uri(self._perturbed(shown.image, texts[level], 1)[0].cpu()),
            pixelated=max(self.first.size[1:]) <= 96,
            heading=heading(texts[level]),
            truth=None if shown.truth is None else self.classes[shown.truth],
            position=100 * level / (len(texts) - 1),
            ticks=[(100 * i / (len(texts) - 1), strength(texts[i])) for i in sorted(set(ticks))],
            kind=kind,
            rows=rows,
            draws=DRAWS,
        )

    def _row(
        self, contestant: Contestant, chances: Tensor, truth: int | None, level: int
    ) -> dict[str, Any]:
        """What the page says about one model."""
        answers = chances.argmax(1).tolist()
        followed = answers[0] if truth is None else truth
        best = chances[level].topk(min(_TOP, len(self.classes)))
        curve = (100 * chances[:, followed]).tolist()
        points = [(100 * i / (len(curve) - 1), 100 - y) for i, y in enumerate(curve)]
        dashes = line_style(contestant.label, "light")["linestyle"]
        confidence = float(best.values[0])
        return {
            "label": contestant.label,
            "light": colour(contestant.label, "light"),
            "dark": colour(contestant.label, "dark"),
            "dashes": " ".join(f"{2 * x:g}" for x in dashes[1]) if dashes != "solid" else "none",
            "points": " ".join(f"{x:.2f},{y:.2f}" for x, y in points),
            "here": points[level],
            "answer": self.classes[answers[level]],
            "confidence": confidence,
            "right": None if truth is None else answers[level] == truth,
            "abstains": confidence < contestant.lowest,
            "lowest": threshold_text(contestant.lowest) if contestant.lowest else "",
            "top": [
                (self.classes[i], p)
                for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ],
        }


def build_page(demo: Demo) -> Any:
    """The page as gradio's Blocks."""
    gr = _gradio()
    kinds = list(demo.levels)
    start = demo.examples[0] if demo.examples else None
    kind = kinds[0]
    level = len(demo.levels[kind]) // 3
    hint = "<p class='np-hint'>Upload an image to begin.</p>"

    def page(shown: Shown | None, kind: str, level: float) -> str:
        return demo.page(Shown(*shown), kind, int(level)) if shown else hint

    def message(text: str) -> Any:
        alert = f"<p class='np-alert' role='alert'>{escape(text)}</p>"
        return gr.HTML(alert, visible=bool(text))

    def pick(kind: str, level: float, event: Any) -> tuple[Any, ...]:
        shown = demo.examples[event.index]
        return shown, page(shown, kind, level), message("")

    pick.__annotations__["event"] = gr.SelectData  # by which gradio knows what to pass

    def upload(path: str, shown: Shown | None, kind: str, level: float) -> tuple[Any, ...]:
        try:
            new = demo.upload(path)
        except ValueError as error:
            return shown, page(shown, kind, level), message(str(error))
        return new, page(new, kind, level), message("")

    def change(shown: Shown | None, kind: str) -> tuple[Any, ...]:
        steps = len(demo.levels[kind]) - 1
        level = max(1, steps // 3)
        return gr.Slider(maximum=steps, value=level), page(shown, kind, level)

    names = [contestant.label for contestant in demo.contestants]
    day = 24 * 3600  # seconds; uploads are deleted at the end, too
    with gr.Blocks(
        title="Noiseproof", analytics_enabled=False, fill_width=True, delete_cache=(day, day)
    ) as blocks:
        state = gr.State(start)
        gr.HTML(
            "<header class='np-head'><h1>How much noise can it take?</h1><p>"
            f"{escape(', '.join(names))} on {escape(data_name(demo.first.run))}: "
            "choose an image and a perturbation, and slide its level.</p></header>"
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                gallery = gr.Gallery(
                    [
                        (_picture(demo.pixels(shown.image)), demo.classes[shown.truth or 0])
                        for shown in demo.examples
                    ],
                    show_label=False, columns=6, allow_preview=False, buttons=[],
                    object_fit="contain", height="auto", elem_id="np-gallery",
                    interactive=False, visible=bool(demo.examples),
                )  # fmt: skip
                file = gr.UploadButton("Upload an image", elem_id="np-upload", variant="secondary")
                alert = gr.HTML(elem_id="np-message", visible=False)
                choice = gr.Dropdown(kinds, value=kind, label="Perturbation", elem_id="np-kind")
                slider = gr.Slider(
                    0, len(demo.levels[kind]) - 1, value=level, step=1, label="Level",
                    buttons=[], elem_id="np-level",
                )  # fmt: skip
            with gr.Column(scale=3, min_width=320):
                result = gr.HTML(page(start, kind, level), elem_id="np-result")
        quick: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
        gallery.select(pick, [choice, slider], [state, result, alert], **quick)
        file.upload(upload, [file, state, choice, slider], [state, result, alert], **quick)
        choice.input(change, [state, choice], [slider, result], **quick)
        slider.input(page, [state, choice, slider], result, **quick)
    return blocks


def _picture(image: Tensor) -> Any:
    """An image as gradio's gallery takes it, small ones enlarged without smoothing."""
    factor = max(1, 96 // max(image.shape[1:]))
    larger = image.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    array = (larger * 255).round().byte().permute(1, 2, 0)
    return (array.expand(-1, -1, 3) if array.shape[2] == 1 else array).numpy()


def _gradio() -> Any:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when it is imported
    import gradio

    return gradio


def demo_runs(
    paths: Sequence[str],
    *,
    abstain: float | None = None,
    port: int | None = None,
    device: str = "auto",
    browser: bool = False,
) -> None:
    """Serves the page on the loopback address until interrupted.

    Args:
        paths: as for `Demo`.
        abstain: as for `Demo`.
        port: of the server; by default the first free one from 7860.
        device: as for `Demo`.
        browser: open the page in the default browser.
    """
    if port is not None:
        _check_port(port)
    demo = Demo(paths, abstain, device)
    gr, blocks = _gradio(), build_page(demo)
    system = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
    theme = gr.themes.Base(
        primary_hue="orange", neutral_hue="stone", font=system, font_mono=["monospace"]
    ).set(body_text_color_subdued="*neutral_500", body_text_color_subdued_dark="*neutral_400")
    blocks.launch(
        server_name="127.0.0.1", server_port=port, share=False, inbrowser=browser, quiet=True,
        theme=theme,
        css_paths=_TEMPLATES / "demo.css", footer_links=[], ssr_mode=False, pwa=False,
        max_file_size=_LARGEST, prevent_thread_lock=True, enable_monitoring=False,
    )  # fmt: skip
    print(f"The demo is at {blocks.local_url} (Ctrl-C ends it)", flush=True)
    blocks.block_thread()


def _check_port(port: int) -> None:
    """Raises ValueError if a server cannot use this port; gradio's own error leaves threads."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"--port {port} cannot be used: {error.strerror}; choose another, or leave it out "
                "for the first free one"
            ) from None
