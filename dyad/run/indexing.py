"""Index the training data on all machines together, before rank 0 opens them: each machine scans its share of the
shards."""

from dyad.data.config import Mode
from dyad.data.shards.index import index_shards
from dyad.run.checks import training_files
from dyad.train.cli.also import auxiliary_configs
from dyad.train.config import TrainConfig
from dyad.train.distributed.agreement import is_first_of_machine, machine_index_and_count, only_on
from dyad.train.distributed.world import World

LARGE = (".tar", ".jsonl")  # other formats are small, or are converted when they are opened


def index_shares(config: TrainConfig, world: World) -> None:
    """Index the shards of data.train that have no index: the first rank of machine k of n scans shards k, k + n, ….

    Shards are files with a suffix in LARGE; streams are left out. `index_shards` stores the indexes. Every rank must
    call it. With one machine it does nothing, as rank 0 indexes what it opens. If machines do not share the folder of
    an index, each indexes the remaining shards when it opens the data. Raises the errors of `training_files` and
    `index_shards` on all ranks.
    """
    number, count = machine_index_and_count(world)
    own = (config, *auxiliary_configs(config).values())

    def index() -> None:
        files = [file for each in own if each.data.mode is not Mode.stream for file in training_files(each)]
        for _ in index_shards([file for file in dict.fromkeys(files) if file.endswith(LARGE)][number::count]):
            pass

    if count > 1:
        only_on(world, is_first_of_machine(), index)
