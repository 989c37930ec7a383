"""`python -m eval`: the suite, its JSON files and tables, and one clear answer to every mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.eval import ROOT
from helpers.messages import raises
from helpers.runs import EMOJI, distinct_emoji, make_run, save_checkpoint, small_task, write_wds
from helpers.shards import image, write_tar

from dyad import process
from dyad.data.base.command_line import help_text, parse_options
from dyad.data.base.errors import ConfigError, DataError, HardwareError, SampleError
from dyad.data.image_text.decode import decode
from dyad.eval.config import Baseline, EvalCommand
from dyad.eval.results.write import write
from dyad.evaluation.load_run import find_run, load_run, own_output, read_config
from dyad.evaluation.main import baselines_of, main, with_eval_options
from dyad.evaluation.suite import KINDS, check_suite
from dyad.train.cli.compose import compose_config
from dyad.train.config import Task, TrainConfig
from dyad.train.eval_config import EvalConfig, Truth


def evaluate(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", *arguments])
    main()


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> Path:
    return small_task(tmp_path_factory.mktemp("groups"), "groups.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory, groups: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("suite"), f"eval.suite=[zero_shot:{groups}]")


def test_an_index_serves_retrieval_and_zero_shot(run: Path, monkeypatch, tmp_path: Path, capsys) -> None:
    subgroups = small_task(tmp_path, "subgroups.json")
    for index in ("Flat", "HNSW32", "PQ4x4"):
        words = [f"suite=[retrieval:{EMOJI / 'twemoji-unseen.tar'},zero_shot:{subgroups}]", "examples=4"]
        evaluate(monkeypatch, f"checkpoint={run}", *words, f"out={tmp_path / index[:3]}", f"index={index}")
        shown = capsys.readouterr().out
        if index != "Flat":
            agrees_with_exact_search(tmp_path / "Fla", tmp_path / index[:3], index, shown)


def test_nothing_is_written_through_a_link_of_a_run_of_somebody_else(
    run: Path, groups: Path, monkeypatch, tmp_path: Path
) -> None:
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    shutil.copytree(run, theirs, ignore=shutil.ignore_patterns("eval"))
    elsewhere.mkdir()
    for name in ("eval", "mined", "export"):
        (theirs / name).symlink_to(elsewhere)
        with raises(ConfigError, theirs / name, "out="):
            own_output(theirs, name)
    suite = f"suite=[zero_shot:{groups}]"
    with raises(ConfigError, theirs / "eval", "out="):
        evaluate(monkeypatch, f"checkpoint={theirs}", suite)
    assert not list(elsewhere.iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    evaluate(monkeypatch, f"checkpoint={theirs}", suite, "out=~/elsewhere")
    assert (elsewhere / "groups.json").exists()


def agrees_with_exact_search(exact: Path, approximate: Path, spec: str, shown: str) -> None:
    """As far as an index can; `approximate` and `shown` are the files and the tables of its evaluation."""
    for name, ways, k in (("twemoji-unseen", ("image_to_text_", "text_to_image_"), 10), ("subgroups", ("",), 5)):
        flat, found = (json.loads((folder / f"{name}.json").read_text()) for folder in (exact, approximate))
        agreement = [found["metrics"].pop(f"{way}recall_against_exact@{k}") for way in ways]
        assert all(0 < share < 1 or (spec == "HNSW32" and share > 0.9) for share in agreement)
        assert found["search"] == ({way[:-1]: {"index": spec} for way in ways} if ways[0] else {"index": spec})
        assert found["metrics"].keys() == {metric for metric in flat["metrics"] if not metric.endswith("_rank")}
        for case in (case for cases in found["gallery"].values() for case in cases):
            rights = [answer["right"] for answer in case["systems"]["model"]]
            assert rights.index(True) + 1 == case["value"]["rank"] if any(rights) else case["value"]["rank"] != 1
        assert "search" not in flat and "approximate" in shown
    assert found["metrics"]["acc1"] == pytest.approx(1 - sum(m["count"] for m in found["confused"]) / 181, abs=1)


@pytest.fixture(scope="module")
def wds(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wds") / "small"
    write_wds(folder, distinct_emoji(40))
    return folder


def test_a_run_is_evaluated_as_it_was_while_training(run: Path, monkeypatch, capsys) -> None:
    evaluate(monkeypatch, f"checkpoint={run}", "examples=3")
    shown = capsys.readouterr().out
    assert (
        "image → text" in shown
        and "95 %" in shown
        and "to look at" in shown
        and "groups" in shown
        and "step 7 of" in shown
    )
    val, groups = (json.loads((run / "eval" / f"{name}.json").read_text()) for name in ("val", "groups"))
    assert val["task"] == "zeroshot_retrieval" and groups["task"] == "zeroshot_classification"
    assert (val["dataset"], val["step"], val["truth"], val["model"]) == ("val", 7, "keys", "tiny")
    assert val["pretrained"].endswith("step_00000007")
    metrics = val["metrics"]
    assert metrics["num_images"] == metrics["num_texts"] == 181
    for k in (1, 5, 10):
        assert metrics[f"text_to_image_R@{k}"] == metrics[f"image_retrieval_recall@{k}"]
        assert metrics[f"image_to_text_R@{k}"] == metrics[f"text_retrieval_recall@{k}"]
        assert val["chance"][f"image_to_text_R@{k}"] == pytest.approx(k / 181, rel=0.02)
    assert groups["metrics"]["num_samples"] == 181 and len(groups["per_class"]) == 9
    assert groups["confusion"]["counts"] and groups["intervals"]["acc1"]
    for result, titles in ((val, ["picture → texts", "text → pictures"]), (groups, ["picture → classes"])):
        assert list(result["gallery"]) == titles
        cases = [case for of in result["gallery"].values() for case in of]
        assert [case["kind"] for case in cases] == len(titles) * (3 * ["best"] + 3 * ["worst"] + 3 * ["random"])
        folder = run / "eval" / f"{result['dataset']}.pictures"
        shown = {item["picture"] for case in cases for item in items(case) if "picture" in item}
        assert shown == {path.name for path in folder.iterdir()} and len(shown) >= 9
        assert all(decode(path.read_bytes(), 10_000).shape == (3, 64, 64) for path in folder.iterdir())
    first = val["gallery"]["text → pictures"][0]
    scores = [answer["score"] for answer in first["systems"]["model"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 5
    assert first["query"]["id"].endswith("-twemoji") and first["query"]["text"] == first["right"][0]["text"]
    assert (run / "report.html").stat().st_size > 10_000


def items(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [case["query"], *case["right"], *(answer for of in case["systems"].values() for answer in of)]


def test_cases_agree_with_the_ranks(run: Path, monkeypatch, tmp_path: Path) -> None:
    """Every query is a case; its best answer is right when its rank is 1, and only then."""
    words = [f"suite=[retrieval:{EMOJI / 'twemoji-unseen.tar'}]", "examples=181", f"out={tmp_path}"]
    evaluate(monkeypatch, f"checkpoint={run}", *words)
    result = json.loads((tmp_path / "twemoji-unseen.json").read_text())
    for way, title in (("image_to_text", "picture → texts"), ("text_to_image", "text → pictures")):
        cases = result["gallery"][title]
        firsts = [case["systems"]["model"][0]["right"] for case in cases]
        assert firsts == [case["value"]["rank"] == 1 for case in cases]
        ids = {case["query"]["id"] for case in cases}
        assert 170 < len(ids) == len(cases) <= 181  # what is there twice is shown once
        best, worst = ([c["value"]["rank"] for c in cases if c["kind"] == kind] for kind in ("best", "worst"))
        assert best == sorted(best) and worst == sorted(worst, reverse=True) and best[-1] <= worst[-1]
        low, high = result["intervals"][f"{way}_R@10"]
        assert low < result["metrics"][f"{way}_R@10"] < high
    assert sum(result["scores"]["right"]) == sum(result["scores"]["best_wrong"]) == 181
    assert not (tmp_path / "report.html").exists() and not (tmp_path.parent / "report.html").exists()


def test_clip_benchmark_folders_of_both_kinds(run: Path, wds: Path, monkeypatch, tmp_path: Path) -> None:
    retrieval = tmp_path / "pairs"
    write_wds(retrieval, distinct_emoji(40), shards=1)
    (retrieval / "dataset_type.txt").write_text("retrieval\n")
    evaluate(
        monkeypatch, f"checkpoint={run}", f"suite=[wds:{wds},wds:{retrieval}]", f"out={tmp_path}/out", "examples=0"
    )
    small, pairs = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("small", "pairs"))
    assert small["metrics"]["num_samples"] == 40 and "per_class" in small
    assert pairs["truth"] == "pairs" and pairs["metrics"]["num_images"] == 40 and not any(pairs["gallery"].values())
    assert not list((tmp_path / "out").glob("*.pictures"))


def test_images_and_texts_are_probed(run: Path, monkeypatch, capsys, tmp_path: Path) -> None:
    known = {e.group for e in distinct_emoji(30)}
    for name, count in (("train", 30), ("test", 60)):
        shown = [(e.image, json.dumps({"group": e.group}).encode()) for e in distinct_emoji(count) if e.group in known]
        members = ((f"{n}.{end}", of[i]) for n, of in enumerate(shown) for i, end in enumerate(("webp", "json")))
        write_tar(tmp_path / f"{name}.tar", members)
    (tmp_path / "look.json").write_text(json.dumps({"train": "train.tar", "test": "test.tar", "label": "group"}))
    rows = [{"text": ["a frog", "a red flag"][i % 2] + "!" * (i // 2), "kind": i % 2} for i in range(20)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.json").write_text(json.dumps({"train": "test.jsonl", "test": "test.jsonl", "label": "kind"}))
    suite = f"suite=[probe:{tmp_path}/look.json,probe:{tmp_path}/words.json]"
    words = (suite, f"out={tmp_path}/out", "examples=1", "baselines=[untrained]", "probe_k=3")
    evaluate(monkeypatch, f"checkpoint={run}", *words, "probe_features=embeddings")
    assert "k-NN" in capsys.readouterr().out
    look, texts = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("look", "words"))
    assert (look["task"], texts["task"]) == ("linear_probe", "text_linear_probe")
    assert look["probe"]["features"] == "embeddings" and look["probe"]["k"] == 3 and look["probe"]["num_train"] == 30
    assert look["metrics"]["linear_acc1"] > look["chance"]["linear_acc1"] and texts["metrics"]["linear_acc1"] == 1
    assert look["baselines"]["untrained"]["difference"]["auc"]["interval"]
    assert list((tmp_path / "out" / "look.pictures").iterdir()) and not (tmp_path / "out" / "words.pictures").exists()


def test_the_command_line_wins_over_the_run(run: Path, monkeypatch, tmp_path: Path) -> None:
    words = [f"val={EMOJI}/{{noto,fxemoji}}-unseen.tar", "truth=pairs", "recall_k=[2,7]", "block=50", "workers=1"]
    evaluate(monkeypatch, f"checkpoint={run}", *words, f"out={tmp_path}", "examples=0")
    assert [p.name for p in tmp_path.iterdir()] == ["val.json"]
    result = json.loads((tmp_path / "val.json").read_text())
    assert result["truth"] == "pairs" and {"image_to_text_R@2", "text_to_image_R@7"} <= set(result["metrics"])
    assert "image_to_text_R@10" not in result["metrics"]


def test_a_damaged_checkpoint_is_passed_over_or_refused(run: Path, tmp_path: Path, capsys) -> None:
    """A checkpoint folder is taken itself."""
    folder = tmp_path / "tiny"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("eval"))
    older, newer = folder / "checkpoints/step_00000007", save_checkpoint(folder, read_config(run), seed=5, step=9)
    assert find_run(str(folder)) == (folder, newer)
    found, checkpoint = find_run(str(older))
    assert (found.resolve(), checkpoint) == (folder.resolve(), older)
    assert load_run(found, checkpoint).step == 7
    capsys.readouterr()
    weights = newer / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert find_run(str(folder))[1] == older
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_00000009" in line
    with raises(DataError, "model.safetensors"):
        load_run(*find_run(str(newer)))


def test_the_saved_configuration_is_read_back(run: Path, tmp_path: Path) -> None:
    config = read_config(run)
    assert config.objective.temperature == 0.05 and type(config.objective).__name__ == "SoftmaxOptions"
    assert config.data.text_key == "concept"
    with raises(ConfigError, "config.yaml"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text() + "\nsomething_new: 1\n")
    with raises(ConfigError, tmp_path):
        read_config(tmp_path)


MISTAKES = {
    ("chekpoint=x",): "Did you mean 'checkpoint'",
    (): "give one of run=, such as runs/NAME, checkpoint= and model=",
    ("checkpoint=runs/nowhere",): "is no folder",
    ("--checkpoint", "x"): "Did you mean 'checkpoint'",
    ("checkpoint=x", "truth=pair"): "truth=pair",
    ("checkpoint=x", "block=many"): "block=many",
    ("checkpoint=x", "block=0"): "block=0: must be 1 or more",
    ("checkpoint=x", "recall_k=[0,5]"): "recall_k=[0, 5]",
    ("checkpoint=x", "val=a.tar", "val=b.tar"): "given twice",
    ("checkpoint=x", "depth=10"): "depth=10: must be 100",
    ("checkpoint=x", "examples=-1"): "examples=-1: must be 0 or more",
    ("checkpoint=x", "workers=-1"): "workers=-1: must be 0 or more",
    ("checkpoint=x", "baselines=[bm52]"): "Did you mean 'bm25'",
    ("checkpoint=x", "model=st:x"): "give one of run=",
    ("run=x", "checkpoint=x"): "give one of run=",
    ("model=st:nowhere",): "nowhere",
    ("model=clip:ViT-B-32",): "no such kind of model. Write FOLDER or open_clip:…, st:…",
    ("model=open_clip:ViT-B-32", "suite=[wds:x]"): "say which weights, open_clip:ViT-B-32@FILE",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_exit_with_2(words: tuple[str, ...], monkeypatch, capfd) -> None:
    with pytest.raises(SystemExit) as ended:
        process.run(lambda: evaluate(monkeypatch, *words))
    said = capfd.readouterr()
    is_mistake(ended.value.code, said.out, said.err, MISTAKES[words])


def test_a_mistake_exits_with_2_in_a_process_of_its_own() -> None:
    """The mistake that is found last, after most imports."""
    *_, words = MISTAKES
    done = subprocess.run([sys.executable, "-m", "eval", *words], capture_output=True, text=True, cwd=ROOT, timeout=60)
    is_mistake(done.returncode, done.stdout, done.stderr, MISTAKES[words])


def is_mistake(code: object, out: str, err: str, named: str) -> None:
    assert code == 2 and out == ""
    assert named in err and len(err.splitlines()) <= 6 and "Traceback" not in err


def test_options_are_refused_where_the_run_does_not_read_them() -> None:
    for task, items in (("sequence", "ids"), ("sequence", "pictures"), ("question_passage", "texts")):
        config = compose_config([f"task={task}", f"data.items={items}", "objective=dpr"])
        found = with_eval_options(config, EvalCommand(suite=["x:y"], depth=200, index="Flat"))
        assert found.eval.depth == 200
        if task == "sequence":
            assert with_eval_options(config, EvalCommand(suite=["x:y"], recall_k=[2])).eval.recall_k == [2]
        with raises(ConfigError, "truth=", "captions=", f"task={task}"):
            with_eval_options(config, EvalCommand(suite=["x:y"], truth=Truth.pairs, captions=["a"]))
    with raises(ConfigError, "depth=", "corpus="):
        with_eval_options(compose_config([]), EvalCommand(suite=["x:y"], depth=200, corpus="x"))


def test_bm25_is_a_baseline_of_passages_alone() -> None:
    for task in ("question_passage", "language_model", "labelled", "image_text"):
        config = compose_config([f"task={task}", *["data.items=texts"] * (task == "labelled")])
        if task == "question_passage":
            assert baselines_of(EvalCommand(), config) == [Baseline.untrained, Baseline.bm25, Baseline.fusion]
            continue
        assert baselines_of(EvalCommand(), config) == []  # untrained costs as much as the model
        with raises(ConfigError, "baselines=[bm25]", f"task={task}", "untrained"):
            baselines_of(EvalCommand(baselines=[Baseline.bm25]), config)


def test_null_unsets_what_the_run_has_and_may_lack() -> None:
    config = compose_config(["data.text_key=concept", "data.relevance=score", "data.val=x.tar", "eval.suite=[wds:x]"])
    typed = ["run=x", "text_key=null", "val=null", "truth=null"]
    found = with_eval_options(config, parse_options(EvalCommand, typed, "python -m eval"))
    assert (found.data.text_key, found.data.val, found.data.relevance) == (None, None, "score")
    assert (found.eval.suite, found.eval.truth) == (["wds:x"], Truth.keys)
    untyped = with_eval_options(config, EvalCommand()).data
    assert (untyped.text_key, untyped.val, untyped.relevance) == ("concept", "x.tar", "score")


def test_the_events_of_data_val_of_a_run_precede_those_of_another_val() -> None:
    config = compose_config(["task=sequence", "data.items=ids", "objective=dpr", "data.val=a.csv"])
    found = with_eval_options(config, EvalCommand(val="b.csv")).data
    assert (found.val, found.sequence.earlier) == ("b.csv", "a.csv")


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(run: Path) -> None:
    with raises(ConfigError, run.name):
        find_run(str(run.parent))


SPECS = {
    "beir:x": "beir:x",
    "retreival:x.tar": "'retrieval'",
    "emoji": "emoji",
    "retrieval:": "retrieval:",
    "retrieval:nowhere.tar": "nowhere.tar",
    "zero_shot:nowhere.json": "nowhere.json",
    "wds:nowhere": "nowhere",
    "imagenet:nowhere": "imagenet:nowhere",
    "probe:nowhere.json": "eval.suite: probe:nowhere.json",
    "context_probe:nowhere.json": "eval.suite: context_probe:nowhere.json",
}


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_entries_are_refused_before_anything_is_loaded(spec: str) -> None:
    task = Task.sequence if spec.startswith("context_probe") else Task.image_text
    with raises(ConfigError, SPECS[spec]):
        check_suite(TrainConfig(task, eval=EvalConfig(suite=[spec])))


def test_options_of_passages_are_refused(run: Path, monkeypatch) -> None:
    with raises(ConfigError, "depth=", "task=image_text"):
        evaluate(monkeypatch, f"checkpoint={run}", "depth=200")


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(HardwareError, "file/x"):
        write(tmp_path / "file" / "x", {"dataset": "d"}, {})


def test_nothing_to_evaluate_is_said() -> None:
    with raises(ConfigError):
        with_eval_options(TrainConfig(Task.image_text), EvalCommand())


def test_help_teaches_without_torch() -> None:
    code = """import runpy, sys
