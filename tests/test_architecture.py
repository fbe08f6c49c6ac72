"""Rooms import only from lower levels; rooms of one level do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
LEVELS = (
    ("errors",),
    ("options",),
    ("profile",),
    ("core",),
    ("kv", "heads", "plan", "models"),
    ("runners", "drafting"),
    ("decode",),
    ("engines",),
    ("serve", "bench", "train"),
    ("assemble",),
    ("decoder",),
    ("transformers",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
LIGHT_ROOMS = {"plan": ("torch", "transformers"), "kv": ("torch",)}
TOP = ("__init__", "__main__")  # the public names, and the door of `python -m paceline`


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def rooms() -> list[str]:
    names = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    return sorted(names - set(TOP))


def imports(room: str) -> Iterator[tuple[Path, str]]:
    """Every module that a room's files import, at the top or inside a function."""
    home = SOURCE / room
    for path in sorted(home.rglob("*.py")) if home.is_dir() else [SOURCE / f"{room}.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
                yield from ((path, f"paceline.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are written in full"
                yield path, node.module or ""


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_from_lower_levels(room: str) -> None:
    assert room in LEVEL, f"{room} stands on no level; give it one here and in docs"
    for path, module in imports(room):
        if module.startswith("paceline.") and room_of(module) not in (room, "__version__"):
            lower = room_of(module)
            assert LEVEL[lower] < LEVEL[room], f"{path.relative_to(SOURCE)} looks up or sideways to {lower}"


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_do_without_heavy_packages(room: str) -> None:
    found = {module.split(".")[0] for _, module in imports(room)}
    assert not found & set(LIGHT_ROOMS[room])


def test_importing_paceline_loads_neither_torch_nor_web_nor_plotting() -> None:
    import subprocess
    import sys

    heavy = ("torch", "transformers", "fastapi", "uvicorn", "matplotlib")
    program = f"import sys, paceline, paceline.cli; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
