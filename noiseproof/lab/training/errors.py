"""Errors that a training raises, without torch, so that the command line can import them."""


class Diverged(RuntimeError):
    """The loss or a weight is not finite, or the loss is far above its first value."""
