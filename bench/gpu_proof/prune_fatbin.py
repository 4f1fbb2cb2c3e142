"""CUDA libraries with the code of one GPU architecture: the other entries of their fat binaries are removed.

Each container stays where it is and gets shorter; what it loses becomes zeros behind it, which compress to nothing. PTX
goes too where a container has machine code for the architecture; without that, the best PTX stays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEAD = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""How a container begins: its magic number, its version, and the size of its head, which ends with that of the rest."""
PTX, ELF = 1, 2


def pruned(library: bytes, architecture: int) -> bytearray:
    """A library, the whole file, without the code of other architectures than 90 (sm_90) or so."""
    data = bytearray(library)
    for begin, stop in containers(library):
        left = kept(entries(library, begin, stop), architecture)
        struct.pack_into("<Q", data, begin - 8, len(left))
        data[begin:stop] = left + bytes(stop - begin - len(left))
    return data


def containers(data: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of the entries of each container."""
    at = data.find(HEAD)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        yield at + 16, at + 16 + size
        at = data.find(HEAD, at + 16 + size)


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
