"""Batches one ahead of the step that uses them."""

from collections.abc import Iterator

import pytest
import torch
from helpers.messages import raises

from dyad.data.batch import Batch
from dyad.data.loading.ahead import copied_ahead, one_ahead
from dyad.train.monitor.stragglers import LocalTimer


def test_each_item_is_prepared_before_the_one_before_is_used() -> None:
    seen = list[str]()

    def prepared(item: int) -> int:
        seen.append(f"prepared {item}")
        return item

    for item in one_ahead(range(3), prepared):
        seen.append(f"used {item}")
    assert seen == ["prepared 0", "prepared 1", "used 0", "prepared 2", "used 1", "used 2"]
    assert list(one_ahead([], prepared)) == []


def test_an_error_comes_after_what_was_before_it() -> None:
    def items() -> Iterator[int]:
        yield from (0, 1)
        raise OSError("gone")

    used = list[int]()
    with raises(OSError):
        used.extend(one_ahead(items(), lambda item: item))
    with raises(OSError):
        for item in one_ahead(items(), lambda item: item):
            used.append(item)
    assert used[-2:] == [0, 1]


def test_on_a_cpu_nothing_is_asked_for_ahead() -> None:
    asked = list[int]()

    def batches() -> Iterator[Batch]:
        for i in range(2):
            asked.append(i)
            item = torch.full((1,), i)
            yield Batch(item, item, item, item, item)

    for i, batch in enumerate(copied_ahead(batches(), torch.device("cpu"), LocalTimer(torch.device("cpu")))):
        assert asked == [*range(i + 1)] and int(batch.x[0]) == i


@pytest.mark.gpu
def test_on_a_gpu_batches_arrive_whole() -> None:
    items = [torch.full((4096, 64), float(i)).pin_memory() for i in range(8)]
    whole = [Batch(item, item, item, item, item) for item in items]
    sums = [batch.x.sum() for batch in copied_ahead(whole, torch.device("cuda"), LocalTimer(torch.device("cuda")))]
    assert [float(s) for s in sums] == [4096 * 64 * i for i in range(8)]
