"""The seconds that steps wait for data, compute and save checkpoints, and the samples per second."""

from dataclasses import dataclass

from dyad.train.run_schedule import RunSchedule


@dataclass
class Stopwatch:
    """Adds up the seconds that steps have spent waiting, computing and saving since the last call of `read`.

    schedule: gives the size of a batch and the number of ranks. waited: seconds of waiting for batches; worked: of
    computing; saving: of writing checkpoints. steps: how many steps were added.
    """

    schedule: RunSchedule
    steps: int = 0
    waited: float = 0.0
    worked: float = 0.0
    saving: float = 0.0

    def add(self, waited: float, worked: float) -> None:
        """Count one training step, and add its seconds of waiting for its batch and of computing to the sums."""
        self.steps, self.waited, self.worked = self.steps + 1, self.waited + waited, self.worked + worked

    def read(self) -> dict[str, float]:
        """Return timing metrics (name → value) of the steps since the last call of `read`, then set all sums to zero.

        data_time: mean seconds that a step waited for its batch. batch_time: mean seconds per step, waiting included.
        samples_per_second: pairs per second of all ranks together; samples_per_second_per_device: the mean per rank.
        checkpoint_seconds: seconds spent on saving since the last call. Call it after at least one `add`.
        """
        batch_time = (self.waited + self.worked) / self.steps
        rate = self.schedule.global_batch_size / batch_time
        times = {
            "data_time": self.waited / self.steps,
            "batch_time": batch_time,
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self.schedule.world_size,
            "checkpoint_seconds": self.saving,
        }
        self.steps, self.waited, self.worked, self.saving = 0, 0.0, 0.0, 0.0
        return times
