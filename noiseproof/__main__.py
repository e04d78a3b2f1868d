"""The command `noiseproof`, also `python -m noiseproof` and `torchrun ... -m noiseproof`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 for success, 1 for a system error (a file,
    memory), 2 for an invalid command or setting or a damaged file, 3 for a diverged training, 130
    if interrupted.

    Args:
        argv: the words after `noiseproof`; by default those of this process.
    """
    try:
        from noiseproof.cli.main import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("noiseproof"):
            raise
        print(
            f"noiseproof: the command line needs {error.name}, which is not installed; "
            "install it with `pip install 'noiseproof[lab]'`",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("noiseproof: stopped", file=sys.stderr)
        return 130
    return run(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
