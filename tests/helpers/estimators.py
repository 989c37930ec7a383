"""The global estimators as the papers write them: plain loops over dense float64 scores, exponentials unshifted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

OLD = {"tau": 0.07, "zeta": 0.0}


@dataclass
class Reference:
    """An estimator (SogCLR, FastCLIP, iSogCLR, NUCLR) with its state: "u_x" and the like → sample id → number.

    name: of the objective. n: number of samples. gamma: of the moving average u. options: of the objective. twice:
    whether τ's gradient also has the part through the batch's own u. seen: samples so far.
    """

    name: str
    n: int
    tau: float = 0.07
    gamma: float = 0.8
    directions: str = "sum"
    options: Mapping[str, float] = field(default_factory=dict)
    twice: bool = False  # the part of τ's gradient through the batch
    state: dict[str, dict[int, float]] = field(default_factory=dict)
    seen: int = 0

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        ids: list[int],
        keys: list[int] | None = None,
        weights: Sequence[float] = (),
        further: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Loss and the gradients of x, y and logit_scale (0 where τ does not learn); moves the state.

        further: y items beside the pairs, candidates of every x, with ζ = 0; their gradient is "further". wrong: in the
        same way x items.
        """
        w = weights or [1.0] * len(ids)
        x, y, more = (e.detach().clone().requires_grad_() for e in (x, y, y[:0] if further is None else further))
        of_x = (x[:0] if wrong is None else wrong).detach().clone().requires_grad_()
        rows, columns = (F.normalize(torch.cat(parts), dim=1) for parts in ((x, of_x), (y, more)))
        scores = rows @ columns.T
        loss, d_tau, pull = 0.0, 0.0, torch.zeros_like(scores)
        half = 0.5 if self.directions == "mean" else 1.0
        for side, s in (("x", scores[: len(x)].tolist()), ("y", scores.T[: len(y)].tolist())):
            if self.directions in ("sum", "mean", side):
                value, matrix, of_tau = self._side(side, s, ids, keys, w)
                loss, d_tau = loss + half * value, d_tau + half * of_tau
                of_scores = torch.tensor(matrix, dtype=torch.float64)
                place = pull[: len(x)] if side == "x" else pull[:, : len(y)].T
                place += half * of_scores
        scores.backward(pull)
        self.seen += len(ids)
        assert x.grad is not None and y.grad is not None
        scalars = torch.tensor([loss, -self.tau * d_tau], dtype=torch.float64)
        gradients = {"loss": scalars[0], "x": x.grad, "y": y.grad, "logit_scale": scalars[1]}
        gradients |= {} if further is None else {"further": more.grad}  # type: ignore[dict-item]
        return gradients | ({} if wrong is None else {"wrong": of_x.grad})  # type: ignore[dict-item]

    def get(self, number: str, side: str, i: int) -> float | None:
        """Return a number of sample i: the one that is kept, else its start (OLD), else None."""
        return self.state.get(f"{number}_{side}", {}).get(i, OLD.get(number))

    def kept(self, number: str, side: str, i: int) -> float:
        value = self.get(number, side, i)
        assert value is not None
        return value

    def put(self, number: str, side: str, i: int, value: float) -> None:
        self.state.setdefault(f"{number}_{side}", {})[i] = value

    def _side(
        self, side: str, s: list[list[float]], ids: list[int], keys: list[int] | None, w: Sequence[float]
    ) -> tuple[float, list[list[float]], float]:
        """Loss, ∂L/∂s and ∂L/∂τ of one side's anchors."""
        B = range(len(ids))
        others = [[j for j in B if j != i and ids[j] != ids[i] and (keys is None or keys[j] != keys[i])] for i in B]
        others = [[*own, *range(len(ids), len(s[i]))] for i, own in zip(B, others, strict=True)]  # and further columns
        valid = [i for i in B if others[i]]
        tau = [self.kept("tau", side, ids[i]) if self.name == "isogclr" else self.tau for i in B]
        zeta = [self.kept("zeta", side, ids[i]) if self.name == "nuclr" else 0.0 for i in B]
        zeta += [0.0] * (len(s[0]) - len(ids))
        e = {i: {j: math.exp((s[i][j] - s[i][i] + zeta[j]) / tau[i]) for j in others[i]} for i in B}
        g = {i: sum(e[i].values()) / len(e[i]) for i in valid}
        u: dict[int, float] = {}
        for i in valid:
            same = [g[k] for k in valid if ids[k] == ids[i]]
            fresh, old = sum(same) / len(same), self.get("u", side, ids[i])
            u[i] = fresh if old is None else (1 - self.gamma) * old + self.gamma * fresh
        own = {i: math.exp(zeta[i] / tau[i]) / (self.n - 1) if self.name == "nuclr" else 0.0 for i in B}
        d = {i: u[i] + own[i] for i in valid}
        loss, d_tau, matrix = 0.0, 0.0, [[0.0 for _ in s[0]] for _ in B]
        count = max(len(valid), 1)
        for i in valid:
            through_g = sum(e[i][j] * (s[i][j] - s[i][i]) for j in others[i]) / len(others[i])
            rho = self.options.get("rho", 0.0)
            if self.name == "fastclip_v0":
                loss += w[i] * math.log(u[i]) / count
                d_tau -= w[i] * (1 + self.twice) * through_g / (tau[i] ** 2 * u[i]) / count
            elif self.name == "nuclr":
                loss += w[i] * (tau[i] * math.log((self.n - 1) * d[i]) - zeta[i]) / count
            else:
                loss += w[i] * (tau[i] * math.log(u[i]) + rho * tau[i]) / count
                d_tau += w[i] * (math.log(u[i]) + rho - (1 + self.twice) * through_g / (tau[i] * u[i])) / count
            for j in others[i]:
                weight = w[i] * e[i][j] / (len(others[i]) * d[i]) / count
                weight = weight / tau[i] if self.name == "fastclip_v0" else weight
                matrix[i][j] += weight
                matrix[i][i] -= weight
        moves = {}
        for i in valid:
            alike = [k for k in valid if ids[k] == ids[i]]
            if self.name == "isogclr":
                gradients = [
                    w[k] * (math.log(u[k]) + self.options["rho"])
                    - w[k] * sum(e[k][j] * (s[k][j] - s[k][k]) for j in others[k]) / len(others[k]) / (tau[k] * u[k])
                    for k in alike
                ]
                moves[i] = self._descended("tau", side, ids[i], sum(gradients) / len(alike))
            if self.name == "nuclr":
                gradients = [
                    sum(w[a] * e[a][k] / (len(others[a]) * d[a]) for a in valid if k in others[a])
                    + w[k] * (own[k] / d[k] - 1)
                    for k in alike
                ]
                moves[i] = self._descended("zeta", side, ids[i], sum(gradients) / len(alike))
        for i in valid:
            self.put("u", side, ids[i], u[i])
            for number, value in moves.get(i, {}).items():
                self.put(number, side, ids[i], value)
        return loss, matrix, d_tau if self.name in ("fastclip_v0", "fastclip_v3") else 0.0

    def _descended(self, number: str, side: str, i: int, gradient: float) -> dict[str, float]:
        """Return τ or ζ of sample i and its velocity after a step of momentum descent; the state is not changed."""
        o, before = self.options, self.get(f"{number}_velocity", side, i)
        old, clip = self.kept(number, side, i), o.get("tau_clip", math.inf)
        gradient = min(max(gradient, -clip), clip)
        momentum = o[f"{number}_momentum"]
        velocity = gradient if before is None else momentum * before + (1 - momentum) * gradient
        lr = o[f"{number}_lr"] if self.seen // self.n >= o.get("zeta_warmup", 0) else 0.0
        new = old - lr * velocity
        if number == "tau":
            new = min(max(new, o["min_temperature"]), o["max_temperature"])
        return {number: new, f"{number}_velocity": velocity}
