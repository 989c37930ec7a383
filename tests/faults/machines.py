"""Two machines on one: name spaces with a host name and a network card each, joined by a cable that can be cut."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = {"one": "10.77.0.1", "two": "10.77.0.2"}
BEGIN = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo ready; read -r'
OWN = ["--net", "--uts", "--mount"]


@dataclass(frozen=True)
class Machine:
    """name: also of its network card. process: it holds the name spaces."""

    name: str
    process: int

    def command(self, *words: str) -> list[str]:
        """The words of a command, to be run there."""
        return ["nsenter", f"--target={self.process}", "--user", "--preserve-credentials", *OWN, *words]

    def do(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Mark such a test with pytest.mark.machines. `one.do("ip", "link", "set", "one", "down")` cuts the cable."""
    names = {"localhost": "127.0.0.1", **ADDRESSES}
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    with ExitStack() as stack:
        one = stack.enter_context(_held("one", hosts, ["unshare", "--map-root-user", *OWN]))
        two = stack.enter_context(_held("two", hosts, one.command("unshare", *OWN)))
        one.do("ip", "link", "add", "one", "type", "veth", "peer", "name", "two", "netns", str(two.process))
        for machine in (one, two):
            machine.do("ip", "address", "add", f"{ADDRESSES[machine.name]}/24", "dev", machine.name)
            machine.do("ip", "link", "set", machine.name, "up")
        yield one, two


@contextmanager
def _held(name: str, hosts: Path, spaces: Sequence[str]) -> Iterator[Machine]:
    command = [*spaces, "bash", "-ec", BEGIN, "bash", name, str(hosts)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        yield Machine(name, process.pid)
        process.stdin.close()
