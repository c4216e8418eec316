"""The house's rules about who imports whom, walked over the syntax of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("runtime", "models", "server", "bench")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MAY_IMPORT = {
    "runtime": {"runtime"},
    "models": {"models", "runtime"},
    "server": {"server", "models", "runtime"},
    "bench": {"bench", "models", "runtime"},
}
NO_TORCH = (
    "runtime/request.py",
    "runtime/scheduler.py",
    "runtime/config.py",
    "runtime/errors.py",
    "models/config.py",
    "models/traffic.py",
    "server/schema.py",
)


def name(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_room_imports_only_the_rooms_below_it(path):
    room = name(path).split("/")[0]
    allowed = set(ROOMS) if path.name == "__main__.py" else MAY_IMPORT[room]
    found = {module.split(".")[0] for module in imports(path)} & set(ROOMS)
    assert found <= allowed
    if room == "bench":
        assert "server" not in found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_triton_stays_under_ops_and_flags_in_the_doors(path):
    modules = {module.split(".")[0] for module in imports(path)}
    if not name(path).startswith(("runtime/ops/", "bench/")):
        assert "triton" not in modules
    if path.name != "__main__.py":
        assert "argparse" not in modules
        assert "os.environ" not in path.read_text()


@pytest.mark.parametrize("file", NO_TORCH)
def test_plain_rooms_do_not_know_torch(file):
    assert not {"torch", "triton"} & {module.split(".")[0] for module in imports(ROOT / file)}


def test_ops_do_not_know_the_engine():
    for path in (ROOT / "runtime/ops").glob("*.py"):
        for module in imports(path):
            assert not module.startswith("runtime") or module.startswith(("runtime.ops", "runtime.errors"))


def test_importing_the_rooms_needs_no_triton():
    """Laptops without Triton play the torch path: only the stand-in module may import it at the top."""
    for path in (ROOT / "runtime/ops").glob("*.py"):
        if path.name != "_triton.py":
            assert "triton" not in {module.split(".")[0] for module in imports(path)}
