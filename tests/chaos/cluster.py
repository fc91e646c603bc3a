"""The cluster that the faults happen to: real processes whose workers are reached through byte proxies, and their supervisor."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from services.cli.cluster import Cluster, ClusterPlan
from services.cli.process import ProcessSpec
from services.cli.topology import LOOPBACK, ClusterSettings, plan, with_model_here
from tests.chaos.engines import engine_of
from tests.chaos.network import DEVICE, Network
from tests.chaos.proxy import Link, Proxy
from tests.chaos.quiet import pinned
from tests.chaos.report import Exit
from tests.chaos.watch import Watch

POLL_S = 0.1
SETTINGS = {  # short, so that what a fault leaves behind is given back while the run looks
    "engine.doomed-limit-s": "1",
    "engine.generation-drain-s": "2",
    "session.lease-s": "15",
}


def settings(model: str, workers: Mapping[str, tuple[str, int]], network: Network | None) -> ClusterSettings:
    """`workers`: the address that each one advertises. verify=checksum, so that a wrong byte is an error and never a token; small
    chunks, so that a prompt takes several; whatever has a candidate goes through a hand-off, however short the rest is."""
    extra = [(kind, f"{key}={value}") for kind in ("prefill", "decode") for key, value in SETTINGS.items()]
    extra += [("prefill", "engine.chunk-tokens=64"), ("decode", "local-max-tokens=0"), ("router", "local-max-tokens=0")]
    extra += [(name, f"advertise={host}:{port}") for name, (host, port) in workers.items()]
    if network is not None:
        extra += [("router", f"grpc-host={network.here}")]
        extra += [(name, f"host={network.address(name)}") for name in workers]
    prefill, decode = (sum(name.startswith(kind) for name in workers) for kind in ("prefill", "decode"))
    return ClusterSettings(
        model=model, port=0, prefill=prefill, decode=decode, dtype="float32", verify="checksum", cache_bytes=96 << 20,
        extra=tuple(extra),
    )  # fmt: skip


def port_of(made: ClusterPlan, name: str) -> int:
    """Where a worker listens itself."""
    spec = next(s for s in made.specs if s.name == name)
    return next(int(a.removeprefix("--port=")) for a in spec.argv if a.startswith("--port="))


def on_hosts(made: ClusterPlan, network: Network) -> ClusterPlan:
    """The same with every worker on its host; the router stays here."""
    registry = f"{network.here}:{made.admin.rpartition(':')[2]}"

    def moved(spec: ProcessSpec) -> ProcessSpec:
        if spec.name == "router":
            return spec
        argv = tuple(a.replace(f"--router={made.admin}", f"--router={registry}") for a in spec.argv)
        env = {**spec.env, "UCX_NET_DEVICES": DEVICE}
        return ProcessSpec(spec.name, network.command(spec.name, argv), env)

    return replace(made, specs=tuple(moved(s) for s in made.specs), admin=registry)


class ChaosCluster:
    """Use as an async context manager, on the main thread: children end with the thread that started them."""

    def __init__(self, model: str, workers: Sequence[str], log_dir: Path, network: Network | None = None) -> None:
        """With `network` each worker is a host of its own; it stays the caller's."""
        here = network.here if network is not None else LOOPBACK
        sockets = {name: socket.create_server((here, 0)) for name in workers}
        chosen = with_model_here(settings(model, {n: s.getsockname() for n, s in sockets.items()}, network))
        made = plan(chosen)
        addresses = {n: (network.address(n) if network else LOOPBACK, port_of(made, n)) for n in workers}
        if network is not None:
            made = on_hosts(made, network)
        self.watch = Watch()
        self.model = chosen.served_name
        self.router_grpc = made.admin
        self.base_url = made.base_url
        self.exits: list[Exit] = []
        self._cluster = Cluster(made, sink=self.watch, log_dir=log_dir)
        self._network = network
        hosts = {host: name for name, (host, _) in addresses.items()} if network else {}
        self._proxies = {n: Proxy(s, addresses[n], self._pids, hosts=hosts) for n, s in sockets.items()}
        self._own = {n: f"{host}:{port}" for n, (host, port) in addresses.items()}
        self._down: set[str] = set()  # killed, paused or frozen, by a fault
        self._frozen: dict[str, int] = {}  # engines, by worker
        self._http = httpx.AsyncClient(base_url=made.base_url, timeout=1.0)

    @property
    def names(self) -> list[str]:
        return self._cluster.names

    async def __aenter__(self) -> "ChaosCluster":
        for proxy in self._proxies.values():
            await proxy.start()
        self._cluster.start_all()
        try:
            await asyncio.to_thread(self._cluster.wait_ready, 150.0)
        except BaseException:
            self._cluster.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="supervisor")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Raises AssertionError if a process does not leave by itself."""
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        for name in self.names:  # where the run was cut short amid a fault
            self._signal_group(name, signal.SIGCONT)
            if self._network is not None and name != "router":
                self._network.plug(name)
                self._network.fast(name)
        killed = await asyncio.to_thread(self._cluster.stop)
        for proxy in self._proxies.values():
            await proxy.close()
        await self._http.aclose()
        assert killed == [], f"these did not leave by themselves: {', '.join(killed)}"

    # ---- what a fault does ----

    def kill(self, name: str) -> None:
        self._down.add(name)
        self._cluster.kill(name)

    def restart(self, name: str) -> float:
        """Returns when it was started."""
        at = time.monotonic()
        self._cluster.start(name)
        self._down.discard(name)
        return at

    def pause(self, name: str) -> None:
        self._down.add(name)
        self._signal_group(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal_group(name, signal.SIGCONT)
        self._down.discard(name)

    def freeze(self, name: str) -> None:
        """Its engine alone."""
        self._down.add(name)
        self._frozen[name] = engine_of(self._cluster.process(name).pid)
        os.kill(self._frozen[name], signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._frozen.pop(name), signal.SIGCONT)
        self._down.discard(name)

    def unplug(self, name: str) -> None:
        assert self._network is not None
        self._network.unplug(name)

    def plug(self, name: str) -> None:
        assert self._network is not None
        self._network.plug(name)

    def slow(self, name: str) -> None:
        assert self._network is not None
        self._network.slow(name)

    def fast(self, name: str) -> None:
        assert self._network is not None
        self._network.fast(name)

    def link(self, client: str, server: str) -> Link:
        return self._proxies[server].link(client)

    # ---- how it is ----

    async def connected(self) -> set[str]:
        """The workers that the router has a session with; empty while it does not answer."""
        try:
            known = (await self._http.get("/health")).json()["workers"]
        except (httpx.HTTPError, ValueError):
            return set()
        return {w["id"] for w in known if w["connected"]}

    async def reads_posted(self) -> bool:
        """A decode worker says that its arena is being read into, all of them asked themselves: a router would wait for a
        process that is stopped."""
        decode = [address for name, address in self._own.items() if name.startswith("decode")]
        return any(await asyncio.gather(*(asyncio.to_thread(pinned, address) for address in decode)))

    async def wait_up(self, names: set[str], within_s: float) -> set[str]:
        """Until these serve again; returns those that do not in time. The router serves once it knows a worker."""
        began = time.monotonic()
        while True:
            here = await self.connected()
            here |= {"router"} if here else set()
            missing = {n for n in names if n not in here or n in self._down}
            if not missing or time.monotonic() - began > within_s:
                return missing
            await asyncio.sleep(POLL_S)

    async def back_s(self, name: str, since: float, within_s: float) -> float | None:
        """Seconds from a restart until the process serves; None if it does not in time."""
        while time.monotonic() - since < within_s:
            up = await self.connected() if name == "router" else self.watch.session_up(name, since)
            if up:
                return time.monotonic() - since
            await asyncio.sleep(POLL_S)
        return None

    # ---- inside ----

    def _pids(self) -> Mapping[str, int]:
        return {p.name: p.pid for p in self._cluster.running}

    def _signal_group(self, name: str, sig: signal.Signals) -> None:
        process = self._cluster.process(name)
        if process.returncode is None:
            os.killpg(process.pid, sig)

    async def _supervise(self) -> None:
        """Starts again what ended by itself, as a supervisor does."""
        while True:
            for name in self.names:
                died = self._cluster.process(name).died()
                if died is not None and name not in self._down:
                    self.exits.append(Exit(name, died.code, died.tail))
                    self._cluster.start(name)
            await asyncio.sleep(POLL_S)
