"""Encoding in blocks: one process, several, with and without loader processes: the same bits."""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dist import in_ways, printed
from helpers.eval import LOCAL, Rows, encoder, random_images, tokenize, towers
from helpers.messages import raises
from torch import Tensor, nn

from dyad.data.base.errors import DataError, HardwareError
from dyad.data.batch import PADDING
from dyad.data.image_text.items import Captions
from dyad.eval.encode.encoder import Encoder
from dyad.train.distributed.signals import Stopped


@in_ways
def test_every_number_of_ranks_gives_the_same_bits(ways: str, tmp_path: Path) -> None:
    printed("dist_encoder.py", 3, str(tmp_path), ways)
    by_rank = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    found, metrics, (told, *_) = zip(*by_rank, strict=True)
    calls, *digests = found[0]["1"]
    assert calls == 7  # 100 items in blocks of 16
    for size, expected_calls in (("2", 4), ("3", 3)):
        for rank in range(int(size)):
            assert found[rank][size] == [expected_calls, *digests]
    for size in {"2", "3"} & metrics[0].keys():
        assert told[size] == told["1"]
        assert [of[size] for of in metrics[: int(size)]] == [metrics[0]["1"]] * int(size)
    assert told.keys() == {"1", "3"} or (ways == "all" and len(told) == 3)
    assert [len(cases) for details in told["1"] for cases in details["gallery"].values()] == [9] * 11


def test_values_are_the_tower_normalised_and_in_order() -> None:
    encode = encoder()
    inputs = random_images(40)
    result = encode("x", Rows(inputs))
    tower = encode.towers["x"].eval()
    with torch.no_grad():
        expected = nn.functional.normalize(tower(inputs), dim=-1).numpy()
    assert result.dtype == np.float32 and result.shape == (40, 8)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_dot_products_stay_unnormalised() -> None:
    norms = np.linalg.norm(encoder(cosine=False)("x", Rows(random_images(20))), axis=1)
    assert norms.std() > 1e-3


def test_an_item_costs_one_item_and_what_stands_beside_it_changes_roundings_alone() -> None:
    """Blocks are full but for the last, which has the rest."""
    shapes: list[int] = []
    encode = encoder()
    encode.towers["x"].register_forward_pre_hook(lambda _, inputs: shapes.append(len(inputs[0])))
    whole = encode("x", Rows(random_images(32)))
    for count in (1, 5, 17):
        np.testing.assert_allclose(encode("x", Rows(random_images(32)[:count])), whole[:count], rtol=0, atol=1e-6)
    assert shapes == [16, 16, 1, 5, 16, 1]


@pytest.mark.parametrize(("count", "rows"), [(1, [1]), (5, [8]), (12, [12]), (25, [12, 12, 1])])
def test_compiled_towers_and_gpus_see_few_shapes(count: int, rows: list[int]) -> None:
    shapes: list[int] = []
    encode = encoder(few_shapes=True, block=12)
    encode.towers["x"].register_forward_pre_hook(lambda _, inputs: shapes.append(len(inputs[0])))
    np.testing.assert_allclose(
        encode("x", Rows(random_images(count))), encoder()("x", Rows(random_images(count))), atol=1e-6
    )
    assert shapes == rows


