"""NCE of sequences recovers a known density of the next item and its normaliser: total variation at most 0.02.

python -m tests.benchmarks.sequence_density [uniform|unigram …]: for each density of the noise, a run of task=sequence
on a log of users with two events, of which the first is one of 4 items and the second is drawn from a known p(next |
first) over 30; a minute of a core each. Prints the total variation of u/Z and p for each first item, and log Z = log
Σ_y u, which is 0 at the optimum. Exit code 1 if one is further off than allowed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

import dyad
from dyad.train.towers.sequence import HistoryEncoder, SequenceTower

FIRST, ITEMS, ROWS = 4, 30, 1000
VARIATION, LOG_Z = 0.02, 0.05  # allowed, of every first item


def write_log(path: Path) -> np.ndarray:
    """Write a log in which each first item has ROWS users, and return p(next | first), (FIRST, ITEMS)."""
    p = np.random.default_rng(0).dirichlet(np.full(ITEMS, 0.7), FIRST)
    counts = np.maximum(np.round(p * ROWS), 1).astype(int)
    pairs = [(x, y) for x in range(FIRST) for y in range(ITEMS) for _ in range(counts[x, y])]
    rows = [f"u{n},{name},{time}" for n, (x, y) in enumerate(pairs) for time, name in enumerate((f"x{x}", f"y{y}"))]
    path.write_text("\n".join(["user,item,time", *rows]))
    return counts / counts.sum(1, keepdims=True)


def learnt(run: Path, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Total variation of p and u/Z for each first item, and log Z of each, (FIRST,)."""
    last = max((run / "checkpoints").glob("step_*"))
    bias = float(load_file(last / "model.safetensors")["objective.bias"])
    recommender = dyad.load(str(run))._recommender
    place = {name: i for i, name in enumerate(recommender.items.names)}
    tower = recommender.encoder.towers["x"].eval()
    assert isinstance(tower, SequenceTower)
    first = torch.tensor([[place[f"x{x}"]] for x in range(FIRST)])
    with torch.no_grad():
        log_u = HistoryEncoder(tower, recommender.items_ND)(first) @ recommender.items_ND.T + bias
    log_u = log_u.double().numpy()[:, [place[f"y{y}"] for y in range(ITEMS)]]
    log_z = np.logaddexp.reduce(log_u, axis=1)
    return np.abs(np.exp(log_u - log_z[:, None]) - p).sum(1) / 2, log_z


def main() -> None:
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        p = write_log(folder / "log.csv")
        for noise in sys.argv[1:] or ("uniform", "unigram"):
            words = f"""train task=sequence data=log model=next_item model.embed_dim=16 model.context.dropout=0
            data.train={folder / "log.csv"} data.workers=0 objective=nce objective.noise={noise}
            objective.similarity=dot objective.temperature=1 objective.learnable=false optim.lr=0.01
            optim.weight_decay=0 steps=2500
            global_batch_size=256 tracking=local tracking.report=false run.dir={folder} run.name={noise}""".split()
            print("python -m", *words)
            subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)
            variation, log_z = learnt(folder / noise, p)
            print(f"{noise}: total variation {np.round(variation, 4)}, log Z {np.round(log_z, 4)}", flush=True)
            failed |= bool(variation.max() > VARIATION or np.abs(log_z).max() > LOG_Z)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
