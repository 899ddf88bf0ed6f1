"""Pages of the site that lie at the top of the repository. MkDocs calls ``on_files`` as it builds."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = MappingProxyType(
    {
        "README.md": "index.md",
        "ARCHITECTURE.md": "architecture.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
    }
)


def on_files(files: Any, config: Any) -> Any:
    """Add these pages; their links fit their places on the site."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for name, other in PAGES.items():
            text = text.replace(f"]({name})", f"]({other})")
        files.append(File.generated(config, page, content=text))
    return files