class Uneven(nn.Module):
    """Gives equal rows other last bits in each block, and in each of its rows, as kernels may."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1)[:, :6].double() + 2
        return (rows * (1 + 1e-7 * torch.arange(1, len(rows) + 1)[:, None] / len(rows))).float()


def test_equal_items_have_equal_embeddings_whatever_blocks_they_are_in() -> None:
    """A text is equal to itself with more padding, and an image that ends in white is not one that ends earlier."""
    encode = Encoder(dict.fromkeys("xy", Uneven()), LOCAL, block=4, cosine=False)
    found = encode("x", Rows(random_images(9)[[0, 1, 2, 3, 4, 1, 5, 0, 6, 1]]))
    assert np.array_equal(found[[7, 5, 9]], found[[0, 1, 1]]) and len(np.unique(found, axis=0)) == 7
    white = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    white[0, 0, 0, 0] = 254
    assert len(np.unique(encode("x", Rows(white)), axis=0)) == 2

    class Padded(Rows):
        def block(self, start: int, stop: int) -> Tensor:
            return nn.functional.pad(self.rows[start:stop], (0, start), value=PADDING)

    texts = encode("y", Padded(torch.arange(6).repeat(9, 1)))
    assert len(np.unique(texts, axis=0)) == 1


def test_modes_come_back_part_by_part() -> None:
    encode = encoder()
    tower = encode.towers["x"].train()
    frozen = tower.get_submodule("linear").eval()
    modes: list[bool] = []
    tower.register_forward_hook(lambda module, *_: modes.append(module.training))
    encode("x", Rows(random_images(3)))
    assert modes == [False]
    assert tower.training and tower.get_submodule("dropout").training and not frozen.training


def test_precision_is_that_of_the_tower_and_results_are_float32() -> None:
    seen: list[torch.dtype] = []
    encode = encoder(precision="bf16")
    encode.towers["x"].get_submodule("linear").register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    rounded = encode("x", Rows(random_images(8)))
    exact = encoder()("x", Rows(random_images(8)))
    assert seen == [torch.bfloat16] and rounded.dtype == np.float32
    assert 0 < np.abs(rounded - exact).max() < 0.02


def test_loader_processes_change_nothing() -> None:
    texts = Captions([f"text {i}" for i in range(70)], tokenize)
    np.testing.assert_array_equal(encoder(workers=2)("y", texts), encoder()("y", texts))


@dataclass(frozen=True)
class Damaged:
    """Items of which one cannot be read."""

    def __len__(self) -> int:
        return 40

    def block(self, start: int, stop: int) -> Tensor:
        if start <= 20 < stop:
            raise DataError("shard.tar: sample '20' is damaged")
        return random_images(stop - start)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_arrives_as_it_was(workers: int) -> None:
    before = multiprocessing.active_children()
    with raises(DataError, "shard.tar", "'20'") as caught:
        encoder(workers=workers)("x", Damaged())
    assert caught.value, "somebody holds the error"
    assert set(multiprocessing.active_children()) <= {*before}, "workers live on"


def test_training_noise_after_an_evaluation_is_what_it_would_have_been() -> None:
    encode = encoder()
    before = torch.get_rng_state()
    for workers in (0, 2):
        replace(encode, workers=workers)("x", Rows(random_images(40)))
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_may_return_into_training() -> None:
    """A frozen trunk remembers what it computed here; inference tensors could not take part in a backward pass."""

    class Remembering(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            self.kept = tokens.float()
            return self.kept

    tower = Remembering()
    Encoder({"y": tower}, LOCAL, block=4)("y", Captions(["a", "b"], tokenize))
    weight = torch.ones(6, requires_grad=True)
    (tower.kept[:2] @ weight).sum().backward()
    assert weight.grad is not None


def test_a_diverged_tower_is_named() -> None:
    broken = towers()
    broken["x"].get_parameter("linear.weight").data.fill_(float("nan"))
    with raises(DataError, "x tower"):
        Encoder(broken, LOCAL, block=4)("x", Rows(random_images(9)))


def test_encoding_is_given_up_between_two_blocks() -> None:
    answers = iter([False, False, True])
    encode = Encoder(towers(), LOCAL, block=4, should_stop=lambda: next(answers))
    rounds = encode.rounds("x", Rows(random_images(20)))
    assert len(next(rounds)[0]) == len(next(rounds)[0]) == 4
    with pytest.raises(Stopped):
        next(rounds)
    assert encode.towers["x"].training


@dataclass(frozen=True)
class Fatal:
    """Items that kill the process that reads the one at `bad`."""

    bad: int

    def __len__(self) -> int:
        return 40

    def block(self, start: int, stop: int) -> Tensor:
        if start <= self.bad < stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(stop - start, 3)


def test_a_loader_process_that_is_lost_is_named_with_its_items() -> None:
    encode = Encoder({"x": nn.Identity()}, LOCAL, block=4, workers=2, cosine=False)
    with raises(HardwareError, "rank 0", "20 … 23", "SIGKILL"):
        encode("x", Fatal(22))
    assert encode("x", Fatal(99)).shape == (40, 3)
