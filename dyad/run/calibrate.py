"""Take temperature and bias of the loss from the weights that a run starts from; compare given scores with cosines;
describe the inputs of the towers."""

from collections.abc import Iterator

from dyad.data.base.arrays import evenly_spaced
from dyad.data.image_text.dataset import image_spec
from dyad.data.image_text.stream import Stream
from dyad.data.loading.loader import BatchSource
from dyad.data.loading.negatives import LOOKED_AT
from dyad.train.config import Activation, ImageTower, TextTower, TrainConfig
from dyad.train.losses.objectives.base import Objective
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.libraries.open_clip import BuildContext, resolve_model_name
from dyad.train.towers.models import ImageModel, ImageTextModel, TwoTowerModel

CONTEXT_LENGTH = 77  # of open_clip, for a model whose configuration has none


def calibrate(config: TrainConfig, objective: Objective, known: Calibration | None) -> list[str]:
    """Set the objective's temperature and bias to those of the initial weights; return at most one line for the log.

    Every rank must call it, before the first step. known: the temperature and bias with which the weights were trained;
    None if unknown. Only those of "temperature" and "init_bias" that config.from_weights lists are set. Nothing is set
    if `known` belongs to another similarity than the objective's, or does not fit its parameters; the line says so.
    Without `known` or from_weights, [] is returned.
    """
    if known is None or not config.from_weights:
        return []
    bias = "" if known.logit_bias is None else f", bias {known.logit_bias:.4g}"
    there = f"{known.source} knows temperature {known.temperature:.4g} (logit scale {1 / known.temperature:.4g}){bias}"
    name, similarity = config.objective.name, config.objective.similarity.value
    if similarity != known.similarity:
        return [f"{there}, of {known.similarity}. Not taken: objective.similarity={similarity}"]
    if taken := objective.calibrate(known.logit_scale, known.logit_bias, config.from_weights):
        return [f"{there}. Taken: {', '.join(f'objective.{option}={value:.4g}' for option, value in taken.items())}"]
    return [f"{there}. Not taken: objective={name} has no place for it, and starts as its options say"]


def describe_scores(objective: Objective, dataset: BatchSource | Stream, samples: int) -> list[str]:
    """Return a line for the log if cosines cannot become the teacher's scores, divided by options.divisor; else [].

    So it is if one of these quotients is above 1. At most LOOKED_AT samples are read, evenly spaced. samples: the
    number of all samples. Objectives without a divisor, and streams, have no line.
    """
    divisor = getattr(objective.options, "divisor", None)
    if divisor is None or isinstance(dataset, Stream):
        return []
    scores = dataset.__getitems__([(0, int(i)) for i in evenly_spaced(samples, LOOKED_AT)]).teacher
    if scores is None or (largest := scores.abs().max().item()) <= divisor:
        return []
    own = f"objective.divisor={divisor:g}: there are scores of {largest:g}, and cosines are at most 1"
    return [f"{own}. Set objective.divisor to the largest score, such as {largest:g}"]


def describe_positions(config: TrainConfig) -> list[str]:
    """Return a line for the log if open_clip has interpolated the position embeddings of pretrained weights, else [].

    It does so to load them into a text tower that takes texts of another length (model.text.context_length).
    """
    wanted = config.model.text.context_length
    if wanted is None or not config.has_texts or config.model.text.kind is not TextTower.open_clip:
        return []
    import open_clip  # takes seconds, and other runs do not need it

    name, weights = BuildContext(config.model, True).text_model
    known = resolve_model_name(name)
    settings = (open_clip.get_model_config(known) or {}).get("text_cfg", {})
    own, has_table = settings.get("context_length", CONTEXT_LENGTH), "hf_model_name" not in settings
    if own == wanted or not has_table or not (weights or ":" in known):
        return []
    problem = f"model.text.context_length={wanted}: open_clip interpolates the {own} positions of the weights"
    return [f"{problem}, so that texts get others than these were trained with. Fine-tune the model before use"]


def describe_inputs(config: TrainConfig, model: TwoTowerModel) -> Iterator[str]:
    """Yield at most one line for the log on the inputs of the towers, such as the size of images.

    It has image size, resizing and normalisation, the most tokens of a text, and the activation if that is QuickGELU or
    model.activation=model chose it. Nothing is yielded unless the image tower is of another library (open_clip, timm,
    transformers).
    """
    own = config.model
    if not isinstance(model, ImageModel) or own.image.kind not in {*ImageTower} - {ImageTower.cnn}:
        return
    named = {"name": own.image.name or own.name, "pretrained": own.image.pretrained or own.pretrained}
    words = " ".join(f"model.{key}={value}" for key, value in named.items() if value)
    image = image_spec(model.image, config.data)
    mean, std = (", ".join(f"{number:.4g}" for number in numbers) for numbers in (image.mean, image.std))
    parts = [f"images of {image.size} pixels, {image.interpolation}, {image.resize}, ({mean}) ± ({std})"]
    if isinstance(model, ImageTextModel) and (length := getattr(model.tokenize, "context_length", None)):
        parts.append(f"texts of {length} tokens")
    if isinstance(model, ImageTextModel) and (model.open_clip_config or {}).get("quick_gelu"):
        parts.append("QuickGELU")
    elif own.activation is Activation.model and own.pretrained:
        parts.append("the activation of its name, whatever the weights had (model.activation=model)")
    yield f"{words}: {'; '.join(parts)}"
