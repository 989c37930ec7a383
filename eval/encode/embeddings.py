"""Embeddings of a corpus, in memory or in a folder; a folder is written piece by piece, so that a restart continues.

The items are divided into windows, by default of WINDOW consecutive items. With a folder, the embeddings are saved
after each window. Inside a window the items are sorted by length, the longest first, and cut into the encoder's blocks
(the items of one tower call). So there is little padding, and the processes divide the blocks among themselves. Neither
the number of processes nor a restart changes the blocks, so they do not change the embeddings.

    embeddings.npy   (N, D) float32 or float16, in the order of the items
    ids.txt          N lines: the id of each item
    state.json       settings that the embeddings depend on, and number of windows on disk; written after each window

Process 0 writes. With several machines the folder must be on a shared file system.

Shape letters: N items, D embedding width, S items in a window.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dyad.data.base.arrays import evenly_spaced, map_array
from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import free_bytes, sync, whole_file, write_errors, write_json
from dyad.data.base.json_text import read_json
from dyad.data.base.progress import print_line, progress
from dyad.eval.encode.encoder import Encoder, check_finite, one_embedding_per_key
from dyad.eval.encode.process_memory import trim_heap
from dyad.train.distributed.agreement import from_rank_0, raise_on_all, rank_0_only
from dyad.train.distributed.sharded_tensors import is_sharded
from dyad.train.distributed.world import World
from dyad.train.run_folder.named_tensors import named_tensors
from dyad.train.run_folder.run_state import locked

VECTORS, IDS, STATE = "embeddings.npy", "ids.txt", "state.json"
FORMAT = 2
WINDOW = 16_384
SAMPLED = 64  # texts whose tokens tell tokenizers apart

Ids = Callable[[int, int], Sequence[str]]  # (start, stop) → the ids of these items


class SizedItems(Protocol):
    """Items that a tower can encode, with random access and known lengths.

    Loader processes read them, so they must be picklable. lengths: (N,) the length of each of N items, in any unit;
    items are sorted by length to save padding. take: returns the tower inputs of the items with the indices `rows` as
    one tensor (len(rows), …), padded to one length.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def take(self, rows: Sequence[int], /) -> Tensor: ...


def encode_corpus(
    encode: Encoder,
    side: Literal["x", "y"],
    items: SizedItems,
    folder: Path | None,
    *,
    ids: Ids | None = None,
    identity: str = "",
    dtype: str = "float32",
    window: int = WINDOW,
    log: Callable[[str], None] | None = None,
) -> np.ndarray:
    """Encode all N items with a tower of `encode`; return their embeddings, (N, D), in every process.

    All processes must call it together. side: the tower, "x" or "y". dtype: float32 or float16. folder: where the
    embeddings are written; the result is a read-only memory map of them; None: each process has them in RAM. ids:
    function (start, stop) → ids of the items start … stop − 1; needed with a folder. identity: digest of weights and
    items (identity_of); needed with a folder, since embeddings with the same identity are used again. A folder with the
    same settings is completed if a part is missing; a folder with other settings is overwritten, and `log` prints a
    line. window: number of items after which the embeddings are saved, rounded up to whole blocks of the encoder. log:
    function that prints a line, called in process 0; None: a progress bar on a terminal, lines on standard output
    elsewhere.

    Raises ConfigError for a folder that is in use, contains files of other origin, or is on a disk without enough
    space, and for an encode.width above that of the embeddings; DataError for a damaged folder, an id with a line
    break, and values that are not finite or too large for float16; HardwareError if the disk fails; Stopped if
    encode.should_stop returns True.
    """
    world, size = encode.world, -(-window // encode.block) * encode.block
    settings = {
        "format": FORMAT,
        "identity": identity,
        "side": side,
        "items": len(items),
        "dtype": dtype,
        "window": size,
        "block": encode.block,
        "precision": encode.precision,
        "normalised": encode.cosine,
        **({"width": encode.width} if encode.width else {}),  # folders of before have none
    }
    with ExitStack() as stack:
        if folder is None:
            store, first = _Memory(len(items)), 0
        else:
            assert ids is not None, "a folder needs ids"
            store = _Folder(folder, settings, world)
            first = from_rank_0(world, lambda: store.opened(ids, stack, log or print_line)) * size
        if first < len(items):
            on_rank_0 = log if world.rank == 0 else lambda line: None
            on_progress = stack.enter_context(progress(f"Encode {side}", len(items), first, on_rank_0))
            for start, vectors in _windows(encode, side, items, size, first):
                store.write(start, raise_on_all(world, partial(_as_dtype, vectors, dtype)))
                trim_heap()
                on_progress(start + len(vectors))
        return store.matrix()


def identity_of(tower: nn.Module, *facts: str) -> str:
    """Return a digest (SHA-256, hexadecimal) of a tower and of `facts` about its inputs.

    It covers the parameters and persistent buffers by name, the extra_repr of the modules (for example the kind of
    pooling), and `facts`: digests or descriptions of the data and of how texts are prepared. Options of the Encoder,
    such as precision and width, are not in it: encode_corpus compares them itself. The result is the same for whole and
    for sharded weights. If weights are sharded, every rank must call it, because the parts of each weight are gathered.
    """
    digest = hashlib.sha256(json.dumps(facts).encode())
    for module in tower.modules():
        digest.update(module.extra_repr().encode())
    for name, tensor in named_tensors({"tower": tower}).items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def token_digest(items: SizedItems) -> str:
    """Return a digest (SHA-256, hexadecimal) of the tokens of at most SAMPLED of the items, evenly spaced; "" for
    images.

    As a fact of `identity_of` it tells tokenizers apart: their files are not among the weights.
    """
    if items.take(evenly_spaced(len(items), 1).tolist()).dtype is not torch.int64:
        return ""  # without decoding so many images
    tokens = items.take(evenly_spaced(len(items), SAMPLED).tolist())
    return hashlib.sha256(repr((tokens.shape, tokens.dtype)).encode() + tokens.numpy().tobytes()).hexdigest()


# ---- windows -------------------------------------------------------------------------------------------------------


@dataclass
class _Sorted:
    """The items from index `first` on as Items (data/image_text/items.py), in the order in which they are encoded.

    The order is window by window; in each window (`size` consecutive items) the longest item comes first. `first` is
    the first item of a window. _order: (first item, order) of the window that was asked for last.
    """

    items: SizedItems
    size: int
    first: int
    _order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.items) - self.first

    def block(self, start: int, stop: int) -> Tensor:
        """Return the tower inputs of the items at positions start … stop − 1 of the encoding order, as one tensor.

        In this order each window (a fixed number of consecutive items) is sorted by length, the longest item first. The
        positions must lie in one window. They count from the item `first`.
        """
        window = (start + self.first) // self.size * self.size
        begin = start + self.first - window
        return self.items.take((window + self.order(window)[begin : begin + stop - start]).tolist())

    def order(self, window: int) -> np.ndarray:
        """Return the encoding order of a window: item indices relative to its first item, the longest item first.

        window: the index of the first item of the window, which has `size` consecutive items.
        """
        if self._order[0] != window:
            lengths = np.asarray(self.items.lengths[window : window + self.size]).astype(np.int64)
            self._order = window, np.argsort(-lengths, kind="stable")
        return self._order[1]


