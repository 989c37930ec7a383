"""`jobs`: what every test of this folder asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # tests/gpu.sh runs where their packages are missing
    from harness import Jobs
    from helpers.cli import Commands


@pytest.fixture
def jobs(commands: Commands, tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path) -> Iterator[Jobs]:
    from harness import Jobs

    started = Jobs(commands, tiny, tmp_path)
    yield started
    started.close()
