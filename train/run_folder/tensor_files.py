"""Read and write tensors in safetensors files. A tensor is in one file, or cut by rows into parts in several files."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from dyad.data.base.files import checked_path
from dyad.data.base.json_text import parse_json

PIECE = 1 << 20  # bytes that are hashed and then written at a time, so that the CPU cache still has them
DTYPES = {dtype: name for name, dtype in _TYPES.items()}  # dtype → its name in a safetensors file
STARTS = "starts"  # key of a file's metadata: name of a tensor → the row of the whole at which the file's part begins


class SavedTensors(Mapping[str, Tensor]):
    """A read-only mapping of name → tensor over the safetensors files `files`; a tensor is read when it is looked up.

    Each look-up reads it anew, to the CPU; the files must stay. If several files have a tensor of one name, each has a
    part of its rows, and the value is the whole tensor. The constructor raises ValueError for several parts of a tensor
    that leave a gap, overlap or differ in their other dimensions, OSError for a file that cannot be opened,
    SafetensorError for a file of another format. A missing last part is not noticed.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        for path in files:
            file = safe_open(checked_path(path), "pt")
            starts = parse_json((file.metadata() or {}).get(STARTS, "{}"))
            for name in file.keys():  # noqa: SIM118  it is no mapping
                self._parts.setdefault(name, []).append((starts.get(name, 0), file))
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part[0])
            shapes = [file.get_slice(name).get_shape() for _, file in parts]
            ends = accumulate((shape[0] for shape in shapes if shape), initial=0)
            if len(parts) > 1 and any(
                start != end or shape[1:] != shapes[0][1:]
                for (start, _), end, shape in zip(parts, ends, shapes, strict=False)
            ):
                starts = ", ".join(f"{start} ({shape})" for (start, _), shape in zip(parts, shapes, strict=True))
                raise ValueError(f"parts of '{name:.80}' begin at rows {starts:.80} and do not fit together")

    def __getitem__(self, name: str) -> Tensor:
        parts = [file.get_tensor(name) for _, file in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __or__(self, other: "SavedTensors") -> "SavedTensors":
        """Return the union of the two mappings; for a name that both have, it has the tensor of `other`."""
        both = SavedTensors()
        both._parts = self._parts | other._parts
        return both

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor `name`, without reading the tensor."""
        shapes = [file.get_slice(name).get_shape() for _, file in self._parts[name]]
        return torch.Size(shapes[0] if len(shapes) == 1 else [sum(shape[0] for shape in shapes), *shapes[0][1:]])

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return the rows `rows` of tensor `name`, on the CPU, without reading its other rows.

        rows: a slice with start and stop, from 0, and without step; rows past the end are left out.
        """
        parts = [(start, file.get_slice(name)) for start, file in self._parts[name]]
        found = []
        for start, part in parts:
            first, end = max(rows.start - start, 0), min(rows.stop - start, part.get_shape()[0])
            if first < end:
                found.append(part[first:end])
        return torch.cat(found) if found else parts[0][1][:0]


def shape_of(saved: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape of saved[name]; SavedTensors need not read the tensor for it."""
    return saved.shape(name) if isinstance(saved, SavedTensors) else saved[name].shape


def save_tensors(path: Path, tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> str:
    """Write tensors to a safetensors file, and return the file's SHA-256 in hexadecimal.

    The SHA-256 is computed while the bytes are written, so that the file is not read again; this takes half the time of
    safetensors' save_file followed by a SHA-256. The file is neither moved into place atomically nor synced to the
    disk. starts: name of a tensor that is a part of a larger one → the row of the larger tensor at which the part
    begins. Raises OSError when the file cannot be written, KeyError for a dtype that safetensors does not have.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = hashlib.sha256()
    names = sorted(own, key=lambda name: (-own[name].element_size(), name))  # wide dtypes first: all are aligned
    with path.open("wb") as file:
        for content in (_header({name: own[name] for name in names}, starts), *(_bytes(own[name]) for name in names)):
            for start in range(0, len(content), PIECE):
                digest.update(content[start : start + PIECE])
                file.write(content[start : start + PIECE])
    return digest.hexdigest()


def _header(tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> memoryview:
    """Return the header of a safetensors file: 8 bytes with the length of the JSON, then the JSON (dtypes, offsets)."""
    content: dict[str, Any] = {"__metadata__": {STARTS: json.dumps(starts, sort_keys=True)}} if starts else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        content[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
