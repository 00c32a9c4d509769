"""The nouns that cross between rooms, and nothing else.

Each is frozen, and each that reaches a medium is a msgspec struct, so that its JSON is its definition.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from everstep.errors import Damaged

AnyType = TypeVar("AnyType", bound=type[msgspec.Struct])


def learnt(kind: AnyType) -> AnyType:
    """Let msgspec look at a type now. It does so when it first decodes one, and two threads in that moment crash it."""
    msgspec.json.Decoder(kind)
    return kind


# What a record may claim: these become names of files and directories, so nothing else is believed.
RunName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Step = Annotated[int, msgspec.Meta(ge=0, lt=10**10)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=10**5)]
World = Annotated[int, msgspec.Meta(ge=1, le=10**5)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]

Room = Callable[[int], memoryview]  # gives memory for at least so many bytes, which begins on a block

# Of a frame: the ranges that are kept as gaps between rising integers: where, bytes of an integer, bytes of the gaps.
Gaps = tuple[tuple[Offset, Literal[4, 8], Length], ...]


class Level(enum.IntEnum):
    """How far a checkpoint has climbed."""

    SEALED = 1  # complete in host memory: survives the death of the process
    DURABLE = 2  # committed on a disk: survives a reboot
    PROTECTED = 3  # copied or encoded over several nodes: survives the loss of a node
    SHARED = 4  # committed on the deepest tier: survives the loss of all nodes

    @classmethod
    def named(cls, name: str) -> Level:
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(repr(level.name.lower()) for level in cls)
            raise ValueError(f"level must be one of {known}, not {name!r}") from None


class Survives(enum.IntEnum):
    """The worst event after which a tier still has its bytes."""

    PROCESS = 1
    REBOOT = 2
    NODE = 3


class Noun(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen value with keyword fields."""


class Traits(Noun, frozen=True, kw_only=True):
    """What a tier promises, for plans and for people."""

    survives: Survives
    shared: bool  # readable from every node
    appends: bool  # whether a blob can grow and be cut; otherwise each is made once


class Piece(Noun, frozen=True, kw_only=True, gc=False):
    """A box of a named tensor, and where its bytes lie in an image's data."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # of the box within it
    extent: tuple[int, ...]
    offset: int
    length: int
    private: bool = False  # this rank's own value, not a share of a common one
    order: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET  # of the dimensions in memory, where it is another one

    @property
    def whole(self) -> bool:
        return self.extent == self.shape

    @property
    def stored(self) -> tuple[int, ...]:
        """The extent, in the order in which the dimensions lie in memory."""
        return self.extent if self.order is msgspec.UNSET else tuple(self.extent[one] for one in self.order)


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a rank's part of a tensor lies."""

    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]
    extent: tuple[int, ...]


class OptimizerInfo(Noun, frozen=True, kw_only=True):
    type: str
    groups: tuple[tuple[str, ...], ...]  # the names of the parameters of each group


class PackedBuffer(Noun, frozen=True, kw_only=True):
    dtype: str
    device: str  # where it was packed: some compressors multiply, and that rounds differently elsewhere
    members: tuple[tuple[str, tuple[int, ...]], ...]  # parameters and their shapes, one after the other


class Codec(Noun, frozen=True, kw_only=True):
    """How the gradients of a record are packed: by which compressor, and what each buffer is made of."""

    kind: str
    buffers: dict[str, PackedBuffer]


class ImageInfo(Noun, frozen=True, kw_only=True):
    """What an image says about itself, beside its tensors; the same for every step."""

    format: int
    run: RunName
    rank: Rank
    world: World
    aliases: dict[str, str] = {}  # second names of tied tensors
    on_host: tuple[str, ...] = ()  # optimizer state that lies on the host though its parameter does not
    optimizers: tuple[OptimizerInfo, ...] = ()
    codec: Codec | None = None  # of a record, unless it is dense
    has_values: bool = False  # a record whose step also has values in an image of their own, or that image
    devices: tuple[str, ...] = ()  # of a record: the kinds of device that its updates ran on
    replica: str = ""  # the kind of device whose steps a host repeated to make this image, so that bits may differ
    stepped: dict[str, Place] | None = None  # of a record: what its rank's optimizers step, unless that is everything


