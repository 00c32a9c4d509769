"""Any number of losses, by Reed-Solomon over GF(256), with the arithmetic of Intel's ISA-L.

Row r, column c of the parity matrix is 1 / ((width + r) xor c) in the field of polynomial 0x11d: a Cauchy matrix, of
which every square part can be inverted, so any `width` blocks of a stripe give all others.

ISA-L is called directly, out of the pyeclib package or from the system, because `ec_encode_data` sums buffers where
they lie, one row at a time if asked, which is what a member with one row of each of several stripes needs, and without
Python's lock. RS 4+2 in blocks of 256 KiB on one core: 13 GB/s of data. pyeclib's own interface joins the data, copies
them into fragments with headers and always makes all rows: 8 GB/s in one run, 0.4 in another.
Horner's scheme in numpy: 2.3 GB/s, and no cheap form for recovery. zfec: 1.2 GB/s. (`bench/results/parity.md`, LOG.md)
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, files

import numpy as np

from everstep.errors import BadConfig, MissingPackage
from everstep.protect.xor import Bytes

MAX_COLUMNS = 256  # as many as the field has elements
_TABLE_BYTES = 32  # of one weight, at most: some processors need fewer


class ReedSolomon:
    """The code with `losses` rows of parity over `width` data blocks."""

    def __init__(self, width: int, losses: int) -> None:
        if width + losses > MAX_COLUMNS:
            raise BadConfig(f"a parity group has at most {MAX_COLUMNS} members, not {width + losses}; make it smaller")
        self._isal = _library()
        self._generator = np.empty((width + losses, width), np.uint8)
        self._isal.gf_gen_cauchy1_matrix(_pointer(self._generator), width + losses, width)

    def weights(self, wanted: int, present: Sequence[int]) -> bytes:
        width = self._generator.shape[1]
        seen, inverse = self._generator[list(present)], np.empty((width, width), np.uint8)
        if self._isal.gf_invert_matrix(_pointer(seen), _pointer(inverse), width):
            raise ValueError(f"{width} different columns are needed, not {sorted(present)}")
        found = np.empty(width, np.uint8)  # the wanted column in terms of data, and those in terms of what is present
        self.combine(self._generator[wanted].tobytes(), list(inverse), found)
        return found.tobytes()

    def combine(self, weights: bytes, chunks: Sequence[Bytes], out: Bytes) -> None:
        if len(weights) != len(chunks) or any(len(chunk) > len(out) for chunk in chunks) or not out.flags.writeable:
            raise ValueError("each chunk has a weight, and the sum has room for the longest")  # C would not look
        places = [_pointer(chunk) for chunk in chunks]
        target, done = _pointer(out), 0
        # Between two lengths the same chunks take part; mostly all are equally long, and this is one round.
        for length in sorted({len(chunk) for chunk in chunks if len(chunk)}):
            left = [index for index, chunk in enumerate(chunks) if len(chunk) > done]
            sources = (ctypes.c_void_p * len(left))(*(places[index] + done for index in left))
            table = _table(bytes(weights[index] for index in left))
            self._isal.ec_encode_data(
                length - done, len(left), 1, table, sources, ctypes.byref(ctypes.c_void_p(target + done))
            )
            done = length
        out[done:] = 0


def _pointer(array: Bytes) -> int:
    if array.dtype != np.uint8 or not array.flags.c_contiguous or array.size >= 1 << 31:
        raise ValueError("a chunk is bytes without gaps, less than 2 GiB of them")
    return int(array.__array_interface__["data"][0])


@lru_cache(maxsize=1024)
def _table(weights: bytes) -> ctypes.Array[ctypes.c_char]:
    """The weights as the library's inner loop wants them on this processor."""
    table = ctypes.create_string_buffer(_TABLE_BYTES * len(weights))
    _library().ec_init_tables(len(weights), 1, weights, table)
    return table


@cache
def _library() -> ctypes.CDLL:
    try:
        bundled = [str(file.locate()) for file in files("pyeclib") or () if file.name.startswith("libisal")]
    except PackageNotFoundError:
        bundled = []
    for path in (*bundled, ctypes.util.find_library("isal")):
        if path:
            try:
                return _declared(ctypes.CDLL(path))
            except (OSError, AttributeError):
                pass  # for another processor, or without what is needed: the next may do
    raise MissingPackage("pyeclib", "Reed-Solomon parity (more than one loss)", extra="nodes")


def _declared(isal: ctypes.CDLL) -> ctypes.CDLL:
    """Pointers as Python's integers would be cut to 32 bits if the library's functions were not declared."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    isal.gf_gen_cauchy1_matrix.argtypes = (pointer, number, number)
    isal.gf_invert_matrix.argtypes = (pointer, pointer, number)
    isal.ec_init_tables.argtypes = (number, number, pointer, pointer)
    isal.ec_encode_data.argtypes = (number, number, number, pointer, pointer, pointer)
    for function in (isal.gf_gen_cauchy1_matrix, isal.ec_init_tables, isal.ec_encode_data):
        function.restype = None
    return isal
