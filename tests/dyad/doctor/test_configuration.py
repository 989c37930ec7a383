"""The findings of the doctor on the data and the towers of a configuration."""

from pathlib import Path

from helpers import tiny_bert
from helpers.messages import raises
from helpers.rows import dpr_row, write_lines

from dyad.data.base.errors import ConfigError
from dyad.data.base.findings import Level
from dyad.doctor import configuration
from dyad.train.cli.compose import compose_config


def test_batch_norms_of_a_head_are_told() -> None:
    """`build_model` has set their statistics already."""
    *_, last = configuration.model(compose_config(["experiment=simclr_emoji"]))
    assert last.level is Level.ok and "2 batch norms: statistics of the global batch" in str(last)


def test_prompts_and_answers_are_rows_of_questions(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", map(dpr_row, range(3)))
    (found,) = configuration.data(compose_config(["experiment=lm_nll", f"data.train={rows}"]))
    assert found.level is Level.ok and "3 samples" in str(found)


def test_texts_that_training_refuses_fail(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    words = ["model=encoder", f"model.text.name={tmp_path}", "data.items=texts", "objective=simclr"]
    for more, named in (
        (["task=views", "model.text.frozen=true"], "model.text.frozen=false"),
        (["task=question_passage", "data.passage.length=600"], "data.passage.length"),
    ):
        with raises(ConfigError, named):
            list(configuration.model(compose_config([*words, *more])))