class Part(Noun, frozen=True, kw_only=True):
    """One rank's share of a checkpoint on a medium: `rank-00003.json`."""

    format: int
    run: RunName
    generation: str  # parts of one checkpoint come from one life of the job
    step: Step
    rank: Rank
    world: World
    bytes: int
    chunk_bytes: int
    chunks: tuple[int, ...]  # xxh3-64 of every chunk
    raw_pieces: msgspec.Raw = msgspec.field(name="pieces")  # there may be many, and most readers ask for none of them
    cut_time: float
    torch: str
    replica: str = ""  # as the image says
    digest: str = ""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the image holds, without the extras. Like all of a record they have one spelling."""
        try:
            pieces = _PIECES.decode(self.raw_pieces)
            problem = "" if as_raw(pieces) == self.raw_pieces else "they are not spelt as they are written"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            problem = str(error)
        if problem:
            raise Damaged(f"unreadable pieces: {problem}", step=self.step, rank=self.rank)
        return pieces


_PIECES = msgspec.json.Decoder(tuple[Piece, ...])


def as_raw(pieces: Sequence[Piece]) -> msgspec.Raw:
    """As a manifest has them."""
    return msgspec.Raw(msgspec.json.encode(pieces))


class PartRef(Noun, frozen=True, kw_only=True):
    rank: Rank
    bytes: int
    digest: str  # of the part manifest, which in turn names the digests of the data


class Commit(Noun, frozen=True, kw_only=True):
    """`step-0000001200.json`: the checkpoint exists because this file does.

    On a medium that only one node reads it lists that node's parts, and the checkpoint exists when all nodes' do.
    """

    format: int
    run: RunName
    generation: str
    step: Step
    world: World
    parts: tuple[PartRef, ...]
    cut_time: float
    committed_time: float
    digest: str = ""


class Frame(Noun, frozen=True, kw_only=True, omit_defaults=True):
    """The header of one frame of a log: what the optimizers of one rank consumed in one step, or the log's layout."""

    format: int
    run: RunName
    generation: str
    step: Step  # of a layout: the step after which the log begins
    rank: Rank
    world: World
    cut_time: float
    kind: Literal["layout", "record"]
    layout: int  # digest of the image header that says what the bytes are
    ranges: tuple[tuple[Offset, Length], ...]  # which bytes of the image the payload holds: offset and length
    gaps: Gaps = ()

    def __post_init__(self) -> None:
        place = 0
        for offset, length in self.ranges:
            if offset < place:
                raise ValueError(f"the bytes at {offset} come before {place}, where the last ones end")
            place = offset + length
        lengths, place = dict(self.ranges), -1
        for offset, item, stored in self.gaps:
            if offset <= place or lengths.get(offset, 0) % item or stored >= lengths.get(offset, 0):
                raise ValueError(f"no integers of {item} bytes are at {offset} that {stored} bytes stand for")
            place = offset

    @property
    def payload_bytes(self) -> int:
        lengths = dict(self.ranges) | {offset: stored for offset, _, stored in self.gaps}
        return sum(lengths.values())


class ParityPart(Noun, frozen=True, kw_only=True):
    """One rank's part of a base that parity was made of: its checksums prove what is rebuilt."""

    rank: Rank
    bytes: Length
    cut_time: float
    chunks: tuple[int, ...]


