"""A silent fallback to TCP: refused with the reason, by name and in the pulls of that peer alone."""

import pytest

from tests.transfer.test_generations import Reader
from twinflow.transfer.base import PeerKey, PullFinished, ReadRange
from twinflow.transfer.generation import Generation, make_pull
from twinflow.transfer.paths import refuse_tcp


@pytest.mark.parametrize("path", ["ucx/tcp", "ucx/cuda_copy+tcp", "ucx/tcp+cma"])
def test_tcp_is_refused_with_the_remedy(path: str) -> None:
    why = refuse_tcp(path)
    assert path in why and "require_rdma" in why and "UCX_TLS" in why


@pytest.mark.parametrize("path", ["ucx/cma", "ucx/rc_mlx5", "ucx/cuda_ipc", "ucx/unknown", "loopback"])
def test_others_are_allowed(path: str) -> None:
    assert refuse_tcp(path) == ""


def test_what_cannot_be_told_apart_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert refuse_tcp("ucx/cma|tcp") == ""
    assert "may be TCP" in caplog.text


def test_the_refused_peer_fails_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Reader()
    paths = {"p": "ucx/tcp", "q": "ucx/rc_mlx5"}

    def in_use(key: PeerKey) -> str:
        return paths[key[0]]

    monkeypatch.setattr(r.agents[1], "transport_in_use", in_use)
    events: list[PullFinished] = []
    g = Generation(1, r.agents[1], events.append, path_rule=refuse_tcp)
    for arena in r.arenas.values():
        g.connect(arena)

    def pull(name: str, peer: str, posts: int) -> None:
        g.pull(make_pull(name, r.arenas[peer].key, [[ReadRange(0, 0, 8)]] * posts))
        for _ in range(3):
            g.turn()
            for read in r.manual.reads:
                read.copy()
                read.done()

    pull("p1", "p", 9)
    pull("q1", "q", 9)
    pull("p2", "p", 1)
    posted = len(r.manual.reads)
    g.connect(r.arenas["p"])
    pull("p3", "p", 1)
    assert len(r.manual.reads) == posted, "nothing more is read from it"
    by_name = {e.pull_id: e for e in events}
    assert {n: e.ok for n, e in by_name.items()} == {"p1": False, "p2": False, "p3": False, "q1": True}
    for name in ("p1", "p2", "p3"):
        assert by_name[name].refused and "p is not read: reads take ucx/tcp" in by_name[name].error
    assert by_name["p1"].transport == "ucx/tcp" and not by_name["q1"].refused
