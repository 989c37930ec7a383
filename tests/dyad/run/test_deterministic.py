"""deterministic=true changes no bit of a run on CPUs, on which bits are equal anyway."""

from pathlib import Path

from helpers.tiny_runs import records


def test_a_deterministic_run_on_cpus_is_the_same_run(commands, tiny, tmp_path: Path) -> None:
    for name, deterministic in (("a", "true"), ("b", "false")):
        ended = commands.world(1, *tiny({"run.name": name, "steps": 3, "deterministic": deterministic}))[0]
        assert ended.code == 0, ended.out
    a, b = (tmp_path / "runs" / name for name in "ab")
    assert "deterministic: true" in (a / "config.yaml").read_text()
    losses = [[r["train/loss"] for r in records(run) if "train/loss" in r] for run in (a, b)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    for kind in ("model", "optimizer"):
        first, second = ((run / f"checkpoints/step_00000003/{kind}.safetensors").read_bytes() for run in (a, b))
        assert first == second
