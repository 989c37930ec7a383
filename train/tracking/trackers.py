"""The table of trackers. A plugin adds one with `dyad.plugins.register_tracker`.

Does not import torch, because the configuration is checked with this table before anything heavy is imported.
"""

from dyad.train.config import TrackingConfig
from dyad.train.tracking.background import Tracker
from dyad.train.tracking.tensorboard import TensorBoard
from dyad.train.tracking.wandb import WandbRun

TRACKERS: dict[str, type[Tracker]] = {"W&B": WandbRun, "TensorBoard": TensorBoard}


def check_tracking(config: TrackingConfig) -> None:
    """Raise ConfigError if `config` asks for a tracker whose `is_on` finds that an API key or package is missing.

    Uses no network; call it on rank 0, before heavy imports.
    """
    for tracker in TRACKERS.values():
        tracker.is_on(config)
