"""CUDA libraries with the code of one GPU architecture: the other entries of their fat binaries are removed.

Each container stays where it is and gets shorter; what it loses becomes zeros behind it, which compress to nothing. PTX
goes too where a container has machine code for the architecture; without that, the best PTX stays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = 0xBA55ED50
PTX, ELF = 1, 2


def pruned(library: bytes, architecture: int) -> bytearray:
    """A library, the whole file, without the code of other architectures than 90 (sm_90) or so."""
    data = bytearray(library)
    for start, length in sections(library, b".nv_fatbin"):
        for begin, stop in containers(library, start, start + length):
            left = kept(entries(library, begin, stop), architecture)
            struct.pack_into("<Q", data, begin - 8, len(left))
            data[begin:stop] = left + bytes(stop - begin - len(left))
    return data


def sections(data: bytes, name: bytes) -> Iterator[tuple[int, int]]:
    """Offset and length of an ELF file's sections of a name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, strings = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + k * size) for k in range(count)]
    for head in heads:
        start = heads[strings][4] + head[0]
        if data[start : data.index(b"\0", start)] == name:
            yield head[4], head[5]


def containers(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the entries of each container, whose size stands right before them."""
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        yield at + header, at + header + size
        at += header + size


def entries(data: bytes, at: int, end: int) -> list[tuple[int, int, bytes]]:
    """Kind, architecture and bytes of a container's entries. Raises ValueError if they have another form."""
    found = []
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        if header < 32 or at + header + size > end:
            raise ValueError(f"an entry of another form at {at:#x}")
        found.append((kind, architecture, bytes(data[at : at + header + size])))
        at += header + size
    return found


def kept(found: list[tuple[int, int, bytes]], architecture: int) -> bytes:
    """The entries that stay; the smallest if none is for the architecture, so that the container is valid."""
    own = [code for kind, of, code in found if kind == ELF and of == architecture]
    best = max((of for kind, of, _ in found if kind == PTX and of <= architecture), default=None)
    own = own or [code for kind, of, code in found if kind == PTX and of == best]
    return b"".join(own) or min((code for _, _, code in found), key=len)
