"""Tables of the same rows in every format, as their own libraries write them.

What `datasets` writes is written here by pyarrow, with the schema, the metadata and the files beside it that datasets
5.2 writes: struct<bytes: binary, path: string>, the features as JSON under "huggingface", Arrow as a stream.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.rows import write_lines
from helpers.shards import image, write_tar

Row = dict[str, Any]
Keys = dict[str, Any]  # of the configuration, without "data."
Written = tuple[Path, Keys]

TEXTS: list[Row] = [
    {
        "anchor": f"what is {i}, then",
        "positive": f"it is number {i} of many",
        "negative": f"it is not {i} at all",
        "negative_1": f"nor is it {i + 1}",
    }
    for i in range(60)
]
IMAGES = [(image(i, size=(20, 16)), f"colour {i}") for i in range(60)]
LABELS = ("red_thing", "blue")  # of odd and even images, in a folder each: IMAGES in the order of folders
TEMPLATE = "a photo of a {}"


def write_csv(path: Path, rows: Iterable[Row], separator: str = ",") -> Path:
    rows = list(rows)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0], delimiter=separator)
        table.writeheader()
        table.writerows(rows)
    return path


def features(**kinds: Row) -> dict[str, str]:
    return {"huggingface": json.dumps({"info": {"features": kinds}})}


def hub_images(labels: bool = False) -> pa.Table:
    """What `Dataset.cast_column("image", Image())` writes; with labels `ClassLabel(names=…)`."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    other = ("label", pa.int64()) if labels else ("caption", pa.string())
    kind = {"names": LABELS, "_type": "ClassLabel"} if labels else {"dtype": "string", "_type": "Value"}
    schema = pa.schema([("image", image), other]).with_metadata(features(image={"_type": "Image"}, **{other[0]: kind}))
    rows = [{"bytes": data, "path": f"{i}.png"} for i, (data, _) in enumerate(IMAGES)]
    others = [i % 2 for i in range(60)] if labels else [caption for _, caption in IMAGES]
    return pa.Table.from_arrays([pa.array(rows, image), pa.array(others, other[1])], schema=schema)


def write_arrow(path: Path, table: pa.Table, stream: bool = True) -> Path:
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=25)
    return path


def save_to_disk(folder: Path, table: pa.Table) -> Path:
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text('{"features": {}}')
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write_arrow(folder / "data-00000-of-00001.arrow", table)
    return folder


def hub_clone(folder: Path, table: pa.Table, splits: Iterable[str] = ("train",)) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for split in splits:
        _parquet(folder / "data" / f"{split}-00000-of-00001.parquet", table)
    return folder


def _parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path, row_group_size=25)  # several row groups, as the hub has
    return path


# ---- texts -----------------------------------------------------------------------------------------------------------

TEXT_TABLE = pa.Table.from_pylist(TEXTS, metadata=features(anchor={"dtype": "string", "_type": "Value"}))
NAMES = ["left", "right", "wrong", "wrong too"]
RENAMED = [dict(zip(NAMES, row.values(), strict=True)) | {"score": 1.0} for row in TEXTS]
FLAG = [{"query": a, "pos": [p], "neg": [n, m]} for a, p, n, m in (row.values() for row in TEXTS)]
LISTS = [{"query": row["query"], "positives": row["pos"], "negatives": row["neg"]} for row in FLAG]

TEXT_FORMATS: dict[str, Callable[[Path], Written]] = {
    "csv": lambda d: (write_csv(d / "st.csv", TEXTS), {}),
    "semicolons": lambda d: (write_csv(d / "st.csv", TEXTS, ";"), {}),
    "tsv": lambda d: (write_csv(d / "st.tsv", TEXTS, "\t"), {}),
    "jsonl": lambda d: (write_lines(d / "st.jsonl", TEXTS), {}),
    "parquet": lambda d: (_parquet(d / "st.parquet", TEXT_TABLE), {}),
    "arrow stream": lambda d: (write_arrow(d / "st.arrow", TEXT_TABLE), {}),
    "arrow file": lambda d: (write_arrow(d / "st.arrow", TEXT_TABLE, stream=False), {}),
    "save_to_disk": lambda d: (save_to_disk(d / "saved", TEXT_TABLE), {}),
    "hub clone": lambda d: (hub_clone(d / "clone", TEXT_TABLE), {}),
    "FlagEmbedding": lambda d: (_parquet(d / "flag.parquet", pa.Table.from_pylist(FLAG)), {}),
    "lists": lambda d: (_parquet(d / "lists.parquet", pa.Table.from_pylist(LISTS)), {}),
    "named columns": lambda d: (write_csv(d / "named.csv", RENAMED), {"columns": NAMES}),
    "named columns of jsonl": lambda d: (write_lines(d / "named.jsonl", RENAMED), {"columns": NAMES}),
}


