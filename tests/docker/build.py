"""Executes the Dockerfile in folders, where no engine runs: each stage is a root of its own, each RUN a chroot in it.

python3 -m tests.docker.build BASE WORK [KEY=VALUE …] takes BASE, a root with the Python of the base image, for every
image that the Dockerfile names; the pairs are build arguments. Stages and results lie in WORK. Then it does what users
do: every word of the entry point, as users without a name, without network. Needs root and Linux. See run.sh.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.docker.steps import Step, context, expanded, read_steps

ROOT = Path(__file__).parent.parent.parent
# how this machine reaches its registries; a RUN sees it, the image does not keep it
REGISTRY = """PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_CERT PIP_PROXY PIP_DEFAULT_TIMEOUT SSL_CERT_FILE
http_proxy https_proxy no_proxy""".split()
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Image:
    """A root and what the engine would remember of it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    labels: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        return {**self.arguments, **self.environment}

    def inside(self, words: Sequence[str], *, user: str, network: bool, mounts: Sequence[tuple[Path, str]] = ()):
        """The command line that runs `words` in here as process 1, with nothing mounted once it has ended."""
        root = shlex.quote(str(self.root))
        script = [f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
        script += [f"mount --bind {shlex.quote(str(source))} {root}{target}" for source, target in mounts]
        script += [] if network else ["ip link set lo up"]
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        chroot = ["chroot", f"--userspec={user}", "--groups=", str(self.root), "/usr/bin/env", "-i"]
        script += [f"exec {shlex.join([*chroot, f'--chdir={self.folder}', *variables, *words])}"]
        unshare = "setpriv --pdeathsig=KILL unshare --mount --pid --fork --kill-child".split()
        unshare += [] if network else ["--net"]
        return [*unshare, "bash", "-ec", "\n".join(script)]  # all ends with the one who started it


class Builder:
    def __init__(self, base: Path, work: Path, cache: Path, given: dict[str, str]) -> None:
        self._base, self._work, self._cache, self._given = base, work, cache, given
        self._global: dict[str, str] = {}
        self._stages: dict[str, Image] = {}

    def build(self, dockerfile: Path) -> Image:
        """Every instruction in order; the last stage."""
        image: Image | None = None
        for step in read_steps(dockerfile):
            print(f"\n{step.word} {step.text}", flush=True)
            start = time.monotonic()
            if step.word == "FROM":
                image = self._from(step)
            elif image is None:
                self._global |= self._arguments(step, {})
            else:
                getattr(self, f"_{step.word.lower()}")(image, step)
            print(f"{time.monotonic() - start:.1f} s", flush=True)
        assert image is not None
        return image

    def _from(self, step: Step) -> Image:
        name, *alias = expanded(step.text, self._global).split()
        root = self._work / f"stage{len(self._stages)}"
        earlier = self._stages.get(name)
        subprocess.run(["cp", "-a", str(earlier.root if earlier else self._base), str(root)], check=True)
        if earlier:
            image = replace(earlier, root=root, environment={**earlier.environment}, arguments={**earlier.arguments})
        else:
            image = Image(root)
        self._stages[alias[1] if alias else str(len(self._stages))] = image
        return image

    def _arguments(self, step: Step, variables: dict[str, str]) -> dict[str, str]:
        return {key: self._given.get(key, value) for key, value in step.pairs(variables).items()}

    def _arg(self, image: Image, step: Step) -> None:
        image.arguments |= self._arguments(step, image.variables)

    def _env(self, image: Image, step: Step) -> None:
        image.environment |= step.pairs(image.variables)

    def _label(self, image: Image, step: Step) -> None:
        image.labels |= step.pairs(image.variables)

    def _workdir(self, image: Image, step: Step) -> None:
        image.folder = expanded(step.text, image.variables)
        (image.root / image.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, image: Image, step: Step) -> None:
        image.user = step.text

    def _entrypoint(self, image: Image, step: Step) -> None:
        image.entrypoint = step.listed()

    def _cmd(self, image: Image, step: Step) -> None:
        image.command = step.listed()

    def _copy(self, image: Image, step: Step) -> None:
        *sources, target = step.listed()
        into = image.root / os.path.join(image.folder, target).lstrip("/")
        if "from" in step.flags:
            (source,) = sources
            into.mkdir(parents=True, exist_ok=True)
            earlier = self._stages[step.flags["from"]].root / source.lstrip("/")
            subprocess.run(["cp", "-a", f"{earlier}/.", str(into)], check=True)
            return
        files = context(ROOT)
        for source in map(Path, sources):
            below = [file for file in files if file.is_relative_to(source)]
            if not below:
                raise FileNotFoundError(f"COPY {source}: not in the context")
            for file in below:
                copy = into / (file.name if file == source else file.relative_to(source))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy, follow_symlinks=False)

    def _run(self, image: Image, step: Step) -> None:
        mounts = [(Path(CERTIFICATES), CERTIFICATES)] if Path(CERTIFICATES).exists() else []
        if "mount" in step.flags:
            kept = dict(pair.split("=") for pair in step.flags["mount"].split(","))
            assert kept["type"] == "cache"
            target = image.root / kept["target"].lstrip("/")
            for folder in (self._cache, target):
                folder.mkdir(parents=True, exist_ok=True)
            mounts.append((self._cache, kept["target"]))
        registry = {key: os.environ[key] for key in REGISTRY if key in os.environ}
        seen = replace(image, environment={**registry, **image.variables, "HOME": "/root"})
        words = ["/bin/sh", "-c", step.text]
        subprocess.run(seen.inside(words, user=image.user, network=True, mounts=mounts), check=True)


