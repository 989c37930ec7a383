"""The journey of somebody with a model of their own: commands of README and docs/, on a SentenceTransformer folder."""

from pathlib import Path

from helpers import tiny_bert
from helpers.checkout import ROOT, link, write_few_topics
from helpers.cli import Commands
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as parts

NAMED = "model.text.kind=transformers model.text.name=FOLDER"  # in the table of docs/own_model.md
# as README has them
TRAIN = "python -m train experiment=topics run.name=topics"
EVALUATE = "python -m eval checkpoint=runs/topics suite=[beir:data/samples/topics]"
EXPORT = "python -m train.export run=runs/topics format=sentence_transformers"
PROMPTS = {"query": "find: ", "document": "verse: "}


def test_an_own_model_is_trained_evaluated_exported_and_loaded(commands: Commands, tmp_path: Path) -> None:
    assert all(words in (ROOT / "README.md").read_text() for words in (TRAIN, EVALUATE, EXPORT))
    assert NAMED in (ROOT / "docs/own_model.md").read_text()
    link(ROOT, tmp_path, without=(".git", "runs", "data"))
    link(ROOT / "data", tmp_path / "data", without=("samples",))
    write_few_topics(tmp_path / "data/samples/topics", verses=300)
    tiny_bert.write(tmp_path / "bert")
    modules = [
        parts.Transformer(str(tmp_path / "bert"), max_seq_length=20),
        parts.Pooling(32, "cls"),
        parts.Normalize(),
    ]
    own = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
    own.save_pretrained(str(tmp_path / "my_model"), create_model_card=False)
    out = ""
    for command in (f"{TRAIN} {NAMED.replace('FOLDER', 'my_model')} steps=3 global_batch_size=16", EVALUATE, EXPORT):
        ended = commands.run(*command.split()[2:], cwd=str(tmp_path), HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
        assert ended.code == 0 and "Traceback" not in ended.out, ended.out
        out += ended.out
    assert "is a SentenceTransformer. As its folder says: " in out and "model.text.pooling=cls" in out
    assert (tmp_path / "runs/topics/eval/topics.json").is_file(), list((tmp_path / "runs/topics/eval").iterdir())
    exported = SentenceTransformer(str(tmp_path / "runs/topics/export/sentence_transformers"), device="cpu")
    assert {name: exported.prompts[name] for name in PROMPTS} == {**PROMPTS}
    before, after = own.encode_query(["a lamb"]), exported.encode_query(["a lamb"])
    assert 0.9 < float((before * after).sum()) < 1 - 1e-7  # trained for three steps
