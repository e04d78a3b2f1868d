"""Augmentations on the device; each step of the road augmentation agrees with torchvision's."""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as V

from noiseproof import draws
from noiseproof.augment import (
    AUGMENTATIONS,
    MIXINGS,
    augmix,
    crop,
    cutmix,
    cutout,
    erase,
    hybrid,
    mixup,
    parse,
    parse_with_mixing,
    road,
    trivial,
)
from noiseproof.lab import config
from tests.operations import UNCAPTURABLE, RecordOperations

HEIGHT, WIDTH = 40, 50
# Places of the draws: three factors and their order, turn, perspective or not, 4 + 4 corners, flip.
BRIGHT, CONTRAST, SATURATION, ORDER, TURN, SEEN, CORNERS, FLIP = 0, 1, 2, 3, 4, 5, 6, 14


class Given(draws.PerSample):
    """Draws that are given: a half, which changes nothing, but for those named."""

    def __init__(self, count: int, **changed: float):
        super().__init__(torch.zeros(count, dtype=torch.int64))
        self.values = torch.full((count, 15), 0.5)
        for place, value in changed.items():
            self.values[:, int(place[1:])] = value

    def uniform(self, *shape: int) -> Tensor:
        assert shape == (15,)
        return self.values


def smooth(count: int = 2) -> Tensor:
    """Images without edges, which two ways of resampling agree on."""
    down, right = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    made = [
        128 + 100 * torch.sin(right / (5 + i) + k) * torch.cos(down / (7 - k) - i)
        for i in range(count)
        for k in range(3)
    ]
    return torch.stack(made).view(count, 3, HEIGHT, WIDTH).to(torch.uint8)


def augmented(images: Tensor, **changed: float) -> Tensor:
    return road(images, Given(len(images), **changed))


def apart(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.int() - wanted.int()).abs()


def test_draws_in_the_middle_leave_an_image_as_it_is():
    assert torch.equal(augmented(smooth()), smooth())


