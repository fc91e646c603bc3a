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


def agent_name(worker_id: str, incarnation: str, generation: int) -> str:
    """A restarted worker, or a new generation of a living one, is a different agent."""
    return f"{worker_id}/{incarnation}/{generation}"


@dataclass(slots=True)
class _Peer:
    arena: PeerArena
    path: str | None = None  # known after the first READ


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
            self._registered = self._agent.register_memory([(self._base, self._size, device_id, "")], memory)
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
            self._forget(peer.arena.agent_name)

    def post(self, key: PeerKey, ranges: Sequence[ReadRange]) -> int:
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"no connection to {key}")
        table = np.array([(r.remote_offset, r.local_offset, r.length) for r in ranges], dtype=np.uint64)
        if int(table[:, 2].sum()) > MAX_POST_BYTES:
            raise TransferError(f"a post of {int(table[:, 2].sum())} B, at most {MAX_POST_BYTES}")
        far = self._descriptors(table[:, 0], table[:, 2], peer.arena.base_address, peer.arena.device_id)
        near = self._descriptors(table[:, 1], table[:, 2], self._base, self._device_id)
        agent = self._agent
        try:
            xfer = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(near, self._memory),
                agent.get_xfer_descs(far, peer.arena.memory),
                peer.arena.agent_name,
            )
        except self._errors as e:
            raise TransferError(f"READ from {peer.arena.worker_id} was refused: {_text(e)}") from e
        self._posts += 1
        handle = self._posts
        self._reads[handle] = (key, xfer)
        self._posted_s = time.monotonic()
        try:
            if agent.transfer(xfer) == "DONE":
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

    def _descriptors(self, offsets: Any, lengths: Any, base: int, device_id: int) -> Any:
        table = np.empty((len(offsets), 3), dtype=np.uint64)
        table[:, 0] = offsets + np.uint64(base)
        table[:, 1] = lengths
        table[:, 2] = device_id
        return table

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