class ParityMember(Noun, frozen=True, kw_only=True):
    """One node of a parity group: its data are the images of its ranks, one after the other."""

    node: str
    parts: tuple[ParityPart, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


class ParityRecord(Noun, frozen=True, kw_only=True):
    """`parity-0000001200/member-00003.json`: what the parity beside it is made of."""

    format: int
    run: RunName
    generation: str
    step: Step
    world: World
    losses: int
    member: int  # whose parity this is, in `members`
    members: tuple[ParityMember, ...]
    bytes: int
    chunk_bytes: int
    chunks: tuple[int, ...]  # of the parity itself
    digest: str = ""


class RunRecord(Noun, frozen=True, kw_only=True):
    """`run.json`: the identity of a run directory."""

    format: int
    run: RunName
    created_time: float
    digest: str = ""


class TiersRecord(Noun, frozen=True, kw_only=True):
    """`tiers.json`: where else the bytes of a run lie."""

    format: int
    memory: str | None
    disk: str  # empty: in the run's directory
    shared: str  # empty: nowhere
    objects: str
    digest: str = ""


class HaltRecord(Noun, frozen=True, kw_only=True):
    """`halt.json`: somebody wants the run to end before its end."""

    format: int
    now: bool
    after: int | None  # so many checkpoints
    before: float | None  # this time
    seconds: float | None  # so many left of the allocation
    set_time: float
    obeyed_time: float | None = None
    obeyed_step: Step | None = None
    why: str = ""  # which of the conditions it was
    digest: str = ""


class Attempt(Noun, frozen=True, kw_only=True):
    """`attempt.json`: somebody began to load this step and has not said how it went."""

    format: int
    step: Step
    count: int
    error: str = ""  # set when the reader raised, empty when it just stopped living
    digest: str = ""


class Rewind(Noun, frozen=True, kw_only=True):
    """`rewind.json`: the next life is to go on from this step, whatever is newer."""

    format: int
    step: Step
    digest: str = ""


class DatasetRecord(Noun, frozen=True, kw_only=True):
    """`dataset-0000001200.json`: a dataset of files, by name; `dropped-0000001200.json`: it is not offered any more."""

    format: int
    dataset: Step
    name: str
    flags: int
    digest: str = ""


Source = Literal["memory", "partner", "disk", "parity", "shared", "objects"]  # the nearest first


class Holding(Noun, frozen=True, kw_only=True):
    """One part that somebody still has."""

    source: Source
    node: str
    step: int
    rank: int
    world: int
    generation: str
    bytes: int
    cut_time: float
    checked: bool = True  # carries checksums
    replica: str = ""  # as the image says
    everywhere: bool = False  # every node reads it for itself


class Records(Noun, frozen=True, kw_only=True):
    """What one rank consumed in every step from `first` to `last`, as far as somebody still has it."""

    source: Source
    node: str
    rank: int
    world: int
    first: int
    last: int
    bytes: int  # of one
    cut_time: float  # of the last
    has_values: bool = False  # a step that ends here also needs its values
    everywhere: bool = False  # every node reads them for itself


class ParityHolding(Noun, frozen=True, kw_only=True):
    """The parity that one member of a group still has."""

    node: str
    record: ParityRecord

    @property
    def group(self) -> tuple[object, ...]:
        """The same for all members of a group."""
        one = self.record
        return (one.step, one.generation, one.world, one.losses, one.members)


class Rejection(Noun, frozen=True, kw_only=True):
    step: int  # 0: not known
    source: Source | Literal["any"]
    reason: str
    certain: bool = True  # False: a crash that lost nothing looks the same


class Survey(Noun, frozen=True, kw_only=True):
    """What the surviving memories and tiers hold, and what they hold in vain."""

    holdings: tuple[Holding, ...]
    records: tuple[Records, ...] = ()
    values: tuple[Holding, ...] = ()  # what a step left that is too large for every record
    parities: tuple[ParityHolding, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    rewind: int | None = None  # the newest step that is wanted, if somebody has asked to go back


class Plan(Noun, frozen=True, kw_only=True):
    """Which step to restore, and from where: each old rank's part of a base, and the records that follow it."""

    step: int | None
    world: int
    parts: tuple[Holding, ...]
    rejections: tuple[Rejection, ...]
    records: tuple[Records, ...] = ()  # for every rank, one after the other, from the base's step to `step`
    values: tuple[Holding, ...] = ()  # of `step`, if its records need them
    parities: tuple[ParityHolding, ...] = ()  # what parts whose source is parity are rebuilt from, beside the others

    @property
    def base(self) -> int | None:
        return self.parts[0].step if self.parts else None


class Exposure(Noun, frozen=True, kw_only=True):
    """What one kind of event would cost right now."""

    event: str
    restored_from: str
    steps: int
    seconds: float | None  # None: all that was ever spent


for _noun in [one for one in vars().values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]:
    learnt(_noun)
