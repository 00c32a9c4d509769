"""The same tiers in Python, in a file and on a command line; whatever is wrong is named, with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep import Disk, Memory, Objects, Parity, Partner, Shared
from everstep.errors import BadConfig
from everstep.tiers import Tier, Tiers, choose, gather, parse, rate_of, read

SAME: list[tuple[list[Tier], str, str]] = [
    ([], "", ""),
    ([Partner()], "Partner()", "[partner]"),
    ([Partner()], "Partner", "[partner]"),
    ([Partner(copies=2, every=5)], "Partner(copies=2, every=5)", "[partner]\ncopies = 2\nevery = 5"),
    ([Partner(rate="500MB/s", encrypt=True)], "Partner(rate='500MB/s', encrypt=True)",
     "[partner]\nrate = '500MB/s'\nencrypt = true"),
    ([Parity(rate="1.5 GB/s"), Shared("/l", rate="80KB/s"), Objects("s3://b/r", rate="1 kB/s")],
     "Parity(rate='1.5 GB/s'), Shared('/l', rate='80KB/s'), Objects('s3://b/r', rate='1 kB/s')",
     "[parity]\nrate = '1.5 GB/s'\n[shared]\npath = '/l'\nrate = '80KB/s'\n"
     "[objects]\nurl = 's3://b/r'\nrate = '1 kB/s'"),
    ([Parity("rs", group=6, losses=2)], "Parity('rs', group=6, losses=2)",
     "[parity]\nkind = 'rs'\ngroup = 6\nlosses = 2"),
    ([Memory(path="/mnt/pmem", slots=4)], "Memory(path='/mnt/pmem', slots=4)",
     "[memory]\npath = '/mnt/pmem'\nslots = 4"),
    ([Disk("/nvme/run7", every="30s"), Partner(), Shared("/lustre/run7", every=10), Objects("s3://bucket/run7")],
     'Disk("/nvme/run7", every="30s"), Partner(), Shared("/lustre/run7", every=10), Objects("s3://bucket/run7")',
     "[disk]\npath = '/nvme/run7'\nevery = '30s'\n[partner]\n[shared]\npath = '/lustre/run7'\nevery = 10\n"
     "[objects]\nurl = 's3://bucket/run7'"),
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "everstep.toml"


@pytest.mark.parametrize(("tiers", "words", "toml"), SAME, ids=[words or "nothing" for _, words, _ in SAME])
def test_python_toml_and_the_command_line_give_the_same(tiers: list[Tier], words: str, toml: str, file: Path) -> None:
    file.write_text(toml)
    chosen = choose(tiers, {})
    assert chosen == gather(parse(words, "--tiers")) == choose(str(file), {}) == choose(file, {}) == choose(None, {})
    file.unlink()
    assert chosen == choose(None, {"EVERSTEP_TIERS": words})
    assert chosen == gather(parse(str(chosen), "itself")), "as it is written, it can be read"


def test_what_is_given_comes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("[partner]\ncopies = 3")
    words = {"EVERSTEP_TIERS": "Partner(copies=2)"}
    assert choose([Partner()], words).protection == Partner()
    assert choose(None, words).protection == Partner(copies=2)
    assert choose(None, {}).protection == Partner(copies=3)
    file.unlink()
    assert choose(None, {}) == Tiers()


WRONG = [  # as words, as a file, and what is said of both
    ("Lustre()", "[lustre]", "there is no tier 'Lustre'; there are Memory, Disk, Partner, Parity, Shared, Objects"),
    ("Partner(copys=2)", "[partner]\ncopys = 2", "Partner has no 'copys'; it has copies, every, rate, encrypt"),
    ("Partner(copies=0)", "[partner]\ncopies = 0", "Partner(copies=) must be at least 1, not 0"),
    ("Partner(copies='2')", "[partner]\ncopies = '2'", "Partner(copies=) must be a whole number, not '2'"),
    ("Partner(every='5s')", "[partner]\nevery = '5s'", "Partner(every=) must be a whole number, not '5s'"),
    ("Parity('raid')", "[parity]\nkind = 'raid'", "Parity takes 'xor' or 'rs', not 'raid'"),
    ("Parity('xor', losses=2)", "[parity]\nlosses = 2",
     "Parity('xor') covers one loss, not 2; use Parity('rs', losses=2)"),
    ("Parity('rs', group=2)", "[parity]\nkind = 'rs'\ngroup = 2", "Parity(group=2) must be more than its 2 losses"),
    ("Memory(slots=1)", "[memory]\nslots = 1", "Memory(slots=) must be from 2 to 28, not 1"),
    ("Memory(path=7)", "[memory]\npath = 7", "Memory(path=) must be a path, not 7"),
    ("Disk(path='')", "[disk]\npath = ''", "Disk(path=) must be a path, not ''"),
    ("Disk(every='often')", "[disk]\nevery = 'often'",
     "Disk(every=) must be a positive duration such as '30s', '5m' or '2h', not 'often'"),
    ("Disk(every=0)", "[disk]\nevery = 0",
     "Disk(every=) must be a number of steps from 1, or a duration such as '30s', not 0"),
    ("Shared()", "[shared]", "Shared needs its 'path'"),
    ("Shared(path=7)", "[shared]\npath = 7", "Shared takes a path, not 7"),
    ("Shared('/l', every=True)", "[shared]\npath = '/l'\nevery = true",
     "Shared(every=) must be a number of steps from 1, or a duration such as '30s', not True"),
    ("Partner(encrypt='yes')", "[partner]\nencrypt = 'yes'", "Partner(encrypt=) must be true or false, not 'yes'"),
    ("Parity(encrypt=1)", "[parity]\nencrypt = 1", "Parity(encrypt=) must be true or false, not 1"),
    *((f"{tier}(rate={rate!r})", f"[{tier.lower()}]\nrate = {rate!r}",
       f"{tier}(rate=) must be a rate such as '500MB/s', '800KB/s' or '1.5GB/s', not {rate!r}")
      for tier, rate in (("Partner", "fast"), ("Partner", "500Mb/s"), ("Parity", "0MB/s"), ("Partner", 500))),
    ("Shared('/l', rate='5MB')", "[shared]\npath = '/l'\nrate = '5MB'", "Shared(rate=) must be a rate such as "),
    ("Objects('s3://b', rate='-1GB/s')", "[objects]\nurl = 's3://b'\nrate = '-1GB/s'", "Objects(rate=) must be"),
    ("Objects('/l')", "[objects]\nurl = '/l'", "Objects takes a URL such as 's3://bucket/prefix', not '/l'"),
    ("Partner(), Parity()", "[partner]\n[parity]", " has Partner(copies=1, every=1, rate=None, "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "toml", "said"), WRONG, ids=[words for words, _, _ in WRONG])
def test_wrong_tiers_are_named_with_their_place_and_what_would_be_right(
    words: str, toml: str, said: str, file: Path
) -> None:
    file.write_text(toml)
    for place, ask in (
        ("EVERSTEP_TIERS", lambda: choose(None, {"EVERSTEP_TIERS": words})),
        (str(file), lambda: choose(file, {})),
        ("everstep.toml", lambda: choose(None, {})),
    ):
        with pytest.raises(BadConfig) as refused:
            ask()
        assert str(refused.value).startswith(place)
        assert said in str(refused.value)
        assert str(refused.value).count(place) == 1, "said once"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Partner(", "--tiers: 'Partner(' cannot be read: "),
        ("3", "--tiers: 3 is no tier; write for example Partner()"),
        ("os.system('x')", "--tiers: os.system('x') is no tier; write for example Partner()"),
        ("Partner()]+[Partner()", "is no tier; write for example Partner()"),
        ("Shared(/lustre)", "cannot be read: "),
        ("Shared(lustre)", "--tiers: lustre is neither a number nor a text; quote it: 'lustre'"),
        ("Shared('/l', 3)", "--tiers: Shared takes path, every, keep, rate, each by its name but for the first"),
    ],
)
def test_words_that_are_no_tiers_are_never_run(words: str, said: str) -> None:
    with pytest.raises(BadConfig) as refused:
        parse(words, "--tiers")
    assert said in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"none\.toml cannot be read: No such file"):
        read(tmp_path / "none.toml")
    for text, said in (("[partner", "Expected ']'"), ("partner = 2", r"partner must be a table, such as \[partner\]")):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(BadConfig, match=rf"bad\.toml: {said}"):
            read(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("Partner()", None), ("Partner(rate='500MB/s')", 5e8), ("Parity(rate='1.5 GB/s')", 1.5e9),
     ("Shared('/l', rate='80KB/s')", 8e4), ("Objects('s3://b', rate='7B/s')", 7.0)],
)  # fmt: skip
def test_rates_are_decimal(words: str, expected: float | None) -> None:
    (tier,) = parse(words, "--tiers")
    assert isinstance(tier, Partner | Parity | Shared | Objects) and rate_of(tier) == expected
