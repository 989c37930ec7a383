"""python -P reload.py LIBRARY FOLDER JOB: what a library makes of an export, in a process that has nothing else.

Nothing of ours is imported here, there is no network, and the caches are those that the caller sets. JOB holds
calls.json, a list of {"texts", "pairs", hints of the format} or {"pictures": true, …}, and given.safetensors with the
pictures of call i as "i", uint8 (n, 3, S, S). theirs.safetensors is left there: embeddings (n, D) as "i", or as "i/…"
where more than one way leads to them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Answers = Iterator[tuple[str, np.ndarray]]  # "i" or "i/…", embeddings
CALLS, GIVEN, THEIRS = "calls.json", "given.safetensors", "theirs.safetensors"
OURS = {"train", "data", "eval"}
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def main(library: str, folder: str, job: Path) -> None:
    calls = json.loads((job / CALLS).read_text())
    given = load_file(job / GIVEN)
    for i, call in enumerate(calls):
        call["pictures"] = given.get(str(i))
    save_file({name: np.ascontiguousarray(rows) for name, rows in LIBRARIES[library](folder, calls)}, job / THEIRS)


def leave_the_network() -> None:
    """A network of its own, with nobody in it, where the system allows; and no address is ever connected to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(NEW_NETWORK)  # for root; else it fails and the hook is left
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise for what would reach another machine: names, and addresses that are not of a file."""
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
        raise ConnectionRefusedError(f"it asks the network ({event})")


def _open_clip(folder: str, calls: list[dict[str, Any]]) -> Answers:
    import open_clip
    import torch
    from PIL import Image

    library: Any = open_clip  # its own annotations are too wide to be checked
    model, _, preprocess = library.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = library.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    with torch.no_grad():
        for i, call in enumerate(calls):
            if call["pictures"] is None:
                yield str(i), model.encode_text(tokenize(call["texts"])).numpy()
            else:
                pictures = [Image.fromarray(picture.transpose(1, 2, 0)) for picture in call["pictures"]]
                yield str(i), model.encode_image(torch.stack([preprocess(p) for p in pictures])).numpy()


def _sentence_transformers(folder: str, calls: list[dict[str, Any]]) -> Answers:
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, device="cpu", local_files_only=True)
    for i, call in enumerate(calls):
        encode = {"query": model.encode_query, "document": model.encode_document}[call["prompt"]]
        texts, pairs = call["texts"], call["pairs"]
        yield str(i), encode(list(zip(texts, pairs, strict=True)) if pairs else texts)


def _transformers(folder: str, calls: list[dict[str, Any]]) -> Answers:
    """Texts one by one, without padding, pooled by hand; and all together by DPR's own class where there is one."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # of the weights that a class leaves out
    pool: dict[str, Callable[[Any], Any]] = {
        "cls": lambda states: states[0],
        "mean": lambda states: states.mean(0),
        "last": lambda states: states[-1],
    }
    for i, call in enumerate(calls):
        place = Path(folder) / call["folder"]
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
        encoder = transformers.AutoModel.from_pretrained(place, local_files_only=True).eval()
        texts, pairs = call["texts"], call["pairs"] or [None] * len(call["texts"])
        with torch.no_grad():
            rows = []
            for text, pair in zip(texts, pairs, strict=True):
                inputs = tokenizer(text, pair, truncation=True, return_tensors="pt")
                rows.append(pool[call["pooling"]](encoder(**inputs).last_hidden_state[0]))
            yield str(i), torch.stack(rows).numpy()
            if call["own_class"]:
                whole = getattr(transformers, call["own_class"]).from_pretrained(place, local_files_only=True).eval()
                inputs = tokenizer(texts, call["pairs"], padding=True, truncation=True, return_tensors="pt")
                yield f"{i}/{call['own_class']}", whole(**inputs).pooler_output.numpy()


def _onnxruntime(folder: str, calls: list[dict[str, Any]]) -> Answers:
    import onnxruntime
    from tokenizers import Tokenizer

    for i, call in enumerate(calls):
        session: Any = onnxruntime.InferenceSession(f"{folder}/{call['graph']}", providers=["CPUExecutionProvider"])
        if call["pictures"] is not None:
            yield str(i), session.run(None, {"pixels": call["pictures"]})[0]
            continue
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.enable_truncation(call["length"])
        texts = list(zip(call["texts"], call["pairs"], strict=True)) if call["pairs"] else call["texts"]
        tokens = np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)], np.int64)
        yield str(i), session.run(None, {"input_ids": tokens})[0]


LIBRARIES: dict[str, Callable[[str, list[dict[str, Any]]], Answers]] = {
    "open_clip": _open_clip,
    "sentence_transformers": _sentence_transformers,
    "transformers": _transformers,
    "onnxruntime": _onnxruntime,
}

if __name__ == "__main__":
    leave_the_network()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    assert not OURS & set(sys.modules), "an export stands without the program that made it"
