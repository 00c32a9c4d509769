"""Where those of a view meet: what torch asks of a store, and nobody is kept waiting when a view has ended."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from team import STEPS, Here, Team, kill_at, survivors

from everstep.keeper.protocol import Lost
from everstep.live import meeting
from everstep.live.meeting import Meeting, Visit
from everstep.live.presence import Presence
from everstep.topology import Formed

PATIENCE = timedelta(seconds=20)
SHORT = timedelta(milliseconds=50)


@pytest.fixture
def place() -> Iterator[Meeting]:
    made = Meeting("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def visit(place: Meeting) -> Iterator[Visit]:
    made = Visit(place.address, PATIENCE)
    yield made
    made.close()


def begun(what: Callable[[], Any]) -> queue.SimpleQueue[Any]:
    """What comes of it, in a thread."""
    ended = queue.SimpleQueue[Any]()

    def work() -> None:
        try:
            ended.put(what())
        except Exception as error:
            ended.put(error)

    threading.Thread(target=work, daemon=True).start()
    return ended


def ways(store: dist.Store) -> list[Any]:
    """All that torch does with a store, and what it is told."""
    told: list[Any] = [store.set("a", "1"), store.get("a"), store.add("n", 2), store.add("n", -5), store.get("n")]
    told += [store.check(["a", "n"]), store.check(["a", "b"]), store.num_keys()]
    told += [store.compare_set("c", "x", "y"), store.check(["c"]), store.compare_set("c", "", "new"), store.get("c")]
    told += [store.compare_set("c", "old", "newer"), store.compare_set("c", "new", "newer"), store.get("c")]
    told += [store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    told += [store.wait(["c", "n"]), store.wait(["c"], SHORT)]
    return told


def test_it_answers_as_torchs_own_stores_do(visit: Visit) -> None:
    assert ways(visit) == ways(dist.HashStore())


def test_so_it_does_when_torch_asks(visit: Visit) -> None:
    """In C++, by names of its own."""
    found, wanted = (ways(dist.PrefixStore("view", store)) for store in (visit, dist.HashStore()))
    assert found == wanted
    assert visit.get("view/c") == b"newer"


def test_what_is_not_there_yet_is_waited_for(place: Meeting, visit: Visit) -> None:
    others = [Visit(place.address, PATIENCE) for _ in range(2)]
    got = begun(lambda: others[0].get("word"))
    waited = begun(lambda: others[1].wait(["word", "another"]))
    visit.set("word", b"\x00\xff" * 100_000)
    assert got.get(timeout=20) == b"\x00\xff" * 100_000
    assert waited.empty()
    visit.add("another", 1)
    assert waited.get(timeout=20) is None


def test_after_a_wait_in_vain_the_next_answer_is_the_right_one(place: Meeting, visit: Visit) -> None:
    with pytest.raises(dist.DistStoreError, match="nobody said word in the store"):
        visit.wait(["word"], SHORT)
    Visit(place.address, PATIENCE).set("word", "late")
    assert visit.get("word") == b"late"
    assert visit.add("n", 3) == 3


def test_a_copy_has_a_connection_of_its_own(visit: Visit) -> None:
    copy = visit.clone()
    got = begun(lambda: visit.get("word"))
    copy.set("word", "x")  # while the first one waits
    assert got.get(timeout=20) == b"x"


def test_who_waits_is_sent_away_when_it_is_closed(place: Meeting, visit: Visit) -> None:
    visit.set("word", "x")
    got = begun(lambda: visit.get("another"))
    place.close()
    assert isinstance(got.get(timeout=20), dist.DistNetworkError)
    host, _, port = place.address.rpartition(":")
    with pytest.raises(OSError):
        Visit(f"{host}:{port}", PATIENCE)


@pytest.mark.parametrize("said", [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"\xc1\xc1\xc1"])
def test_whoever_makes_no_sense_is_sent_away_and_the_others_are_served(
    place: Meeting, visit: Visit, said: bytes
) -> None:
    host, _, port = place.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    visit.set("word", "x")
    assert visit.get("word") == b"x"


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_it_is_found_by_other_nodes_under_any_name_of_this_one(host: str) -> None:
    place = Meeting(host)
    try:
        Visit(place.address, PATIENCE).set("word", "x")
    except OSError:
        if host != "[::1]" or has_address(host):
            raise
        pytest.skip("this machine has no such address")
    finally:
        place.close()


def has_address(host: str) -> bool:
    try:
        with socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_those_who_meet_there_are_a_group(place: Meeting) -> None:
    def form(rank: int) -> dist.ProcessGroupGloo:
        visits.append(Visit(place.address, PATIENCE))
        return dist.ProcessGroupGloo(dist.PrefixStore("view", visits[-1]), rank, 2, PATIENCE)

    visits: list[Visit] = []
    groups = [begun(lambda rank=rank: form(rank)) for rank in range(2)]
    found = [group.get(timeout=20) for group in groups]
    assert sorted(group.rank() for group in found) == [0, 1]


def test_who_is_cut_while_it_meets_does_not_call_again() -> None:
    """With whoever is there and says nothing, as the one who has left the view already."""
    here = Presence.__new__(Presence)
    here.lost = None
    how = Formed("gloo", PATIENCE, {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def meet() -> None:
            with how.wires.noting(1):
                here._find(address).get("word")

        ended = begun(meet)
        silent.settimeout(20)
        with silent.accept()[0] as called:
            assert called.recv(1)
            here.lost = Lost(view=0, ranks=(1,), reason="its process ended")
            how.wires.cut()
            assert isinstance(ended.get(timeout=20), dist.DistNetworkError)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_who_looks_for_one_that_is_lost_hears_of_it() -> None:
    here = Presence.__new__(Presence)
    here.lost = None
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    ended = begun(lambda: here._find(address))
    here.lost = Lost(view=0, ranks=(0,), reason="its process ended")
    assert "the view ended" in str(ended.get(timeout=20))


def test_nobody_needs_torchs_store_after_a_loss(directory: Path) -> None:
    """It asks for the names of those who connect, and waits for a name server that does not answer."""

    def no_store(*_: object, **__: object) -> None:
        raise AssertionError("a store of torch is made")

    def act(here: Here) -> None:
        if here.tries == 4:
            dist.TCPStore = no_store  # type: ignore[misc,assignment]
        kill_at(1, 5)(here)

    found = survivors(Team(directory, 3, spares=1, on_loss=["spare", "rollback"]).start(act).wait())
    assert [(one["world"], one["step"]) for one in found] == [(3, STEPS)] * 3


def test_messages_are_bounded() -> None:
    heard = bytearray(struct.pack("<I", meeting._MOST_BYTES + 1))
    with pytest.raises(ValueError, match="none of ours"):
        meeting._message(heard)
