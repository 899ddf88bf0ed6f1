"""Reference tables of flags and arguments, from the parsers, signatures and docstrings that define them."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fp8dist
from fp8dist.cli import launch
from fp8dist.cli.main import _parser as command_line
from fp8dist.state.settings import VARIABLES, Settings
from launch.train_gpt.options import parser as job_parser
from scripts.benchmarks.markdown import table
from scripts.simulation.__main__ import parser as simulation_parser

RECIPES = (
    fp8dist.DelayedScaling,
    fp8dist.CurrentScaling,
    fp8dist.RowwiseScaling,
    fp8dist.BlockScaling,
    fp8dist.MXFP8Scaling,
    fp8dist.NVFP4Scaling,
)

_DEFAULT = re.compile(r"\s*\(default: (?P<value>.*)\)$|^default: (?P<whole>.*)$")
_CODE = re.compile(
    r"(?<!\w)'[^']+'(?!\w)|--[a-z][\w-]*|\b[\w-]+\.(?:jsonl|json|txt|png)\b(?:@\w+)?|(?<![\w`])[\w.]*_[\w…]*|\S*\*\S*"
    r"|(?:^|(?<=; )|(?<=\. ))(?!default|FP8)[a-z][\w-]*(?=: )|\{\w+\}"
)


def _subcommands() -> Mapping[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in command_line()._actions if isinstance(action.choices, dict)]
    return choices


COMMANDS = tuple(_subcommands())
"""The subcommands of ``fp8dist``."""


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return all flags of a parser."""
    return [flag for action in parser._actions for flag in action.option_strings]


def command_help(name: str) -> str:
    """Return the usage and the arguments of a subcommand, as Markdown."""
    if name == "launch":
        first = (launch.__doc__ or "").strip().split("\n\n")[0]  # The rest is on docs/launching.md.
        return f"{first}\n\nUsage: `{launch.USAGE}`\n"
    parser = _subcommands()[name]
    places = [action for action in parser._actions if not action.option_strings]
    usage = " ".join(f"{action.metavar}{' …' if action.nargs == '+' else ''}" for action in places)
    described = [f"{_coded(parser.description)}\n"] if parser.description else []
    needed = [action for action in parser._actions if action.required and action.option_strings]
    flags = "".join(f" {action.option_strings[0]} {action.metavar}" for action in needed)
    return "\n".join(
        [*described, f"Usage: `fp8dist {name}{flags} [FLAG …]{f' {usage}' if usage else ''}`\n", _rows(parser._actions)]
    )


def of_simulation() -> str:
    """Return a table of the flags of ``python -m scripts.simulation``."""
    return _rows(simulation_parser()._actions)


def of_job() -> str:
    """Return a table of the example job's flags."""
    return _rows(job_parser()._actions)


def of_prepare() -> str:
    """Return a table of the arguments of ``prepare``. ``variables.of_library`` has their environment variables."""
    meanings = _arguments_of(fp8dist.prepare)
    resolved = Settings.resolve(environ={})
    rows = []
    for name, parameter in inspect.signature(fp8dist.prepare).parameters.items():
        if name == "model":
            continue
        variable = f"FP8DIST_{name.upper()}"
        default = getattr(resolved, name) if variable in VARIABLES else parameter.default
        rows.append([f"`{name}`", _value(default), meanings[name]])
    return table(["argument", "default", "meaning"], rows)


def of_recipes() -> str:
    """Return a table of recipe fields, with the recipes that have them and their defaults."""
    fields: dict[str, dict[Any, list[str]]] = {}
    meanings: dict[str, str] = {}
    for recipe in RECIPES:
        for field in dataclasses.fields(recipe):
            fields.setdefault(field.name, {}).setdefault(field.default, []).append(f"`{recipe.__name__}`")
        meanings = {**_arguments_of(recipe), **meanings}
    rows = []
    for name, defaults in fields.items():
        several = len(defaults) > 1
        default = "; ".join(_value(v) + (f" ({', '.join(of)})" if several else "") for v, of in defaults.items())
        having = [of for each in defaults.values() for of in each]
        lacking = [f"`{recipe.__name__}`" for recipe in RECIPES if f"`{recipe.__name__}`" not in having]
        few = f"all but {', '.join(lacking)}" if lacking else "all"
        owners = ", ".join(having) if len(lacking) > 2 else few
        rows.append([f"`{name}`", owners, default, meanings[name]])
    return table(["field", "recipes", "default", "meaning"], rows)


def _rows(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction):
            continue
        meaning, default = _meaning_and_default(action)
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
        rows.append([names, _takes(action), default, meaning])
    return table(["name", "value", "default", "meaning"], rows)


def _takes(action: argparse.Action) -> str:
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if action.nargs == 0 or not action.option_strings:
        return ""
    return f"`{action.metavar}`{' …' if action.nargs == '+' else ''}"


def _meaning_and_default(action: argparse.Action) -> tuple[str, str]:
    help_, default = action.help or "", action.default
    found = _DEFAULT.search(help_)
    if found:
        said = found["value"] or found["whole"]
        return _sentence(_DEFAULT.sub("", help_)), _coded(said)
    if action.required:
        return _sentence(help_), "required" if action.option_strings else ""
    if default is None or default is argparse.SUPPRESS:
        return _sentence(help_), ""
    return _sentence(help_), "off" if default is False else f"`{default}`"


def _arguments_of(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the texts in the docstring's ``Args`` section by argument name."""
    section = re.search(r"\nArgs:\n(.*?)(?=\n\S|\Z)", inspect.getdoc(documented) or "", re.S)
    assert section is not None, f"{documented.__name__} has no Args"
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(section[1])):
        name, _, text = entry.partition(": ")
        found[name] = _sentence(" ".join(text.split()).replace("``", "`"), coded=False)
    return found


def _value(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _sentence(text: str, coded: bool = True) -> str:
    """Add a full stop and a capital. Text that begins with a code span gets no capital."""
    text = _coded(text) if coded else text
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '…')) or not text else '.'}"


def _coded(text: str) -> str:
    """Put flags, names and patterns in backticks."""
    return _CODE.sub(lambda found: f"`{found[0].strip(chr(39))}`", text)
