"""`jobs`: what every test of this folder asks for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs
from helpers.cli import Commands


@pytest.fixture
def jobs(commands: Commands, tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path) -> Iterator[Jobs]:
    started = Jobs(commands, tiny, tmp_path)
    yield started
    started.close()
