"""Which experiment of the paper a dataset is nearest to, told from its name alone."""

from __future__ import annotations

import os
from typing import Literal

Kind = Literal["digits", "cifar10", "svhn", "folder"]


def kind(data: str) -> Kind:
    """The named datasets are themselves; a .npz file is taken as CIFAR-10, or as SVHN if its own
    name says so; anything else is a folder of images.

    >>> kind("digits"), kind("sets/svhn_small.npz"), kind("mine.npz"), kind("photos/")
    ('digits', 'svhn', 'cifar10', 'folder')
    """
    if data == "digits":
        return "digits"
    if data == "cifar10":
        return "cifar10"
    if data == "svhn":
        return "svhn"
    if not data.lower().endswith(".npz"):
        return "folder"
    # Not its folder's: a file keeps its noise wherever it is moved. Of two, the last counts.
    name = os.path.basename(data.lower())
    return "svhn" if name.rfind("svhn") > name.rfind("cifar") else "cifar10"
