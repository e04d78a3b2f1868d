"""The paper's own settings for each of its datasets, and quick settings for the digits.

What the paper leaves open is chosen here and said so. Its values are those of section 5 and the
appendix on experimental details; α = β = λ = 1, γ_reg = 1e-3 and δ_v = 0.5 are the config's own
defaults.
"""

from __future__ import annotations

from noiseproof.lab.config import Config, Data, Method, Model, Optim
from noiseproof.lab.recipe_kinds import kind


def paper(data: str) -> Config:
    """The paper's settings: 200 epochs of small steps (digits: quick settings of our own).

    >>> paper("svhn").method.noise, paper("photos/").model.model
    ('gaussian:0.15', 'mobilenet_v3_small')
    """
    match kind(data):
        case "digits":
            return Config(data=Data(data=data))
        case "cifar10":
            return _small_images(data, noise="gaussian:0.06")
        case "svhn":
            return _small_images(data, noise="gaussian:0.15")
        case "folder":
            return _road(data)


def _small_images(data: str, noise: str) -> Config:
    """ResNet18 on 32 x 32 images. No validation share: the paper trains on all training images, so
    the last epoch is the one to report. Views are cropped independently, as the authors' code
    does."""
    return Config(
        data=Data(data=data, val_share=0.0, augment="crop-flip"),
        model=Model(model="resnet18", feature_dim=128),
        method=Method(noise=noise, margin=5.0, views="independent"),
        optim=Optim(
            epochs=200,
            batch_size=64,
            opt="sgd",
            lr=1e-3,
            momentum=0.9,
            weight_decay=5e-4,
            sched="multistep",
            decay_milestones=(60, 120, 160),
            decay_rate=0.2,
        ),
    )


def _road(data: str) -> Config:
    """MobileNetV3 on photographs, from ImageNet weights.

    The paper does not state which size of MobileNetV3, the feature size, the batch size or a weight
    decay: small, 128, 64 and none are our choice. It keeps the best epoch by validation accuracy
    without describing a validation set: a tenth of the training images here. The noisy view shares
    its crop with the clean one, as in the paper's text (the code of this experiment is not public).
    The paper's images are 400 x 500; images keep their own size unless --img-size is given.
    """
    return Config(
        data=Data(data=data, val_share=0.1, test_share=0.2, augment="road"),
        model=Model(model="mobilenet_v3_small", feature_dim=128, weights="imagenet"),
        method=Method(noise="gaussian:40/255", margin=3.0),
        optim=Optim(
            epochs=70,
            batch_size=64,
            opt="adam",
            lr=1e-4,
            weight_decay=0.0,
            sched="multistep",
            decay_milestones=(50,),
            decay_rate=0.1,
        ),
    )