def use(image: Image) -> None:
    """What users do with the image; ends with an AssertionError where it does not do what README.md says."""
    runs = image.root.parent / "runs"
    runs.mkdir()
    os.chown(runs, 54321, 54321)
    emoji = """experiment=emoji global_batch_size=32 tracking.wandb=disabled eval.suite=[]
    data.val=data/samples/emoji/twemoji-unseen.tar""".split()
    short = [*emoji, "steps=3"]

    def start(words: Sequence[str], user: str, mounts: Sequence[tuple[Path, str]]) -> subprocess.Popen[bytes]:
        print(f"\n$ docker run --user {user} dyad {' '.join(words)}", flush=True)
        words = [*image.entrypoint, *(words or image.command)]
        return subprocess.Popen(image.inside(words, user=user, network=False, mounts=mounts))

    def run(*words: str, user: str = image.user, mounts: Sequence[tuple[Path, str]] = (), ends: int = 0) -> None:
        before = time.monotonic()
        code = start(words, user, mounts).wait()
        print(f"exit code {code} after {time.monotonic() - before:.1f} s", flush=True)
        assert code == ends

    print("labels:", image.labels)
    run()
    run("train", "--help")
    run("eval.mine", "--help")
    run("data", "check", "data/samples/topics")
    run("trian", ends=2)
    run("train", "stepz=3", ends=2)
    run("train", *short, "run.name=own")
    run("eval", "checkpoint=runs/own")
    run("torchrun", *short, "run.name=two")
    mounted = {"user": "54321:54321", "mounts": [(runs, "/dyad/runs")]}
    run("train", *short, "run.name=stranger", **mounted)
    assert (runs / "stranger/config.yaml").stat().st_uid == 54321

    process = start(["train", *emoji, "steps=100000", "run.name=stopped"], **mounted)
    while not (runs / "stopped/metrics.jsonl").is_file():
        assert process.poll() is None
        time.sleep(0.2)
    # what `docker stop` does; process 1 of the container is the child of unshare
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    code = process.wait()
    print(f"exit code {code} after SIGTERM; checkpoints: {[p.name for p in (runs / 'stopped/checkpoints').iterdir()]}")
    assert code == 75 and list((runs / "stopped/checkpoints").glob("step_*"))


def main() -> None:
    base, work, *pairs = sys.argv[1:]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dyad/image-pip")
    given = dict(pair.split("=", 1) for pair in pairs)
    start = time.monotonic()
    image = Builder(Path(base), Path(work), cache, given).build(ROOT / "Dockerfile")
    print(f"\nbuilt in {time.monotonic() - start:.0f} s")
    subprocess.run(["du", "-sh", str(image.root)], check=True)
    use(image)
    print(f"\nthe steps of the Dockerfile ran, and so does what they made: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
