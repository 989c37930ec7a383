"""Probes of frozen features: a linear probe, k-nearest neighbours, AUC and partial AUC, on images, texts, or contexts.

A context is the embedding of a sequence up to one of its items.

The linear probe (linear_probe.py) is fitted to the training part, in which k-NN searches too; the test part is scored.
Classes are the labels of the training part, sorted. Features are the output of the tower's trunk before the projection
or head, or the embeddings (eval.probe_features).

k-NN: the k training samples with the highest cosine similarity vote. If similarities are equal, earlier samples are
taken first; if votes are equal, the first class wins, as in scikit-learn's KNeighborsClassifier(metric="cosine"). In
the weighted vote of Wu et al. 2018 (arXiv 1805.01978) a neighbour counts exp(similarity / 0.07).

AUC and partial AUC (up to the false-positive rate MAX_FPR) are computed from the probabilities of the linear probe: the
mean over the classes of the test part, each against all others, as in scikit-learn's roc_auc_score(multi_class="ovr",
average="macro"). If there are two classes, the AUC of the second one alone is computed, as roc_auc_score does for
binary labels.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from scipy.special import softmax

from dyad.data.base.errors import DataError
from dyad.data.image_text.items import Items, LabelledSet
from dyad.data.sequence.histories import Histories
from dyad.eval.encode.encoder import Encoder
from dyad.eval.encode.histories import encode_histories
from dyad.eval.metrics.auc import MAX_FPR, auc_values
from dyad.eval.metrics.bootstrap import Values
from dyad.eval.search.index import Index
from dyad.eval.tasks.classification import Classification, Scored, class_indices
from dyad.eval.tasks.linear_probe import held_out, linear_probe, logits
from dyad.eval.tasks.zero_shot import l2_normalised
from dyad.train.eval_config import ProbeFeatures

TEMPERATURE = 0.07  # temperature of the weighted vote


@dataclass(frozen=True)
class Probe(Classification):
    """Evaluator of frozen features on one data set.

    data: the test part. classes: the labels of `train`, sorted. train: the training part. side: the tower that encodes
    the samples; sequences are always encoded as contexts by the x tower. features: whether to probe the trunk's output
    or the embeddings. k: the number of neighbours of k-NN. `report` raises DataError for a test label that is not in
    `train`, and unless the test part has two classes and a class of `train` two different samples.
    """

    task: ClassVar[str] = "linear_probe"
    start: ClassVar[str] = "linear_"
    train: LabelledSet
    side: Literal["x", "y"]
    features: ProbeFeatures = ProbeFeatures.features
    k: int = 20

    def higher_is_better(self) -> dict[str, bool]:
        others = ("auc", f"partial_auc@{MAX_FPR}", "knn_acc1", "knn_weighted_acc1")
        return {**super().higher_is_better(), **dict.fromkeys(others, True)}

    def scored(self, encode: Encoder, target: np.ndarray) -> Scored:
        if self.features is ProbeFeatures.features:
            encode = replace(encode, features=True, cosine=False)  # for histories: the contexts
        names = list(self.classes)
        fitted = class_indices(self.train.labels, names, self.name)
        out = held_out(fitted, self.train.keys)
        if not out.any() or len(np.unique(target)) < 2:
            raise DataError(f"{self.name}: needs two classes in test, and two different samples of a class in train")
        train_nD, test_nD = (self._embedded(encode, part.items) for part in (self.train, self.data))
        weight, c, accuracy = linear_probe(train_nD, fitted, out, encode.world)
        areas, aucs = _areas(softmax(logits(test_nD, weight), axis=1), target)
        near = Index(l2_normalised(train_nD), world=encode.world).search(l2_normalised(test_nD), self.k)
        votes = {"knn_acc1": np.ones_like(near.scores), "knn_weighted_acc1": np.exp(near.scores / TEMPERATURE)}
        knn = {name: 1.0 * (_elected(fitted[near.positions], by) == target) for name, by in votes.items()}
        facts = {"features": self.features, "num_train": len(fitted), "C": c, "held_out_acc1": accuracy, "k": self.k}
        rows = np.concatenate([test_nD, np.ones_like(test_nD[:, :1])], axis=1)  # ones for the intercepts
        by_class = {names[index]: {"auc": auc} for index, auc in aucs.items()}
        return Scored(rows, weight.astype(np.float32), areas | knn, by_class, {"probe": facts})

    def _embedded(self, encode: Encoder, items: Items) -> np.ndarray:
        return encode_histories(encode, items)[0] if isinstance(items, Histories) else encode(self.side, items)


def _areas(probability_nC: np.ndarray, target: np.ndarray) -> tuple[Values, dict[int, float]]:
    """Return (metric → (n,) values of AUC and partial AUC, whose means are the metrics; class index → its AUC).

    probability_nC: probabilities of the C classes, (n, C). target (n,): the class index of each sample. Only classes in
    `target` count; of two classes only the second.
    """
    found = [1] if probability_nC.shape[1] == 2 else np.unique(target).tolist()
    total, aucs = np.zeros((2, len(target))), {}
    for c in found:
        both = [auc_values(probability_nC[:, c], target == c, limit) for limit in (1.0, MAX_FPR)]
        total, aucs[c] = total + both, float(both[0].mean())
    return {"auc": total[0] / len(found), f"partial_auc@{MAX_FPR}": total[1] / len(found)}, aucs


def _elected(labels_nk: np.ndarray, votes_nk: np.ndarray) -> np.ndarray:
    """Return the class index with the most votes for each of n samples, int64 (n,); of equal votes the lowest index.

    labels_nk: the class indices of k neighbours, (n, k). votes_nk: the weights of their votes, (n, k).
    """
    total = np.zeros((len(labels_nk), labels_nk.max() + 1))
    np.add.at(total, (np.arange(len(labels_nk))[:, None], labels_nk), votes_nk)
    return total.argmax(axis=1)
