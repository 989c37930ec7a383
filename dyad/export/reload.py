"""python -P reload.py LIBRARY FOLDER JOB: load an export with a library and embed inputs, in a process of its own.

It imports no module of this project and has no network; the caller sets the model caches. Input, in the folder JOB:
calls.json, a list of dictionaries, one for each call of the encoder: "texts", "pairs" (the second text of each pair, or
null), and the further keys that the function for this library reads, such as "graph"; and given.safetensors, with the
images of call number i as "i", uint8 (n, 3, H, W) with H and W in pixels. Output: theirs.safetensors with the
embeddings (n, D) of call i as "i".
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

CALLS, GIVEN, THEIRS = "calls.json", "given.safetensors", "theirs.safetensors"
TOKEN_OF_POOLING = {"cls": 0, "last": -1}  # pooling → the token whose state is the embedding
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def main(library: str, folder: str, job: Path) -> None:
    """Load `folder` with `library`, embed the inputs in the folder `job`, and save the embeddings there.

    library: a key of LIBRARIES. The files in `job` are those of the module's docstring.
    """
    calls = json.loads((job / CALLS).read_text())
    given = load_file(job / GIVEN)
    for i, call in enumerate(calls):
        call["images"] = given.get(str(i))
    found = enumerate(LIBRARIES[library](folder, calls))
    save_file({str(i): np.ascontiguousarray(rows) for i, rows in found}, job / THEIRS)


def leave_the_network() -> None:
    """Cut this process from the network: by an empty network namespace where possible, and by refusing connections."""
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(NEW_NETWORK)  # works for root; otherwise only the hook refuses
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise ConnectionRefusedError if Python is about to look up a name or to connect; an audit hook of Python.

    event, arguments: as Python passes them to a hook. Connections to the path of a Unix socket are allowed.
    """
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
        raise ConnectionRefusedError(f"it asks the network ({event})")


def _open_clip(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load the export in `folder` by open_clip; yield the embeddings of each entry of `calls`.

    An entry holds texts or images. Images pass open_clip's preprocessing.
    """
    import open_clip
    import torch
    from PIL import Image

    library: Any = open_clip  # its annotations are too wide for the type checker
    model, _, preprocess = library.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = library.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    with torch.no_grad():
        for call in calls:
            if call["images"] is None:
                yield model.encode_text(tokenize(call["texts"])).numpy()
            else:
                images = [Image.fromarray(image.transpose(1, 2, 0)) for image in call["images"]]
                yield model.encode_image(torch.stack([preprocess(p) for p in images])).numpy()


def _sentence_transformers(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load the export in `folder` by sentence-transformers; yield the embeddings of each entry of `calls`.

    An entry holds texts and the name of their prompt, query or document.
    """
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, device="cpu", local_files_only=True)
    for call in calls:
        encode = {"query": model.encode_query, "document": model.encode_document}[call["prompt"]]
        texts, pairs = call["texts"], call["pairs"]
        yield encode(list(zip(texts, pairs, strict=True)) if pairs else texts)