sys.argv[1:] = ["--help"]
runpy.run_module("eval", run_name="__main__")
assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    for word in (*KINDS, "checkpoint", "truth", "recall_k", "python -m eval checkpoint="):
        assert word in done.stdout
    assert help_text("a", {"b": "c"}, EvalCommand).splitlines()[:2] == ["a", ""]


def test_values_are_taken_as_they_stand() -> None:
    suite = 'suite=[retrieval:d/{0,1}.tar,"wds:a b"]'
    words = ["checkpoint=x", suite, "val='d/{00..99}.tar'", "truth=keys", "out=null"]
    command = parse_options(EvalCommand, words, "python -m eval")
    assert command.suite == ["retrieval:d/{0,1}.tar", "wds:a b"]
    assert (command.val, command.truth, command.out) == ("d/{00..99}.tar", Truth.keys, None)


def test_keys_are_taken_as_training_writes_them_too() -> None:
    """Messages about data name the keys of training."""
    words = ["run=x", "data.columns=[a,b]", "eval.depth=200", "data.passage.corpus=c.jsonl"]
    command = parse_options(EvalCommand, words, "python -m eval")
    assert (command.columns, command.depth, command.corpus) == (["a", "b"], 200, "c.jsonl")
    for wrong in ("optim.columns=[a]", "data.depth=200", "eval.suit=[]"):
        with raises(ConfigError, wrong.partition("=")[0]):
            parse_options(EvalCommand, ["run=x", wrong], "python -m eval")


def test_a_table_with_columns_of_its_own_is_evaluated(run: Path, tmp_path: Path, monkeypatch) -> None:
    """The run has data.text_key=concept."""
    rows = "".join(f"{i}.png,emoji {i}\n" for i in range(4))
    (tmp_path / "t.csv").write_text(f"file,description\n{rows}")
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(image(i))
    words = [f"run={run}", f"val={tmp_path / 't.csv'}", "examples=0", "columns=[file,description]", "captions=[txt]"]
    with raises(SampleError, "'concept'", "data.text_key=null"):
        evaluate(monkeypatch, *words)
    for word in ("text_key=null", "truth=pairs"):
        evaluate(monkeypatch, *words, word, f"out={tmp_path / word}")
        assert json.loads((tmp_path / word / "val.json").read_text())["metrics"]["num_images"] == 4


@pytest.mark.parametrize(("name", "value"), [("block", 0), ("examples", -1)])
def test_limits_hold_for_the_configuration_of_a_run_folder_too(name: str, value: Any) -> None:
    with raises(ConfigError, f"eval.{name}={value}"):
        EvalConfig(**{name: value})
