"""A hook of MkDocs: files above docs/ that its pages link to are pages of the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABOVE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/LAST_PASS.md", "tests/benchmarks/RESULTS.md")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # in the environment of the site

    for name in ABOVE:
        content = (ROOT / name).read_text().replace("](docs/", f"]({'../' * name.count('/')}")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to a file above docs/ lead one folder less upwards: the site has the file beside the pages."""
    return re.sub(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, ABOVE))})", r"](\1\2", markdown)
