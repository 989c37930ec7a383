"""Ten random changes of each kind of foreign file: read, or refused by an error of ours. More: mutations.py."""

from faults.foreign_files import KINDS
from helpers.cli import Commands


def test_ten_damaged_files_of_each_kind(commands: Commands) -> None:
    ended = commands.run("faults.mutations", "--count", "10", "--kind", *KINDS)
    assert ended.code == 0 and ended.out.count(" 0 wrong") == len(KINDS), ended.out
