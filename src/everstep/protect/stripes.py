"""Where the parity of a group lies, and what each byte of it is made of: geometry, without a byte in hand.

A group of n members survives m losses. It has n stripes, and each member is in all of them: stripe s has its parity
blocks, rows 0 to m-1, on members s, s+1, ..., s+m-1 (mod n), and one data block of every other member. So the data of
a member, of whatever length, are cut into n-m blocks, one for each stripe in which it has no parity; its m parity
blocks, one of each row, lie one after the other in its parity file. With m = 1 this is RAID-5.

A parity block is as long as the longest data block of its stripe. Shorter ones count as if zeros followed them; those
zeros are neither stored nor sent.

In the code's numbering the blocks of a stripe are columns: data 0 to n-m-1, then parity row r as n-m+r. Any n-m of
them give all others; `mixes` says which, for any range of bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator

from everstep.errors import TooManyLost
from everstep.types import Noun

ALIGN_BYTES = 64  # blocks begin on cache lines of the member's data


class Place(enum.Enum):
    """Which of a member's two byte strings."""

    DATA = "data"
    PARITY = "parity"


class Block(Noun, frozen=True, kw_only=True, gc=False):
    """One member's part of a stripe, or a range of it: where it lies in the member's data or parity file."""

    member: int
    place: Place
    column: int  # in the code's numbering
    offset: int
    length: int

    def cut(self, start: int, stop: int) -> Block:
        """What this block has of the stripe's bytes from `start` to `stop`; less, or nothing, where it is shorter."""
        start = min(start, self.length)
        return Block(
            member=self.member,
            place=self.place,
            column=self.column,
            offset=self.offset + start,
            length=min(stop, self.length) - start,
        )


class Mix(Noun, frozen=True, kw_only=True, gc=False):
    """A range of one block, and the same range of the blocks that it can be computed from."""

    target: Block
    sources: tuple[Block, ...]


class Geometry(Noun, frozen=True, kw_only=True):
    """A parity group: who is in it, how many bytes each of them has, and how many may be lost."""

    members: tuple[str, ...]
    lengths: tuple[int, ...]
    losses: int

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"the members of a group have different names, unlike {', '.join(self.members)}")
        if len(self.lengths) != len(self.members) or min(self.lengths, default=0) < 0:
            raise ValueError(f"{len(self.members)} members cannot have the lengths {self.lengths}")
        if not 1 <= self.losses < len(self.members):
            raise ValueError(f"a group of {len(self.members)} cannot make up for {self.losses} losses")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def width(self) -> int:
        """The number of data blocks in a stripe, and of blocks that a member's data are cut into."""
        return self.size - self.losses

    def block_bytes(self, member: int) -> int:
        """The length of a member's data blocks; the last ones may be shorter, or empty."""
        lines = -(-self.lengths[member] // (self.width * ALIGN_BYTES))
        return lines * ALIGN_BYTES

    def stripe_bytes(self, stripe: int) -> int:
        """The length of a stripe's parity blocks: that of its longest data block."""
        return max(block.length for block in self.data_blocks(stripe))

    def parity_bytes(self, member: int) -> int:
        """The length of a member's parity file."""
        return sum(self.stripe_bytes(stripe) for stripe in self.parity_stripes(member))

    def parity_stripes(self, member: int) -> tuple[int, ...]:
        """The stripe of which a member holds row 0, that of which it holds row 1, and so on: as its parity file."""
        return tuple((member - row) % self.size for row in range(self.losses))

    def data_blocks(self, stripe: int) -> tuple[Block, ...]:
        """What all parity of a stripe is made of, in the order of columns."""
        return tuple(
            self._data_block((stripe + self.losses + column) % self.size, stripe, column)
            for column in range(self.width)
        )

    def parity_blocks(self, stripe: int) -> tuple[Block, ...]:
        """The parity of a stripe, row by row."""
        return tuple(self._parity_block((stripe + row) % self.size, row) for row in range(self.losses))

    def mixes(
        self, place: Place, member: int, lost: Collection[int] = (), *, start: int = 0, stop: int | None = None
    ) -> Iterator[Mix]:
        """How to compute a range of a member's data or parity without reading the member, nor any that is lost.

        Data are preferred to parity, so with nobody else lost a member's parity is made of data alone: that is how it
        is encoded.
        """
        gone = {member, *lost}
        if not gone <= set(range(self.size)):
            raise ValueError(f"a group of {self.size} has no members {sorted(gone - set(range(self.size)))}")
        if len(gone) > self.losses:
            raise TooManyLost([self.members[one] for one in sorted(gone)], self.size, self.losses)
        for stripe in self._stripes(place, member):
            blocks = (*self.data_blocks(stripe), *self.parity_blocks(stripe))
            whole = next(block for block in blocks if block.member == member)
            end = whole.length if stop is None else min(stop - whole.offset, whole.length)
            begin = max(start - whole.offset, 0)
            if begin < end:
                present = [block for block in blocks if block.member not in gone]
                yield Mix(
                    target=whole.cut(begin, end),
                    sources=tuple(block.cut(begin, end) for block in present[: self.width]),
                )

    def _stripes(self, place: Place, member: int) -> Iterator[int]:
        """The stripes of a member's data, or of its parity file, in the order of its bytes."""
        if place is Place.PARITY:
            yield from self.parity_stripes(member)
        else:
            yield from ((member + 1 + index) % self.size for index in range(self.width))

    def _data_block(self, member: int, stripe: int, column: int) -> Block:
        # Counted from the stripe after its own, so that the short last blocks of members fall into different stripes.
        index, step, length = (stripe - member - 1) % self.size, self.block_bytes(member), self.lengths[member]
        offset = min(index * step, length)
        return Block(member=member, place=Place.DATA, column=column, offset=offset, length=min(step, length - offset))

    def _parity_block(self, member: int, row: int) -> Block:
        stripes = self.parity_stripes(member)
        return Block(
            member=member,
            place=Place.PARITY,
            column=self.width + row,
            offset=sum(self.stripe_bytes(stripe) for stripe in stripes[:row]),
            length=self.stripe_bytes(stripes[row]),
        )
