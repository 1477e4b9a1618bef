"""CRC-32C from Python: published values, a slow reference, any element type, alignment and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lohan._native import AlignedBuffer, ThreadPool, checksum, copy_with_checksum

TILE_BYTES = 256 << 10


@pytest.fixture(scope="module", params=[1, 3], ids=["one thread", "three threads"])
def pool(request) -> ThreadPool:
    return ThreadPool(request.param)


def slow_crc32c(data: bytes) -> int:
    """The definition, bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4, which prints the bytes in the order they are sent.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(pool, data, value):
    assert slow_crc32c(data) == value
    assert checksum(data, pool=pool) == value
    target = bytearray(len(data))
    assert copy_with_checksum(target, data, pool=pool) == value
    assert target == data


@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 511, 512, 513, 769, 1535, 1536, 1537, 24575, 24577])
@pytest.mark.parametrize("skip", [0, 1, 5])
def test_equals_the_definition(pool, length, skip):
    data = np.random.default_rng(length).integers(0, 256, skip + length, np.uint8)[skip:]
    assert checksum(data, pool=pool) == slow_crc32c(data.tobytes())


@pytest.mark.parametrize("length", [TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 5 * TILE_BYTES + 13])
def test_tiles_make_one_standard_value(pool, length):
    """More than a tile equals what the definition gives: appending the last bytes to the value of those before."""
    data = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    target = np.zeros_like(data)
    value = checksum(data, pool=pool)
    assert copy_with_checksum(target, data, pool=pool) == value
    assert np.array_equal(target, data)
    # A message followed by its own value, low byte first, has the same value whatever the message.
    closed = np.concatenate([data, np.frombuffer(value.to_bytes(4, "little"), np.uint8)])
    assert checksum(closed, pool=pool) == 0x48674BC7
    closed[length // 2] ^= 16
    assert checksum(closed, pool=pool) != 0x48674BC7


def test_any_element_type_counts_as_its_bytes(pool):
    values = torch.randn(1001)
    expected = slow_crc32c(values.numpy().tobytes())
    assert checksum(values, pool=pool) == expected
    assert checksum(values.view(torch.bfloat16), pool=pool) == expected
    target = torch.zeros(4 * 1001, dtype=torch.uint8)
    assert copy_with_checksum(target, values, pool=pool) == expected
    assert torch.equal(target.view(torch.float32), values)


def test_an_aligned_buffer_is_an_array_like_others(pool):
    buffer = AlignedBuffer(1000)
    assert checksum(buffer.array(), pool=pool) == slow_crc32c(bytes(1000))
    copy_with_checksum(buffer.array(), b"x" * 1000, pool=pool)
    assert checksum(buffer.array(), pool=pool) == slow_crc32c(b"x" * 1000)
