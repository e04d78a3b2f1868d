"""What `noiseproof COMMAND --help` and `--help-all` print: common flags, or all of them in groups.

The text comes from the classes of arguments: fields are flags, and their docstrings are the help.
A new flag appears in --help only if COMMON names it.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

# The flags that --help lists, in this order, after the positional and required arguments.
COMMON: dict[str, str] = {
    "train": "data group method noise model weights augment epochs batch_size lr seed output name "
    "resume device recipe config",
    "tune": "data model mean std img_size noise epochs lr output name resume device config "
    "launcher",
    "evaluate": "perturb suite attack data draws weights table calibration device",
    "analyse": "parts samples noise draws weights device",
    "certify": "samples every weights device",
    "report": "output title",
    "compare": "data group methods noise model weights augment epochs seeds jobs output name "
    "device recipe launcher",
    "calibrate": "noise output name",
    "renormalise": "noise images output name",
    "predict": "weights top out abstain tolerance device",
    "export": "format input size output weights",
    "card": "",
    "demo": "abstain port browser device",
    "reproduce": "only epochs seeds jobs data data_dir output results device launcher",
    "list": "",
}
# Flags of a training that the help of these commands leaves out: compare has --methods, and always
# continues.
_LEFT_OUT = {"compare": ("method", "resume")}
_WITHOUT_DEFAULT = {"tune": ("model",)}  # a file of weights does not name its network
_HELP = ("-h", "--help", "--help-all")
_COLUMN = 24  # where the text of a flag begins
_LONGEST_CHOICE = 36  # characters; longer lists of names are in the text of their flag
_VALUES = {"output": "DIR", "results": "DIR", "perturb": "NOISE", "only": "ROW", "slurm": "K=V"}


@dataclass(frozen=True)
class _Argument:
    name: str
    group: str  # heading
    text: str
    default: Any
    metavar: str
    positional: bool

    @property
    def invocation(self) -> str:
        flag = f"--{self.name.replace('_', '-')}"
        if self.positional:
            return self.metavar if self.default is MISSING else f"[{self.metavar}]"
        if isinstance(self.default, bool):
            return f"{flag}, --no-{flag[2:]}" if self.default else flag
        return f"{flag} {self.metavar}"

    @property
    def help(self) -> str:
        value = self.default
        if value is MISSING:
            return self.text if self.positional else f"{self.text} (required)"
        if value is None or value is False or value == ():
            return self.text
        items = value if isinstance(value, tuple) else ("on" if value is True else value,)
        shown = " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
        return f"{self.text} (default:\N{NO-BREAK SPACE}{shown})"


def help_text(kind: type, verb: str, argv: list[str], default: Any = None) -> str | None:
    """The help of a command, or None if `argv` does not ask for it; arguments as for `parse`."""
    if not any(word.replace("_", "-") in _HELP for word in argv):
        return None
    left_out = _LEFT_OUT.get(verb, ())
    arguments = [
        replace(a, default=None) if a.name in _WITHOUT_DEFAULT.get(verb, ()) else a
        for a in _arguments(kind, default, "flags")
        if a.name not in left_out
    ]
    first = [a for a in arguments if a.positional or a.default is MISSING]
    flags = {a.name: a for a in arguments if a not in first}
    usage = ["usage: noiseproof", verb]
    usage += [argument.invocation for argument in first]
    lines = [*_wrapped(" ".join([*usage, "[flags]"] if flags else usage)), ""]
    lines += _wrapped(inspect.getdoc(kind) or "")
    if first:
        lines += ["", "arguments:", *_rows(first)]
    everything = any(word.replace("_", "-") == "--help-all" for word in argv)
    shown = list(flags) if everything or verb not in COMMON else COMMON[verb].split()
    for heading in dict.fromkeys(flags[name].group for name in shown) if everything else ["flags"]:
        chosen = [flags[name] for name in shown if not everything or flags[name].group == heading]
        lines += ["", *_wrapped(f"{heading}:"), *_rows(chosen)] if chosen else []
    lines.append("")
    if not everything and len(shown) < len(flags):
        left = len(flags) - len(shown)
        lines.append(f"{left} more flag{'s' * (left > 1)}: noiseproof {verb} --help-all")
    switch = next((name for name, a in flags.items() if a.default is False), None)
    if everything and switch:
        text = f"--no-FLAG turns off a flag that takes no value, as in --no-{switch}."
        lines += _wrapped(text.replace("_", "-"))
    if "recipe" in flags:
        lines += _wrapped(
            "Defaults depend on --data and --recipe; give these with --help to see them."
        )
    return "\n".join(lines).rstrip()


def _arguments(kind: type, default: Any, group: str) -> Iterator[_Argument]:
    """The arguments of a class, with those of its groups; `default` is an instance or None."""
    hints, texts = get_type_hints(kind, include_extras=True), _field_docstrings(kind)
    for field in fields(kind):
        hint = hints[field.name]
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(hint):
            heading = (hint.__doc__ or "").rstrip(".")
            yield from _arguments(hint, value, heading)  # type: ignore[arg-type]
            continue
        notes = getattr(hint, "__metadata__", ())
        yield _Argument(
            field.name,
            group,
            texts[field.name],
            MISSING if value is tyro.MISSING or value == "" else value,
            next((m for note in notes if (m := getattr(note, "metavar", None))), "")
            or _metavar(hint, field.name),
            tyro.conf.Positional in notes,
        )


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _field_docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a class and of its parents."""
    texts: dict[str, str] = {}
    for parent in reversed([cls for cls in kind.__mro__ if is_dataclass(cls)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts


def _metavar(hint: Any, name: str) -> str:
    """What stands for the value of a flag.

    >>> _metavar(int | None, "draws"), _metavar(tuple[str, ...], "val_noise")
    ('N', 'NOISE [NOISE ...]')
    >>> _metavar(Literal["last", "best"], "weights"), _metavar(tuple[int, int], "img_size")
    ('{last,best}', 'N N')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hasattr(hint, "__metadata__"):
        return _metavar(parts[0], name)
    if origin in (Union, types.UnionType):
        return "|".join(_metavar(part, name) for part in parts if part is not types.NoneType)
    if origin is tuple and parts[-1] is ...:
        one = _metavar(parts[0], name.removesuffix("s"))
        return f"{one} [{one} ...]" if len(one) < 10 else f"{one} ..."
    if origin is tuple:
        return " ".join(_metavar(part, name) for part in parts)
    choice = "{" + ",".join(map(str, parts)) + "}"
    if origin is Literal and len(choice) <= _LONGEST_CHOICE:
        return choice
    if hint in (int, float):
        return "N" if hint is int else "X"
    return _VALUES.get(name) or name.split("_")[-1].upper()


def _rows(arguments: list[_Argument]) -> list[str]:
    """Each argument on the left, and its text on the right, or below if it is long."""
    lines = []
    for argument in arguments:
        text = _wrapped(argument.help, " " * _COLUMN)
        left = f"  {argument.invocation}"
        if len(left) < _COLUMN - 1:
            text[0] = left.ljust(_COLUMN) + text[0].lstrip()
        else:
            lines.append(left)
        lines += text
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
