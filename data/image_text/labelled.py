"""The training data set of pictures with a class: ImageText, with the name of the class in the place of a caption."""

from dyad.data.image_text.dataset import ImageText, PairMaker
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.classes import ClassNumbers


class LabelMaker(PairMaker):
    """Makes pairs of a picture and the name of its class, which data.label says. tokenize: the numbers of classes."""

    tokenize: ClassNumbers

    def texts(self, sample: ShardSample, name: str) -> list[str]:
        label = sample.label(self.config.label)
        self.tokenize([label], f"{sample.where}: its class ")
        return [label]


class LabelledPictures(ImageText):
    """The training data set of pictures whose y is the number of their class, int64 (b,)."""

    Maker = LabelMaker