# ---- images --------------------------------------------------------------------------------------------------------


def images_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for i, (data, _) in enumerate(IMAGES):
        (folder / f"{i:02d}.png").write_bytes(data)
    return folder


def with_texts(folder: Path) -> Path:
    for i, (_, caption) in enumerate(IMAGES):
        (images_in(folder) if i == 0 else folder).joinpath(f"{i:02d}.txt").write_text(caption)
    return folder


def class_folders(folder: Path) -> Path:
    for i, (data, _) in enumerate(IMAGES):
        (folder / LABELS[i % 2]).mkdir(parents=True, exist_ok=True)
        (folder / LABELS[i % 2] / f"{i:02d}.png").write_bytes(data)
    return folder


def paths(column: str, caption: str, prefix: str = "") -> list[Row]:
    return [{column: f"{prefix}{i:02d}.png", caption: text} for i, (_, text) in enumerate(IMAGES)]


def imagefolder(folder: Path, write: Callable[[Path, Iterable[Row]], Path], name: str) -> Path:
    write(images_in(folder) / name, paths("file_name", "text"))
    return folder


def table_beside(folder: Path, name: str, separator: str) -> Path:
    images_in(folder / "images")
    return write_csv(folder / name, paths("filepath", "title", "images/"), separator)


def coco(folder: Path) -> Path:
    """coco/annotations/captions_train2017.json beside coco/train2017/."""
    images_in(folder / "train2017")
    (folder / "annotations").mkdir()
    images = [{"id": 7 + i, "file_name": f"{i:02d}.png", "width": 20, "height": 16} for i in range(60)]
    said = [{"id": i, "image_id": 7 + i, "caption": caption} for i, (_, caption) in enumerate(IMAGES)]
    content = {"info": {"year": 2017}, "images": images, "licenses": [], "annotations": said[::-1]}
    (folder / "annotations" / "captions_train2017.json").write_text(json.dumps(content))
    return folder / "annotations" / "captions_train2017.json"


def img2dataset(folder: Path) -> Path:
    """Two shards, a table and a JSON beside each, as `img2dataset --output_format webdataset` leaves them."""
    folder.mkdir()
    for shard in range(2):
        found = list(enumerate(IMAGES))[30 * shard : 30 * (shard + 1)]
        members = [
            (f"{i:09d}.{suffix}", content)
            for i, (data, caption) in found
            for suffix, content in (("png", data), ("txt", caption.encode()), ("json", b'{"status": "success"}'))
        ]
        write_tar(folder / f"{shard:05d}.tar", members)
        rows = [{"url": f"http://x/{i}", "caption": caption, "key": f"{i:09d}"} for i, (_, caption) in found]
        _parquet(folder / f"{shard:05d}.parquet", pa.Table.from_pylist(rows))
        (folder / f"{shard:05d}_stats.json").write_text('{"count": 30}')
    return folder


BINARY = pa.table({"jpg": [data for data, _ in IMAGES], "txt": [caption for _, caption in IMAGES]})
IMAGE_FORMATS: dict[str, Callable[[Path], Written]] = {
    "hub parquet": lambda d: (_parquet(d / "hub.parquet", hub_images()), {}),
    "binary column": lambda d: (_parquet(d / "binary.parquet", BINARY), {}),
    "save_to_disk": lambda d: (save_to_disk(d / "saved", hub_images()), {}),
    "hub clone": lambda d: (hub_clone(d / "clone", hub_images()), {}),
    "metadata.csv": lambda d: (imagefolder(d / "folder", write_csv, "metadata.csv"), {}),
    "metadata.jsonl": lambda d: (imagefolder(d / "folder", write_lines, "metadata.jsonl"), {}),
    "open_clip": lambda d: (table_beside(d / "t", "pairs.csv", "\t"), {}),
    "commas": lambda d: (table_beside(d / "t", "pairs.csv", ","), {}),
    "jsonl of paths": lambda d: (write_lines(images_in(d / "j") / "p.jsonl", paths("image", "caption")), {}),
    "named columns": lambda d: (write_csv(images_in(d / "n") / "n.csv", paths("a", "b")), {"columns": ["a", "b"]}),
    "folder": lambda d: (with_texts(d / "folder"), {}),
    "COCO": lambda d: (coco(d / "coco"), {}),
    "img2dataset": lambda d: (img2dataset(d / "laion"), {}),
}
LABEL_FORMATS: dict[str, Callable[[Path], Written]] = {
    "class folders": lambda d: (class_folders(d / "classes"), {"template": TEMPLATE}),
    "class labels": lambda d: (_parquet(d / "labels.parquet", hub_images(labels=True)), {"template": TEMPLATE}),
}
