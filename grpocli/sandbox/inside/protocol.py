"""Encodes plain values as bytes. Decoding yields built-in types only: it runs no code and makes no other objects.

A value is a letter, a number and a colon, then that many bytes or values: `s3:abc`, `l2:i1:4i2:17`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST = 16 * 2**20
"""Bytes of a message."""
DEEPEST = 200
"""Levels of nested containers."""


class Closed(ConnectionError):
    """The other end has closed the connection or sent something else than a message."""


def encode(value: Any, keep: Callable[[Any], tuple[int, str]]) -> bytes:
    """The bytes of a value. keep: gives a number and a type name to an object that is not plain.

    Raises RecursionError for a list within itself.
    """
    pieces: list[bytes] = []
    _write(value, keep, pieces)
    return b"".join(pieces)


def _write(value: Any, keep: Callable[[Any], tuple[int, str]], out: list[bytes]) -> None:
    if value is None:
        out.append(b"n0:")
        return
    for kind, letter, text in SCALARS:
        if isinstance(value, kind):
            written = text(value)
            out.append(b"%s%d:%s" % (letter, len(written), written))
            return
    for kind, letter in CONTAINERS:
        if isinstance(value, kind):
            items = [one for pair in value.items() for one in pair] if isinstance(value, dict) else list(value)
            out.append(b"%s%d:" % (letter, len(items)))
            for one in items:
                _write(one, keep, out)
            return
    out.append(b"o2:")
    for one in keep(value):
        _write(one, keep, out)


SCALARS: tuple[tuple[type, bytes, Callable[[Any], bytes]], ...] = (
    (bool, b"b", lambda value: b"1" if value else b""),
    (int, b"i", lambda value: b"%x" % value),
    (float, b"f", lambda value: float(value).hex().encode()),
    (str, b"s", lambda value: str(value).encode(errors="surrogatepass")),
    (bytes, b"y", bytes),
    (bytearray, b"y", bytes),
    (complex, b"c", lambda value: f"{value.real.hex()} {value.imag.hex()}".encode()),
)
CONTAINERS = ((list, b"l"), (tuple, b"t"), (set, b"e"), (frozenset, b"z"), (dict, b"d"))


def decode(message: bytes, found: Callable[[int, str], Any]) -> Any:
    """The value of a message. found: the object with a number and a type name. Raises Closed for invalid bytes."""
    try:
        value, end = _read(message, 0, found, DEEPEST)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise Closed("it sent an invalid value") from error
    if end != len(message):
        raise Closed("it sent more than one value")
    return value


def _read(message: bytes, at: int, found: Callable[[int, str], Any], depth: int) -> tuple[Any, int]:
    colon = message.index(b":", at, at + 22)
    letter, size, at = message[at : at + 1], int(message[at + 1 : colon]), colon + 1
    if letter in FROM_BYTES:
        if not 0 <= size <= len(message) - at:
            raise ValueError(size)
        return FROM_BYTES[letter](message[at : at + size]), at + size
    if depth == 0:
        raise ValueError(depth)
    items = []
    for _ in range(size):
        one, at = _read(message, at, found, depth - 1)
        items.append(one)
    return found(*items) if letter == b"o" else FROM_ITEMS[letter](items), at


FROM_BYTES: dict[bytes, Callable[[bytes], Any]] = {
    b"n": lambda _: None,
    b"b": bool,
    b"i": lambda text: int(text, 16),
    b"f": lambda text: float.fromhex(text.decode()),
    b"s": lambda text: text.decode(errors="surrogatepass"),
    b"y": bytes,
    b"c": lambda text: complex(*map(float.fromhex, text.decode().split())),
}
FROM_ITEMS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"e": set,
    b"z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


def plain(value: Any) -> tuple[int, str]:
    """For `keep`: raises TypeError, since only plain values are allowed."""
    raise TypeError(f"{type(value).__name__} is not a plain value")


def nothing(number: int, name: str) -> Any:
    """For `found`: raises ValueError, since only plain values are allowed."""
    raise ValueError(f"{name} is not a plain value")


class Connection:
    """One end of the connection between the two processes. Its methods raise ConnectionError, such as Closed."""

    def __init__(self, fd: int) -> None:
        self._in = os.fdopen(fd, "rb")
        self._out = os.fdopen(os.dup(fd), "wb")

    def send(self, message: bytes) -> None:
        self._out.write(b"%d\n%s" % (len(message), message))
        self._out.flush()

    def receive(self) -> bytes:
        size = self._in.readline(20)
        if not size.strip().isdigit():
            raise Closed("it has ended" if not size else "it sent an invalid message")
        if int(size) > LONGEST:
            raise Closed("it sent a message that is too long")
        message = self._in.read(int(size))
        if len(message) < int(size):
            raise Closed("it has ended")
        return message
