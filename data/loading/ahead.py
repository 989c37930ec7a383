"""Copy each batch to the GPU while the previous step computes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from dyad.data.batch import Batch

T = TypeVar("T")
U = TypeVar("U")
B = TypeVar("B", bound=Batch)


def one_ahead(items: Iterable[T], prepare: Callable[[T], U]) -> Iterator[U]:
    """Yield prepare(item) for each of `items`, in order, with the next item taken and prepared before each result.

    An exception of `items` or `prepare` is raised after all earlier results were yielded.
    """
    iterator, ready, failure = iter(items), list[U](), None
    while failure is None:
        try:
            ready.append(prepare(next(iterator)))
        except Exception as error:  # StopIteration too
            failure = error
        if len(ready) == 2 or (ready and failure is not None):
            yield ready.pop(0)
    if not isinstance(failure, StopIteration):
        raise failure


class Timer(Protocol):
    """Interface of what measures the time between start() and stop() on the current CUDA stream."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def copied_ahead(batches: Iterable[B], device: torch.device, timer: Timer) -> Iterator[B]:
    """Yield the batches, moved to `device`; the batches in Batch.auxiliary are not moved.

    To a GPU, a batch is copied on a separate CUDA stream while the previous step computes. For tensors that do not lie
    in pinned memory, the host waits. For a CPU, batches are yielded as they come. timer: measures each copy, on that
    stream.
    """
    if device.type != "cuda":
        yield from batches
        return
    copying = torch.cuda.Stream(device)

    def copied(batch: B) -> tuple[B, Any]:
        with torch.cuda.stream(copying):
            timer.start()
            moved = batch.to(device)
            timer.stop()
            return moved, copying.record_event()

    for batch, arrived in one_ahead(batches, copied):
        computing = torch.cuda.current_stream(device)
        computing.wait_event(arrived)
        batch.record_stream(computing)  # so that its memory is not reused before the step has read it
        yield batch