def _transformers(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load the export in `folder` by transformers; yield the embeddings of each entry of `calls`.

    If the entries name no folder, the export is a CLIP or SigLIP, which _two_towers loads. Otherwise each entry holds
    texts, and names the subfolder of its encoder and the class that loads it. With AutoModel, each text is embedded
    alone, without padding, and its states are pooled here; with one of DPR's own classes, all texts in one padded
    batch.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # it warns of the weights that a class does not use
    if "folder" not in calls[0]:
        yield from _two_towers(folder, calls)
        return
    for call in calls:
        part = Path(folder) / call["folder"]
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(part, local_files_only=True)
        encoder = getattr(transformers, call["loads"]).from_pretrained(part, local_files_only=True).eval()
        texts, pairs = call["texts"], call["pairs"]
        with torch.no_grad():
            if call["loads"] != "AutoModel":
                inputs = tokenizer(texts, pairs, padding=True, truncation=True, return_tensors="pt")
                yield encoder(**inputs).pooler_output.numpy()
                continue
            rows = []
            for text, pair in zip(texts, pairs or [None] * len(texts), strict=True):
                inputs = tokenizer(text, pair, truncation=True, return_tensors="pt")
                states = encoder(**inputs).last_hidden_state[0]
                rows.append(states.mean(0) if call["pooling"] == "mean" else states[TOKEN_OF_POOLING[call["pooling"]]])
            yield torch.stack(rows).numpy()


def _two_towers(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load a CLIP or SigLIP by transformers; yield the embeddings of each entry of `calls`.

    An entry holds texts and "length", the number of tokens to which they are padded; or images and "options", arguments
    of get_image_features.
    """
    import torch
    import transformers

    local: dict[str, Any] = {"local_files_only": True}
    model: Any = transformers.AutoModel.from_pretrained(folder, **local).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **local)
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, **local)
    with torch.no_grad():
        for call in calls:
            if call["images"] is None:
                shape = {"padding": "max_length", "truncation": True, "max_length": call["length"]}
                found = model.get_text_features(**tokenizer(call["texts"], return_tensors="pt", **shape))
            else:
                pixels = processor(list(call["images"]), return_tensors="pt")
                found = model.get_image_features(**pixels, **call["options"])
            yield found.pooler_output.numpy()


def _onnxruntime(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load the export in `folder` by onnxruntime; yield the embeddings of each entry of `calls`.

    An entry holds texts or images and names the ONNX file that embeds them. Texts are converted to token ids by
    tokenizer.json, images are passed as pixels.
    """
    import onnxruntime
    from tokenizers import Tokenizer

    for call in calls:
        session: Any = onnxruntime.InferenceSession(f"{folder}/{call['graph']}", providers=["CPUExecutionProvider"])
        if call["images"] is not None:
            yield session.run(None, {"pixels": call["images"]})[0]
            continue
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.enable_truncation(call["length"])
        texts = list(zip(call["texts"], call["pairs"], strict=True)) if call["pairs"] else call["texts"]
        tokens = np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)], np.int64)
        yield session.run(None, {"input_ids": tokens})[0]


def _torch(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Compute contexts by torch alone from the export of a model of sequences; yield the context of each call.

    It builds the context network from the weights and the shape in sequence.json. An entry of `calls` holds a history,
    as numbers of items; its context is float32 (1, D).
    """
    import torch
    from safetensors.torch import load_file as load

    about, weights = json.loads((Path(folder) / "sequence.json").read_text()), load(f"{folder}/model.safetensors")
    items, H, of = weights["trunk.weight"], about["width"], "context.network."
    if about["kind"] == "gru":
        network: Any = torch.nn.GRU(H, H, about["layers"], batch_first=True)
    else:
        how: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = torch.nn.TransformerEncoderLayer(H, about["heads"], 4 * H, 0.0, **how)
        network = torch.nn.TransformerEncoder(layer, about["layers"], torch.nn.LayerNorm(H), enable_nested_tensor=False)
    network.load_state_dict({name.removeprefix(of): each for name, each in weights.items() if name.startswith(of)})
    network.eval()

    def linear(name: str, states: Any) -> Any:
        key = f"context.{name}"
        if f"{key}.weight" not in weights:
            return states
        return torch.nn.functional.linear(states, weights[f"{key}.weight"], weights[f"{key}.bias"])

    with torch.no_grad():
        for call in calls:
            states = linear("enter", items[call["history"]])[None]
            if about["kind"] == "gru":
                states = network(states)[0]
            else:
                steps = states.shape[1]
                angle = torch.arange(steps)[:, None] * 10_000 ** (-torch.arange(0, H, 2) / H)
                waves = torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[:, :H]
                ahead = torch.ones(steps, steps, dtype=torch.bool).triu(1)
                states = network(states * H**0.5 + waves, mask=ahead)
            yield linear("leave", states[:, -1]).numpy()


def _causal_lm(folder: str, calls: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Load a language model by transformers; yield the score of the answer of each entry of `calls`.

    An entry holds "ids", the tokens of a prompt and its answer, and "start", the number of tokens of the prompt. The
    score is the mean log-likelihood of the answer's tokens, (1, 1).
    """
    import torch
    import transformers

    transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        for call in calls:
            ids = torch.tensor([call["ids"]])
            labels = ids.where(torch.arange(ids.shape[1]) >= call["start"], -100)
            yield -model(ids, labels=labels).loss.reshape(1, 1).numpy()


LIBRARIES: dict[str, Callable[[str, list[dict[str, Any]]], Iterator[np.ndarray]]] = {
    "open_clip": _open_clip,
    "sentence_transformers": _sentence_transformers,
    "transformers": _transformers,
    "onnxruntime": _onnxruntime,
    "torch": _torch,
    "causal_lm": _causal_lm,
}

if __name__ == "__main__":
    # otherwise the garbage collector takes a fifth of the time of a library's imports
    gc.set_threshold(100_000, 20, 10)
    leave_the_network()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    assert "dyad" not in sys.modules, "an export must load without the program that wrote it"
