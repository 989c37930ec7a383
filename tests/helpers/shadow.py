"""A working folder of a stranger: files that take the place of modules, and settings of libraries, if they are read."""

import shutil
import tarfile
from pathlib import Path

from helpers.cli import ROOT

MODULES = """
    torch numpy sitecustomize usercustomize hydra omegaconf yaml faiss open_clip transformers webdataset pyarrow
    safetensors simplejpeg PIL onnxruntime sentence_transformers tokenizers triton wandb accelerate psutil rich
    matplotlib huggingface_hub datasets timm git tensorboard multiprocessing runpy socket pickle struct tempfile
    json re os selectors signal threading queue random hashlib secrets subprocess logging ctypes copyreg bisect
    shutil weakref inspect typing dyad train configs
""".split()


def write_shadows(folder: Path) -> None:
    """Write modules that leave a file `ran-NAME` in the folder and end the process when they are imported.

    Also settings of Matplotlib and W&B that would end it, or send an API key elsewhere.
    """
    for path in [*(f"{name}.py" for name in MODULES), "data/__init__.py", "eval/__init__.py"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        mark = folder / f"ran-{path.replace('/', '-')}"
        (folder / path).write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('a module of the stranger')\n")
    (folder / "matplotlibrc").write_text("backend: module://torch\nfont.size: nan\n")
    (folder / "wandb").mkdir()
    (folder / "wandb/settings").write_text("[default]\nbase_url = https://127.0.0.1:9\n")


def imported(folder: Path) -> list[str]:
    """The files of `write_shadows` that ran."""
    return sorted(path.name for path in folder.glob("ran-*"))


def write_large_shards(folder: Path) -> None:
    """Two shards so large that each is indexed by a process of its own. What makes them large is no sample."""
    for number in range(2):
        shard = folder / f"{number}.tar"
        shutil.copy(ROOT / "data/samples/emoji/fxemoji-trained.tar", shard)
        padding = tarfile.TarInfo("padding.bin")
        padding.size = 64 << 20
        with tarfile.open(shard, "a") as file, open("/dev/zero", "rb") as zeros:
            file.addfile(padding, zeros)
