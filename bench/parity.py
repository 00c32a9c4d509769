"""What parity costs on one core: exclusive or beside a plain copy, Reed-Solomon by block size, and other libraries.

    python bench/parity.py [--quick] [--out DIR]

Rates are gigabytes of data in a second of processor time, whatever number of parity rows is made of them: nothing here
waits, so on a busy machine that is the time of one core. "In cache" goes over the same block again and again; "out of
cache" walks through more data than any cache holds. In every round each way has its turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from common import Report, Stat, Table, Target, machine

from everstep.protect.coder import coder_for
from everstep.protect.parity import Read, encode, rebuild
from everstep.protect.stripes import Geometry, Place
from everstep.protect.xor import Bytes

HERE = Path(__file__).parent
KIB = 1024
CODES = ((3, 1), (7, 1), (4, 2), (8, 2), (8, 3))  # data and parity blocks of a stripe
BLOCKS = (64 * KIB, 256 * KIB, 1024 * KIB)
FAR_BYTES = 512 * 1024 * KIB
Way = Callable[[], None]


def blocks(length: int, block: int) -> Iterator[slice]:
    return (slice(begin, begin + block) for begin in range(0, length, block))


def copy(data: Sequence[Bytes], into: Sequence[Bytes], block: int) -> None:
    for part in blocks(len(data[0]), block):
        for source, target in zip(data, into, strict=True):
            np.copyto(target[part], source[part])


def coded(data: Sequence[Bytes], rows: Sequence[Bytes], block: int) -> Way:
    """All rows, one at a time as the members of a group make them."""
    width = len(data)
    coder = coder_for(width, len(rows))
    weights = [coder.weights(width + row, range(width)) for row in range(len(rows))]

    def way() -> None:
        for part in blocks(len(data[0]), block):
            for weight, row in zip(weights, rows, strict=True):
                coder.combine(weight, [source[part] for source in data], row[part])

    return way


def rates(ways: dict[str, Way], nbytes: int, rounds: int) -> dict[str, Stat]:
    """GB/s of each way, in turns; short ones are repeated until a turn moves some 64 MB."""
    times = max(1, 64_000_000 // nbytes)
    found = {name: Stat() for name in ways}
    for turn in range(rounds + 1):  # the first one touches the memory
        for name, way in ways.items():
            begin = time.thread_time()
            for _ in range(times):
                way()
            if turn:
                found[name].values.append(times * nbytes / (time.thread_time() - begin) / 1e9)
    return found


def made_up(count: int, length: int) -> list[Bytes]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length, np.uint8) for _ in range(count)]


def by_code(report: Report, rounds: int, far: bool) -> None:
    rows = []
    for width, losses in CODES:
        longest = FAR_BYTES // width // BLOCKS[-1] * BLOCKS[-1] if far else BLOCKS[-1]
        whole, rooms = made_up(width, longest), [np.zeros(longest, np.uint8) for _ in range(width + losses)]
        for block in BLOCKS:
            length = longest if far else block
            data = [one[:length] for one in whole]
            into, parity = ([room[:length] for room in part] for part in (rooms[:width], rooms[width:]))
            ways = {"copy": partial(copy, data, into, block), "parity": coded(data, parity, block)}
            found = rates(ways, width * length, rounds)
            share = Stat([b / a for a, b in zip(found["copy"].values, found["parity"].values, strict=True)])
            name = f"{'XOR' if losses == 1 else 'RS'} {width}+{losses}"
            rows.append(
                [name, f"{block // KIB} KiB", found["copy"].text(), found["parity"].text(), share.text(100, 3) + " %"]
            )
            key = f"{name}, {block // KIB} KiB, {'out of' if far else 'in'} cache"
            report.data[key] = {way: stat.values for way, stat in found.items()}
            if losses == 1:
                report.targets.append(
                    Target(f"{key}, of a copy", ">= 80 %", f"{100 * share.median:.0f} %", share.median >= 0.8)
                )
            elif (width, losses) == (4, 2):
                rate = found["parity"].median
                report.targets.append(Target(key, ">= 1 GB/s", f"{rate:.3g} GB/s", rate >= 1))
    headers = ["code", "block", "np.copyto, GB/s", "all parity rows, GB/s", "of the copy in the same round"]
    report.tables.append(Table(f"{'Out of' if far else 'In'} cache, one core: median (range)", headers, rows))


def horner(data: Sequence[Bytes], rows: Sequence[Bytes]) -> None:
    """P and Q as RAID-6 has them, eight bytes at a time, in pieces that stay in the first cache."""
    spare = np.empty(2048, np.uint64)
    for part in blocks(len(data[0]), spare.nbytes):
        lanes = [source[part].view(np.uint64) for source in data]
        p, q = (row[part].view(np.uint64) for row in rows)
        p[:] = q[:] = lanes[-1]
        for lane in lanes[-2::-1]:
            np.bitwise_xor(p, lane, out=p)
            np.right_shift(q, 7, out=spare)
            np.bitwise_and(spare, 0x0101010101010101, out=spare)
            np.multiply(spare, 0x1D, out=spare)
            np.bitwise_and(q, 0x7F7F7F7F7F7F7F7F, out=q)
            np.left_shift(q, 1, out=q)
            np.bitwise_xor(q, spare, out=q)
            np.bitwise_xor(q, lane, out=q)


def by_library(report: Report, rounds: int) -> None:
    width, losses, block = 4, 2, 256 * KIB
    data, parity = made_up(width, block), [np.zeros(block, np.uint8) for _ in range(losses)]
    ways: dict[str, Way] = {
        "ISA-L called directly, row by row (taken)": coded(data, parity, block),
        "P+Q in numpy, encoding only": partial(horner, data, parity),
    }
    try:
        from pyeclib.ec_iface import ECDriver

        for kind in ("isa_l_rs_cauchy", "isa_l_rs_vand", "liberasurecode_rs_vand"):
            driver = ECDriver(k=width, m=losses, ec_type=kind)
            ways[f"pyeclib, {kind}, data joined first"] = partial(_joined, driver, data)
    except ImportError:
        pass
    try:
        import zfec

        encoder = zfec.Encoder(width, width + losses)
        ways["zfec"] = partial(encoder.encode, data, list(range(width, width + losses)))
    except ImportError:
        pass
    found = rates(ways, width * block, rounds)
    base = next(iter(found.values())).median
    rows = [[name, stat.text(), f"{stat.median / base:.2f}"] for name, stat in found.items()]
    report.tables.append(
        Table("Libraries: RS 4+2, 256 KiB blocks, one core", ["way", "GB/s", "of what was taken"], rows)
    )
    report.data["libraries"] = {name: stat.values for name, stat in found.items()}


def _joined(driver: object, data: Sequence[Bytes]) -> None:
    driver.encode(b"".join(one.data for one in data))  # type: ignore[attr-defined]


def whole_flow(report: Report, rounds: int) -> None:
    rows = []
    for members, losses in ((4, 1), (8, 1), (6, 2), (8, 2)):
        length = FAR_BYTES // members
        data = made_up(members, length)
        geometry = Geometry(members=tuple(map(str, range(members))), lengths=tuple(map(len, data)), losses=losses)
        parity = [np.zeros(geometry.parity_bytes(member), np.uint8) for member in range(members)]
        again = np.zeros(length, np.uint8)

        def read(batch: Sequence[Read], data: Sequence[Bytes] = data, parity: Sequence[Bytes] = parity) -> None:
            for one in batch:
                held = (data if one.place is Place.DATA else parity)[one.member]
                one.into[:] = held.data[one.offset : one.offset + len(one.into)]

        def put(into: Bytes, offset: int, content: memoryview) -> None:
            into.data[offset : offset + len(content)] = content

        for member in range(members):
            encode(geometry, member, read, partial(put, parity[member]))
        lost = range(losses)
        ways: dict[str, Way] = {
            "copy": partial(np.copyto, again, data[0]),
            "encode": partial(encode, geometry, 0, read, partial(put, parity[0])),
            "rebuild": partial(rebuild, geometry, lost, 0, Place.DATA, read, partial(put, again)),
        }
        found = rates(ways, length, rounds)
        if not np.array_equal(again, data[0]):
            raise SystemExit("what was rebuilt is not what was lost")
        rows.append([str(members), str(losses), *(stat.text() for stat in found.values())])
        report.data[f"flow, {members} members, {losses} losses"] = {way: s.values for way, s in found.items()}
    note = (
        "`parity.encode` makes one member's parity file, `parity.rebuild` the data of one of as many lost members as "
        "can be, both in chunks of 1 MiB. A read is a copy in memory, and that is most of the time: a member's parity "
        "takes reading as many times its data as there are losses, its data as many times as a stripe has data blocks. "
        "GB/s of that member's data."
    )
    headers = ["members", "losses", "np.copyto", "encode", "rebuild, all losses used"]
    report.tables.append(Table("The whole flow, in memory, one core", headers, rows, note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    rounds = 3 if given.quick else 9
    command = f"python bench/parity.py{' --quick' if given.quick else ''}"
    report = Report(title="Parity", command=command, machine=machine())
    by_code(report, rounds, far=False)
    by_code(report, rounds, far=True)
    by_library(report, rounds)
    whole_flow(report, rounds)
    report.save(given.out, "parity")
    print(report.markdown())


if __name__ == "__main__":
    main()
