"""READs over NIXL (UCX backend): the only module that imports nixl, and only when a transport is built.

No progress thread (an idle one burns most of a core): our reads progress by `poll`, peers' reads from us by `progress`.
No notifications: they hang on a stopped peer. All methods are called from the one transfer thread; building may happen
elsewhere.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinflow.transfer import ucxlog
from twinflow.transfer.base import MAX_POST_BYTES, PeerArena, PeerKey, ReadRange, TransferError

# After a pause a GPU's copy engine sleeps: a READ takes 0.22 ms longer then to be told, to begin and to be seen to end. A small
# one that is told 0.1 ms ahead takes that upon itself. (One of 4 KiB takes another way and wakes little; 16 KiB would do.)
WAKE_PATH = "cuda_ipc"
WAKE_BYTES = 1 << 20
AWAKE_S = 0.05  # behind a READ; after 30 ms nothing sleeps yet, after 100 ms everything does


def agent_name(worker_id: str, incarnation: str, generation: int) -> str:
    """A restarted worker, or a new generation of a living one, is a different agent."""
    return f"{worker_id}/{incarnation}/{generation}"


@dataclass(slots=True)
class _Peer:
    arena: PeerArena
    path: str | None = None  # known after the first READ
    waking: Any = None  # a READ whose bytes nobody wants
    told_s: float = 0.0  # the latest READ, monotonic


class NixlTransport:
    """Registers `storage` (contiguous uint8 tensor, the arena) when built; raises TransferError if NIXL cannot.

    `storage` must live until `close` returns. `memory` and `device_id` describe it, e.g. ("DRAM", 0) or ("VRAM", 3).
    """

    def __init__(self, name: str, storage: Any, memory: str = "DRAM", device_id: int = 0) -> None:
        self._name = name
        self._storage = storage
        self._memory = memory
        self._device_id = device_id
        self._base = int(storage.data_ptr())
        self._size = int(storage.numel())
        self._peers: dict[PeerKey, _Peer] = {}
        self._reads: dict[int, tuple[PeerKey, Any]] = {}
        self._done: set[int] = set()
        self._failed: dict[int, str] = {}
        self._scratch = storage.new_empty(WAKE_BYTES)  # what waking reads write to, all of them
        self._posts = 0
        self._posted_s = 0.0
        self._paths: list[str] = []  # distinct ones that UCX reported, in order
        ucxlog.quiet_environment()
        self._log = ucxlog.UcxLog()
        try:
            import nixl._bindings as bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as e:
            raise TransferError(f"nixl cannot be imported ({e}); install the extra or choose transport=loopback") from e
        _quiet_logger()
        self._errors = tuple(e for e in vars(bindings).values() if isinstance(e, type) and issubclass(e, Exception))
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            regions = [(int(t.data_ptr()), int(t.numel()), device_id, "") for t in (storage, self._scratch)]
            self._registered = self._agent.register_memory(regions, memory)
            self._metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as e:
            raise TransferError(f"NIXL refused {self._size} B of {memory}: {_text(e)}") from e
        self._read_log()

    @property
    def agent_name(self) -> str:
        return self._name

    @property
    def agent_metadata(self) -> bytes:
        return self._metadata

    def connect(self, peer: PeerArena) -> None:
        if peer.key in self._peers:
            return
        if any(p.arena.agent_name == peer.agent_name for p in self._peers.values()):
            raise TransferError(f"agent {peer.agent_name!r} is already known under another incarnation or generation")
        try:
            name = self._agent.add_remote_agent(peer.agent_metadata)
        except self._errors as e:
            raise TransferError(f"agent {peer.agent_name!r} of {peer.worker_id} was refused: {_text(e)}") from e
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != peer.agent_name:
            if all(p.arena.agent_name != name for p in self._peers.values()):
                self._forget(name)
            raise TransferError(f"metadata is of agent {name!r}, expected {peer.agent_name!r}")
        self._peers[peer.key] = _Peer(peer)

    def disconnect(self, key: PeerKey) -> None:
        """Reads in flight to that peer end in an error; the transfer thread calls this when there are none."""
        peer = self._peers.pop(key, None)
        if peer is not None:
            self._end_waking(peer)
            self._forget(peer.arena.agent_name)

    def wake(self, key: PeerKey) -> None:
        """By a READ of a little of the peer's arena into memory that is nobody's, one per peer at a time."""
        peer = self._peers.get(key)
        if peer is None or WAKE_PATH not in (peer.path or "") or time.monotonic() - peer.told_s < AWAKE_S:
            return
        length = np.array([min(WAKE_BYTES, peer.arena.total_bytes)])
        here, there = np.array([self._scratch.data_ptr()]), np.array([peer.arena.base_address])
        try:
            if peer.waking is not None and self._agent.check_xfer_state(peer.waking) == "PROC":
                return
            self._end_waking(peer)
            peer.waking = self._make_read(peer, here, there, length)
            self._agent.transfer(peer.waking)
            peer.told_s = time.monotonic()
        except self._errors as e:  # a read that somebody wants will tell of it
            self._end_waking(peer)
            logging.getLogger(__name__).debug("waking the way to %s: %s", peer.arena.worker_id, _text(e))

    def post(self, key: PeerKey, ranges: Sequence[ReadRange]) -> int:
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"no connection to {key}")
        table = np.array([(r.remote_offset, r.local_offset, r.length) for r in ranges], dtype=np.uint64)
        if int(table[:, 2].sum()) > MAX_POST_BYTES:
            raise TransferError(f"a post of {int(table[:, 2].sum())} B, at most {MAX_POST_BYTES}")
        remote, local = table[:, 0] + np.uint64(peer.arena.base_address), table[:, 1] + np.uint64(self._base)
        try:
            xfer = self._make_read(peer, local, remote, table[:, 2])
        except self._errors as e:
            raise TransferError(f"READ from {peer.arena.worker_id} was refused: {_text(e)}") from e
        self._posts += 1
        handle = self._posts
        self._reads[handle] = (key, xfer)
        self._posted_s = peer.told_s = time.monotonic()
        try:
            if self._agent.transfer(xfer) == "DONE":
                self._done.add(handle)
        except self._errors as e:
            # Parts may have been written already, so this is no refused post: `poll` reports it.
            self._failed[handle] = _text(e)
        return handle

    @property
    def posted_s(self) -> float:
        return self._posted_s

    def poll(self, handle: int) -> bool:
        if handle in self._done:
            return True
        key, xfer = self._reads[handle]
        if handle not in self._failed:
            try:
                state = self._agent.check_xfer_state(xfer)
            except self._errors as e:
                state = _text(e)
            if state == "PROC":
                return False
            if state == "DONE":
                self._done.add(handle)
                return True
            self._failed[handle] = state
            self._read_log()
        raise TransferError(f"READ from {key[0]} failed: {self._failed[handle]}")

    def free(self, handle: int) -> None:
        """Raises ValueError for a read that is not terminal: it still owns its destinations."""
        if handle not in self._done and handle not in self._failed:
            raise ValueError(f"read {handle} is not terminal")
        _, xfer = self._reads.pop(handle)
        self._done.discard(handle)
        self._failed.pop(handle, None)
        self._release(xfer)

    def progress(self) -> None:
        # Fetching notifications (there are none) is NIXL's only call that drives the worker without a read of our own.
        try:
            self._agent.get_new_notifs()
        except self._errors as e:
            raise TransferError(f"NIXL cannot progress: {_text(e)}") from e

    def transport_in_use(self, key: PeerKey) -> str:
        """ "ucx/" and what UCX itself says READs take, e.g. "ucx/cma" (shared memory), "ucx/tcp", "ucx/rc_mlx5".

        UCX names a path once per distinct configuration, so a peer that adds no new one shares the only one seen, or
        with several seen is one of them: "ucx/cma|tcp". Before the first READ: "ucx/unknown".
        """
        peer = self._peers.get(key)
        if peer is None or peer.path is None:
            fresh = self._read_log()
            path = fresh[-1] if fresh else "|".join(self._paths)
            if peer is None or not path:
                return f"ucx/{path or 'unknown'}"
            peer.path = f"ucx/{path}"
        return peer.path

    def close(self) -> None:
        """Peers that read from us get errors. The agent ends its reads in its destructor, which runs when nobody refers to it
        or to a handle of it any more: that is made sure of."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        while self._reads:
            self._release(self._reads.popitem()[1][1])
        for peer in self._peers.values():
            self._end_waking(peer)
        self._peers.clear()
        try:
            agent.deregister_memory(self._registered)
        except self._errors as e:
            logging.getLogger(__name__).warning("deregistering %s: %s", self._name, _text(e))
        if _other_references(agent):
            gc.collect()
        if others := _other_references(agent):
            self._agent = agent
            raise TransferError(f"agent {self._name!r} cannot be destroyed: {others} references to it are left")
        self._registered = None
        del agent  # the last reference: the destructor ends every READ before it returns

    def _make_read(self, peer: _Peer, local: Any, remote: Any, lengths: Any) -> Any:
        """Of addresses, uint64 each. Raises what NIXL raises."""
        agent = self._agent
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(_descriptors(local, lengths, self._device_id), self._memory),
            agent.get_xfer_descs(_descriptors(remote, lengths, peer.arena.device_id), peer.arena.memory),
            peer.arena.agent_name,
        )

    def _end_waking(self, peer: _Peer) -> None:
        waking, peer.waking = peer.waking, None
        if waking is not None:
            self._release(waking)

    def _read_log(self) -> list[str]:
        """Read paths that UCX reported since the last call; passes its warnings on to our logger."""
        text = self._log.read()
        for problem in ucxlog.problems(text):
            logging.getLogger(__name__).warning("UCX: %s", problem)
        fresh = [p.name for p in ucxlog.read_paths(text)]
        self._paths += [p for p in dict.fromkeys(fresh) if p not in self._paths]
        return fresh

    def _release(self, xfer: Any) -> None:
        try:
            xfer.release()
        except self._errors as e:
            logging.getLogger(__name__).debug("releasing a read: %s", _text(e))

    def _forget(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as e:
            logging.getLogger(__name__).debug("forgetting %s: %s", name, _text(e))


def _descriptors(addresses: Any, lengths: Any, device_id: int) -> Any:
    table = np.empty((len(addresses), 3), dtype=np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = addresses, lengths, device_id
    return table


def _other_references(agent: Any) -> int:
    """How many there are to the agent, or to what each handle of a read holds of it, besides the caller's one."""
    inner = agent.agent
    return max(0, sys.getrefcount(agent) - 3) + max(0, sys.getrefcount(inner) - 3)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _quiet_logger() -> None:
    """NIXL's Python logger prints to stdout; here it goes the way of all other loggers."""
    if not os.environ.get(ucxlog.SHOW_LOGS):
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
