"""The table of trackers. A plugin adds one with `dyad.plugins.register_tracker`.

Does not import torch, because the configuration is checked with this table before anything heavy is imported.
"""

from dyad.train.config import TrackingConfig
from dyad.train.tracking.background import Tracker
from dyad.train.tracking.tensorboard import TensorBoard
from dyad.train.tracking.wandb import WandbRun

TRACKERS: dict[str, type[Tracker]] = {"W&B": WandbRun, "TensorBoard": TensorBoard}


def check_tracking(config: TrackingConfig) -> None:
    """Raise ConfigError if the `is_on` of a tracker does, as for an API key or package that is missing.

    Uses no network; call it on rank 0, before heavy imports.
    """
    for tracker in TRACKERS.values():
        tracker.is_on(config)
