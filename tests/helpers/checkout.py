"""A copy of the checkout made of links, and parts of the topics and of the emoji that are encoded in seconds."""

import json
import tarfile
from collections.abc import Collection
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPICS = ROOT / "data/samples/topics"
UNSEEN = ROOT / "data/samples/emoji/twemoji-unseen.tar"


def link(source: Path, folder: Path, without: Collection[str]) -> None:
    """Make `folder`, with a link to each entry of the folder `source` but those named in `without`."""
    folder.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.name not in without:
            (folder / entry.name).symlink_to(entry)


def write_few_topics(folder: Path, verses: int) -> None:
    """Write a BEIR folder with the first `verses` passages of TOPICS, their judgements and the queries of these.

    The whole of TOPICS takes minutes to encode.
    """
    (folder / "qrels").mkdir(parents=True)
    corpus = (TOPICS / "corpus.jsonl").read_text().splitlines(keepends=True)[:verses]
    kept = {json.loads(line)["_id"] for line in corpus}
    asked: set[str] = set()
    for split in (TOPICS / "qrels").glob("*.tsv"):
        header, *judged = split.read_text().splitlines(keepends=True)
        judged = [line for line in judged if line.split("\t")[1] in kept]
        asked |= {line.split("\t")[0] for line in judged}
        (folder / "qrels" / split.name).write_text("".join([header, *judged]))
    queries = (TOPICS / "queries.jsonl").read_text().splitlines(keepends=True)
    (folder / "corpus.jsonl").write_text("".join(corpus))
    (folder / "queries.jsonl").write_text("".join(line for line in queries if json.loads(line)["_id"] in asked))


def write_few_images(path: Path) -> Path:
    """Write a shard with the first 40 images of UNSEEN, and return its path."""
    with tarfile.open(UNSEEN) as shard, tarfile.open(path, "w") as few:
        for member in islice(shard, 80):  # an image and its fields
            few.addfile(member, shard.extractfile(member))
    return path
