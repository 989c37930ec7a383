"""Threads that share a tokenizer of transformers."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

from helpers.towers import MINILM
from transformers import AutoTokenizer

from dyad.train.towers.libraries.published import location_of
from dyad.train.towers.text.text_tower import TextTokenizer

TEXTS = [f"number {i} " * 30 for i in range(20)]


def test_a_text_has_the_length_of_its_own_call() -> None:
    tokenize = TextTokenizer(AutoTokenizer.from_pretrained(location_of(MINILM)), 512)

    def widths(length: int) -> set[int]:
        return {tokenize(TEXTS, length).shape[1] for _ in range(100)}

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(widths, (8, 64, 8, 64))] == [{8}, {64}, {8}, {64}]


def test_a_process_that_is_forked_meanwhile_tokenizes() -> None:
    tokenize, ended = TextTokenizer(AutoTokenizer.from_pretrained(location_of(MINILM)), 512), Event()

    def work() -> None:
        while not ended.is_set():
            tokenize(TEXTS * 20, 64)

    thread = Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            if (child := os.fork()) == 0:
                signal.alarm(60)
                os._exit(tokenize(["a b"], 8).shape[1] - 8)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        thread.join()
