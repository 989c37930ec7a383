"""Rules of the keys data.negatives.*: which values do not fit the task, the data or the objective of a run.

Does not import torch.
"""

from collections.abc import Iterator

from dyad.data.config import DataConfig, Mode


def negatives_rules(data: DataConfig, task: str, objective: str) -> Iterator[str]:
    """Yield an error message for each key data.negatives.* whose value does not fit the run.

    task, objective: their names, e.g. "image_text" and "dpr".
    """
    negatives = data.negatives
    per_row, images, path = negatives.per_row, negatives.pictures, negatives.picture_file
    if per_row > 0 and task not in ("image_text", "question_passage", "language_model"):
        yield f"data.negatives.per_row={per_row}: task={task} has no hard negatives. Set it to 0"
    if images > 0 and task != "image_text":
        yield f"data.negatives.pictures={images}: task={task} has no images that are wrong for a text. Set it to 0"
    if path is not None and data.mode is Mode.stream:
        yield (
            f"data.negatives.picture_file={path}: names images by content, and data.mode=stream reads none out of "
            "turn. Take data.mode=indexed, or data.negatives.picture_fields"
        )
    if negatives.refresh_every > 0 and task != "question_passage":
        yield (
            f"data.negatives.refresh_every={negatives.refresh_every}: only task=question_passage mines while it trains."
            " Leave it out; python -m eval.mine mines before"
        )
    if objective == "epr" and per_row != 1:
        yield (
            f"objective=epr, data.negatives.per_row={per_row}: EPR is DPR with one hard negative a row. Set "
            "data.negatives.per_row=1, or take objective=dpr"
        )
