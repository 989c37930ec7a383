"""A hook of MkDocs: files above docs/ that its pages link to are pages of the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABOVE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/LAST_PASS.md", "tests/benchmarks/RESULTS.md")


def on_files(files: Any, config: Any) -> Any:
    """Add the files of ABOVE to the pages of the site, with their links into docs/ made relative. MkDocs calls it."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # in the environment of the site

    for name in ABOVE:
        content = (ROOT / name).read_text().replace("](docs/", f"]({'../' * name.count('/')}")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page whose links to files of ABOVE lead one folder less upwards. MkDocs calls it.

    The site has these files beside the pages of docs/.
    """
    return re.sub(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, ABOVE))})", r"](\1\2", markdown)
