"""python -m train.export run=runs/x [format=…]: write a trained model as a folder that another library loads.

The export succeeds only if the other library has loaded the folder and computed the same embeddings as the run.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from dyad.data.base.command_line import command_options
from dyad.data.base.errors import ConfigError, first_line
from dyad.data.base.files import setting_errors, whole_folder, write_json
from dyad.data.base.secrets import without_credentials
from dyad.data.config import described

if TYPE_CHECKING:
    from dyad.export.library import ExportSource, Library
    from dyad.train.config import TrainConfig
    from dyad.train.towers.models import TwoTowerModel


# format → the extra of pyproject.toml that installs what it needs
EXTRAS = {"sentence_transformers": "sentence-transformers", "onnx": "onnx"}


ExportFormat = StrEnum(
    "ExportFormat", ["open_clip", "transformers", "sentence_transformers", "dpr", "onnx", "torch", "causal_lm"]
)
CLASSES = "classes.npz"  # names (C,) and embeddings (C, D) of the classes of task=labelled
# task → the format that alone takes its models
ONLY_FORMAT = {"sequence": ExportFormat["torch"], "language_model": ExportFormat["causal_lm"]}


@dataclass
class ExportCommand:
    """The options of `python -m train.export`: which run is exported, in which format, and where to."""

    run: str = described(MISSING, "a run folder (its newest checkpoint), RUN@best or one checkpoint folder")
    format: ExportFormat | None = described(None, "what loads it; null: the library that the model is of, or else onnx")
    out: str | None = described(None, "folder to write; null: export/<format> in the run")
    push: str | None = described(None, "ORG/NAME: then upload the folder to this repository of the Hugging Face Hub")
    public: bool = described(False, "make that repository public if it is new; false: private")


PURPOSE = """\
Write a trained model as a folder that open_clip, sentence-transformers, transformers (dpr: two encoders; causal_lm: a
language model), onnxruntime or torch (of sequences) loads, with a model card, checked by loading it there and comparing
embeddings. Everything is key=value."""
EXAMPLES = {
    "the newest checkpoint, into the run's own folder": "python -m train.export run=runs/emoji_scratch",
    "the best by checkpoint.best": "python -m train.export run=runs/x@best",
    "one checkpoint, elsewhere": "python -m train.export run=runs/x/checkpoints/step_00001000 out=my_model",
    "two encoders, as DPR has them": "python -m train.export run=runs/topics format=dpr",
    "to the Hub, with the token of HF_TOKEN or hf auth login": "python -m train.export run=runs/topics push=ORG/NAME",
    "graphs for onnxruntime, of any model of images and texts": "python -m train.export run=runs/emoji format=onnx",
}


NOTES = "Installed by pip, the command is also: dyad export …"


def main() -> None:
    """Run the command: load a run, export it, print how to load the export, and with push= upload it."""
    command = command_options(ExportCommand, "python -m train.export", PURPOSE, EXAMPLES, lambda: NOTES)

    if command.push:
        check_repository(command.push)

    from dyad.eval.encode.encoder import Encoder
    from dyad.eval.results.panels import scored
    from dyad.eval.results.write import saved_results
    from dyad.evaluation.load_run import load_found, own_output
    from dyad.export.card import CARD
    from dyad.export.library import ExportSource
    from dyad.run.class_names import class_vectors
    from dyad.train.distributed.world import World
    from dyad.train.towers.heads import representation

    trained = load_found(command.run)
    chosen = chosen_format(command.format, trained.config, trained.model)
    library = library_of(chosen)
    out = Path(command.out).expanduser() if command.out else own_output(trained.run, f"export/{chosen.name}")
    name = trained.run.resolve().name
    results = [scored(result) for result in saved_results(trained.run) if result.get("step") == trained.step]
    model, encoder = representation(trained.model), Encoder.of(trained.config, trained.model, World())
    classes = class_vectors(trained.config, trained.model, encoder)
    source = ExportSource(name, trained.config, model, trained.calibration, trained.step, results, classes)
    difference = export(library, source, out)
    print(f"{out}: step {trained.step}. {library.name} loaded it in a process of its own, without a network,")
    print(f"and gave the same embeddings (to {difference:.1g}). Read its model card, {CARD}, before you hand it on.\n")
    print(library.snippet(out, source))
    if command.push:
        print(f"\nUploaded to {push_to_hub(out, command.push, not command.public, f'{name}, step {trained.step}')}")


def check_repository(name: str) -> None:
    """Raise ConfigError unless the Hugging Face Hub accepts `name` as ORG/NAME. This is checked before the export,
    which takes minutes."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError("the organisation or user is missing")
    except HFValidationError as error:
        raise ConfigError(
            f"push={name}: must be ORG/NAME, as the Hub names repositories: {first_line(error)}"
        ) from error


