"""The findings of the doctor on the towers of a configuration."""

from dyad.data.base.findings import Level
from dyad.doctor import configuration
from dyad.train.cli.compose import compose_config


def test_batch_norms_of_a_head_are_told() -> None:
    """`build_model` has set their statistics already."""
    *_, last = configuration.model(compose_config(["experiment=simclr_emoji"]))
    assert last.level is Level.ok and "2 batch norms: statistics of the global batch" in str(last)
