"""The Python API: embeddings equal those of `python -m eval` to the bit, search, exports, and clear mistakes."""

import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from helpers.eval import ROOT
from helpers.export import near
from helpers.messages import raises
from helpers.passages import make_run as make_text_run, write_beir
from helpers.runs import EMOJI, distinct_emoji, make_run
from omegaconf import OmegaConf
from PIL import Image

import dyad
from dyad.data.base.errors import ConfigError
from dyad.data.image_text.dataset import image_spec
from dyad.data.image_text.items import retrieval_set
from dyad.data.loading.order import Order
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.dataset import passage_texts
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.eval.encode.embeddings import encode_corpus
from dyad.eval.encode.encoder import Encoder
from dyad.evaluation.load_run import find_run, load_run, read_config
from dyad.evaluation.main import main as evaluate
from dyad.export.main import main as export
from dyad.train.distributed.world import World

if TYPE_CHECKING:
    from typing import assert_type

SHARD = EMOJI / "twemoji-unseen.tar"
TITLES = ("data.question.prefix='ask: '", "data.passage.prefix='say: '", "objective.similarity=dot")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pictures"), fit=20)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_run(tmp_path_factory.mktemp("texts") / "run", *TITLES)


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("beir") / "small")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    for i, emoji in enumerate(distinct_emoji(40)):
        (folder / f"{i}.webp").write_bytes(emoji.image)
    return folder


def command(main: Any, *words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *words])
        main()


def test_images_and_captions_have_the_embeddings_of_an_evaluation(run: Path) -> None:
    trained, config = load_run(*find_run(str(run))), read_config(run)
    spec, tokenize = trained.model.image, trained.model.tokenize  # type: ignore[attr-defined]
    data = retrieval_set(open_shards(parse_sources(str(SHARD))), spec, tokenize, config.data)
    encode = Encoder.of(config, trained.model, World())
    model = dyad.load(str(run), "cpu")
    given = [data.images.shards.read(i)["webp"] for i in range(len(data.images))]
    assert np.array_equal(model.encode_image(given), encode("x", data.images))
    assert np.array_equal(model.encode_text(data.texts.texts), encode("y", data.texts))
    assert model.temperature == pytest.approx(0.05) and spec == image_spec(spec, config.data)


def test_questions_and_passages_have_the_embeddings_of_an_evaluation(texts: Path, beir: Path) -> None:
    trained, config = load_run(*find_run(str(texts))), read_config(texts)
    corpus = open_corpus(str(beir), "test")
    inputs = passage_texts(corpus, trained.model.tokenize, config.data.passage)
    theirs = encode_corpus(Encoder.of(config, trained.model, World()), "y", inputs, None)
    model = dyad.load(str(texts), "cpu")
    rows = [corpus[i] for i in range(len(corpus))]
    ours = model.encode_passage([(row.title, row.text) for row in rows])
    assert np.array_equal(ours, theirs) and np.linalg.norm(ours, axis=1).std() > 0
    assert np.array_equal(ours, model.encode_passage([vars(row) for row in rows]))
    unit = model.encode_question(["anchor"], normalize=True)
    assert np.linalg.norm(unit) == pytest.approx(1) and not np.array_equal(unit, model.encode_passage(["anchor"]))


def test_an_instruction_takes_the_place_of_the_prefix(texts: Path, run: Path, beir: Path, images: Path) -> None:
    """Of questions, also in a search, and of passages; the run's are 'ask: ' and 'say: '."""
    model = dyad.load(str(texts), "cpu")
    ours, other = model.encode_question("anchor"), model.encode_question("anchor", prefix="find: ")
    assert np.array_equal(ours, model.encode_question("anchor", prefix="ask: ")) and not np.array_equal(ours, other)
    assert np.array_equal(other, model.encode_question("find: anchor", prefix=""))
    assert np.array_equal(model.encode_passage("anchor"), model.encode_passage("anchor", prefix="say: "))
    assert not np.array_equal(model.encode_passage("anchor"), model.encode_passage([("", "anchor")], prefix=""))
    index = model.index(str(beir))
    assert model.search(index, "anchor", prefix="ask: ") == model.search(index, "anchor")
    assert model.search(index, "anchor", prefix="find: ") == model.search(index, "find: anchor", prefix="")
    assert model.search(index, "anchor", prefix="find: ") != model.search(index, "anchor")
    of_images = dyad.load(str(run), "cpu")
    with raises(ConfigError, "prefix='find: '"):
        of_images.search(of_images.index(images), "a frog", prefix="find: ")


