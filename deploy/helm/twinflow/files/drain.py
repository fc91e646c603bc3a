"""preStop of a worker: it takes nothing new, and this returns once it has nothing left, or after LIMIT_S at the latest.

    python drain.py HOST:PORT LIMIT_S

Repeats the admin API's Drain, which says what is left. A worker that does not answer has nothing to wait for.
"""

import sys
import time

import grpc

from twinflow.rpc.v1 import admin_pb2, admin_pb2_grpc

ANSWER_S = 5.0
PAUSE_S = 0.5


def drain(address: str, limit_s: float) -> str:
    """Returns why it is over."""
    end = time.monotonic() + limit_s
    with grpc.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        while True:
            try:
                answer = admin.Drain(admin_pb2.DrainRequest(), timeout=ANSWER_S)
            except grpc.RpcError as e:
                return f"no answer ({e.code().name}): {e.details()}"
            left = sum(w.requests + w.leases for w in answer.workers)
            if not left:
                return "nothing is left"
            if time.monotonic() > end:
                return f"{left} requests and leases are left after {limit_s:g} s"
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    print(f"drain: {drain(sys.argv[1], float(sys.argv[2]))}", flush=True)
