"""What DistributedDataParallel prints. Its gradients: tests/jobs/dist_step.py."""

from helpers.cli import Commands


def test_nothing_of_strides_is_printed(commands: Commands) -> None:
    """torch warns of 1×1 kernels in channels_last, whose order in memory is the same."""
    ended = commands.run("jobs.ddp_strides")
    ours, _, plain = ended.out.partition("plain\n")
    assert (ended.code, ours) == (0, "") and "strides" in plain, ended.out
