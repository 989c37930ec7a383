"""Captions of COCO: its annotations, and Karpathy's splits of COCO, Flickr8k and Flickr30k (dataset_coco.json).

A path such as dataset_coco.json@test names one of Karpathy's splits.
"""

import os
from itertools import islice
from pathlib import Path
from typing import Any

from dyad.data.base.errors import ConfigError

SOUGHT = 100  # images that are looked for to find their folder: some may not be downloaded

Fields = dict[str, Any]


def split_of(path: str) -> tuple[str, str | None]:
    """Return (path of the file, name of the split) of a path such as dataset_coco.json@test; (path, None) of another
    path. The file must exist."""
    file, at, split = path.rpartition("@")
    return (file, split) if at and file.endswith(".json") and os.path.isfile(file) else (path, None)


def caption_rows(coco: Fields, path: str, split: str | None) -> list[Fields]:
    """Convert annotations of COCO, or one of Karpathy's splits, to rows {file_name: path relative to the folder of the
    annotations, captions: list, empty for an image without any}.

    path: the path of the file. split: the name of the split; None for annotations of COCO, which have none. The folder
    of the images is sought by the first SOUGHT names: the folder of the annotations, the folder above, and the folders
    inside these two, such as train2017. If none has any, it is the folder of the annotations. Raises ConfigError if the
    file has splits and `split` is none of them; KeyError or TypeError for another object.
    """
    if "annotations" in coco and split is None:
        captions: dict[Any, list[str]] = {}
        for annotation in coco["annotations"]:
            captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
        named = [(image["file_name"], captions.get(image["id"], [])) for image in coco["images"]]
    else:
        splits = dict.fromkeys(image.get("split") for image in coco["images"])
        if split is not None and {*splits} <= {None}:
            raise ConfigError(f"{path}@{split}: its images have no splits. Leave @{split} out")
        if split not in splits:
            lacks = "has several splits" if split is None else f"has no split '{split}'"
            raise ConfigError(f"{path} {lacks}. Write one of {', '.join(f'{path}@{each}' for each in splits)}")
        named = [
            (os.path.join(image.get("filepath", ""), image["filename"]), [each["raw"] for each in image["sentences"]])
            for image in coco["images"]
            if image["split"] == split
        ]
    folder = os.path.dirname(path)
    roots = (Path(folder), Path(folder, os.pardir))
    places = (place for root in roots for place in (root, *sorted(filter(Path.is_dir, root.iterdir()))))
    sought = [name for name, _ in islice(named, SOUGHT)]
    place = next((each for each in places if any(os.path.isfile(os.path.join(each, name)) for name in sought)), folder)
    relative = os.path.relpath(place, folder or ".")
    return [{"file_name": os.path.join(relative, name), "captions": captions} for name, captions in named]
