"""Errors that a training raises. Free of torch, so that the command line can name them."""


class Diverged(RuntimeError):
    """The loss or a weight is not finite, or the loss is far above its first value."""