def _windows(
    encode: Encoder, side: Literal["x", "y"], items: SizedItems, size: int, first: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Encode the items from index `first` on; yield (index of the first item, embeddings) of each window.

    The embeddings are float32 (S, D) for the S items of the window (`size` consecutive items, fewer in the last one),
    in the order of the items. All processes must iterate to the end; every process gets every window. Equal items of a
    window have equal embeddings. side: the tower, "x" or "y". Raises DataError for values that are not finite.
    """
    view, at = _Sorted(items, size, first), first
    window, keys_S = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    for vectors, keys in encode.rounds(side, view):
        while len(vectors):
            start = at // size * size
            stop = min(start + size, len(items))
            if at == start:
                window = np.empty((stop - start, vectors.shape[1]), np.float32)
                keys_S = np.empty(stop - start, np.int64)
            part, vectors = vectors[: stop - at], vectors[stop - at :]
            rows = view.order(start)[at - start :][: len(part)]
            window[rows], keys_S[rows], keys = part, keys[: len(part)], keys[len(part) :]
            at += len(part)
            if at == stop:
                check_finite(window, side, start)
                yield start, one_embedding_per_key(window, keys_S)


# ---- where they are stored -----------------------------------------------------------------------------------------


class _Memory:
    """A store of embeddings in RAM: a matrix with a row for each of `items` items. Every process has its own store."""

    def __init__(self, items: int) -> None:
        self._items, self._matrix = items, np.empty((0, 0))

    def write(self, start: int, vectors: np.ndarray) -> None:
        if start == 0:
            self._matrix = np.empty((self._items, vectors.shape[1]), vectors.dtype)
        self._matrix[start : start + len(vectors)] = vectors

    def matrix(self) -> np.ndarray:
        return self._matrix


@dataclass(frozen=True)
class _Folder:
    """A store of embeddings in a folder, with the files of the module docstring. Process 0 writes, all processes read.

    settings: what the embeddings depend on, with the keys items, window and dtype; they are compared with those in the
    folder's state.json.
    """

    folder: Path
    settings: dict[str, Any]
    world: World

    def opened(self, ids: Ids, stack: ExitStack, log: Callable[[str], None]) -> int:
        """Open or begin the folder of embeddings; return how many windows are already on disk.

        Windows are explained in the module docstring. The folder stays locked until `stack` closes. Only process 0 may
        call it. A folder made with other settings is begun anew, and `log` prints a line. ids: function (start, stop) →
        ids of the items start … stop − 1. Raises the errors of encode_corpus about the folder and the ids.
        """
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.folder, "folder"))
            state = self._state()
            if other := [name for name in self.settings if state["settings"].get(name) != self.settings[name]]:
                log(f"{self.folder}: has embeddings of other {', '.join(other)}; they are made anew")
            if other or state["windows"] == 0:
                self._begin(ids)
                return 0
            if state["windows"] > -(-self.settings["items"] // self.settings["window"]):
                raise DataError(f"{self.folder / STATE}: windows={state['windows']} are more than the items fill")
            self.matrix()  # raises DataError before the rest is encoded
            return state["windows"]

    def write(self, start: int, vectors: np.ndarray) -> None:
        """Write the embeddings of the window that begins with item `start`; all processes must call it together."""
        rank_0_only(self.world, lambda: self._write(start, vectors))

    def matrix(self) -> np.ndarray:
        """Return the embeddings on disk as a read-only memory map; raise DataError if the file is damaged."""
        path = self.folder / VECTORS
        try:
            vectors = map_array(path, self.folder)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}): delete {self.folder} to encode anew") from error
        if (vectors.ndim, *vectors.shape[:1], vectors.dtype) != (2, self.settings["items"], self.settings["dtype"]):
            raise DataError(f"{path} is not what {STATE} says: delete {self.folder} to encode anew")
        return vectors

    def _state(self) -> dict[str, Any]:
        """Read state.json in the folder of embeddings; without this file return the current settings and 0 windows.

        Returns {"settings": the settings with which the embeddings were made, "windows": how many windows are on disk}.
        Raises ConfigError if the folder has embeddings or ids but no state.json, DataError if state.json is damaged.
        """
        path = self.folder / STATE
        if not path.exists():
            if foreign := [name for name in (VECTORS, IDS) if (self.folder / name).exists()]:
                raise ConfigError(
                    f"{self.folder} has {foreign[0]} but no {STATE}, so it is not of our making: choose another folder"
                )
            return {"settings": self.settings, "windows": 0}
        try:
            state = read_json(path, folder=self.folder)
            if not isinstance(state["settings"], dict) or not isinstance(state["windows"], int) or state["windows"] < 0:
                raise ValueError("unknown fields")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: delete {self.folder} to encode anew") from error
        return state

    def _begin(self, ids: Ids) -> None:
        """Begin the folder of embeddings anew: write state.json, delete the old embeddings, write ids.txt.

        ids: function (start, stop) → ids of the items start … stop − 1. state.json is written first, because a folder
        that has embeddings or ids but no state.json is refused, as not made by Dyad.
        """
        self._save(windows=0)
        (self.folder / VECTORS).unlink(missing_ok=True)
        items, step = self.settings["items"], self.settings["window"]
        with whole_file(self.folder / IDS) as file:
            for start in range(0, items, step):
                file.writelines(_line(name) for name in ids(start, min(start + step, items)))

    def _write(self, start: int, vectors: np.ndarray) -> None:
        path, rows, nbytes = self.folder / VECTORS, self.settings["items"], vectors[0].nbytes
        with write_errors(self.folder):
            if start == 0:
                if (free := free_bytes(self.folder)) < rows * nbytes:
                    raise ConfigError(f"{self.folder}: the embeddings need {rows * nbytes:,} bytes, {free:,} are free")
                np.lib.format.open_memmap(path, "w+", vectors.dtype, (rows, vectors.shape[1]))  # header and length
            with path.open("r+b") as file:  # through a memory map, a full disk would end the process with SIGBUS
                file.seek(-(rows - start) * nbytes, os.SEEK_END)
                file.write(vectors.data)
            sync(path)
            self._save(windows=start // self.settings["window"] + 1)

    def _save(self, windows: int) -> None:
        write_json(self.folder / STATE, {"settings": self.settings, "windows": windows})


def _as_dtype(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Convert embeddings to the dtype with the name `dtype`. Raises DataError if a value is too large for float16."""
    with np.errstate(over="ignore"):
        converted = vectors.astype(dtype, copy=False)
    if dtype == "float16" and not np.isfinite(converted).all():
        raise DataError("embeddings are too large for float16: take dtype=float32")
    return converted


def _line(name: str) -> bytes:
    """Return the line of ids.txt for an id. Raises DataError for an id that has a line break or is no Unicode text."""
    if "\n" in name:
        raise DataError(f"the id {name!r} has a line break, and {IDS} holds one id a line")
    try:
        return f"{name}\n".encode()
    except UnicodeEncodeError:
        raise DataError(f"the id {name!r} is no Unicode text") from None
