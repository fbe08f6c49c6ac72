"""The house: rooms import only from lower levels, nothing imports in a circle, and code stays small and typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
LEVELS = (  # low to high; rooms of one level do not know each other
    ("errors",),
    ("config",),
    ("core",),
    ("device",),
    ("kv", "hub"),
    ("plan",),  # reads the sizes that hub reads from a config
    ("layers",),
    ("quantization",),
    ("models", "heads"),
    ("runners", "drafting"),
    ("engines",),
    ("tuned",),
    ("serve", "bench", "train"),
    ("doctor", "learning", "lint"),  # use bench's statistics and train's tasks
    ("build",),
    ("decoder",),
    ("integrations",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
LIGHT_ROOMS = {"plan": ("torch", "transformers"), "kv": ("torch",), "config": ("torch",), "errors": ("torch",)}
TOP = ("__init__", "__main__")  # the public names, and the entry of `python -m paceline`
MAX_FILE_LINES, MAX_PUBLIC_METHODS, MAX_ATTRIBUTES = 450, 15, 12
P90_FUNCTION_LINES, MIN_TYPED = 15, 0.99
FORBIDDEN_NAMES = ("utils", "common", "helpers", "base")

# Violations that are still to be removed, each as the tests below print it. Empty is the goal; a line that is no
# longer true fails the test that reads it.
KNOWN: frozenset[str] = frozenset(
    {
        "name: Tokenizer in core/protocols.py and hub/tokenizer.py",  # the protocol, and its one implementation
    }
)


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one of our modules, at the top, inside a function or for types only."""

    path: Path
    module: str

    @property
    def room(self) -> str:
        return self.module.split(".")[1]


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Imports, functions and classes of every file: a million nodes are walked once, not for every question."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {path: [node for node in ast.walk(tree) if isinstance(node, kinds)] for path, tree in sources().items()}


def rooms() -> list[str]:
    return sorted({room_of(path) for path in sources()} - set(TOP))


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Every module that a file imports: at the top, inside functions, under TYPE_CHECKING."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in nodes()[path]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: imports are written in full"
            module = node.module or ""
            # `from package import module` imports the module.
            yield from (
                f"{module}.{alias.name}" if (SOURCE.parent / Path(*module.split("."), f"{alias.name}.py")).exists()
                or (SOURCE.parent / Path(*module.split("."), alias.name)).is_dir() else module
                for alias in node.names
            )  # fmt: skip


def own_imports(path: Path) -> list[Import]:
    modules = {module for module in imported_modules(path) if module.startswith("paceline.")}
    return [Import(path, module) for module in sorted(modules)]


def is_triton(path: Path) -> bool:
    return any(module.split(".")[0] == "triton" for module in imported_modules(path))


def check(violations: list[str], prefix: str) -> None:
    """New violations fail, and so do known ones that are gone."""
    known = {line for line in KNOWN if line.startswith(prefix)}
    assert set(violations) - known == set(), "new violations"
    assert known - set(violations) == set(), "no longer violated: take these out of KNOWN"


# --- levels -----------------------------------------------------------------------------------------------------------


def test_every_room_has_a_level() -> None:
    assert set(rooms()) <= set(LEVEL), "give the room a level here and in docs"


def test_a_room_imports_only_from_lower_levels() -> None:
    violations = []
    for path in sources():
        room = room_of(path)
        for other in own_imports(path) if room not in TOP else ():
            if other.room != room and other.room in LEVEL and LEVEL[other.room] >= LEVEL[room]:
                violations.append(f"level: {relative(path)} imports {other.module}")
    check(violations, "level:")


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_do_without_heavy_packages(room: str) -> None:
    packages = {
        module.split(".")[0] for path in sources() if room_of(path) == room for module in imported_modules(path)
    }
    assert not packages & set(LIGHT_ROOMS[room])


def test_importing_paceline_loads_neither_torch_nor_web_nor_plotting() -> None:
    heavy = ("torch", "transformers", "fastapi", "uvicorn", "matplotlib")
    program = f"import sys, paceline, paceline.cli; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_imports_itself_through_others() -> None:
    """Types-only imports and imports inside functions count: a circle hides in them as well."""
    graph = {module_name(path): _targets(path) for path in sources()}
    circles = [" -> ".join(circle) for circle in _circles(graph)]
    check([f"circle: {circle}" for circle in circles], "circle:")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(path: Path) -> set[str]:
    """Our modules that a file imports. What it imports from its own package's __init__ is no circle of its own."""
    names = {other.module for other in own_imports(path)}
    return {name for name in names if name != module_name(path)}


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one module, sorted."""
    reachable = {start: _reachable(graph, start) for start in graph}
    groups = {
        tuple(sorted(other for other in reachable[start] if start in reachable.get(other, set())))
        for start in graph
        if start in reachable[start]
    }
    return sorted([list(group) for group in groups])


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = list(graph[start])
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            stack += graph.get(module, set())
    return seen


# --- names and sizes --------------------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, found in nodes().items():
        if not is_triton(path):
            for node in found:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, node


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, found in nodes().items():
        if not is_triton(path):
            yield from ((path, node) for node in found if isinstance(node, ast.ClassDef))


def test_no_module_is_a_drawer_for_anything() -> None:
    assert not [relative(path) for path in sources() if path.stem in FORBIDDEN_NAMES]


def test_no_class_name_is_used_twice() -> None:
    owners: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_"):
            owners.setdefault(node.name, []).append(relative(path))
    check([f"name: {name} in {' and '.join(paths)}" for name, paths in owners.items() if len(paths) > 1], "name:")


def test_no_file_is_too_long() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in sources()}
    check([f"lines: {name}" for name, lines in lengths.items() if lines > MAX_FILE_LINES], "lines:")


def public_methods(node: ast.ClassDef) -> list[str]:
    defined = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    overloads = {part.name for part in defined if any("overload" in ast.unparse(item) for item in part.decorator_list)}
    return sorted({part.name for part in defined if not part.name.startswith("_")} | overloads)


def attributes(node: ast.ClassDef) -> set[str]:
    """Everything that methods assign to self. The declared fields of a record do not count: options and figures are
    many."""
    parts = list(ast.walk(node))
    targets = [item for part in parts if isinstance(part, ast.Assign) for item in part.targets]
    targets += [part.target for part in parts if isinstance(part, ast.AnnAssign | ast.AugAssign)]
    flat = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {
        item.attr for item in flat
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self"
    }  # fmt: skip


def test_no_class_has_too_many_public_methods() -> None:
    wide = [(path, node) for path, node in classes() if len(public_methods(node)) > MAX_PUBLIC_METHODS]
    check([f"methods: {relative(path)} {node.name}" for path, node in wide], "methods:")


def test_no_class_has_too_many_attributes() -> None:
    wide = [(path, node) for path, node in classes() if len(attributes(node)) > MAX_ATTRIBUTES]
    check([f"attributes: {relative(path)} {node.name}" for path, node in wide], "attributes:")


def test_nine_of_ten_functions_are_short() -> None:
    lengths = sorted(node.end_lineno - node.lineno + 1 for _, node in functions() if node.end_lineno is not None)
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION_LINES


def test_functions_are_typed() -> None:
    def is_typed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        return node.returns is not None and all(argument.annotation is not None for argument in named)

    untyped = [f"{relative(path)}:{node.lineno} {node.name}" for path, node in functions() if not is_typed(node)]
    total = sum(1 for _ in functions())
    assert 1 - len(untyped) / total >= MIN_TYPED, untyped
