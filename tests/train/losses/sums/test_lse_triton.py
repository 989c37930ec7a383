"""The Triton kernels against dense float64: interpreted everywhere, compiled where there is a CUDA device."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dist import in_ways
from jobs import kernels_job
from torch._subclasses import FakeTensorMode

from dyad.train.distributed.devices import chosen_kernels
from dyad.train.losses.sums import lse_triton as kernels, triton_setup
from dyad.train.losses.sums.logits import Logits
from dyad.train.losses.sums.lse_one_shift import _kernels
from dyad.train.losses.sums.tiles import Exclusion, Pairs, Tiles
from dyad.train.losses.sums.triton_setup import compiles

ROOT = Path(__file__).parents[4]
TRIAL = "import torch; from dyad.train.losses.sums.triton_setup import *; print(compile_problem(torch.device('cuda')))"


@in_ways
@pytest.mark.triton
def test_interpreted(ways: str) -> None:
    """tests/jobs/kernels_job.py says what is checked; it prints a line when all of it holds."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/jobs/kernels_job.py"), ways],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "all checks hold" in run.stdout


def test_the_cpu_has_no_kernels() -> None:
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert not kernels.available(x, x)


def test_a_machine_that_cannot_compile_falls_back_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU the trial fails, too, as it does without a compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compiles.cache_clear()
    with FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
        assert not kernels.available(x, x) and not kernels.available(x, x)
    compiles.cache_clear()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the loss is computed without its GPU kernels, which takes longer: Triton cannot compile: ")
    assert "Fix: " in line


@pytest.mark.triton
def test_deterministic_runs_take_one_shape(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape decides the order of sums, and the fastest differs from node to node; what is timed says so, once."""
    for kernel in (kernels._sums_kernel, kernels._gradient_kernel):
        assert kernel.keys == ["D", "KEYS"] and len(kernel.configs) == len(triton_setup.BLOCKS)
        assert kernel.early_config_prune(kernel.configs, {}) == kernel.configs
        with chosen_kernels(deterministic=True):
            assert kernel.early_config_prune(kernel.configs, {}) == kernel.configs[:1]
    calls = []
    active = SimpleNamespace(get_benchmarker=lambda: lambda call, quantiles: calls.append(quantiles))
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))  # there is none without a GPU
    monkeypatch.setattr(triton_setup, "triton", SimpleNamespace(runtime=runtime))
    triton_setup._say_what_is_timed.cache_clear()
    for _ in range(3):
        kernels._sums_kernel.do_bench(lambda: None, quantiles=(0.5,))
    assert calls == [(0.5,)] * 3 and len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.gpu
def test_no_compiler_and_no_cache_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for changed, fix in (
        ({"PATH": str(tmp_path), "CC": "", "TRITON_CACHE_DIR": str(tmp_path / "a")}, "C compiler"),
        ({"TRITON_CACHE_DIR": str(tmp_path / "file")}, "TRITON_CACHE_DIR"),
    ):
        command = [sys.executable, "-c", TRIAL]
        environment = {**os.environ, **changed}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
        assert fix in done.stdout


@pytest.mark.gpu
def test_compiled() -> None:
    kernels_job.check_available("cuda")
    kernels_job.check_all("cuda")


@pytest.mark.gpu
def test_every_shape_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that another device or width would find fastest; some do not fit on every device."""
    from triton.runtime.errors import OutOfResources

    fit = 0
    for sums, gradient in zip(kernels._sums_kernel.configs, kernels._gradient_kernel.configs, strict=True):
        monkeypatch.setattr(kernels._sums_kernel, "configs", [sums])
        monkeypatch.setattr(kernels._gradient_kernel, "configs", [gradient])
        try:
            kernels_job.check_sums_and_strips("cuda", torch.bfloat16)
            kernels_job.check_short_strips("cuda")
        except OutOfResources:
            continue
        fit += 1
    assert fit


@pytest.mark.gpu
def test_larger_and_in_a_usual_width(record_property: Any) -> None:
    for dtype, most in ((torch.bfloat16, 2e-3), (torch.float16, 4e-4)):
        errors = kernels_job.check_symmetric_loss("cuda", size=4096, width=512, scale=100.0, dtype=dtype)
        record_property(f"kernels, {dtype}, 4,096 pairs of width 512: relative error of gradients", max(errors))
        assert max(errors) < most, (dtype, errors)


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    x, y = kernels_job.embeddings(5000, 9000, 512, "cuda", torch.bfloat16)
    first, again = (kernels.exp_sums(x, y, 100.0, 40.0) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    gradients = [kernels.gradients(x, y, 100.0, 40.0, 1 / first[0], 1 / first[1]) for _ in range(2)]
    assert torch.equal(gradients[0][0], gradients[1][0]) and torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.gpu
def test_memory_is_linear() -> None:
    """Sums: 64 partial sums of 4 bytes per column. Gradients: two of float32, and one strip of G."""
    peaks = {}
    for size in (16384, 32768):
        x, y = kernels_job.embeddings(size, size, 64, "cuda", torch.bfloat16)
        of_rows, of_columns = kernels.exp_sums(x, y, 20.0, 3.0)  # shapes are chosen here
        kernels.gradients(x, y, 20.0, 3.0, of_rows, of_columns)
        for name, run in {
            "sums": lambda x=x, y=y: kernels.exp_sums(x, y, 20.0, 3.0),
            "gradients": lambda x=x, y=y, u=of_rows, v=of_columns: kernels.gradients(x, y, 20.0, 3.0, u, v),
        }.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            peaks[name, size] = torch.cuda.max_memory_allocated() - before
    assert peaks["sums", 32768] < 32768 * 300 + 2**23
    assert peaks["gradients", 32768] < 2 * 32768 * 64 * 4 + 2 * kernels.STRIP**2 + 2**25
    assert peaks["gradients", 32768] - peaks["gradients", 16384] < 2 * 16384 * 64 * 4 + 2**23


@pytest.mark.gpu
def test_more_than_2_to_31_numbers() -> None:
    """Takes about 5 GB of the device."""
    width = kernels.WIDEST
    x = torch.zeros(64, width, dtype=torch.bfloat16, device="cuda")
    x[:, 0] = 1.0
    y = torch.zeros(2**31 // width + 4096, width, dtype=torch.bfloat16, device="cuda")
    y[:, 0] = torch.linspace(-1, 1, len(y), device="cuda")
    of_rows, of_columns = kernels.exp_sums(x, y, 3.0, 0.0)
    e = (3.0 * y[:, 0].double()).exp()
    torch.testing.assert_close(of_columns.double(), 64 * e, rtol=1e-5, atol=0)
    torch.testing.assert_close(of_rows.double(), e.sum().expand(64), rtol=1e-5, atol=0)


def test_more_keys_than_the_kernels_know_take_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that is in a batch twice adds its id to the keys of x and y."""
    monkeypatch.setattr(kernels, "available", lambda x, y: True)
    x, scale, key = torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor(1.0), torch.arange(4)
    logits = Logits(scale, None, None, None)
    for keys, fits in ((2, True), (3, False)):
        tiles = Tiles(x, x, Exclusion(((key, key),) * keys, Pairs.own_columns(4, 0, x.device)))
        assert (_kernels(tiles, logits) is not None) == fits
