"""Search by 1, 2 and 3 of three processes, in corpora of few and of many shards: the same bits everywhere."""

import hashlib

import torch.distributed as dist
from helpers.eval import clustered, recall_against_exact, search

from dyad.eval.search import index
from dyad.eval.search.index import Hits, Index
from dyad.train.distributed.world import World

SPECS = ("Flat", "IVF16,Flat;nprobe=2", "IVF16,PQ4x4;nprobe=4", "HNSW8;efSearch=32")


def digest(hits: Hits) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in hits)).hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    me, index.BLOCK = dist.get_rank(), 32
    queries, corpus = clustered(150, 16, 1), clustered(3000, 16, 0)
    corpus[1000:1300] = corpus[:300]  # equal scores in other shards
    found: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for size in (1, 2, 3):
        group = dist.new_group(range(size))
        if not isinstance(group, dist.ProcessGroup):
            continue
        world = World(rank=me, size=size, group=group)
        for spec in SPECS:
            for size in (2**30, 2**16):
                hits = search(queries, corpus, 20, spec, shard_bytes=size, world=world)
                recall = recall_against_exact(hits, queries, corpus, sample=40, world=world)
                found.setdefault((spec, size), []).append((digest(hits), recall))
        again = Index(corpus, world=world)
        assert digest(again.search(queries, 20)) == digest(again.search(queries, 20))
        few = search(queries[:1], corpus[:2], 5, world=world)  # less work than ranks
        found.setdefault(("few", 0), []).append((digest(few), 1.0))
        found.setdefault(("alone", 0), []).append((digest(search(queries, corpus, 20)), 1.0))
    assert all(len(set(same)) == 1 for same in found.values()), found
    assert all(recall == 1.0 for (spec, _), same in found.items() for _, recall in same if spec == "Flat")
    dist.barrier()
    print("all checks hold", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
