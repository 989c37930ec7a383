"""What DistributedDataParallel prints. Its gradients: tests/jobs/dist_step.py."""

from helpers.cli import Commands, Ended


def test_nothing_of_strides_is_printed(commands: Commands) -> None:
    """torch warns of 1×1 kernels in channels_last, whose order in memory is the same."""
    ours, plain = commands.run("jobs.ddp_strides"), commands.run("jobs.ddp_strides", "plain")
    assert ours == Ended(0, "") and plain.code == 0 and "strides" in plain.out, (ours, plain)
