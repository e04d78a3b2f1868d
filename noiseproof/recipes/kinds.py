"""Which experiment of the paper a dataset is nearest to, told from its name alone."""

from __future__ import annotations

import os
import re
from typing import Literal

Kind = Literal["digits", "cifar10", "svhn", "folder"]


def kind(data: str) -> Kind:
    """The named datasets are themselves; a .npz file is taken as CIFAR-10, or as SVHN if its name
    (or else its folder's) says so; anything else is a folder of images.

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
    # The last part that names one decides: svhn/cifar.npz is CIFAR-10. A path says the same whether
    # it is relative or not.
    folder, name = os.path.split(os.path.abspath(data.lower()))
    named = re.findall(r"cifar|svhn", f"{os.path.basename(folder)}/{name}")
    return "svhn" if named and named[-1] == "svhn" else "cifar10"
