"""No framework is loaded unless it is used, and one that is not known is refused in one sentence."""

from __future__ import annotations

import ast
from importlib import metadata
from pathlib import Path

import pytest

import everstep
from everstep.errors import BadConfig, MissingPackage
from everstep.integrations.versions import need

PACKAGE = Path(everstep.__file__).parent
FRAMEWORKS = ("lightning", "transformers", "accelerate", "deepspeed")


def test_a_framework_is_imported_by_its_own_integration_only() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for framework in {*FRAMEWORKS, "torchmetrics"} & {str(name).split(".")[0] for name in names}:
                found.add((framework, file.relative_to(PACKAGE)))
    room = Path("integrations")
    needs_too = {("torchmetrics", room / "lightning_loops.py"), ("accelerate", room / "transformers.py")}
    own = {(name, room / f"{name}.py") for name in FRAMEWORKS}
    assert found == own | needs_too | {("lightning", room / "lightning_loops.py")}


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.6", "2.6.6.post1", "2.6.7rc1"])
def test_a_version_in_the_range_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    need("lightning", "it", least="2.6", below="2.7")


@pytest.mark.parametrize("version", ["2.5.9", "1.9", "2.7", "2.7.0", "2.10.1", "3.0", "unknown"])
def test_any_other_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with pytest.raises(BadConfig) as said:
        need("lightning", "it", least="2.6", below="2.7")
    assert str(said.value) == (
        f"it is made for lightning from 2.6 to before 2.7, and {version} is installed: "
        "pip install 'lightning>=2.6,<2.7'."
    )


def test_a_framework_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingPackage, match=r"it needs no-such-thing: pip install no-such-thing, or pip install 'eve"):
        need("no-such-thing", "it", least="1", below="2")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_extras_and_integrations_name_the_same_range(framework: str) -> None:
    words = (PACKAGE / "integrations" / f"{framework}.py").read_text().split("need(")[1].split(")")[0]
    least, below = words.split('least="')[1].split('"')[0], words.split('below="')[1].split('"')[0]
    extras = (PACKAGE.parents[1] / "pyproject.toml").read_text()
    assert f'"{framework}>={least},<{below}"' in extras
