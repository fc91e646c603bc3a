"""Plain device memory for the arena, straight from the CUDA driver.

Memory from torch's caching allocator may be part of a larger segment, or mapped piece by piece; a peer process can then not
open it as a whole, and transfers fall back to slower ways without a word. What comes from here is one allocation of its own.
"""

import ctypes
from typing import Any

import torch


class DeviceMemory:
    """`size_bytes` of zeroed memory on one GPU, freed with the last tensor over it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._address = 0
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context that the driver allocates in
            self._driver = ctypes.CDLL("libcuda.so.1")
            address = ctypes.c_uint64()
            error = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))
            if error:
                free, total = torch.cuda.mem_get_info()
                raise MemoryError(
                    f"the arena of {size_bytes} B does not fit on {device}: {free} of {total} B are free (driver error {error})"
                )
            self._address = address.value
            self._driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))
            torch.cuda.synchronize()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self._address))


def allocate(size_bytes: int, device: str) -> torch.Tensor:
    """(size_bytes,) uint8, zero. On a GPU: one driver allocation. Raises MemoryError with the numbers."""
    where = torch.device(device)
    if where.type != "cuda":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=where)
    return torch.as_tensor(DeviceMemory(size_bytes, where), device=where)
