"""Options that several objectives share, ranges of numeric options, and `preset`, which makes the options of one name.

This package imports no torch, so that `--help` and the validation of a configuration start at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, make_dataclass
from itertools import pairwise
from typing import Any, ClassVar, get_type_hints

from omegaconf import MISSING

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.limits import check_limits
from dyad.data.config import described
from dyad.train.losses.options.choices import CandidateSet, Directions, Duplicates, Positives, Similarity

SIMILARITY = "score of two embeddings; a SentenceTransformer brings its own"
DIRECTIONS = "x→y and y→x: their mean, their sum, or one of them"
RELATED = frozenset({"negatives", "positives", "excluded", "relevance"})  # values of ObjectiveOptions.takes
WEIGHED = frozenset({"relevance"})
X_NEGATIVES = frozenset({"x_negatives"})
TAKE_BOTH = "For wrong x take a loss of both directions, such as clip, symmetric_dpm or siglip"
# kind of inputs with given scores → the objectives that take it
SCORED = {"scored lists": "distill_kl or margin_mse", "scored pairs": "cosent or cosine_mse"}
BY_KEY = ".safetensors"  # suffix of a file of numbers by content key; a file of numbers by sample id ends in .npy
RANGES: dict[str, Callable[[float], bool]] = {
    "above 0": lambda value: value > 0,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "0 or more": lambda value: not value < 0,  # NaN passes here and is refused as no finite number
    "0 or more and below 1": lambda value: 0 <= value < 1,
    "1 or more": lambda value: value >= 1,
    "2 or more": lambda value: value >= 2,
}


def number(default: Any, meaning: str, allowed: str, **limits: float) -> Any:
    """Make a dataclass field for a numeric option, with the text that `--help` prints and its allowed range.

    meaning: the text for `--help`. allowed: the range, a key of RANGES, which the options check when they are made.
    limits: further limits, by the names least, most, above or below (data/base/limits.py), which they check too. The
    value None is legal in every range. Raises ConfigError for another range.
    """
    if allowed not in RANGES:
        raise ConfigError(f"number(…): no range '{allowed}'.{nearest(allowed, RANGES)} Ranges: {', '.join(RANGES)}")
    return field(default=default, metadata={"help": meaning, "range": allowed, **limits})


@dataclass(frozen=True)
class ExpectedBatch:
    """Properties of the global batches of a run, which ObjectiveOptions.broken_by compares with an objective.

    pairs: the number of pairs of all processes together, in one batch; of sequences of pairs, the most. further:
    whether rows have y items beside that of their pair, such as hard negatives. several: whether any of these further y
    items are positives. classes: whether the columns are classes, not the items of pairs. inputs: the kind of x and y,
    one of those in ObjectiveOptions. catalogue: whether further y items can be drawn from all y items of the data.
    relevance: whether positive pairs have a relevance (a weight in (0, 1]). further_x: whether rows have x items beside
    that of their pair, which are wrong for its y.
    """

    pairs: int
    further: bool = False
    several: bool = False
    classes: bool = False
    inputs: str = "pairs"
    catalogue: bool = True
    relevance: bool = False
    further_x: bool = False
    # the ends of error messages about batches
    no_further: ClassVar[str] = "takes pairs only. Set data.negatives.per_row=0 and data.passage.positives=one"
    no_others: ClassVar[str] = "compares the pairs of a batch, and global_batch_size=1 has one. Set it to 2 or more"
    no_lists: ClassVar[str] = (
        "objective.candidates=list: no row has a list of its own. Take task=question_passage with "
        "data.passage.positives=all and data.negatives.per_row, or objective.candidates=all"
    )

    @property
    def has_lists(self) -> bool:
        """Whether rows have further y items of their own, such as hard negatives, and columns are not classes."""
        return self.further and not self.classes

    def has_others(self, directions: Directions) -> bool:
        """Whether a pair is compared with other pairs or, by sums over y (all directions but y), with further y."""
        return self.pairs > 1 or (self.further and directions is not Directions.y)


@dataclass
class ObjectiveOptions:
    """Options of every objective. Raises ConfigError for a value out of range or options that exclude each other.

    formula: "module:Class" of the objective in train.losses.objectives, which is imported when the objective is built;
    of a plugin, "module:Class" with any module, or the class. takes: the arguments that Objective.forward may accept
    beside embeddings, keys and sample ids; "targets" stands for x_target and y_target, "excluded" for known_positives
    too. inputs: the kind of x and y: "pairs", "scores" (of positives and of negatives), "sequences", "log-likelihoods",
    "scored pairs" (each with a given score) or "scored lists" (pairs with further items, and a given score of each).
    exact: whether the loss and its gradients are those of the global batch on any number of ranks, which a run checks
    for a plugin; False for a loss that is meant to depend on the number of ranks.
    """

    formula: ClassVar[Any]
    takes: ClassVar[frozenset[str]] = frozenset()
    inputs: ClassVar[str] = "pairs"
    exact: ClassVar[bool] = True

    directions = Directions.sum  # where these two are no options
    duplicates = Duplicates.keep
    name: str = MISSING
    similarity: Similarity = described(Similarity.cosine, SIMILARITY)

    @property
    def has_logit_bias(self) -> bool:
        """Whether the loss is SigLIP's, with the logit s/τ + b of a score s: pretrained τ and b of SigLIP fit it."""
        return False

    @property
    def number_file(self) -> str | None:
        """The path of a file with a number for each column, by sample id or by content key; None: no such file."""
        return None

    @property
    def by_key(self) -> bool:
        """Whether `number_file` is given and has numbers by content key, that is, ends in .safetensors."""
        return self.number_file is not None and self.number_file.endswith(BY_KEY)

    @property
    def by_sample_id(self) -> bool:
        """Whether the objective needs sample ids, for per-sample state or for a `number_file` by sample id."""
        return self.number_file is not None and not self.by_key

    @property
    def needs_others(self) -> bool:
        """Whether the loss compares a pair with other items of its batch, without which it teaches nothing useful."""
        return False

    @property
    def draws(self) -> str | None:
        """The density from which a run draws y items as noise for every batch; None: the run draws no items.

        The density is a key of DENSITIES in data/loading/drawn_items.py; if it is read from a file, the option
        noise_file names the file.
        """
        return None

    def drawn_items(self, pairs: int) -> int:
        """Return how many y items a run draws as noise for each global batch of `pairs` pairs; 0 if it draws none."""
        return 0

    @property
    def no_relevance_because(self) -> str:
        """Why positive pairs cannot have a relevance (a weight in (0, 1]), as an error message; "" if they can.

        They cannot if the loss has no own term for each positive pair, or if positives come from equal keys.
        """
        if "relevance" not in self.takes:
            return f"objective={self.name}: its loss has no term for each positive pair. Leave data.relevance out"
        if self.duplicates is Duplicates.positive:
            return "objective.duplicates=positive: pairs that equal keys make have no relevance. Set it to mask or keep"
        return ""

    @property
    def no_x_negatives_because(self) -> str:
        """Why further x items cannot be negatives of y with these options, as an error message; "" if they can.

        They can if the loss has a sum over x for each y, or over all pairs of an x and a y.
        """
        if "x_negatives" not in self.takes:
            return f"objective={self.name}: has no sum over the x of a y. {TAKE_BOTH}"
        if self.directions is Directions.x:
            return f"objective.directions=x: sums run over the y of an x, and never over the x of a y. {TAKE_BOTH}"
        return ""

    def broken_rules(self) -> Iterator[str]:
        """Yield an error message for each forbidden combination in the values of this objective's options."""
        return iter(())

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        """Yield error messages that say why the objective cannot be computed from the batches of a run.

        batch: the properties of these batches.
        """
        if self.inputs != batch.inputs:
            scored, of_batch = "task=question_passage data.teacher=FIELD data.negatives.per_row=", batch.inputs
            ways = {
                "pairs": f"objective={SCORED[of_batch]}, or data.teacher=null"
                if of_batch in SCORED
                else "another task, or data.rare=null",
                "scores": "task=labelled data.rare=CLASS",
                "scored pairs": f"{scored}0 data.passage.positives=one",
                "scored lists": f"{scored}N",
                "sequences": "task=sequence",
                "log-likelihoods": "task=language_model",
            }
            own = "your own loop: from dyad.train.losses import build_objective"
            yield f"objective={self.name}: takes {self.inputs}, not {batch.inputs}. Use {ways.get(self.inputs, own)}"
        elif batch.classes and ("positives" not in self.takes or self.by_sample_id or self.by_key):
            yield f"objective={self.name}: its columns are sides of samples, no classes. Take cross_entropy, say"
        elif self.number_file and not self.by_key and batch.further:
            yield (
                f"{self.number_file} has numbers by sample id, and further columns have none. Give a {BY_KEY} file by "
                f"content key, which python -m data weights makes; or it {batch.no_further}"
            )
        elif batch.classes and self.duplicates is not Duplicates.keep:
            yield f"objective.duplicates={self.duplicates}: no two classes are equal. Leave it out"
        if self.needs_others and not batch.has_others(self.directions):
            yield f"objective={self.name}: {batch.no_others}"
        if batch.relevance and self.no_relevance_because:
            yield self.no_relevance_because
        if batch.further_x and self.no_x_negatives_because:
            yield f"{self.no_x_negatives_because}; or data.negatives.pictures=0"

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and "range" in f.metadata and not RANGES[f.metadata["range"]](value):
                raise ConfigError(f"objective.{f.name}={value}: must be {f.metadata['range']}")
        for message in self.broken_rules():
            raise ConfigError(message)
        check_limits(self, "objective.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Override object.__reduce__: pickle the class that was given to `preset`, and the values of all fields.

        Unpickling looks up the class that `preset` made of it under its name: pickle cannot find that class in any
        module. It raises KeyError if `preset` has not made the class in that process.
        """
        return _restored, (type(self).__base__, vars(self))


def _restored(family: type[ObjectiveOptions], values: dict[str, Any]) -> ObjectiveOptions:
    """Return the options that ObjectiveOptions.__reduce__ pickled, of the class that `preset` made in this process."""
    return _presets[family, values["name"]](**values)


_presets: dict[tuple[type[ObjectiveOptions], str], type[ObjectiveOptions]] = {}  # (family, name) → class of `preset`


def preset(
    name: str, family: type[ObjectiveOptions], summary: str | None = None, **defaults: Any
) -> type[ObjectiveOptions]:
    """Make the options class of the objective `name`: a subclass of `family` with other defaults.

    The class is not added to OBJECTIVES; it is registered only for unpickling its instances. summary: one line for
    `--help`; None: the docstring of `family`. defaults: option → its new default, or a dataclass field with a new
    default and help text.
    """
    inherited, types = {f.name: f for f in fields(family)}, get_type_hints(family)
    changed = {
        key: value if isinstance(value, Field) else field(default=value, metadata=inherited[key].metadata)
        for key, value in {"name": name, **defaults}.items()
    }
    made = make_dataclass(
        family.__name__,
        [(key, types[key], value) for key, value in changed.items()],
        bases=(family,),
        namespace={"__doc__": summary or family.__doc__},
    )
    made.__module__ = family.__module__  # Python 3.12 and later would name this one, also if the namespace has it
    _presets[family, name] = made
    return made


@dataclass
class TemperatureOptions(ObjectiveOptions):
    """Options of objectives with a temperature τ, fixed or learned."""

    temperature: float = number(0.07, "τ, or where it starts when it learns", "above 0")
    learnable: bool = described(True, "whether τ learns (through logit_scale = log 1/τ)")
    min_temperature: float = number(
        0.01, "a learning τ is clamped to at least this after every step, and at most 1", "above 0 and at most 1"
    )

    @property
    def needs_others(self) -> bool:
        return True

    def broken_rules(self) -> Iterator[str]:
        if self.learnable and not self.min_temperature <= self.temperature <= 1:
            yield (
                f"objective.temperature={self.temperature}: where τ learns it starts between "
                f"objective.min_temperature={self.min_temperature} and 1. Change it, or set objective.learnable=false"
            )


@dataclass
class NestedOptions(TemperatureOptions):
    """Options of objectives that can also train the first numbers of an embedding to be an embedding on their own.

    matryoshka: smaller widths. The loss is the sum of the losses of embeddings cut to each of these widths, and of
    whole ones: the sum over M of equation 1 of Matryoshka representation learning, with all c_m = 1 (Kusupati et al.
    2022, arXiv 2205.13147).
    """

    matryoshka: list[int] = described(
        [], "smaller widths, e.g. [64,256]: adds the loss of the first 64 and 256 numbers of each embedding"
    )

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        widths = self.matryoshka
        if widths and (widths[0] < 1 or any(a >= b for a, b in pairwise(widths))):
            yield f"objective.matryoshka={widths}: widths from 1, each above the one before, e.g. [64,256]"


@dataclass
class PairOptions(NestedOptions):
    """Options of objectives whose positive and left-out pairs come from lists of pairs and from equal content keys.

    A content key is an int64 that is equal for equal items. A left-out pair is neither a positive nor a negative.
    """

    takes: ClassVar[frozenset[str]] = RELATED | X_NEGATIVES

    candidates: CandidateSet = described(
        CandidateSet.all, "of a row: all columns; all but its positives; or its own list, such as its passages"
    )
    positives: Positives = described(
        Positives.each, "several positives: mean over each; each without the others; their sum; or one only"
    )
    duplicates: Duplicates = described(
        Duplicates.keep, "columns with an equal content key: negatives, left out, or positives"
    )

    @property
    def no_relevance_because(self) -> str:
        if self.positives is Positives.merge:
            return "objective.positives=merge: the positives of a row share one term. For relevance set each or exclude"
        return super().no_relevance_because

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        if self.duplicates is Duplicates.positive and self.positives is Positives.single:
            yield (
                "objective.duplicates=positive with objective.positives=single: equal keys make several positives. "
                "Set objective.positives to each, exclude or merge, or objective.duplicates=mask"
            )

    def broken_by(self, batch: ExpectedBatch) -> Iterator[str]:
        yield from super().broken_by(batch)
        if self.candidates is CandidateSet.list and not batch.has_lists:
            yield batch.no_lists
        if self.positives is Positives.single and batch.several:
            yield (
                "objective.positives=single with data.passage.positives=all: set objective.positives to each, exclude "
                "or merge, or data.passage.positives=one"
            )