def push_to_hub(folder: Path, repository: str, private: bool, message: str) -> str:
    """Upload the export in `folder` to the Hugging Face Hub and return its URL there.

    repository: ORG/NAME; created if it does not exist. private: whether a new repository is private. message: the
    commit message. The token is that of HF_TOKEN or of `hf auth login`. Raises ConfigError if the Hub refuses the
    upload or cannot be reached; the folder is kept.
    """
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message)
        return without_credentials(str(url))
    except Exception as error:  # of the hub, the HTTP library or the network
        advice = "It takes a network, and a token that may write: HF_TOKEN=…, or hf auth login"
        reason = without_credentials(first_line(error))
        raise ConfigError(f"push={repository}: {reason}. {advice}. {folder} is complete") from error


def library_of(chosen: ExportFormat) -> "Library":
    """Return the Library (dyad/export/library.py) that writes and checks the format `chosen`.

    Raises ConfigError if a package that the format needs is not installed; its message names the pip extra that
    installs it.
    """
    try:
        return import_module(f"dyad.export.{chosen.name}").LIBRARY
    except ImportError as error:
        if chosen.name not in EXTRAS or (error.name or "").startswith("dyad"):
            raise
        raise ConfigError(
            f"format={chosen.name}: {error.name} is not installed, without which nothing is written and checked:  "
            f"pip install -e '.[{EXTRAS[chosen.name]}]' -c requirements.lock"
        ) from error


def export(library: "Library", source: "ExportSource", out: Path) -> float:
    """Write the export of a model into the folder `out`, and check it by the library that will load it.

    Returns the largest difference between our embeddings and the library's, as `compare_embeddings` in
    dyad/export/library.py. Beside the files of the library, `out` gets a model card, the file SETTINGS, and with
    source.classes the file CLASSES. An earlier export in `out` is replaced; the licence that a person wrote into its
    card is kept. Raises ConfigError when the format cannot hold the model, the library cannot load the folder, `out`
    cannot be written, or `out` exists with files that this export does not write, or with a card that was changed by
    hand; HardwareError when the process of the library is killed; AssertionError when the embeddings differ. After an
    error `out` is as it was before.
    """
    from numpy import savez

    from dyad.evaluation.find_model import settings_of
    from dyad.export.card import CARD, card, digest, licence_of_earlier_export
    from dyad.export.library import compare_embeddings
    from dyad.train.towers.libraries.calibration import SETTINGS

    out = out.absolute()
    with setting_errors(f"out={out}"):
        chosen = licence_of_earlier_export(out)
        with whole_folder(out, replace=True) as temporary:
            library.write(temporary, source)
            if source.classes:
                savez(temporary / CLASSES, names=[*source.classes], embeddings=[*source.classes.values()])
            existing = _files(out) if out.is_dir() else {out.name} if out.exists() else set()
            ours = {CARD, SETTINGS} if SETTINGS in existing else set()
            if foreign := existing - _files(temporary) - ours:
                raise ConfigError(f"out={out} exists and holds '{min(foreign)}': choose another folder, or remove it")
            distance = compare_embeddings(library, temporary, source)
            text = card(library, source, distance, chosen)
            (temporary / CARD).write_text(text, encoding="utf-8")
            write_json(temporary / SETTINGS, settings_of(source.config, source.calibration) | {"card": digest(text)})
    return distance


def chosen_format(asked: ExportFormat | None, config: "TrainConfig", model: "TwoTowerModel") -> ExportFormat:
    """Return the export format of a model: `asked` (format=…), or the default of the model if `asked` is None.

    The default is causal_lm for a language model, torch for a model of sequences, sentence_transformers for one of
    texts alone, open_clip or transformers if both towers come from one model of that library, else onnx. Raises
    ConfigError if the task of the model has one format only, and `asked` is another. Whether another format can hold
    the model is checked when it is written.
    """
    from dyad.train.towers.libraries.published import shared_model_name
    from dyad.train.towers.models import TextPairModel

    only = ONLY_FORMAT.get(task := config.task.name)
    if only and asked and asked is not only:
        raise ConfigError(f"format={asked.name} takes no task={task}. Take format={only.name}")
    if chosen := asked or only:
        return chosen
    if isinstance(model, TextPairModel):
        return ExportFormat.sentence_transformers
    if getattr(model, "open_clip_config", None):
        return ExportFormat.open_clip
    return ExportFormat.transformers if shared_model_name(config.model) else ExportFormat.onnx


def _files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder and its subfolders, relative to it. Symbolic links count as files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
