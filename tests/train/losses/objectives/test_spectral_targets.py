"""spectral_alternating against the embeddings of a target network, by plain loops in float64."""

import pytest
import torch

from tests.train.losses.objectives.test_spectral import D, alternating, build, close, embeddings, mean_outer


@pytest.mark.parametrize("directions", ["x", "y", "sum", "mean"])
@pytest.mark.parametrize("given", [("x_target", "y_target"), ("y_target",)], ids=str)
def test_given_targets_equal_the_reference(directions: str, given: tuple[str, ...]) -> None:
    x, y = embeddings()
    targets = {name: e for name, e in zip(("x_target", "y_target"), embeddings(seed=1), strict=True) if name in given}
    loss = build("spectral_alternating", directions=directions)(x, y, **targets).loss
    want = alternating(x, y, directions, **{name: e.detach() for name, e in targets.items()})
    close(loss, want)
    of = (x, y, *targets.values())
    got, expected = (torch.autograd.grad(value, of, materialize_grads=True) for value in (loss, want))
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs, 1e-10)
    assert all(g.eq(0).all() for g in got[2:])


def test_targets_are_normalised_as_the_embeddings_are_and_enter_the_running_mean() -> None:
    x, y = embeddings()
    x_target, y_target = (e.detach() for e in embeddings(seed=1))
    units = [e / e.norm(dim=1, keepdim=True) for e in (x, y, x_target, y_target)]
    loss = build("spectral_alternating", similarity="cosine")(x, y, x_target=x_target, y_target=y_target).loss
    close(loss, alternating(units[0], units[1], "sum", units[2], units[3]))
    objective = build("spectral_alternating", lambda_momentum=0.5, width=D)
    objective(x, y, x_target=x_target, y_target=y_target)
    close(objective.moments_2DD, torch.stack([mean_outer(x_target), mean_outer(y_target)]))
