"""The rules of the house, read from its own source."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lives import forget_memory, live, run_directory, train_tiny

import everstep

PACKAGE = Path(everstep.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
DECISIONS = "tune"  # beside the road, and asked by anybody on it
ROAD = ("capture", "store", "protect", "keeper", "recover", "live")  # in the order of travel
DOORS = ("run", "archive")
BESIDE = ("cli", "testing", "integrations", "lab", "report")
GROUND = {path.stem for path in FILES if len(path.parts) == 1} - {"__init__", *DOORS, *BESIDE}
PURE = (
    Path("recover/plan.py"),
    Path("store/retain.py"),
    Path("halt.py"),
    Path("checked.py"),
    Path("protect/groups.py"),
    Path("protect/stripes.py"),
    Path("keeper/views.py"),
    Path("live/course.py"),
    *(file for file in FILES if file.parts[0] == DECISIONS),
)

FOREIGN = (Path("integrations/foreign.py"), Path("integrations/dcp_files.py"))  # which read files of other tools
IN_MEMORY = Path("integrations/dcp.py")  # gives DCP's planners what they want, out of what was read as plain data

every_module = pytest.mark.parametrize("file", FILES, ids=str)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def imports(file: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands: at the top, in a function, for types only."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(file: Path) -> set[str]:
    """The rooms of the house, and the modules of its ground, that a file imports."""
    known = {*ROAD, *DOORS, *BESIDE, *GROUND, DECISIONS}
    parts = [name.split(".") for name in imports(file)]
    return {part[1] for part in parts if part[0] == "everstep" and len(part) > 1 and part[1] in known}


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


# -- who may know whom


@every_module
def test_a_room_imports_the_ground_and_earlier_rooms_only(file: Path) -> None:
    room = file.parts[0].removesuffix(".py")
    if room in ROAD:
        allowed = GROUND | {DECISIONS} | set(ROAD[: ROAD.index(room) + 1])
    elif room in GROUND:
        allowed = GROUND
    elif room == DECISIONS:
        allowed = GROUND | {DECISIONS}
    elif room in DOORS:
        allowed = GROUND | {DECISIONS} | set(ROAD)
    elif room == "__init__":
        allowed = GROUND | set(DOORS)
    else:
        beside = {
            "cli": {"lab", "report", "integrations"},
            "report": {"lab"},
        }  # a report reads what the lab has written
        allowed = GROUND | {*ROAD, *DOORS, DECISIONS, room} | beside.get(room, set())
    assert rooms(file) <= allowed, f"{file} knows {sorted(rooms(file) - allowed)}"


def test_every_file_has_its_place_in_the_house() -> None:
    top = {file.parts[0].removesuffix(".py") for file in FILES}
    assert top == {"__init__", *GROUND, *ROAD, *DOORS, *BESIDE, DECISIONS}
    folders = {file.parts[0] for file in FILES if len(file.parts) > 1}
    assert folders == {*ROAD, DECISIONS, "cli", "integrations", "lab", "report"}
    assert not any("utils" in str(file) or "helpers" in str(file) for file in FILES)


@pytest.mark.parametrize("file", PURE, ids=str)
def test_decisions_touch_no_clock_file_socket_or_tensor(file: Path) -> None:
    harmless = {
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "msgspec",
        "typing",
    }
    assert {name.split(".")[0] for name in imports(file)} <= harmless | {"everstep"}
    assert rooms(file) <= {"types", "config", "cadence", "checked", "errors", DECISIONS}
    called = {dotted(node.func) for node in ast.walk(tree(file)) if isinstance(node, ast.Call)}
    assert not called & {"open", "print", "input", "__import__", "exec", "eval"}


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] == "protect"], ids=str)
def test_parity_knows_bytes_and_callables_and_no_medium(file: Path) -> None:
    assert rooms(file) <= GROUND | {"protect"}
    media = {"torch", "os", "io", "pathlib", "socket", "zmq", "asyncio", "threading", "time", "shutil", "mmap"}
    assert not {name.split(".")[0] for name in imports(file)} & media


# -- what starts without torch

SEE_WHAT_WAS_LOADED = """
import sys
from everstep.cli import app
app(sys.argv[1:], standalone_mode=False)
sys.stderr.write(" ".join(name for name in ("torch", "numpy") if name in sys.modules))
"""


def test_a_keeper_starts_without_torch() -> None:
    """One that died is awaited by those who train."""
    program = "import sys, everstep.keeper.process, everstep.keeper.keeper; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.fixture(scope="module")
def killed_run() -> Iterator[Path]:
    """A run with steps in memory and on disk, whose trainer is dead."""

    def die(run: everstep.Run) -> None:
        if run.step == 3:
            run.wait("durable")
        if run.step == 5:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, die)).killed
        yield directory
        forget_memory(directory)


@pytest.mark.parametrize("words", ["ls", "show", "status", "verify", "plan", "tune", "top --once", "gc --dry-run"])
def test_reading_commands_start_without_torch(words: str, killed_run: Path) -> None:
    command = [sys.executable, "-c", SEE_WHAT_WAS_LOADED, *words.split(), str(killed_run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    assert "torch" not in ended.stderr.split()
    assert words != "ls" or "numpy" not in ended.stderr.split()


@pytest.mark.parametrize("words", ["simulate spares", "simulate --list", "tune --state 1GB --step 1s", "doctor"])
def test_what_needs_no_run_starts_without_torch(words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SEE_WHAT_WAS_LOADED, *words.split()], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    assert "torch" not in ended.stderr.split()


def test_the_scenarios_are_shipped() -> None:
    from hatchling.builders.wheel import WheelBuilder

    shipped = {file.distribution_path for file in WheelBuilder(str(PACKAGE.parents[1])).recurse_included_files()}
    assert {f"everstep/lab/scenarios/{path.name}" for path in (PACKAGE / "lab/scenarios").glob("*.toml")} <= shipped


# -- the public face


def test_the_public_names_are_these_and_each_resolves() -> None:
    documented = {
        "guard", "Run", "open", "Archive", "init_process_group", "Memory", "Disk", "Partner", "Parity",
        "Shared", "Objects", "Keep", "EverstepError",
    }  # fmt: skip
    assert set(everstep.__all__) == documented
    assert len(everstep.__all__) == len(documented)
    for name in everstep.__all__:
        public = getattr(everstep, name)
        assert public.__name__ == name
        assert public.__module__.startswith("everstep.")
    with pytest.raises(AttributeError, match="no attribute 'guards'"):
        everstep.guards


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    seen = {
        alias.name: node.module
        for node in ast.walk(tree(Path("__init__.py")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("everstep.")
        for alias in node.names
    }
    assert seen == everstep._WHERE
    assert seen.keys() == set(everstep.__all__)


def test_the_map_in_the_docstring_lists_the_modules_that_exist() -> None:
    listed = set()
    lines = iter(str(everstep.__doc__).splitlines()[2:])
    for line in lines:
        if line.startswith("# ground"):
            listed |= {f"{name}.py" for name in next(lines).split()}
        elif found := re.match(r"(\w+\.py) ", line):
            listed.add(found[1])
        elif found := re.match(r"(\w+)/ +\S.*?\S(?:   +(.*))?$", line):
            names = str(found[2] or "").split()
            listed |= {f"{found[1]}/{name}.py" for name in names} or {found[1]}
    exist = {str(file) for file in FILES if file.stem != "__init__" and file.parts[0] != "cli"} | {"cli"}
    assert listed == exist


def test_types_are_shipped() -> None:
    from hatchling.builders.wheel import WheelBuilder

    root = PACKAGE.parents[1]
    shipped = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    assert "everstep/py.typed" in shipped
    assert {f"everstep/{file}" for file in FILES} <= shipped


# -- never pickle


@every_module
def test_nothing_reads_or_writes_pickle(file: Path) -> None:
    banned = {"pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "copyreg"}
    assert not {name.split(".")[0] for name in imports(file)} & banned
    used = {dotted(node) for node in ast.walk(tree(file))} | set(imports(file))
    tails = {".".join(name.split(".")[-2:]) for name in used}
    writers = {"torch.save", "dcp.save", "checkpoint.save", "dcp.async_save"}
    readers = {"torch.load", "np.load", "numpy.load", "dcp.load", "checkpoint.load", "torch.package"}
    assert not tails & (readers - {"torch.load"} if file in FOREIGN else readers)
    in_memory = {"torch.save"} if file == IN_MEMORY else set()
    assert file == Path("recover/export.py") or not tails & (writers - in_memory)
    objects = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"}
    assert not {name.split(".")[-1] for name in used} & objects


@pytest.mark.parametrize("file", FOREIGN, ids=str)
def test_files_of_other_tools_are_read_as_weights_only(file: Path) -> None:
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call) and dotted(node.func) == "torch.load"]
    said = [{word.arg: ast.unparse(word.value) for word in call.keywords}.get("weights_only") for call in calls]
    assert said and set(said) == {"True"}


def test_what_planners_of_dcp_are_given_never_leaves_memory() -> None:
    calls = [ast.unparse(node) for node in ast.walk(tree(IN_MEMORY)) if isinstance(node, ast.Call)]
    assert [call for call in calls if call.startswith("torch.save")] == ["torch.save(value, made)"]
    assert "made = io.BytesIO()" in (PACKAGE / IN_MEMORY).read_text()


def test_export_is_where_pickle_would_be_seen() -> None:
    used = {dotted(node) for node in ast.walk(tree(Path("recover/export.py")))}
    assert {"torch.save", "dcp.save"} <= used


# -- the tail


@every_module
def test_no_file_and_no_function_is_long(file: Path) -> None:
    lines = len((PACKAGE / file).read_text().splitlines())
    assert lines <= 450, f"{file} has {lines} lines: which noun is missing?"
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = int(node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{node.name} in {file} has {length} lines"


@every_module
def test_a_module_begins_with_a_sentence(file: Path) -> None:
    first = (ast.get_docstring(tree(file)) or "").split("\n\n")[0]
    assert re.match(r"[A-Z`].*[.:]", first, re.DOTALL), f"{file} begins with {first!r}"


@pytest.mark.parametrize("name", everstep.__all__)
def test_no_public_signature_hides_its_types(name: str) -> None:
    public = getattr(everstep, name)
    module = importlib.import_module(public.__module__)
    assert inspect.getdoc(public) or inspect.getdoc(module)
    if inspect.isfunction(public):
        untyped = [p.name for p in inspect.signature(public).parameters.values() if p.annotation is p.empty]
        assert not untyped


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest loads them by name: of two with the same one the second is an error, whatever is in it."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_those_that_only_the_soak_runs_are_there() -> None:
    root = Path(__file__).parents[1]
    for line in (root / "long.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (root.parent / file).read_text(), f"{line} is in no file"
