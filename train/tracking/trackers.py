"""The table of trackers. A new one takes a Tracker subclass in a file of its own, a row here and a configuration key.

Does not import torch, because the configuration is checked with it before anything heavy is imported.
"""

from dyad.train.config import TrackingConfig
from dyad.train.tracking.background import Tracker
from dyad.train.tracking.tensorboard import TensorBoard
from dyad.train.tracking.wandb import WandbRun

TRACKERS: dict[str, type[Tracker]] = {"W&B": WandbRun, "TensorBoard": TensorBoard}


def check_tracking(config: TrackingConfig) -> None:
    """Raise ConfigError for a tracker that `config` asks for and that cannot work.

    Uses no network; call it on rank 0, before heavy imports.
    """
    for tracker in TRACKERS.values():
        tracker.is_on(config)
