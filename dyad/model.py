"""The public Python interface to a model, which `dyad.load` opens (dyad/load_model.py).

Texts and images are prepared with the settings of the model: prefixes, lengths, use of titles, image size. Embeddings
are numpy arrays, float32 (n, D), with L2 norm 1 if the model compares by cosine. On the same device, and with the same
`block` and width, they are equal bit for bit to those of `python -m eval`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import numpy as np
import torch

from dyad import inputs
from dyad.data.base.errors import ConfigError, nearest
from dyad.data.config import ItemKind, PassageConfig, QuestionConfig
from dyad.data.image_text.in_memory import GivenImages, ImageInput, readable
from dyad.data.image_text.items import Captions, Images, Items
from dyad.data.question_passage.corpus import open_corpus
from dyad.data.question_passage.dataset import TextInputs
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.eval.encode.embeddings import encode_corpus, identity_of
from dyad.eval.encode.encoder import Encoder
from dyad.eval.search.index_spec import Spec
from dyad.evaluation.find_model import settings_of
from dyad.evaluation.load_run import LoadedModel
from dyad.index import Hit, Index
from dyad.inputs import OnError, PassageLike
from dyad.recommend import Recommender, build_recommender, contexts_of_frames
from dyad.run.class_names import class_vectors
from dyad.train.config import TrainConfig
from dyad.train.towers.models import ImageModel, ImageTextModel, LanguageModel, SequenceModel, TextPairModel


@dataclass(frozen=True, eq=False)
class Model:
    """A model that embeds images, texts, questions, passages or items of sequences, or that scores answers to prompts.

    For a model with a projection head (model.head), embeddings are taken before that head. loaded: the model, its
    configuration and its temperature. encoder: runs the towers, with a device and a block size.

    An image is a path, the bytes of an image file, a file opened for bytes, a PIL image, or uint8 pixels: a numpy array
    (H, W, 3) or a torch tensor (3, H, W). A passage is a text, a mapping with "text" and optionally "title", or in a
    list a pair (title, text). A single image, text or passage counts as a list of one: "a frog" gives embeddings (1,
    D). Iterators and columns of pandas and pyarrow count as lists. normalize: whether embeddings are scaled to L2 norm
    1; None: only if the model compares by cosine. The methods raise ConfigError for an empty list, for a value of
    another type, and for a kind of input that this model does not embed; DataError for an image that cannot be read,
    for an element of a list of images that is no image, and for embeddings that are not finite.
    """

    loaded: LoadedModel
    encoder: Encoder

    def __repr__(self) -> str:
        compared = "cosine" if self.encoder.cosine else "inner product"
        what, _ = inputs.USES[type(self.loaded.model)]
        return f"Model({self.loaded.source}: {what}, {compared}, on {self.encoder.world.device})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model is neither pickled nor copied: call dyad.load in the process that needs it")

    # ---- embeddings --------------------------------------------------------------------------------------------------

    def encode_image(self, images: ImageInput | Iterable[ImageInput], *, normalize: bool | None = None) -> np.ndarray:
        """Return the embeddings of n images, float32 (n, D).

        normalize: whether to scale them to L2 norm 1; None: only if the model compares by cosine.
        """
        return self._encode("x", self._given(inputs.images_of(images)), normalize)

    def encode_text(self, texts: str | Iterable[str], *, normalize: bool | None = None) -> np.ndarray:
        """Return the embeddings of n captions or class prompts by a model of images and texts, float32 (n, D).

        A text is cut to the context length of the text tower. normalize: whether to scale embeddings to L2 norm 1;
        None: only if the model compares by cosine.
        """
        if not isinstance(self.loaded.model, ImageTextModel):
            raise inputs.unsupported_input_error(self.loaded.model, self.classes)
        return self._encode("y", Captions(inputs.texts_of(texts), self.tokenize), normalize)

    def encode_question(
        self, questions: str | Iterable[str], *, prefix: str | None = None, normalize: bool | None = None
    ) -> np.ndarray:
        """Return the embeddings of n questions, float32 (n, D). Each question is cut to the model's length in tokens.

        prefix: the text before each question, such as an instruction; None: that of the model. normalize: whether to
        scale embeddings to L2 norm 1; None: only if the model compares by cosine.
        """
        prefix = inputs.prefix_of(prefix)
        given = [Question("", text, prefix=prefix) for text in inputs.texts_of(questions, "questions")]
        return self._encode("x", self._texts(given, self.config.data.question), normalize)

    def encode_passage(
        self,
        passages: PassageLike | Iterable[PassageLike],
        *,
        prefix: str | None = None,
        normalize: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of n passages, float32 (n, D). Each passage is cut to the model's length in tokens.

        Titles are used as in training: as part of the text, as the first text of a pair, or not at all. prefix: the
        text before each passage; None: that of the model. normalize: whether to scale embeddings to L2 norm 1; None:
        only if the model compares by cosine.
        """
        prefix = inputs.prefix_of(prefix)
        given = [replace(passage, prefix=prefix) for passage in inputs.passages_of(passages)]
        texts = self._texts(given, self.config.data.passage)
        return encode_corpus(self._encoder(normalize), "y", texts, None, log=lambda line: None)

    def encode_class(self, names: str | Iterable[str] | None = None) -> np.ndarray:
        """Return the vectors of n classes, by which a model of task=labelled is evaluated, float32 (n, D).

        names: of `classes`; None: all of them, in their order. Raises ConfigError for a name that is no class, and for
        a model without vectors of classes, such as one of a rare class (data.rare): the embedding of an item is its
        score.
        """
        if not (vectors := self._class_vectors):
            only = "this model has no vectors of classes: only one of task=labelled without data.rare does"
            raise ConfigError(f"{only}. It is a run; the classes of an export are in its file classes.npz")
        chosen = [*vectors] if names is None else inputs.texts_of(names, "classes")
        if unknown := [name for name in chosen if name not in vectors]:
            raise ConfigError(f"'{unknown[0]:.80}' is no class of this model.{nearest(unknown[0], vectors)}")
        return np.stack([vectors[name] for name in chosen])

    def similarity(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the scores (n, m) of embeddings x (n, D) and y (m, D): cosines, or inner products.

        They are cosines if the model compares by cosine; x and y need not be normalised for it. The result is float32,
        or float64 if x or y needs it. A single embedding (D,) counts as (1, D). Raises ConfigError if x and y differ in
        width D, or are no numeric arrays.
        """
        x, y = inputs.embeddings_of(x, "x"), inputs.embeddings_of(y, "y")
        if x.shape[1] != y.shape[1]:
            raise ConfigError(f"x has embeddings of width {x.shape[1]}, y of {y.shape[1]}: they must be equal")
        if self.encoder.cosine:
            x, y = (e / np.maximum(np.linalg.norm(e, axis=-1, keepdims=True), 1e-12) for e in (x, y))
        return x @ y.T

    # ---- search ------------------------------------------------------------------------------------------------------

    def index(
        self, items: ImageInput | PassageLike | Iterable[Any], *, spec: str = "Flat", on_error: OnError = "stop"
    ) -> Index:
        """Embed images or passages, and return an Index for `search`.

        items: images or passages, or a path: a folder of images, shards, or a corpus of passages with ids
        (.jsonl, .tsv, or a BEIR folder). In a folder of images, links that lead out of the folder are left out. Missing
        indexes of shards and of a corpus are written beside them or into the cache. spec: a FAISS index and its search
        options, such as "IVF256,Flat;nprobe=16"; "Flat" is exact. FAISS builds it at the first search. on_error: what
        an image that cannot be read does: "stop" raises DataError, "skip" leaves it out with a line on stderr, for
        which all images are decoded twice. Raises ConfigError for an invalid argument or path, and for a passage that
        JSON cannot hold; DataError for damaged files.
        """
        Spec.parsed(spec)
        if on_error not in ("stop", "skip"):
            raise ConfigError(f"on_error={on_error!r:.50} must be 'stop' or 'skip'")
        path = os.path.expanduser(items) if isinstance(items, str | PathLike) else None
        if isinstance(self.loaded.model, TextPairModel):
            if path is None:
                given = inputs.stored_passages(items)
            else:
                corpus = open_corpus(path, "items")
                given = [
                    {"id": p.id, "title": p.title, "text": p.text} for p in map(corpus.__getitem__, range(len(corpus)))
                ]
            return Index(given, self.encode_passage(given), self.identity, spec)
        given = inputs.images_of(items) if path is None else inputs.image_files(Path(path))
        images = self._given(given)
        if path is not None and not given:
            images = Images(open_shards(parse_sources(path, "items")), self._images.image, self.config.data)
        rows = readable(images) if on_error == "skip" else range(len(images))
        keys = [images.key(i) for i in rows]
        return Index(keys, self._encode("x", images.chosen(rows), None), self.identity, spec)

    def index_text(self, texts: str | Iterable[str], *, spec: str = "Flat") -> Index:
        """Embed n captions or class prompts as `encode_text` does, and return an Index of these texts for `search`.

        With an image as the query, `search` then finds its best captions. spec: as in `index`. Raises ConfigError for
        an invalid argument.
        """
        Spec.parsed(spec)
        given = inputs.texts_of(texts)
        return Index(given, self.encode_text(given), self.identity, spec)

    @overload
    def search(
        self, index: Index, query: list[str] | list[ImageInput], k: int = 5, *, prefix: str | None = None
    ) -> list[list[Hit]]: ...
    @overload
    def search(self, index: Index, query: str | ImageInput, k: int = 5, *, prefix: str | None = None) -> list[Hit]: ...
    def search(self, index: Index, query: Any, k: int = 5, *, prefix: str | None = None) -> list[Hit] | list[list[Hit]]:
        """Return the k best items of an index, best first; for a list of queries, such a list for each query.

        query: a text or an image. A model of questions and passages embeds a text as a question. The path of an image
        must be a pathlib.Path, because a str is a text. k: number of results, at least 1; fewer are returned if the
        search finds fewer. prefix: the text before each question; None: that of the model. Raises ConfigError if
        another model, or one with another `width`, made the index; for k below 1, for texts and images in one list, and
        for a prefix where the query is no question.
        """
        k = inputs.count_of(k)
        queries, are_texts = inputs.queries_of(query)
        if not isinstance(index, Index):
            raise ConfigError(f"index must be an Index, as model.index(FOLDER) makes it, not {type(index).__name__}")
        if index.model != self.identity:
            raise ConfigError("this index has embeddings of another model, or of other weights: make it anew")
        if are_texts and not isinstance(self.loaded.model, ImageTextModel):
            embeddings = self.encode_question(queries, prefix=prefix)
        elif prefix is not None:
            raise ConfigError(f"prefix={prefix!r:.80}: only questions have one. Write it before the text")
        else:
            embeddings = (self.encode_text if are_texts else self.encode_image)(queries)
        hits = index.search(embeddings, k)
        return hits[0] if inputs.is_single(query) else hits

    # ---- sequences ---------------------------------------------------------------------------------------------------

    @overload
    def recommend(self, history: list[list[str]], k: int = 5, *, drop_seen: bool = False) -> list[list[Hit]]: ...
    @overload
    def recommend(self, history: list[str], k: int = 5, *, drop_seen: bool = False) -> list[Hit]: ...
    def recommend(self, history: Any, k: int = 5, *, drop_seen: bool = False) -> list[Hit] | list[list[Hit]]:
        """Return the k items most likely to come next after a history, best first; for histories, a list for each.

        history: ids of items, oldest first, or a list of such lists. As in the evaluation, ids that the model does not
        know are left out, and only the last items count if there are more than the model takes. k: number of results,
        at least 1; fewer are returned if the model has fewer items. drop_seen: whether to leave out the items of the
        history. The first call embeds all items. Raises ConfigError for k below 1, for a model of another task than
        sequence or of frames, and for a history without an item that the model knows; ConfigError or DataError if the
        training log, which has the ids for a model that is no export, cannot be read.
        """
        k, (histories, single) = inputs.count_of(k), inputs.histories_of(history)
        found = [[Hit(*pair) for pair in row] for row in self._recommender(histories, k, drop_seen)]
        return found[0] if single else found

    def encode_item(self, names: str | Iterable[str] | None = None) -> np.ndarray:
        """Return the vectors of n items by a model of sequences, float32 (n, D), as `recommend` compares them.

        names: ids of items; None: all `items`, in their order. The first call embeds all items. Raises the errors of
        `recommend`, and ConfigError for an id that the model does not know.
        """
        return self._recommender.vectors(self.items if names is None else inputs.texts_of(names, "items"))

    def encode_history(self, history: Sequence[str] | Sequence[Sequence[str]]) -> np.ndarray:
        """Return the vectors of n histories, float32 (n, D), whose products with those of items `recommend` sorts by.

        history: as for `recommend`, whose errors are raised; a single one counts as a list of one. Of a model trained
        by CPC they are W_1 c: what the context c predicts for the next step.
        """
        made = self._recommender
        return made.contexts(made.numbers(inputs.histories_of(history)[0]))

    def encode_sequence(self, sequences: Any) -> np.ndarray:
        """Return the contexts c at the last frames of n sequences, float32 (n, D), by a model of frames.

        They are not normalised, as those of context_probe in the evaluation. sequences: an array (T, features) of
        floats, the path of such a .npy file, or a list of them; the last data.sequence.length frames count. For the
        context at an earlier frame, give the frames up to it. Raises ConfigError for other values and for a model that
        is not of frames, DataError for a file that cannot be read, for another number of features, and for a value that
        is not finite.
        """
        if not isinstance(self.loaded.model, SequenceModel):
            raise inputs.unsupported_input_error(self.loaded.model, self.classes)
        if self.config.data.items is not ItemKind.frames:
            raise ConfigError(f"this model is not of frames (data.items=frames): {inputs.USES[SequenceModel][1]}")
        frames = inputs.frames_of(sequences, self.config.run.inputs, self.config.data.sequence.length)
        return contexts_of_frames(self.encoder, frames)

    def score(self, prompt: str, answers: Iterable[str]) -> np.ndarray:
        """Return the log-likelihoods of n answers after a prompt, each as the mean over its tokens, float32 (n,).

        Prompt and answers get the prefixes of training, and are cut to the lengths of training: a prompt keeps its last
        tokens, an answer its first. Raises ConfigError for a model of another task than language_model, for a prompt
        that is no text, and for answers that are none or no texts; SampleError (a DataError) for an answer without
        tokens.
        """
        if not isinstance(self.loaded.model, LanguageModel):
            raise ConfigError("this model scores no answers: only one of task=language_model does")
        if not isinstance(prompt, str):
            raise ConfigError(f"prompt must be one str, not {type(prompt).__name__}")
        (prompt,), data, model = inputs.texts_of(prompt, "prompt"), self.config.data, self.loaded.model
        given = [data.passage.prefix + answer for answer in inputs.texts_of(answers, "answers")]
        asked = [data.question.prefix + prompt] * len(given)
        rows = model.tokenize(asked, given, data.question.length, data.passage.length)
        with torch.inference_mode():
            return model.towers.y_tower.eval()(rows.to(self.encoder.world.device))[:, 0].cpu().numpy()

    @cached_property
    def _class_vectors(self) -> dict[str, np.ndarray]:
        return class_vectors(self.config, self.loaded.model, self.encoder)

    @cached_property
    def _recommender(self) -> Recommender:
        if not isinstance(self.loaded.model, SequenceModel):
            raise ConfigError("this model is of no sequences: only one of task=sequence recommends")
        return build_recommender(self.config, self.loaded.model, self.encoder)

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> TrainConfig:
        """The configuration of the model's run.

        For a model of another library, it holds the settings that came with the model, and defaults.
        """
        return self.loaded.config

    @property
    def classes(self) -> list[str]:
        """The names of the classes of a run of task=labelled, in the order of `encode_class`; [] for other models."""
        return self.config.run.classes or []

    @property
    def items(self) -> Sequence[str]:
        """The ids of the items of a model of sequences, in the order of `encode_item`.

        The first access embeds all items, as the first call of `recommend`, whose errors are raised.
        """
        return self._recommender.items.names

    @property
    def temperature(self) -> float | None:
        """The temperature of the trained model, by which scores are divided to give logits; None if none is known."""
        return self.loaded.calibration and self.loaded.calibration.temperature

    @property
    def bias(self) -> float | None:
        """The bias of the logits, score / temperature + bias, of a model trained by SigLIP's loss; None for others."""
        return self.loaded.calibration and self.loaded.calibration.logit_bias

    @property
    def tokenize(self) -> Any:
        """The function that converts n texts to token ids, int64 (n, L); None for a model that takes no texts.

        If a model of images has learnt vectors of classes, it converts n names of classes to numbers, int64 (n,). For
        questions and passages it is called as tokenize(texts, length, pairs): length is the most tokens of a row; pairs
        has the second text of each pair of title and text, or is None. The function of a language model takes (prompts,
        answers, longest prompt, longest answer), with lengths in tokens; its column 0 is the number of tokens of the
        prompt.
        """
        return self.loaded.model.tokenize

    def preprocess(self, image: ImageInput) -> torch.Tensor:
        """Return an image resized for the image tower, uint8 (3, S, S), where S is the side in pixels.

        It is cropped or padded to a square, or squeezed into one, as in evaluation. The tower itself normalises the
        pixels.
        """
        return self._given([image]).block(0, 1)[0]

    @cached_property
    def identity(self) -> str:
        """A SHA-256 digest of the weights and of settings, in hexadecimal. An Index stores it, `search` compares it.

        The settings are the similarity, the pooling of texts, prefixes, lengths, and the use of titles. Others, such as
        `width`, do not count. An export has the digest of its run, unless LoRA adapters are merged into its weights.
        """
        return identity_of(self.loaded.model.towers, json.dumps(settings_of(self.config, None)))

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _images(self) -> ImageModel:
        if not isinstance(self.loaded.model, ImageModel):
            raise inputs.unsupported_input_error(self.loaded.model, self.classes)
        return self.loaded.model

    def _given(self, images: Sequence[Any]) -> GivenImages:
        # once: a file may be decoded twice
        read = [image.read() if hasattr(image, "read") else image for image in images]
        return GivenImages(read, self._images.image, self.config.data.max_image_pixels)

    def _texts(self, texts: Sequence[Question | Passage], options: QuestionConfig | PassageConfig) -> TextInputs:
        if not isinstance(self.loaded.model, TextPairModel):
            raise inputs.unsupported_input_error(self.loaded.model, self.classes)
        return TextInputs.of(texts, self.tokenize, options)

    def _encode(self, side: Literal["x", "y"], items: Items, normalize: bool | None) -> np.ndarray:
        if not len(items):
            raise ConfigError("nothing to embed: no sample is there")
        return self._encoder(normalize)(side, items)

    def _encoder(self, normalize: bool | None) -> Encoder:
        return self.encoder if normalize is None else replace(self.encoder, cosine=normalize)
