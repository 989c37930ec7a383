"""Foreign weights stay the model they were: what training, `dyad.load`, evaluation and exports take from them.

Each model is made by its own library. Temperature, bias, activation, mean, std, size, interpolation, context and
tokenizer are taken; of SentenceTransformers see test_sentence_transformers_folder.py, too.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import open_clip.factory as factory
import pytest
import torch
from helpers import tiny_bert
from helpers.export import near
from helpers.foreign import MADE, Foreign, clip_tokenizer, of_two_towers, stand_in_hub, unit
from helpers.messages import raises
from helpers.tiny_runs import records
from helpers.towers import random_images
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor

import dyad
from dyad.data.base.errors import ConfigError
from dyad.evaluation.find_model import find_model
from dyad.evaluation.load_run import find_run, load_run, read_config
from dyad.export.library import ExportSource
from dyad.export.main import chosen_format, export, library_of
from dyad.run.calibrate import calibrate, describe_inputs, describe_positions
from dyad.train.cli.compose import compose_config, words_for
from dyad.train.config import Activation, TrainConfig
from dyad.train.losses import build_objective
from dyad.train.losses.objectives.base import Objective
from dyad.train.run_folder.folder import CONFIG, all_keys, check_run, open_run, recorded_activation, run_folder
from dyad.train.towers.build import build_model
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.models import ImageTextModel

TEXTS = ["a frog", "", "two red flags on a mountain, and a very long row of words behind them, " * 3]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "download_pretrained", factory.download_pretrained)
        stand_in_hub(folder)
        yield folder
    factory._MODEL_CONFIG_PATHS.remove(folder)
    factory._rescan_model_configs()


@pytest.fixture(scope="module", params=MADE)
def foreign(request: pytest.FixtureRequest, hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    return MADE[request.param](tmp_path_factory.mktemp("model"))


def configured(*words: str) -> TrainConfig:
    return compose_config(["data.train=x.tar", "steps=1", *words])


def close(ours: Any, theirs: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), unit(theirs), atol=1e-6, rtol=0)


@torch.no_grad()
def check_model(model: ImageTextModel, foreign: Foreign) -> None:
    """Embeddings, preprocessing, lengths and calibration are those of the library."""
    pixels, towers = random_images(3, foreign.image[0]), model.towers.eval()
    close(unit(towers.x_tower(pixels)), foreign.images(pixels))
    close(unit(towers.y_tower(model.tokenize(TEXTS))), foreign.texts(TEXTS))
    image = model.image
    assert (image.size, image.interpolation, image.resize) == foreign.image[:3]
    assert (image.mean, image.std) == (pytest.approx(foreign.image[3]), pytest.approx(foreign.image[4]))
    assert model.tokenize([""]).shape[1] == foreign.length
    check_calibration(model.calibration, foreign)


def check_calibration(known: Calibration | None, foreign: Foreign) -> None:
    assert known is not None and known.logit_scale == pytest.approx(foreign.scale, abs=1e-6)
    assert known.logit_bias == (None if foreign.bias is None else pytest.approx(foreign.bias, abs=1e-6))


def started(config: TrainConfig, known: Calibration | None) -> tuple[Objective, list[str]]:
    """The objective of a run as it starts."""
    options = {key: value for key, value in vars(config.objective).items() if key != "name"}
    objective = build_objective(config.objective.name, **options)
    return objective, calibrate(config, objective, known)


@pytest.fixture(scope="module")
def source(foreign: Foreign) -> ExportSource:
    """What a run that names the model begins with."""
    config = configured(*foreign.words)
    model = cast(ImageTextModel, build_model(config))
    return ExportSource("mine", config, model, model.calibration)


def test_training_evaluation_and_the_api_have_the_model(foreign: Foreign, source: ExportSource) -> None:
    assert source.config.from_weights == ["temperature", "init_bias"]
    check_model(cast(ImageTextModel, source.model), foreign)
    loaded = dyad.load(foreign.name, "cpu")
    found = loaded.loaded  # by find_model, as python -m eval model= does
    check_model(cast(ImageTextModel, found.model), foreign)
    check_calibration(found.calibration, foreign)
    pixels = random_images(2, foreign.image[0])
    close(loaded.encode_image([*pixels]), foreign.images(pixels))
    close(loaded.encode_text(TEXTS), foreign.texts(TEXTS))
    assert loaded.temperature == pytest.approx(math.exp(-foreign.scale), rel=1e-6)
    assert loaded.bias == (None if foreign.bias is None else pytest.approx(foreign.bias))


def test_an_export_has_the_model(
    foreign: Foreign, source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near(monkeypatch)
    format_ = chosen_format(None, source.config, source.model)
    assert format_.name in ("open_clip", "transformers")
    assert export(library_of(format_), source, tmp_path / "out") < 1e-5
    check_calibration(find_model(str(tmp_path / "out")).load().calibration, foreign)
    again = cast(ImageTextModel, build_model(configured(*_words_of(format_.name, tmp_path / "out"))))
    check_model(again, foreign)


def _words_of(library: str, folder: Path) -> list[str]:
    return (
        [f"model.name=local-dir:{folder}"] if library == "open_clip" else ["model=transformers", f"model.name={folder}"]
    )


# temperature and bias -------------------------------------------------------------------------------------------------

SOFTMAX, SIGMOID = Calibration("w", math.log(50)), Calibration("w", 3.5, -12.9)
WEIGHTS = ("model.name=ViT-B-32", "model.pretrained=openai")
# Words of a command, what the weights know → temperature and bias at the start, None: as configured
STARTS: dict[str, tuple[list[str], Calibration, float, float | None]] = {
    "clip": ([], SOFTMAX, 0.02, None),
    "typed": (["objective.temperature=0.1"], SOFTMAX, 0.1, None),
    "a preset types nothing": (["objective=clip_emoji"], SOFTMAX, 0.02, None),
    "fixed": (["objective.learnable=false"], Calibration("w", math.log(200)), 0.005, None),
    "clamped": ([], Calibration("w", math.log(200)), 0.01, None),
    "cosine": (["objective.similarity=dot"], SOFTMAX, 0.07, None),
    "siglip": (["objective=siglip"], SIGMOID, math.exp(-3.5), -12.9),
    "siglip, typed bias": (["objective=siglip", "objective.init_bias=-5"], SIGMOID, math.exp(-3.5), -5.0),
    "siglip, typed scale": (["objective=siglip", "objective.init_scale=5"], SIGMOID, 0.2, -12.9),
    "siglip of a softmax": (["objective=siglip"], SOFTMAX, 0.1, -10.0),
    "local_nce": (["objective=local_nce", "objective.init_bias=0"], SIGMOID, math.exp(-3.5), 0.0),
    "local_nce, bias on top of a prior": (["objective=local_nce"], SIGMOID, 0.07, 0.0),
    "weights of dot products": ([], Calibration("w", 3.5, None, "dot"), 0.07, None),
    "dot": (["objective.similarity=dot"], Calibration("w", 1.5, None, "dot"), math.exp(-1.5), None),
    "nce": (["objective=nce"], SIGMOID, 0.07, 0.0),
    "clip of a sigmoid": ([], SIGMOID, math.exp(-3.5), None),
    "left": (["from_weights=[]"], SOFTMAX, 0.07, None),
}


@pytest.mark.parametrize("start", STARTS)
def test_the_objective_starts_where_the_weights_are(start: str) -> None:
    words, known, temperature, bias = STARTS[start]
    objective, lines = started(configured(*WEIGHTS, *words), known)
    assert math.exp(-objective.get_parameter("logit_scale").item()) == pytest.approx(temperature, rel=1e-5)
    assert bias is None or objective.get_parameter("bias").item() == pytest.approx(bias)
    assert (lines == []) == (start == "left") and all(line.startswith("w knows") for line in lines)


def test_a_tower_from_scratch_leaves_no_scale_of_the_weights(tmp_path: Path) -> None:
    words = of_two_towers(tmp_path, kind="clip").words
    for side in ("image", "text"):
        assert build_model(configured(*words, f"model.{side}.from_scratch=true")).calibration is None


def test_temperatures_of_samples_start_as_configured_and_a_line_says_so() -> None:
    config = configured(*WEIGHTS, "objective=isogclr", "objective.num_samples=4", "objective.gamma=0.8")
    _, (line,) = started(config, SOFTMAX)
    assert "Not taken: objective=isogclr" in line
    assert started(config, None)[1] == []


def test_a_run_logs_the_scale_of_the_weights_and_init_from_that_of_the_run(
    commands, hub: Path, tiny: Callable[[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    """A run of the tag openai, and one that begins with its weights and names nothing of its model."""
    there = {"PYTHONPATH": str(Path(__file__).parents[3]), "DYAD_HUB": str(hub)}
    common = {"plugins": "[helpers.foreign]", "data.augment": "null", "steps": 2, "optim.lr": 1e-9}
    of_tag = ["model=open_clip", *(f"{word}" for word in WEIGHTS)]
    words = [w for w in tiny({"run.name": "a", **common}) if not w.startswith(("model", "data.augment"))]
    begun = commands.run(*words, *of_tag, **there)
    assert begun.code == 0, begun.out
    assert (
        "model.pretrained=openai knows temperature 0.01 (logit scale 100). Taken: objective.temperature=0.01"
        in begun.out
    )
    assert "images of 64 pixels, bicubic, shortest" in begun.out and "QuickGELU" in begun.out
    run = tmp_path / "runs/a"
    assert records(run)[0]["train/logit_scale"] == pytest.approx(100, rel=1e-4)
    second = [w for w in tiny({"run.name": "b", **common}) if not w.startswith(("model", "data.augment"))]
    after = commands.run(*second, f"init_from={run}", **there)
    assert after.code == 0, after.out
    assert records(tmp_path / "runs/b")[0]["train/logit_scale"] == pytest.approx(100, rel=1e-3)
    models = [cast(ImageTextModel, load_run(*find_run(str(tmp_path / "runs" / name))).model) for name in "ab"]
    pixels = random_images(2, 64)
    x, again = (model.towers.eval().x_tower(pixels) for model in models)
    torch.testing.assert_close(x, again, atol=1e-5, rtol=0)
    assert all((model.open_clip_config or {})["quick_gelu"] for model in models)
    typed = commands.run(*second, f"init_from={run}", "run.name=c", "objective.temperature=0.5", **there)
    assert typed.code == 2 and "given twice" in typed.out  # run.name


def test_the_log_has_the_resize_mode_of_the_run(hub: Path) -> None:
    config = configured(*WEIGHTS, "data.resize=squash")
    (line,) = describe_inputs(config, build_model(config))
    assert "images of 64 pixels, bicubic, squash" in line


@pytest.mark.parametrize(("length", "lines"), [("null", 0), (24, 0), (12, 1), (40, 1)])
def test_the_log_says_that_positions_are_interpolated(length: object, lines: int, hub: Path) -> None:
    said = describe_positions(configured(*WEIGHTS, f"model.text.context_length={length}"))
    assert len(said) == lines and all("24 positions" in line and f"={length}:" in line for line in said)


# activation -----------------------------------------------------------------------------------------------------------


def test_weights_of_the_other_activation_are_refused_with_two_commands(hub: Path) -> None:
    commands = "model.name=ViT-B-32 model.pretrained=laion2b_s34b_b79k", "model.name=ViT-B-32-quickgelu"
    with raises(ConfigError, *commands, "model.pretrained=openai"):
        build_model(configured("model.name=ViT-B-32-quickgelu", "model.pretrained=laion2b_s34b_b79k"))


def test_an_older_run_goes_on_with_gelu(tmp_path: Path, hub: Path) -> None:
    """Before from_weights there was a config.yaml of a run that had GELU with these weights."""
    words = (*WEIGHTS, f"run.dir={tmp_path}", "run.name=old")
    run = open_run(configured(*words))
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    tree: Any = OmegaConf.load(run / CONFIG)
    del tree["from_weights"], tree["model"]["activation"]
    OmegaConf.save(tree, run / CONFIG)
    model = cast(ImageTextModel, build_model(read_config(run), load_pretrained=False))
    assert "quick_gelu" not in (model.open_clip_config or {})
    again = configured(*words)
    check_run(again)
    assert recorded_activation(again) is Activation.model
    check_run(configured(*words, "objective.temperature=0.07"))
    open_run(again)
    with raises(ConfigError, "objective.temperature: 0.07 there, 0.1 now") as changed:
        check_run(configured(*words, "objective.temperature=0.1"))
    assert "from_weights" not in str(changed.value)
    with raises(ConfigError, "from_weights: [temperature,init_bias] there, [init_bias] now"):  # the default, typed
        check_run(configured(*words, "objective.temperature=0.07"))
    assert run_folder(configured(*WEIGHTS)) == run_folder(configured(*WEIGHTS, "from_weights=[]"))


def test_words_for_a_configuration_compose_to_it(sentences: Path) -> None:
    config = configured("experiment=mnrl", f"model.text.name={sentences}", "data.passage.length=256")
    assert all_keys(compose_config(words_for(config))) == all_keys(config)
    config = configured(*WEIGHTS, "objective=clip_emoji")
    assert compose_config(words_for(config)).from_weights == ["temperature", "init_bias"]


# missing tensors ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return folder


def without(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], out: Path) -> Path:
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(change(load_file(folder / "model.safetensors")), out / "model.safetensors", {"format": "pt"})
    return out


def text_words(folder: Path) -> list[str]:
    return ["task=question_passage", "model=encoder", f"model.text.name={folder}", "objective=dpr"]


def test_missing_weights_of_an_encoder_are_refused_by_name(bert: Path, tmp_path: Path) -> None:
    dropped = without(bert, lambda w: {k: v for k, v in w.items() if "attention" not in k}, tmp_path / "dropped")
    with raises(ConfigError, "encoder.layer.0.attention"):
        build_model(configured(*text_words(dropped)))


def test_a_head_that_no_tower_uses_may_be_missing(bert: Path, tmp_path: Path) -> None:
    dropped = without(bert, lambda w: {k: v for k, v in w.items() if "pooler" not in k}, tmp_path / "headless")
    same = [build_model(configured(*text_words(folder))) for folder in (bert, dropped)]
    tokens = same[0].tokenize(["abc", "a"], 8)
    assert torch.equal(*(model.towers.eval().x_tower(tokens) for model in same))


def test_prefixes_of_wrappers_are_stripped_and_not_exported(bert: Path, tmp_path: Path) -> None:
    config = configured(*text_words(bert))
    own = build_model(config)
    tokens = own.tokenize(["abc", "a"], 8)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        wrapped = without(bert, lambda w, p=prefix: {f"{p}{k}": v for k, v in w.items()}, tmp_path / prefix)
        config.model.text.name = str(wrapped)
        model = build_model(config)
        assert torch.equal(*(of.towers.eval().x_tower(tokens) for of in (own, model)))
        cast(Any, model.towers.x_tower).trunk.encoder.save_pretrained(wrapped / "again")
        assert not [name for name in load_file(wrapped / "again/model.safetensors") if name.startswith(prefix)]


def test_a_folder_without_weights_is_no_random_model(tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {}, "preprocess_cfg": {}}))
    from helpers.foreign import SMALL

    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": SMALL, "preprocess_cfg": {}}))
    with raises(ConfigError, tmp_path):
        build_model(configured(f"model.name=local-dir:{tmp_path}"))


# lengths, tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentenceTransformer's folder."""
    from sentence_transformers.sentence_transformer import modules as parts

    out = tmp_path_factory.mktemp("sentences")
    modules: Any = [parts.Transformer(str(bert), max_seq_length=512), parts.Pooling(32, "cls"), parts.Normalize()]
    prompts = {"query": "q: ", "document": "d: "}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save_pretrained(str(out))
    return out


