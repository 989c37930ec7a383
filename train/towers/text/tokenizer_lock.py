"""Calls tokenizers in one thread at a time: those of transformers keep the length and padding of a call in themselves.

Without this, a thread that tokenizes questions beside one that tokenizes passages gets texts cut at the other length.
"""

import os
from threading import Lock
from typing import Any

_LOCK = Lock()
# a process that is forked while another thread holds the lock could never take it
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def call_tokenizer(tokenizer: Any, *texts: Any, **options: Any) -> Any:
    """Return tokenizer(*texts, **options); other threads wait meanwhile."""
    with _LOCK:
        return tokenizer(*texts, **options)
