import zlib

import torch

from twinflow.transfer.checksum import crc32


def test_tensor_views_and_buffers_agree() -> None:
    storage = torch.arange(1000, dtype=torch.int64).to(torch.uint8)
    view = storage[100:356]
    assert crc32(view) == crc32(bytes(view.tolist())) == zlib.crc32(bytes(view.tolist()))
    assert crc32(memoryview(bytearray(b"abc"))) == zlib.crc32(b"abc")
    assert crc32(storage[::2]) == zlib.crc32(bytes(storage[::2].tolist()))