@pytest.mark.parametrize("experiment", ["mnrl", "tevatron", "llm_embedder", "dpr_nq"])
def test_the_folder_wins_over_a_recipe_and_typed_keys_over_the_folder(sentences: Path, experiment: str) -> None:
    common = [f"experiment={experiment}", f"model.text.name={sentences}"]
    config = configured(*common)
    question, passage = config.data.question, config.data.passage
    assert (question.length, passage.length, question.prefix, passage.prefix) == (512, 512, "q: ", "d: ")
    assert (config.model.text.pooling.value, config.objective.similarity.value) == ("cls", "cosine")
    typed = configured(*common, "data.question.length=99", "data.passage.prefix=x", "model.text.pooling=mean")
    assert (typed.data.question.length, typed.data.passage.prefix, typed.model.text.pooling.value) == (99, "x", "mean")


def test_texts_of_scored_pairs_have_no_prompt_of_queries(sentences: Path) -> None:
    """As in sentence-transformers, whose losses and evaluators take the default prompt alone."""
    for words in (["experiment=sts"], ["experiment=mnrl", "objective=cosine_mse"]):
        data = configured(*words, f"model.text.name={sentences}").data
        assert (data.question.prefix, data.passage.prefix, data.question.length) == ("", "", 512)


def test_a_recipe_of_the_user_is_typed(sentences: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults:\n  - override /task: question_passage\n  - override /model: encoder\ndata: {question: {length: 7}}\n"
    )
    config = configured(f"experiment={recipe}", f"model.text.name={sentences}", "objective=dpr")
    assert (config.data.question.length, config.data.passage.length) == (7, 512)


