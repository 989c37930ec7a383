"""Probes of frozen features: a linear probe, k-nearest neighbours, AUC and partial AUC, on pictures or texts.

The training part fits the linear probe (linear_probe.py) and is searched by k-NN; the test part is scored. Classes are
the labels of the training part, sorted. Features are what the trunk of the tower gives before the projection or head, or
the embeddings (eval.probe_features).

k-NN: the `probe_k` training samples with the highest cosine similarity vote; of equal samples the earlier counts, of
equally many votes the first class wins, as in scikit-learn's KNeighborsClassifier(metric="cosine"). In the weighted vote
of Wu et al. 2018 (arXiv 1805.01978) a neighbour counts exp(similarity / 0.07).

AUC and partial AUC are of the probabilities of the linear probe, each class against all others, averaged over the
classes that occur in the test part, as roc_auc_score(multi_class="ovr", average="macro"); of two classes only the
second counts, as there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from scipy.special import softmax
from torch import Tensor

from dyad.data.base.errors import BadRow, DataError
from dyad.data.config import QuestionConfig
from dyad.data.image_text.dataset import Captions, Items, LabelledSet, Pictures
from dyad.data.image_text.sample import SURROGATE
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.formats import named
from dyad.data.question_passage.passages import Question
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.rows import Rows
from dyad.data.shards.shards import Shards
from dyad.eval.config import ProbeFeatures
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.metrics.auc import auc_values
from dyad.eval.metrics.bootstrap import Values, comparison
from dyad.eval.metrics.matches import Labels, Matches, Ranking
from dyad.eval.results.cases import Item, excerpt, item
from dyad.eval.results.thumbnails import Thumbnails
from dyad.eval.search.index import Index
from dyad.eval.tasks.baselines import before_training
from dyad.eval.tasks.image_text_retrieval import Direction
from dyad.eval.tasks.linear_probe import LinearProbe, held_out, linear_probe
from dyad.eval.tasks.zero_shot import accuracies, class_details, class_indices, per_class, unit
from dyad.train.distributed.agreement import rank_0_only

MAX_FPR = 0.05  # of the partial AUC
TEMPERATURE = 0.07  # of the weighted vote


@dataclass(frozen=True)
class Labelled:
    """One part of a data set: n inputs of a tower, the class label of each, and content keys (n,) int64.

    texts: the inputs as texts; empty for pictures.
    """

    items: Items
    labels: Sequence[str]
    keys: np.ndarray
    texts: Sequence[str] = ()

    @staticmethod
    def of(data: LabelledSet) -> "Labelled":
        return Labelled(data.images, data.labels, data.keys)


def labelled_texts(shards: Shards, label: str, tokenize: Callable[[list[str]], Tensor]) -> Labelled:
    """Read texts and labels from .jsonl files. label: the field of a row with its class; its text is in "text".

    tokenize: of the tower. Raises DataError, with the line, for a row that lacks one of them.
    """
    rows = Rows(shards)
    pairs = [rows.read(i, partial(_text_and_label, label)) for i in range(len(rows))]
    texts, labels = [text for text, _ in pairs], [name for _, name in pairs]
    keys = np.array([content_key(text.encode()) for text in texts], dtype=np.int64)
    return Labelled(Captions(texts, tokenize), labels, keys, texts)


def question_tokens(tokenize: TokenizeTexts, config: QuestionConfig, texts: list[str]) -> Tensor:
    """Tokenise n texts as the questions of a model of questions and passages, int64 (n, L), L tokens of the longest."""
    return tokens([Question("", text) for text in texts], tokenize, config)


def _text_and_label(label: str, fields: dict[str, Any]) -> tuple[str, str]:
    text = fields.get("text")
    if not isinstance(text, str) or not text.strip() or SURROGATE.search(text):
        raise BadRow("no text", f"'text' is {text!r:.80}")
    if fields.get(label) is None:
        raise BadRow("no label", f"it has no '{label}'; its fields are {named(fields)}")
    return text, str(fields[label])


class Probed(NamedTuple):
    """What the probes of one encoder found. values: metric → (n,) values of the n test samples, whose mean is the
    metric. aucs: class → its AUC. direction, found: the linear probe as a search for classes, and its ranks.
    """

    probe: LinearProbe
    values: Values
    aucs: dict[str, float]
    direction: Direction
    found: Ranking


@dataclass(frozen=True)
class Probe(Evaluator):
    """Evaluator of frozen features on one data set. side: the tower that takes its inputs. k: neighbours of k-NN."""

    train: Labelled
    test: Labelled
    side: Literal["x", "y"]
    features: ProbeFeatures = ProbeFeatures.features
    k: int = 20

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        world, names = encode.world, sorted(set(self.train.labels))
        target = class_indices(self.test.labels, names, self.name)
        if len(set(target.tolist())) < 2:
            raise DataError(
                f"{self.name}: the test part has one class only, '{self.test.labels[0]}': a probe takes two"
            )
        small = None if self.test.texts else Thumbnails(cast(Pictures, self.test.items))
        probe, values, aucs, direction, found = self._probed(encode, names, target, small)
        chance = {metric: 0.5 if "auc" in metric else 1 / len(names) for metric in values}
        chance |= {metric: 5 / len(names) for metric in values if metric.endswith("acc5")}
        chance["majority_class_share"] = float(np.bincount(target).max() / len(target))
        metrics = {**{name: float(v.mean()) for name, v in values.items()}, "num_samples": float(len(target))}
        details: dict[str, Any] = {
            "probe": {
                "features": str(self.features),
                "num_train": len(self.train.labels),
                "C": probe.c,
                "held_out_acc1": probe.held_out_accuracy,
                "k": self.k,
            },
            "per_class": {
                name: {**of, "auc": aucs.get(name)} for name, of in per_class(found.rank, target, names).items()
            },
        }
        if before := before_training(self.untrained, world):
            others = self._probed(before, names, target, small).values
            details["baselines"] = {"untrained": comparison(values, others, lambda metric: range(len(target)))}
        if examples is not None:
            make = partial(class_details, direction, found, target, values, names, examples)
            details |= rank_0_only(world, make) or {}
        files = {".pictures": small.write} if small and examples is not None else {}
        return Report("linear_probe" if small else "text_linear_probe", metrics, chance, details, files)

    def _probed(self, encode: Encoder, names: Sequence[str], target: np.ndarray, small: Thumbnails | None) -> Probed:
        """Encode both parts, and fit and score the probes. All processes call it together."""
        encode = replace(encode, features=self.features is ProbeFeatures.features)
        train_nD, test_nD = (encode(self.side, part.items) for part in (self.train, self.test))
        fitted = class_indices(self.train.labels, names, self.name)
        out = held_out(fitted, self.train.keys)
        if not out.any():
            raise DataError(f"{self.name}: no class of the training part has two different samples, one to choose C")
        probe = linear_probe(train_nD, fitted, out, encode.world)
        samples, classes = np.arange(len(target)), np.arange(len(names))
        direction = Direction(
            f"{'picture' if small else 'text'} → classes",
            np.concatenate([test_nD, np.ones_like(test_nD[:, :1])], axis=1),
            probe.weight.astype(np.float32),
            Matches(Labels(samples, target, len(samples)), Labels(classes, classes, len(classes))),
            partial(self._shown, small),
            lambda c: item(names[c], names[c]),
            keys=samples,
            groups=target,
        )
        found = direction.ranking(encode.world)
        linear = {f"linear_{metric}": v for metric, v in accuracies(found.rank, target, len(names)).items()}
        areas = _areas(softmax(probe.logits(test_nD), axis=1), target)
        near = Index(unit(train_nD), world=encode.world).search(unit(test_nD), self.k)
        votes = {"knn_acc1": np.ones_like(near.scores), "knn_weighted_acc1": np.exp(near.scores / TEMPERATURE)}
        knn = {metric: _vote(fitted[near.positions], vote, target) for metric, vote in votes.items()}
        whole, partly = np.mean(list(areas.values()), axis=0)
        values = {**linear, "auc": whole, f"partial_auc@{MAX_FPR}": partly, **knn}
        return Probed(probe, values, {names[c]: float(of[0].mean()) for c, of in areas.items()}, direction, found)

    def _shown(self, small: Thumbnails | None, i: int) -> Item:
        if small is None:
            return item(f"row {i}", excerpt(self.test.texts[i])[0])
        return item(cast(Pictures, self.test.items).key(i), self.test.labels[i], picture=small.name(i))


def _areas(probability_nK: np.ndarray, target: np.ndarray) -> dict[int, np.ndarray]:
    """Return class → (2, n) values of AUC and partial AUC, each class against the others, without classes that do not
    occur; of two classes only the second.
    """
    classes = [1] if probability_nK.shape[1] == 2 else np.unique(target).tolist()
    limits = (1.0, MAX_FPR)
    return {c: np.stack([auc_values(probability_nK[:, c], target == c, limit) for limit in limits]) for c in classes}


def _vote(labels_nk: np.ndarray, votes_nk: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return (n,) values: 1 where the class with the most votes of k neighbours is the right one, else 0.

    labels_nk, votes_nk: the class of each neighbour, and how much it counts. Of equal sums the first class wins.
    """
    rows = np.arange(len(target))
    total = np.zeros((len(target), max(labels_nk.max(), target.max()) + 1))
    np.add.at(total, (rows[:, None], labels_nk), votes_nk)
    return 1.0 * (total.argmax(axis=1) == target)
