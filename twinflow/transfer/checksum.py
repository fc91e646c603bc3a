"""crc32 of a block's or slot's bytes, computed alike on both sides when `verify=checksum`."""

import zlib
from typing import Any


def crc32(data: Any) -> int:
    """crc32 (unsigned 32 bit) of `data`: a contiguous uint8 torch tensor on any device, or anything with a buffer.

    A tensor on a device is copied to the host first and thereby waits for the device's current stream.
    """
    if hasattr(data, "untyped_storage"):
        data = memoryview(data.detach().cpu().contiguous().numpy())
    return zlib.crc32(data)
