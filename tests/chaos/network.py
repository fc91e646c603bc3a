"""Hosts for workers on one machine: a network namespace each, on one bridge, whose cable can be pulled or made slow.

What a byte proxy cannot do: it hits everything at once, the sessions' connections and the READs, and nothing is reset.
"""

import contextlib
import os
import subprocess
from collections.abc import Sequence

DEVICE = "eth0"  # inside a namespace
SLOW = ("tbf", "rate", "4mbit", "burst", "32kbit", "latency", "200ms")  # a hand-off of 1.5 MB takes 3 s


class Network:
    """Made by `create`, or not at all; `close` removes all of it. `here` is this side's address on the bridge."""

    def __init__(self, names: Sequence[str]) -> None:
        pid = os.getpid()
        subnet = f"10.{64 + (pid >> 8) % 64}.{pid % 256}"
        self.here = f"{subnet}.1"
        self._bridge = f"tw{pid}"
        self._namespaces = {name: f"tw{pid}-{name}" for name in names}
        self._cables = {name: f"tw{pid}c{i}" for i, name in enumerate(names)}
        self._addresses = {name: f"{subnet}.{i + 2}" for i, name in enumerate(names)}

    @classmethod
    def create(cls, names: Sequence[str]) -> "Network | str":
        """Or why this machine does not allow it."""
        made = cls(names)
        try:
            made._create()
        except (OSError, subprocess.CalledProcessError) as e:
            made.close()
            return f"no network namespaces: {getattr(e, 'stderr', None) or e}".strip()
        return made

    def address(self, name: str) -> str:
        return self._addresses[name]

    def command(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        """`argv`, run on that host; still the same process, so signals and its end are its own."""
        return ("ip", "netns", "exec", self._namespaces[name], *argv)

    def unplug(self, name: str) -> None:
        ip("link", "set", self._cables[name], "down")

    def plug(self, name: str) -> None:
        ip("link", "set", self._cables[name], "up")

    def slow(self, name: str) -> None:
        """Little gets through, in both directions. Raises CalledProcessError where the kernel cannot do that."""
        for tc, device in self._ends(name):
            run(*tc, "qdisc", "replace", "dev", device, "root", *SLOW)

    def fast(self, name: str) -> None:
        """As before. Idempotent."""
        for tc, device in self._ends(name):
            with contextlib.suppress(subprocess.CalledProcessError):
                run(*tc, "qdisc", "del", "dev", device, "root")

    def can_be_slow(self) -> bool:
        name = next(iter(self._cables))
        try:
            self.slow(name)
        except (OSError, subprocess.CalledProcessError):
            return False
        self.fast(name)
        return True

    def close(self) -> None:
        """Idempotent; also of what was made in part."""
        for namespace in self._namespaces.values():
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", namespace)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("link", "del", self._bridge)

    def _ends(self, name: str) -> tuple[tuple[tuple[str, ...], str], ...]:
        """`tc` and the device, for either end of a cable."""
        return (("tc",), self._cables[name]), (("tc", "-n", self._namespaces[name]), DEVICE)

    def _create(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self.here}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for name, namespace in self._namespaces.items():
            cable = self._cables[name]
            ip("netns", "add", namespace)
            ip("link", "add", cable, "type", "veth", "peer", "name", DEVICE, "netns", namespace)
            ip("link", "set", cable, "master", self._bridge)
            ip("-n", namespace, "addr", "add", f"{self._addresses[name]}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                ip("-n", namespace, "link", "set", device, "up")
            ip("link", "set", cable, "up")


def ip(*argv: str) -> None:
    """As `run`."""
    run("ip", *argv)


def run(*argv: str) -> None:
    """Raises OSError where there is no such program, CalledProcessError with its words."""
    subprocess.run(argv, check=True, capture_output=True, text=True)
