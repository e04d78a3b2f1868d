"""What can be chosen as --data and --model, with a line of help each; standard library alone.

>>> "digits" in DATASETS and "small_cnn" in MODELS
True
"""

from __future__ import annotations

__all__ = ["DATASETS", "MODELS", "NAMED"]

NAMED = ("digits", "cifar10", "svhn")  # data that are called by a name; others by a path

DATASETS: dict[str, str] = {
    "digits": "1,797 handwritten digits, 8 x 8 grey, embedded in scikit-learn: no download",
    "cifar10": "60,000 photographs in 10 classes, 32 x 32 colour; downloaded to --data-dir",
    "svhn": "99,289 house-number digits, 32 x 32 colour; downloaded to --data-dir",
    "PATH/": "a folder of images: train/ beside val/ or test/, or one folder a class",
    "PATH.npz": "arrays train_images, train_labels, test_images, test_labels [, classes]",
}

MODELS: dict[str, str] = {
    "small_cnn": "four small convolutions, for the digits",
    "resnet18": "ResNet-18 for 32 x 32 images: 3 x 3 stem, no max-pool, as in the paper",
    "mobilenet_v3_small": "MobileNetV3 small, 2.5 million parameters; for photographs",
    "mobilenet_v3_large": "MobileNetV3 large, 5.5 million parameters; for photographs",
    "mobilenet_v2": "MobileNetV2, 3.5 million parameters; for photographs",
    "NAME": "any torchvision classifier by its name, such as efficientnet_b0",
    "timm:NAME": "any model of timm, where timm is installed",
}
