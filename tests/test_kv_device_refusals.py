"""What is refused of streams, slots and makers of arrays, with a message that names the argument."""

from __future__ import annotations

import pytest

import kvbm_kernels as kk
from kv_places import FakeCuda
from kv_support import contiguous, new_pool, some


def test_streams_are_for_cuda(rng):
    """In host memory there is none, and rows in CUDA memory cannot go there."""
    cache, flat = kk.KvCache.paged(new_pool()), contiguous()
    k = some(rng, 2)
    for call in (
        lambda: cache.append(k, k, stream=0),
        lambda: flat.append(k, k, stream=0),
        lambda: cache.gather(stream=0),
        lambda: cache.reserve(1, stream=0),
        lambda: cache.release(stream=0),
        lambda: kk.KvCache.paged(cache.pool, stream=0),
        lambda: kk.KvBatch([cache], stream=0),
        lambda: kk.KvBatch([cache]).write(k, k, stream=0),
        lambda: new_pool(stream=0),
        lambda: contiguous(stream=0),
    ):
        with pytest.raises(kk.KvbmValueError, match="stream is 0, expected None: the cache is in host memory"):
            call()
    with pytest.raises(kk.KvbmTypeError, match="stream is 'main', expected a handle"):
        cache.append(k, k, stream="main")
    fake = FakeCuda()
    on_device = fake.put(k)
    fake.close()
    with pytest.raises(kk.KvbmValueError, match="k and v is on cuda:0, expected host memory, as the cache"):
        cache.append(on_device, on_device)
    assert len(cache) == len(flat) == 0


def test_wrong_replacements(rng):
    """A slot is one of the batch, and what goes in is a cache of the pool with a table that fits, and in no other."""
    pool = new_pool()
    first, second = (kk.KvCache.paged(pool, max_blocks=4) for _ in range(2))
    batch = kk.KvBatch([first, None])
    assert batch.max_blocks == 4
    for call, error, message in (
        (lambda: batch.replace(2, second), IndexError, "slot is 2, expected 0 to 1"),
        (lambda: batch.replace(-1, second), IndexError, "slot is -1"),
        (lambda: batch.replace("0", second), TypeError, "slot is '0', expected an integer"),
        (lambda: batch.replace(1, first), ValueError, "cache is in slot 0 already"),
        (lambda: batch.replace(1, pool), TypeError, "cache is a BlockPool, expected a paged KvCache or None"),
        (lambda: batch.replace(1, kk.KvCache.paged(new_pool())), ValueError, "cache is of another pool than the batch"),
        (lambda: batch.replace(1, kk.KvCache.paged(pool)), ValueError, "cache has a table of 12 blocks, expected at"),
        (lambda: kk.KvBatch([first], max_blocks=3), ValueError, r"caches\[0\] has a table of 4 blocks, expected at"),
        (lambda: kk.KvBatch([None]), ValueError, "caches has only None, expected a cache, or a pool as well"),
        (lambda: kk.KvBatch([first], pool=3), TypeError, "pool is an int, expected a BlockPool"),
        (lambda: kk.KvBatch([None, first], pool=new_pool()), ValueError, r"caches\[1\] is of another pool"),
        (lambda: batch.tables(5), ValueError, "max_blocks is 5, expected at most 4, the batch's own"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert batch.caches == (first, None)
    assert kk.KvBatch([None], pool=pool).block_table.shape == (1, 12)
    k, v = some(rng, 3), some(rng, 3)
    with pytest.raises(kk.KvbmValueError, match="k has rows for 3 tokens, expected a multiple of 2 slots"):
        batch.write(k, v)
    assert batch.replace(0, first) is first
    assert batch.csr().indptr.tolist() == [0, 0, 0]


def test_arrays_that_do_not_fit(rng):
    """A maker's tables are the host's own memory or CUDA's, and CUDA arrays need a build with CUDA."""

    class Copies(FakeCuda):
        def __init__(self):
            pass

        def zeros(self, shape, dtype):
            return super().zeros(shape, dtype).memory

        def table(self, host):
            return host.copy()

    with pytest.raises(kk.KvbmValueError, match=r"arrays\.table gave another array in host memory"):
        kk.KvCache.paged(new_pool(arrays=Copies()))
    with pytest.raises(kk.KvbmTypeError, match="arrays is an object, expected .*on, zeros, empty, view and table"):
        new_pool(arrays=object())
    with pytest.raises(kk.KvbmError, match="cupy\", which cannot be imported|device is 'here', expected the number of"):
        new_pool(arrays="cupy", device="here")
    if kk.is_stub_build():
        copies = Copies()
        copies.zeros = lambda shape, dtype: FakeCuda.zeros(copies, shape, dtype)
        with pytest.raises(kk.StubBuildError, match="arrays are in CUDA memory"):
            new_pool(arrays=copies)
