"""Blocks in memory that a GPU reaches, laid out in every way, and conversions of them against the reference."""

from __future__ import annotations

import numpy as np

import reference
from gpu_support import DTYPE_OF_NBYTES, NHD, Memory, check, device_table, make_view, synchronize, table

GUARD = 64


def spread(
    chunks: list[np.ndarray], where: str, misalign: int, rng: np.random.Generator, slots: np.ndarray | None = None
) -> tuple[Memory, np.ndarray]:
    """The chunks in one allocation, each in its slot (default: shuffled) with guard bytes around it; the allocation and
    the offset of each."""
    pitch = (chunks[0].nbytes + 2 * GUARD + 15) // 16 * 16
    slots = rng.permutation(len(chunks)) if slots is None else slots
    image = np.full(pitch * (int(slots.max()) + 1) + GUARD, 0xA5, dtype=np.uint8)
    offsets = slots * pitch + GUARD + misalign
    for chunk, offset in zip(chunks, offsets, strict=True):
        image[offset : offset + chunk.nbytes] = chunk.reshape(-1).view(np.uint8)
    return Memory(image.size, where).write(image), offsets


def flat(arrays: np.ndarray) -> list[np.ndarray]:
    return list(arrays.reshape(len(arrays), -1))


def pool_slots(nb: int, places: int, rng: np.random.Generator) -> np.ndarray:
    """Slots of chunks [nb, places] where each place, layer and outer, is a pool with room to spare and the same ids."""
    pool = nb + 2
    ids = rng.permutation(pool)[:nb]
    return (np.arange(places) * pool + ids[:, None]).reshape(-1)


def convert(
    name: str,
    kv: np.ndarray,
    layout: int,
    places: tuple[str, str] = ("device", "device"),
    misalign: tuple[int, int] = (0, 0),
    tables: str = "device",
    pools: bool = False,
) -> None:
    """Convert kv one way and compare the whole destination allocation, guards included.

    The chunks are shuffled, or in a pool for each layer and outer.
    """
    rng = np.random.default_rng(7)
    nb, nl, no, nt, nh, hd = kv.shape
    stacks = reference.block_stack(kv, "NHD" if layout == NHD else "HND")
    chunks = [chunk for block in stacks for chunk in block]
    slots = pool_slots(nb, nl * no, rng) if pools else None
    blocks, block_at = spread(chunks, places[0], misalign[0], rng, slots)
    universal, universal_at = spread(flat(reference.universal(kv)), places[1], misalign[1], rng)
    target, other = (universal, universal_at) if name == "launch_universal_from_block" else (blocks, block_at)
    expected = target.read()
    wiped = expected.copy()
    nbytes = kv.nbytes // len(other)
    for offset in other:
        wiped[offset : offset + nbytes] = 0x11
    target.write(wiped)
    universal_table = device_table(universal.address + universal_at, tables)
    block_table = device_table(blocks.address + block_at, tables)
    synchronize()
    check(
        name,
        universal_table.address,
        block_table.address,
        nb,
        nh,
        nl,
        no,
        nt,
        hd,
        DTYPE_OF_NBYTES[kv.dtype.itemsize],
        layout,
        0,
    )
    synchronize()
    reference.assert_same_bytes(target.read(), expected)


class Layout:
    """One way to lay out kv in one allocation: the bytes, and the view of them."""

    def __init__(self, kind: str, kv: np.ndarray, ids: np.ndarray | None, pool: int, where: str, pad: int = 0) -> None:
        nb, nl, no, nt, nh, hd = kv.shape
        row = hd * kv.dtype.itemsize
        rng = np.random.default_rng(9)
        full = reference.random_kv(rng, (pool, *kv.shape[1:]), kv.dtype)
        self.where = np.arange(nb) if ids is None else ids
        full[self.where] = kv
        self.ids = ids
        self.kind = kind
        nhd, hnd = (nh * row, row), (row, nt * row)
        chunk = nt * nh * row
        if kind in ("stack NHD", "stack HND"):
            order = kind[-3:]
            chunks = [c for block in reference.block_stack(full, order) for c in block]
            self.memory, at = spread(chunks, where, pad, rng)
            self.bases = table(self.memory.address + at)
            token, head = nhd if order == "NHD" else hnd
            numbers = dict(steps=(nl * no, no, 1), token=token, head=head)
        elif kind in ("layers NHD", "layers HND"):
            # One tensor a layer and outer, [pool, nt, nh, hd], as most engines hold them.
            order = kind[-3:]
            parts = [full[:, layer, outer] for layer in range(nl) for outer in range(no)]
            parts = [p if order == "NHD" else p.transpose(0, 2, 1, 3) for p in parts]
            self.memory, at = spread([np.ascontiguousarray(p) for p in parts], where, pad, rng)
            self.bases = table(self.memory.address + at)
            token, head = nhd if order == "NHD" else hnd
            numbers = dict(steps=(0, no, 1), block=chunk, token=token, head=head)
        elif kind == "operational":
            self.memory, at = spread(flat(reference.operational(full, "NHD")), where, pad, rng)
            self.bases = table(self.memory.address + at)
            numbers = dict(steps=(1, 0, 0), layer=no * chunk, outer=chunk, token=nhd[0], head=nhd[1])
        elif kind == "universal":
            self.memory, at = spread(flat(reference.universal(full)), where, pad, rng)
            self.bases = table(self.memory.address + at)
            numbers = dict(steps=(1, 0, 0), layer=no * nt * row, outer=nt * row, token=row, head=nl * no * nt * row)
        elif kind == "packed":
            # K and V of a row side by side, [pool, nl, nt, nh, no, hd]: one base and strides for all the rest.
            image = np.ascontiguousarray(full.transpose(0, 1, 3, 4, 2, 5))
            self.memory = Memory(image.nbytes + pad, where)
            self.memory.write(np.concatenate([np.zeros(pad, np.uint8), image.reshape(-1).view(np.uint8)]))
            self.bases = table([self.memory.address])
            numbers = dict(
                offset=pad, block=nl * no * chunk, layer=no * chunk, outer=row, token=nh * no * row, head=no * row
            )
        else:
            raise AssertionError(kind)
        self.view = make_view(self.bases, ids, pool, **numbers)


LAYOUTS = ["stack NHD", "stack HND", "layers NHD", "layers HND", "operational", "universal", "packed"]
