"""CPC on a Gaussian chain: its bound stays below log K, and reaches the known mutual information within 5 %.

python -m tests.benchmarks.cpc_gaussian: frames of an AR(1) chain, z_{t+1} = ρ z_t + √(1 − ρ²) noise, F independent
features; I(past; z_{t+1}) = −(F/2) log(1 − ρ²). A run of task=sequence data.items=frames objective=cpc, by command; the
bound log K − L (van den Oord et al. 2018, section 2.3) is the mean over the last steps. Exit code 1 if it is further
off than allowed, or above log K.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RHO, FEATURES, SEQUENCES, STEPS, BATCH = 0.8, 2, 2000, 20, 512
ALLOWED = 0.05


def write_frames(folder: Path) -> None:
    generator = np.random.default_rng(0)
    z = generator.normal(size=(SEQUENCES, FEATURES))
    chain = [z]
    for _ in range(STEPS - 1):
        z = RHO * z + math.sqrt(1 - RHO**2) * generator.normal(size=z.shape)
        chain.append(z)
    for number, frames in enumerate(np.stack(chain, 1).astype(np.float32)):
        np.save(folder / f"{number:05d}.npy", frames)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "frames").mkdir()
        write_frames(folder / "frames")
        words = f"""train task=sequence data=log data.items=frames data.train={folder / "frames"} data.workers=0
        data.sequence.length={STEPS} model=next_item model.embed_dim=32 model.context.width=32 model.context.dropout=0
        objective=cpc objective.horizons=1 optim.lr=0.003 optim.weight_decay=0 optim.warmup=20 steps=600
        global_batch_size={BATCH} tracking=local tracking.every=1 tracking.report=false run.dir={folder} run.name=run
        """.split()
        print("python -m", *words)
        subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()][-50:]
    bound, log_k = (float(np.mean([row[f"train/{key}"] for row in rows])) for key in ("mi_bound", "log_k"))
    known = -FEATURES / 2 * math.log(1 - RHO**2)
    print(f"bound {bound:.4f} nats, known {known:.4f} ({bound / known:.1%}), log K {log_k:.3f}")
    sys.exit(int(bound > log_k or abs(bound - known) > ALLOWED * known))


if __name__ == "__main__":
    main()
