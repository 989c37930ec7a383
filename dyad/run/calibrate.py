"""Values that a run takes from the weights that it starts from: temperature and bias of its loss, with lines for the
log."""

from collections.abc import Iterator

from dyad.data.image_text.dataset import image_spec
from dyad.train.config import Activation, ImageTower, TrainConfig
from dyad.train.losses.objectives.base import Objective
from dyad.train.towers.libraries.calibration import Calibration
from dyad.train.towers.models import ImageModel, ImageTextModel, TwoTowerModel


def calibrate(config: TrainConfig, objective: Objective, known: Calibration | None) -> list[str]:
    """Set the objective's temperature and bias to those of the initial weights, as far as config.from_weights lists
    them.

    known: the temperature and bias of the weights; None if unknown. Nothing is set if these belong to another
    similarity than the objective's. Returns lines for the log, at most one.
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


def describe_inputs(config: TrainConfig, model: TwoTowerModel) -> Iterator[str]:
    """Yield at most one line for the log on the inputs of the towers: image size, normalisation, length of texts,
    activation. Nothing is yielded unless the image tower is one of another library, such as open_clip or timm."""
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