@pytest.mark.parametrize("draw", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(
    ("place", "step"),
    [
        (BRIGHT, V.adjust_brightness),
        (CONTRAST, V.adjust_contrast),
        (SATURATION, V.adjust_saturation),
    ],
)
def test_each_colour_step_is_torchvisions(place: int, step: Any, draw: float):
    wanted = step(smooth(), 1 + 0.3 * (2 * draw - 1))
    assert apart(augmented(smooth(), **{f"d{place}": draw}), wanted).max() <= 1


def test_the_six_orders_of_the_colour_steps_all_occur():
    steps = (V.adjust_brightness, V.adjust_contrast, V.adjust_saturation)
    # Strong ones, so that colours are cut off: without that some of the steps would commute.
    factors = {f"d{BRIGHT}": 0.95, f"d{CONTRAST}": 0.9, f"d{SATURATION}": 0.98}
    orders = [(0, 1, 2), (0, 2, 1), (1, 2, 0), (1, 0, 2), (2, 0, 1), (2, 1, 0)]
    images = torch.rand(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    images = (images * 255).round() / 255
    seen = []
    for number, order in enumerate(orders):
        wanted = images
        for step in order:
            wanted = steps[step](wanted, 1 + 0.3 * (2 * factors[f"d{step}"] - 1))
        pixels = (images * 255).to(torch.uint8)
        found = augmented(pixels, **factors, **{f"d{ORDER}": (number + 0.5) / 6})
        assert apart(found, (wanted * 255).round()).max() <= 1
        seen.append(found)
    assert len({image.numpy().tobytes() for image in seen}) == 6


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.999])
def test_the_turn_is_torchvisions(draw: float):
    found = augmented(smooth(), **{f"d{TURN}": draw})
    angle = 10 * (2 * draw - 1)
    wanted = V.rotate(smooth(), angle, interpolation=InterpolationMode.BILINEAR)
    off = apart(found, wanted)
    assert off[..., 1:-1, 1:-1].float().mean() < 0.6  # rounding, and edges that one lets fade
    assert apart(found, V.rotate(smooth(), -angle)).float().mean() > 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_perspective_is_torchvisions(seed: int):
    draw = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    moved = [(int(u * (WIDTH // 4 + 1)), int(v * (HEIGHT // 4 + 1)))
             for u, v in zip(draw[:4].tolist(), draw[4:].tolist(), strict=True)]  # fmt: skip
    right, low = WIDTH - 1, HEIGHT - 1
    start = [[0, 0], [right, 0], [right, low], [0, low]]
    end = [[abs(x - i), abs(y - j)] for (x, y), (i, j) in zip(start, moved, strict=True)]
    wanted = V.perspective(smooth(), start, end, interpolation=InterpolationMode.BILINEAR)
    corners = {f"d{CORNERS + k}": float(u) for k, u in enumerate(draw)}
    found = augmented(smooth(), **corners, **{f"d{SEEN}": 0.49})
    assert apart(found, wanted).float().mean() < 1
    assert torch.equal(augmented(smooth(), **corners, **{f"d{SEEN}": 0.5}), smooth())


def test_the_corners_move_by_whole_pixels_to_a_quarter_at_most():
    # All of them as far as they go: what is left is the inner half, up to a pixel.
    white = torch.full((1, 3, HEIGHT, WIDTH), 255, dtype=torch.uint8)
    corners = {f"d{CORNERS + k}": 0.9999 for k in range(8)}
    shown = (augmented(white, **corners, **{f"d{SEEN}": 0.0})[0, 0] > 0).nonzero()
    top, left = shown.min(0).values.tolist()
    bottom, right = shown.max(0).values.tolist()
    assert (top, left) == (HEIGHT // 4, WIDTH // 4)
    assert HEIGHT - 1 - HEIGHT // 4 - bottom in (0, 1)
    assert WIDTH - 1 - WIDTH // 4 - right in (0, 1)


def test_half_of_the_images_are_mirrored():
    assert torch.equal(augmented(smooth(), **{f"d{FLIP}": 0.49}), smooth().flip(3))
    assert torch.equal(augmented(smooth(), **{f"d{FLIP}": 0.5}), smooth())


def test_what_turned_out_of_the_image_does_not_come_back():
    # Turned, then seen from elsewhere: as one map, but black where the first step had cut it off.
    white = torch.full((1, 3, HEIGHT, WIDTH), 255, dtype=torch.uint8)
    corners = {f"d{CORNERS + k}": 0.5 for k in range(8)}
    found = augmented(white, **corners, **{f"d{SEEN}": 0.0, f"d{TURN}": 1.0})
    turned = V.rotate(white, 10, interpolation=InterpolationMode.BILINEAR)
    moved = int(0.5 * (WIDTH // 4 + 1)), int(0.5 * (HEIGHT // 4 + 1))
    right, low = WIDTH - 1, HEIGHT - 1
    start = [[0, 0], [right, 0], [right, low], [0, low]]
    end = [[abs(x - moved[0]), abs(y - moved[1])] for x, y in start]
    wanted = V.perspective(turned, start, end, interpolation=InterpolationMode.BILINEAR)
    assert apart(found, wanted).float().mean() < 6  # along the edges
    assert (apart(found, wanted) > 128).float().mean() < 0.02


def test_an_image_looks_the_same_in_any_company():
    images, keys = smooth(6), draws.keys(3, torch.arange(6))
    together = road(images, draws.PerSample(keys))
    for i in range(6):
        alone = road(images[i : i + 1], draws.PerSample(keys[i : i + 1]))
        assert apart(alone[0], together[i]).max() <= 1
    assert len({image.numpy().tobytes() for image in together}) == 6


def test_augmented_images_are_as_bright_as_torchvisions():
    """In law: mean and spread of brightness and of the black share over many draws."""
    from torchvision.transforms import v2

    count = 400
    image = smooth(1)
    ours = road(
        image.expand(count, -1, -1, -1), draws.PerSample(draws.keys(0, torch.arange(count)))
    )
    recipe = v2.Compose(
        [
            v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
            v2.RandomRotation([-10, 10]),
            v2.RandomPerspective(),
            v2.RandomHorizontalFlip(),
        ]
    )
    torch.manual_seed(0)
    theirs = torch.stack([recipe(image[0]) for _ in range(count)])
    measures = (
        lambda x: x.float().mean((1, 2, 3)),
        lambda x: (x.amax(1) == 0).float().mean((1, 2)),
    )
    for measure in measures:
        a, b = measure(ours), measure(theirs)
        noise = math.sqrt(float(a.var() + b.var()) / count)
        assert abs(float(a.mean() - b.mean())) < 4 * noise
        assert 0.75 < float(a.std() / b.std()) < 1.33


@pytest.mark.parametrize("name", ["road", "crop-flip+trivial+erase", "augmix"])
def test_it_can_be_compiled_whole(name: str):
    images, source = smooth(), draws.PerSample(draws.keys(0, torch.arange(2)))
    compiled = torch.compile(parse(name), fullgraph=True, backend="aot_eager")
    assert apart(compiled(images, source), parse(name)(images, source)).max() <= 1


@pytest.mark.parametrize("augment", [*map(parse, AUGMENTATIONS), cutmix, mixup])
def test_a_cuda_graph_can_capture_it(augment: Any):
    images, source = smooth(), draws.PerSample(draws.keys(0, torch.arange(2)))
    labels = (torch.arange(2),) if augment in (cutmix, mixup) else ()
    with RecordOperations() as recorded:
        augment(images, *labels, source)
    assert not recorded.names & UNCAPTURABLE
    with RecordOperations() as recorded:  # these would be found
        assert torch.tensor([1.0, 2.0])[torch.tensor([True, False])].item() == 1
    assert recorded.names >= {"_local_scalar_dense", "lift_fresh", "index"}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_index_selects_the_images_that_are_augmented(name: str):
    images, index = smooth(6), torch.tensor([4, 0, 4, 5])
    source = draws.PerSample(draws.keys(1, torch.arange(4)))
    augment = parse(name)
    assert torch.equal(augment(images, source, index), augment(images[index], source))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floating_point_images_are_augmented_like_bytes_and_keep_their_dtype(
    name: str, dtype: torch.dtype
):
    images, source = smooth(4), draws.PerSample(draws.keys(1, torch.arange(4)))
    found = parse(name)(images.to(dtype) / 255, source)
    assert found.dtype == dtype
    # Of 255; trivial truncates the bytes of a grey image, and those that it is blended to.
    tolerance = 4 if dtype == torch.bfloat16 else 2 if name == "trivial" else 1
    assert apart((found.float() * 255).round(), parse(name)(images, source)).max() <= tolerance


def test_a_crop_is_the_same_in_any_batch_and_differs_between_samples():
    images, keys = smooth(1).expand(40, -1, -1, -1), draws.keys(0, torch.arange(40))
    crops = parse("crop-flip")(images, draws.PerSample(keys))
    alone = parse("crop-flip")(images[:1], draws.PerSample(keys[7:8]))
    assert torch.equal(alone[0], crops[7])
    assert len({image.numpy().tobytes() for image in crops}) > 30  # of 11 x 11 x 2


def test_the_command_line_knows_every_augmentation():
    assert list(config.AUGMENTATIONS) == [*AUGMENTATIONS, *MIXINGS]
    assert tuple(MIXINGS) == config.MIXINGS


def test_an_unknown_name_is_refused_with_the_known_ones():
    known = "none, crop, crop-flip, road, trivial, erase, cutout, augmix, hybrid, mixup or cutmix"
    with pytest.raises(ValueError, match=rf"must be {known}, or several joined by \+, got 'blur'$"):
        parse("blur")
    with pytest.raises(ValueError, match=r"joined by \+, got 'blur' in 'crop\+blur\+erase'$"):
        parse("crop+blur+erase")
    with pytest.raises(ValueError, match=r"got '' in 'crop\+'$"):
        parse("crop+")
    with pytest.raises(ValueError, match=r"got 'erasing' \(did you mean 'erase'\?\)$"):
        parse("erasing")
    with pytest.raises(ValueError, match=r"must be text such as 'crop-flip\+trivial', got None$"):
        parse(None)  # pyright: ignore[reportArgumentType]


def test_arguments_out_of_range_are_refused():
    images, labels = smooth(), torch.zeros(2, dtype=torch.long)
    for call, message in {
        lambda: erase(images, probability=2): "probability must be from 0 to 1, got 2",
        lambda: cutout(images, share=-0.1): "share must be from 0 to 2, got -0.1",
        lambda: cutout(images, share=math.inf): "share must be from 0 to 2, got inf",
        lambda: augmix(images, severity=20): "severity must be from 0.1 to 10, got 20",
        lambda: hybrid(images, fraction=-0.1): "fraction must be from 0 to 1, got -0.1",
        lambda: mixup(images, labels, fraction=math.nan): "fraction must be from 0 to 1, got nan",
        lambda: cutmix(images, labels, fraction=2): "fraction must be from 0 to 1, got 2",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_mixing_stands_last_and_has_its_own_parser():
    images, source = smooth(4), draws.PerSample(draws.keys(1, torch.arange(4)))
    augment, mixing = parse_with_mixing("crop-flip+cutmix")
    assert mixing is cutmix
    assert torch.equal(augment(images, source), parse("crop-flip")(images, source))
    assert parse_with_mixing("mixup") == (parse("none"), mixup)
    assert parse_with_mixing("crop") == (crop, None)
    for text in ("cutmix+crop", "cutmix+mixup", "crop+cutmix+cutmix"):
        with pytest.raises(ValueError, match=r"only one of mixup and cutmix .* at the end, got '"):
            parse_with_mixing(text)
    with pytest.raises(ValueError, match=r"'crop\+mixup' mixes labels too.*parse_with_mixing"):
        parse("crop+mixup")


def test_joined_augmentations_follow_each_other_with_random_numbers_of_their_own():
    images, index = smooth(6), torch.tensor([4, 0, 4, 5])
    source = draws.PerSample(draws.keys(1, torch.arange(4)))
    expected = parse("crop-flip")(images, source.fold(0), index)
    expected = parse("erase")(trivial(expected, source.fold(1)), source.fold(2))
    assert torch.equal(parse("crop-flip+trivial+erase")(images, source, index), expected)
    assert torch.equal(parse("crop")(images, source, index), crop(images, source, index))
    repeated = pickle.loads(pickle.dumps(parse("crop+trivial")))
    assert torch.equal(
        repeated(images, source, index), parse("crop+trivial")(images, source, index)
    )


@pytest.mark.parametrize("name", [*AUGMENTATIONS, "crop-flip+trivial+erase"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_single_image_and_torchs_generator_are_enough(name: str, channels: int):
    image, augment = smooth(1)[0, :channels], parse(name)
    seeds = [torch.manual_seed(s) and augment(image) for s in (0, 0, 1, 2, 3)]
    assert all(found.shape == image.shape and found.dtype == torch.uint8 for found in seeds)
    assert torch.equal(seeds[0], seeds[1])
    assert name in ("none", "hybrid") or len({found.numpy().tobytes() for found in seeds}) > 1
    given = [augment(image, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*given)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_random_numbers_do_not_depend_on_torchs_default_dtype(name: str):
    draw = [parse(name)(smooth(2), torch.Generator().manual_seed(0))]
    torch.set_default_dtype(torch.float64)
    try:
        draw.append(parse(name)(smooth(2), torch.Generator().manual_seed(0)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert apart(*draw).max() <= 1  # of 255


def test_road_takes_grey_images_as_colour_images_of_three_equal_channels():
    grey, source = smooth(6)[:, :1], draws.PerSample(draws.keys(2, torch.arange(6)))
    found, expected = road(grey, source), road(grey.expand(-1, 3, -1, -1), source)
    assert apart(found, expected[:, :1]).max() <= 1  # of 255
    with pytest.raises(ValueError, match="must have 1 or 3 channels, got 4"):
        road(torch.rand(2, 4, 8, 8))


@pytest.mark.parametrize("shape", [(HEIGHT, 1), (1, WIDTH), (1, 1)])
def test_road_keeps_an_image_one_pixel_wide_or_high(shape: tuple[int, int]):
    image = smooth(1)[:, :, : shape[0], : shape[1]].float() / 255
    torch.testing.assert_close(augmented(image), image)
    source = draws.PerSample(draws.keys(0, torch.arange(64)))
    found = road(image.expand(64, -1, -1, -1), source)  # also with a perspective
    assert found.isfinite().all()
    assert found.flatten(1).amax(1).min() > 0.1  # none is black


def test_augmentations_are_transforms():
    recipe = transforms.Compose(
        [transforms.PILToTensor(), parse("crop-flip+trivial"), partial(erase, probability=1),
         transforms.ConvertImageDtype(torch.float32), augmix]
    )  # fmt: skip
    found = recipe(transforms.ToPILImage()(smooth(1)[0]))
    assert found.shape == (3, HEIGHT, WIDTH)
    assert 0 <= found.min() <= found.max() <= 1


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (transforms.ToPILImage()(smooth(1)[0]), "must be a torch.Tensor, got Image; convert first"),
        (smooth(2).long(), "must be uint8 or floating point, got torch.int64"),
        (smooth(2)[0, 0], r"must be C x H x W or B x C x H x W, got shape \(40, 50\)"),
        (smooth(2).float(), r"in \[0, 1\], got values from .* divide them by 255"),
        (smooth(2)[0] / 64 - 2, r"in \[0, 1\], got values from -.* before they are normalised"),
    ],
)
def test_what_is_not_an_image_in_its_range_is_refused(images: Any, message: str):
    for augment in (trivial, crop, parse("crop-flip+trivial")):
        with pytest.raises(ValueError, match=message):
            augment(images)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_range_is_that_of_the_batch_and_not_of_all_images(name: str):
    images = torch.stack([torch.rand(3, 40, 50), 9 * torch.rand(3, 40, 50)])
    assert parse(name)(images, None, torch.tensor([0])).shape == (1, 3, 40, 50)
    with pytest.raises(ValueError, match="divide them by 255"):
        parse(name)(images, None, torch.tensor([1]))