def test_embeddings_may_be_cut(run: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = dyad.load(str(run), "cpu"), dyad.load(str(run), "cpu", width=8)
    assert "width=8: objective.matryoshka of " in capsys.readouterr().err
    theirs = whole.encode_text(["a frog", "a toad"], normalize=False)[:, :8]
    assert np.array_equal(cut.encode_text(["a frog", "a toad"], normalize=False), theirs)
    assert np.allclose(np.linalg.norm(cut.encode_text("a frog"), axis=1), 1)
    index = cut.index(images)
    assert index.embeddings.shape == (40, 8) and len(cut.search(index, "a frog", k=3)) == 3
    with raises(ConfigError, "8"):
        whole.search(index, "a frog")
    with raises(ConfigError, "eval.width=4096"):
        dyad.load(str(run), "cpu", width=4096).encode_text("a frog")
    with raises(ConfigError, "width"):
        dyad.load(str(run), "cpu", width=0)


def test_the_width_of_evaluations_is_of_evaluations_alone(run: Path, tmp_path: Path) -> None:
    """As in `python -m eval`; exports and dyad.load have whole embeddings."""
    entry, narrow = f"zero_shot:{EMOJI / 'groups.json'}", tmp_path / "run"
    shutil.copytree(run, narrow)
    tree = OmegaConf.load(run / "config.yaml")
    tree.eval.width = 8
    OmegaConf.save(tree, narrow / "config.yaml")
    model = dyad.load(str(narrow), "cpu")
    assert model.encode_text("a frog").shape == (1, 32)
    of_8, of_all = (dyad.evaluate(dyad.load(str(run), "cpu", width=width), entry) for width in (8, None))
    assert dyad.evaluate(model, entry) == of_8 != of_all == dyad.evaluate(dyad.load(narrow, "cpu", width=32), entry)


def test_metrics_equal_those_of_the_command(run: Path, texts: Path, beir: Path, tmp_path: Path) -> None:
    for folder, entry in ((run, f"zero_shot:{EMOJI / 'groups.json'}"), (texts, f"beir:{beir}@test")):
        command(evaluate, f"checkpoint={folder}", f"suite=[{entry}]", f"out={tmp_path}", "examples=0", "baselines=[]")
        ((name, metrics),) = dyad.evaluate(dyad.load(str(folder), "cpu"), entry).items()  # a single one
        assert json.loads((tmp_path / f"{name}.json").read_text())["metrics"] == metrics
    assert name == "small"  # of @test, too


def test_images_are_found_by_words_and_by_images(run: Path, images: Path, tmp_path: Path) -> None:
    model = dyad.load(str(run), "cpu")
    index = model.index(images)
    assert repr(index) == "Index(40 items, 32 numbers each, Flat)"
    assert repr(model).endswith(": images and texts, cosine, on cpu)") and str(run) in repr(model)
    files = sorted(images.iterdir())
    assert list(index.items) == list(map(str, files))
    scores = model.similarity(model.encode_text(["a frog"]), model.encode_image(files))[0]
    hits = model.search(index, "a frog", k=3)
    assert [hit.item for hit in hits] == [str(files[i]) for i in np.argsort(-scores)[:3]]
    assert hits[0].score == pytest.approx(scores.max(), abs=1e-6) and len(model.search(index, ["a frog", "b"])) == 2
    assert model.search(index, files[7], k=1)[0].item == str(files[7])
    index.save(tmp_path / "index")
    again = dyad.Index.load(tmp_path / "index")
    assert model.search(again, "a frog", k=3) == hits
    assert {file.suffix for file in (tmp_path / "index").iterdir()} == {".npy", ".json"}
    of_shards = model.index(SHARD, spec="IVF4,Flat;nprobe=4")
    assert model.search(of_shards, [files[7]], k=1)[0][0].score == pytest.approx(1, abs=1e-5)


def test_captions_are_found_by_an_image_and_by_words(run: Path, texts: Path, images: Path) -> None:
    model, captions = dyad.load(run, "cpu"), [emoji.label for emoji in distinct_emoji(40)]
    index = model.index_text(captions)
    scores = model.similarity(model.encode_image(images / "7.webp"), model.encode_text(captions))[0]
    hits = model.search(index, images / "7.webp", k=3)
    assert [hit.item for hit in hits] == [captions[i] for i in np.argsort(-scores)[:3]]
    assert model.search(index, captions[5], k=1)[0].item == captions[5]
    with raises(ConfigError, "takes questions and passages only"):
        dyad.load(texts, "cpu").index_text("a frog")


def test_passages_are_found(texts: Path, beir: Path) -> None:
    model = dyad.load(str(texts), "cpu")
    index = model.index(str(beir))
    (hit,) = model.search(index, "anchor bridge", k=1)
    scores = model.encode_question(["anchor bridge"]) @ index.embeddings.T
    assert hit.item == index.items[int(scores.argmax())] and hit.item.keys() == {"text", "title", "id"}
    assert model.search(model.index(["one", ("title", "two")]), "one", k=2)[0].item in ("one", ("title", "two"))


def test_an_image_may_come_in_many_forms(run: Path, images: Path) -> None:
    model = dyad.load(str(run), "cpu", block=2)
    file = images / "3.webp"
    opened = Image.open(file)
    pixels = np.array(Image.open(BytesIO(file.read_bytes())).convert("RGBA"))
    white = np.array(Image.alpha_composite(Image.new("RGBA", opened.size, "white"), opened.convert("RGBA")))[..., :3]
    forms = [str(file), file, file.read_bytes(), opened, white, torch.from_numpy(white).permute(2, 0, 1)]
    rows = model.encode_image([*forms, BytesIO(file.read_bytes())])
    assert rows.shape == (7, 32) and rows.dtype == np.float32 and pixels.shape[-1] == 4
    assert all(np.allclose(row, rows[0], atol=1e-6) for row in rows)
    assert model.preprocess(file).shape == (3, 64, 64) and model.preprocess(file).dtype == torch.uint8


def test_one_that_is_no_list_is_one_row(run: Path, texts: Path, images: Path) -> None:
    """Never the letters of a text."""
    model, of_texts, file = dyad.load(str(run), "cpu"), dyad.load(str(texts), "cpu"), images / "3.webp"
    cases: list[tuple[Any, Any]] = [(model.encode_text, "a frog"), (model.encode_image, file)]
    cases += [(of_texts.encode_question, "a frog"), (of_texts.encode_passage, {"text": "a frog"})]
    for embed, one in cases:
        assert np.array_equal(embed(one), embed([one])) and len(embed(one)) == 1
    assert model.similarity(model.encode_text("a frog"), model.encode_image(file)).shape == (1, 1)
    pixels = np.array(Image.open(file).convert("RGB"))
    kinds = (pixels, torch.from_numpy(pixels).permute(2, 0, 1), Image.open(file), file.read_bytes())
    for image in kinds:
        index = model.index(image)
        assert index.items == (0,) and np.array_equal(index.embeddings, model.encode_image(image))
    index = model.index(BytesIO(file.read_bytes()), on_error="skip")  # which decodes it twice
    assert np.array_equal(index.embeddings, model.index(file).embeddings) and model.index(file).items == (str(file),)
    assert torch.equal(model.preprocess(BytesIO(file.read_bytes())), model.preprocess(file))
    assert model.search(index, BytesIO(file.read_bytes()), k=1)[0].item == 0


def test_images_that_cannot_be_read_stop_or_are_left_out(
    run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = dyad.load(run, "cpu"), tmp_path / "pictures"
    shutil.copytree(images, folder)
    (folder / "10.webp").write_bytes((folder / "10.webp").read_bytes()[:80])
    (folder / "empty.jpg").touch()
    with raises(dyad.DataError, "10.webp"):
        model.index(folder)
    index, sound = model.index(folder, on_error="skip"), sorted({*images.iterdir()} - {images / "10.webp"})
    assert [Path(item).name for item in index.items] == [path.name for path in sound]
    assert np.array_equal(index.embeddings, model.encode_image(sound))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "left out: " in said[0] and "10.webp" in said[0] and "empty.jpg" in said[1]
    assert model.index([folder / "empty.jpg", np.zeros((4, 4, 3), np.uint8)], on_error="skip").items == (1,)
    of_shards = model.index(SHARD, on_error="skip")
    assert of_shards.items == model.index(SHARD).items


def test_paths_begin_in_the_home_folder(run: Path, images: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(images.parent))
    model = dyad.load(run, "cpu")  # a Path
    index = model.index(f"~/{images.name}")
    assert len(index.items) == 40
    assert np.array_equal(model.encode_image(f"~/{images.name}/3.webp"), model.encode_image(images / "3.webp"))
    monkeypatch.setenv("HOME", str(tmp_path))
    index.save("~/index")
    assert dyad.Index.load("~/index").items == index.items and (tmp_path / "index").is_dir()


def test_mistakes_are_said_in_one_line(run: Path, texts: Path, images: Path, tmp_path: Path) -> None:
    model, of_texts = dyad.load(str(run), "cpu"), dyad.load(str(texts), "cpu")
    (tmp_path / "damaged.jpg").write_bytes(b"\xff\xd8\xff")
    mistakes: list[tuple[type[Exception], object, Any]] = [
        (dyad.DataError, "damaged.jpg", lambda: model.encode_image([tmp_path / "damaged.jpg"])),
        (dyad.DataError, "nowhere.jpg", lambda: model.encode_image(["nowhere.jpg"])),
        (dyad.DataError, "(H, W, 3)", lambda: model.encode_image([np.zeros((4, 4, 1))])),
        (dyad.DataError, "np.stack([grey] * 3, axis=-1)", lambda: model.encode_image(np.zeros((4, 5), np.uint8))),
        (dyad.ConfigError, "prefix=5", lambda: of_texts.encode_question("a", prefix=5)),  # type: ignore[arg-type]
        (dyad.ConfigError, "prefix=5", lambda: of_texts.encode_passage("a", prefix=5)),  # type: ignore[arg-type]
        (dyad.ConfigError, "index.search(EMBEDDINGS", lambda: model.search(model.index(images), np.zeros(32))),
        (dyad.ConfigError, "", lambda: model.search(model.index(images), type("DataFrame", (), {"ndim": 2})())),  # type: ignore
        (dyad.ConfigError, "only: encode_image", lambda: model.encode_sequence(np.zeros((3, 2)))),
        (dyad.ConfigError, "", lambda: model.encode_text([])),
        (dyad.ConfigError, "encode_question", lambda: of_texts.encode_text(["a"])),
        (dyad.ConfigError, "encode_image", lambda: model.encode_passage(["a"])),
        (dyad.ConfigError, "", lambda: of_texts.search(model.index(images), "a")),
        (dyad.DataError, tmp_path, lambda: dyad.Index.load(tmp_path)),
        (dyad.ConfigError, "runs/nowhere", lambda: dyad.load("runs/nowhere")),
        (dyad.ConfigError, "st:NOBODY/some-model", lambda: dyad.load("NOBODY/some-model")),
        (dyad.ConfigError, f"'{run}@best'", lambda: dyad.load(f"{run}@bst")),
        (dyad.ConfigError, "beir:x", lambda: dyad.evaluate(model, ["beir:x"])),
        (dyad.ConfigError, "width 3", lambda: model.search(dyad.Index(["a"], np.ones((1, 3)), model.identity), "a")),
        (dyad.ConfigError, "width 3", lambda: model.similarity(np.ones((1, 3)), np.ones((1, 2)))),
        (dyad.ConfigError, "k=0", lambda: model.search(model.index(images), "a", k=0)),
        (dyad.ConfigError, "'LSH'", lambda: model.index(images, spec="LSH")),
        (dyad.ConfigError, "set", lambda: model.index({"a.png"})),  # type: ignore[arg-type]
        (dyad.ConfigError, "on_error='drop'", lambda: model.index(images, on_error="drop")),  # type: ignore[arg-type]
        (dyad.ConfigError, "model.index(FOLDER)", lambda: model.encode_image(images)),
        (dyad.ConfigError, "eval.suite", lambda: dyad.evaluate(model, [{"question": "a"}])),  # type: ignore[list-item]
        (dyad.ConfigError, "no path", lambda: dyad.batches([{"text": "a"}], model=model)),  # type: ignore[arg-type]
        (dyad.ConfigError, "no path", lambda: dyad.evaluate(of_texts, val=[{"text": "a"}])),  # type: ignore[arg-type]
        (dyad.ConfigError, "global_batch_size=0", lambda: dyad.batches("x", model=model, global_batch_size=0)),
        (dyad.ConfigError, "block=0", lambda: dyad.load(run, "cpu", block=0)),
        (dyad.ConfigError, "device='gpu'", lambda: dyad.load(run, "gpu")),
        (dyad.ConfigError, "device='cuda:99'", lambda: dyad.load(run, "cuda:99")),
        (dyad.ConfigError, "name=None", lambda: dyad.load(None)),  # type: ignore[arg-type]
        (dyad.ConfigError, "model.index(FOLDER)", lambda: model.search("folder", "a")),  # type: ignore[arg-type]
        (dyad.ConfigError, "eval.suite", lambda: dyad.evaluate(model, Path("a.json"))),  # type: ignore[arg-type]
        (dyad.ConfigError, "suite=None", lambda: dyad.evaluate(model, None)),  # type: ignore[arg-type]
        (dyad.ConfigError, "captions=7", lambda: dyad.evaluate(model, captions=7)),  # type: ignore[arg-type]
        (dyad.ConfigError, "steps=", lambda: dyad.batches("x", model=model, steps=range(-2, 3))),
    ]
    for kind, named, mistake in mistakes:
        with raises(kind, named) as caught:
            mistake()
        assert len(str(caught.value).splitlines()) == 1


def test_models_and_indexes_are_keys_and_an_index_is_sent_to_other_processes(run: Path, images: Path) -> None:
    model = dyad.load(run, "cpu")
    index = model.index(images)
    hits = model.search(index, "a frog")  # builds FAISS's object, which is not sent
    again = pickle.loads(pickle.dumps(index))
    assert model.search(again, "a frog") == model.search(deepcopy(index), "a frog") == hits
    assert len(again) == 40 and again != index and len({model, index, again}) == 3
    with raises(TypeError, "dyad.load"):
        pickle.dumps(model)


def test_one_field_of_captions_is_one_name(run: Path) -> None:
    model = dyad.load(run, "cpu")
    entry = f"retrieval:{SHARD}"
    one, listed = (dyad.evaluate(model, entry, captions=captions) for captions in ("caption", ["caption"]))
    assert one == listed


def test_exports_embed_as_the_run(run: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch)
    command(export, f"run={run}", f"out={tmp_path / 'open_clip'}")
    shards = open_shards(parse_sources(str(SHARD)))
    images = [shards.read(i)["webp"] for i in range(20)]
    ours, exported = dyad.load(str(run), "cpu"), dyad.load(str(tmp_path / "open_clip"), "cpu")
    assert np.allclose(exported.encode_image(images), ours.encode_image(images), atol=1e-6)
    assert np.array_equal(exported.encode_text(["a frog"]), ours.encode_text(["a frog"]))
    assert exported.temperature == ours.temperature
    for form in ("sentence_transformers", "dpr"):
        command(export, f"run={texts}", f"format={form}", f"out={tmp_path / form}")
        ours, exported = dyad.load(str(texts), "cpu"), dyad.load(str(tmp_path / form), "cpu")
        assert np.array_equal(exported.encode_question(["anchor bridge"]), ours.encode_question(["anchor bridge"]))
        passages = [("title", "candle"), "desert engine"]
        assert np.array_equal(exported.encode_passage(passages), ours.encode_passage(passages))
        assert exported.config.data.passage.prefix == "say: " and not exported.encoder.cosine


def test_batches_are_those_of_training(run: Path) -> None:
    model = dyad.load(str(run), "cpu")
    found = list(dyad.batches(SHARD, model=model, global_batch_size=64, seed=np.int64(3)))  # type: ignore[arg-type]
    order = Order([181], [1.0], seed=3, global_batch_size=64)
    expected = [order.local(step, 0, 1)[1] for step in range(order.steps_per_epoch)]
    assert [batch.sample_ids.tolist() for batch in found] == [ids.tolist() for ids in expected]
    (later,) = dyad.batches(str(SHARD), model=model, global_batch_size=64, seed=3, steps=range(1, 2))
    assert torch.equal(later.x, found[1].x) and torch.equal(later.y, found[1].y)


def test_the_import_is_light_and_shows_its_names() -> None:
    code = """import sys, dyad
assert not {"torch", "numpy", "transformers"} & set(sys.modules), "import dyad"
dyad.OBJECTIVES, dyad.ConfigError
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(getattr(dyad, name) for name in dyad.__all__)
    with raises(AttributeError, "'laod'"):
        dyad.laod  # type: ignore[attr-defined]  # noqa: B018


def test_the_examples_of_the_documents_run(
    run: Path, texts: Path, images: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """As shown, but for a smaller batch; each has at most twelve lines."""
    examples = re.findall(r"```python\n(import dyad\n.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert all(len(example.splitlines()) <= 12 for example in examples)
    examples.pop()  # of sequences: test_recommend.py
    assert len(examples) == 2 and examples[0] in (ROOT / "README.md").read_text()
    shutil.copytree(beir, tmp_path / "data/samples/topics")
    (tmp_path / "data/samples/topics/qrels/test.tsv").rename(tmp_path / "data/samples/topics/qrels/train.tsv")
    (tmp_path / "runs").mkdir()
    links = {"runs/mine": run, "runs/topics": texts, "my_pictures": images, "data/samples/emoji": EMOJI}
    for name, folder in links.items():
        (tmp_path / name).symlink_to(folder)
    code = "\n".join(examples).replace("global_batch_size=64", "global_batch_size=4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text(code)
    runpy.run_path("shown.py")
    printed = capsys.readouterr().out
    for shown in ("image_to_text_R@1", "my_pictures/", "torch.Size([4, 32]) torch.Size([4, "):
        assert shown in printed, printed


def checked_by_pyright(model: dyad.Model, index: dyad.Index) -> None:
    """Never called: the type checker compares what it knows of each name."""
    assert_type(dyad.load("runs/x", "cpu", block=8), dyad.Model)
    assert_type(model.encode_image([Path("a.jpg"), "b.jpg"]), np.ndarray)
    assert_type(model.search(index, "a frog", k=5), list[dyad.Hit])
    assert_type(model.search(index, ["a frog", "a toad"]), list[list[dyad.Hit]])
    assert_type(model.search(index, "a")[0].score, float)
    assert_type(dyad.evaluate(model, ["beir:x"]), dict[str, dict[str, float]])
    assert_type(next(dyad.batches("shards", model=model)), dyad.Batch)
    assert_type(model.temperature, float | None)
    dyad.load(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
