"""NCE with drawn noise recovers a known density and its normaliser: total variation at most 0.02, by `python -m train`.

python -m tests.benchmarks.nce_density [uniform|unigram …]: for each density of the noise, a run on 4 contexts of 30
items, whose p(y|x) is that of the data by construction; a minute of a core each. Prints the total variation of u/Z and
p of each context, and log Z = log Σ_y u, which is 0 at the optimum. Exit code 1 if one is further off than allowed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.density import Density

VARIATION, LOG_Z = 0.02, 0.05  # allowed, of every context


def main() -> None:
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        density = Density.write(Path(folder), contexts=4, items=30, rows=1000)
        for noise in sys.argv[1:] or ("uniform", "unigram"):
            words = [f"objective.noise={noise}", f"run.name={noise}", "steps=1500", "global_batch_size=256"]
            line = density.arguments(*words)
            print("python -m", *line)
            subprocess.run([sys.executable, "-m", *line], check=True, stdout=subprocess.DEVNULL)
            variation, log_z = density.learnt(noise)
            print(f"{noise}: total variation {np.round(variation, 4)}, log Z {np.round(log_z, 4)}")
            failed |= bool(variation.max() > VARIATION or np.abs(log_z).max() > LOG_Z)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
