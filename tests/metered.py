"""What a keeper says to Prometheus, asked for over HTTP and read by the letter of the text format."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lives import told

from everstep.events import MetricsServed

Labels = tuple[tuple[str, str], ...]
_T = TypeVar("_T")
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL},)*{_LABEL})?\}})? (\S+)")
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def until(wanted: Callable[[], _T], timeout_s: float = 60.0) -> _T:
    """What is wanted, as soon as there is any of it."""
    deadline = time.monotonic() + timeout_s
    while not (found := wanted()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


def address_of(directory: Path) -> str:
    return until(lambda: [event.address for event in told(directory, MetricsServed)])[-1]


def scrape(address: str, timeout_s: float = 30.0) -> str:
    with urllib.request.urlopen(address, timeout=timeout_s) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


class Family:
    def __init__(self, help: str) -> None:
        self.help, self.kind = help, ""
        self.samples: dict[Labels, float] = {}


def read(text: str) -> dict[str, Family]:
    """Strictly: every line is of a family that was begun by its HELP and its TYPE, and no family is interrupted."""
    assert text.endswith("\n") and "\r" not in text
    found: dict[str, Family] = {}
    present = ""
    for line in text[:-1].split("\n"):
        if help := re.fullmatch(rf"# HELP ({_NAME}) (.+)", line):
            assert help[1] not in found, f"{help[1]} begins twice"
            present, found[help[1]] = help[1], Family(help[2])
            continue
        if kind := re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge)", line):
            assert kind[1] == present and not found[present].kind and not found[present].samples, line
            found[present].kind = kind[2]
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, f"this is no line of the text format: {line!r}"
        assert sample[1] == present and found[present].kind, line
        pairs = [(name, re.sub(r"\\.", lambda m: _ESCAPED[m[0]], value)) for name, value in _labels(sample[2] or "")]
        names = [name for name, _ in pairs]
        labels, value = tuple(sorted(pairs)), float(sample[7])
        assert len(names) == len(set(names)) and labels not in found[present].samples, f"{line!r} comes twice"
        assert found[present].kind != "counter" or (present.endswith("_total") and value >= 0)
        found[present].samples[labels] = value
    return found


def _labels(text: str) -> list[tuple[str, str]]:
    return [(m[1], m[2]) for m in re.finditer(_LABEL, text)]


class Scraped:
    """One answer, to be asked for its values."""

    def __init__(self, text: str) -> None:
        self.text, self.families = text, read(text)

    def __call__(self, name: str, **labels: str) -> float:
        """Of the only sample that has these labels."""
        (value,) = self.all(name, **labels).values()
        return value

    def all(self, name: str, **labels: str) -> dict[Labels, float]:
        return {key: v for key, v in self.families[name].samples.items() if labels.items() <= dict(key).items()}


def scraped(directory: Path) -> Scraped:
    return Scraped(scrape(address_of(directory)))
