"""Exact top-k search with FAISS (flat inner product): galleries, examples and, later, mining and large corpora.

FAISS is on the GEMM floor of a CPU and goes to the GPU when its GPU build is installed. Scores are always float32:
bf16 would change two of a hundred neighbours.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from data.errors import ConfigError


def search(queries_nD: np.ndarray, corpus_mD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores (n, k) float32 descending, ids (n, k) int64) of the k best rows of the corpus; k is cut to m.

    Raises ConfigError when FAISS is missing, ValueError when the arrays are not finite float32 of one width.
    """
    _check("queries", queries_nD)
    _check("corpus", corpus_mD)
    if queries_nD.shape[1] != corpus_mD.shape[1]:
        raise ValueError(f"queries are {queries_nD.shape[1]} wide, the corpus is {corpus_mD.shape[1]} wide")
    if k < 1:
        raise ValueError(f"k={k}: must be 1 or more")
    faiss = _faiss()
    index = _on_device(faiss, faiss.IndexFlatIP(corpus_mD.shape[1]))
    index.add(np.ascontiguousarray(corpus_mD))
    return index.search(np.ascontiguousarray(queries_nD), min(k, len(corpus_mD)))


def _check(name: str, array: np.ndarray) -> None:
    if array.ndim != 2 or array.dtype != np.float32 or len(array) == 0:
        raise ValueError(f"{name}: needs a non-empty float32 matrix, got {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: holds values that are not finite")


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "search needs FAISS, which is not installed. Take one: pip install -e '.[cpu]', or '.[gpu]' for CUDA 13"
        ) from error
    return faiss


def _on_device(faiss: Any, index: Any) -> Any:
    """The CPU build of FAISS lacks StandardGpuResources; the GPU build may stand on a machine without a GPU."""
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        return index
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
