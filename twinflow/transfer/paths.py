"""Which paths reads may take. A path is named as `Transport.transport_in_use` does: "ucx/rc_mlx5", "ucx/cuda_copy+tcp"."""

import logging

log = logging.getLogger(__name__)

REMEDY = (
    "give both workers the devices and rights of the faster path (InfiniBand or RoCE devices; on one host a shared IPC "
    "namespace and all GPUs visible), check UCX_TLS and UCX_NET_DEVICES, or set require_rdma=off"
)


def refuse_tcp(path: str) -> str:
    """Why reads over `path` are refused where RDMA, NVLink or shared memory is required; "" = allowed.

    A name with "|" is one of several that cannot be told apart any more: allowed, with a warning.
    """
    names = path.removeprefix("ucx/").replace("|", "+").split("+")
    if "tcp" not in names:
        return ""
    if "|" in path:
        log.warning("reads take one of %s, which may be TCP: UCX names a path only once", path)
        return ""
    return f"reads take {path} and require_rdma is on: {REMEDY}"
