"""Imports the programs of ``scripts``, whose names have no suffix."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from unittest import mock

from tests.support.forked import ROOT


def program(name: str) -> ModuleType:
    """Return ``scripts/NAME`` as a module."""
    loader = SourceFileLoader(f"scripts_{name}", str(ROOT / "scripts" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    # Else bytecode lands beside the script. dataclasses look modules up by name.
    with mock.patch.object(sys, "dont_write_bytecode", True), mock.patch.dict(sys.modules, {loader.name: module}):
        loader.exec_module(module)
    return module