def test_the_values_of_a_recipe_for_its_own_model_stay() -> None:
    config = configured("experiment=topics")
    assert (config.data.question.length, config.data.passage.length) == (32, 64)


def test_a_text_whose_tokenizer_pads_with_its_end(tmp_path: Path) -> None:
    """CLIP's tokenizer with an encoder that we pool: a row does not depend on what it is filled up with."""
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=49408, **cast(Any, shape))).save_pretrained(tmp_path)
    clip_tokenizer().save_pretrained(tmp_path)
    for pooling in ("mean", "cls", "last"):
        model = build_model(configured(*text_words(tmp_path), f"model.text.pooling={pooling}"))
        tower = model.towers.eval().x_tower
        alone, together = (
            model.tokenize(["a frog"], 16),
            model.tokenize(["a frog", "a frog on a very long green leaf"], 16),
        )
        tokenizer: Any = model.tokenize
        assert tokenizer.lengths(together)[0] == 4  # start, a, frog, end
        torch.testing.assert_close(tower(alone)[0], tower(together)[0], atol=1e-6, rtol=0)


def test_the_text_model_of_clip_embeds_questions_of_any_length_and_that_of_siglip_none(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    foreign = of_two_towers(tmp_path / "clip", "clip")
    model = build_model(configured(*text_words(tmp_path / "clip"), "model.embed_dim=null"))
    tower = model.towers.eval().x_tower
    rows = [model.tokenize(texts, 24) for texts in (["a frog"], ["a frog", TEXTS[2]])]
    assert [tokens.shape[1] for tokens in rows] == [8, 24]
    for tokens in rows:
        torch.testing.assert_close(tower(tokens)[:1], foreign.texts(["a frog"]), atol=1e-6, rtol=0)
    (tmp_path / "siglip").mkdir()
    of_two_towers(tmp_path / "siglip", "siglip")
    with raises(ConfigError, "siglip"):
        build_model(configured(*text_words(tmp_path / "siglip")))
