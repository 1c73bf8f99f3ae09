"""The architecture as data: which room may import which, and which third parties; the code is held to the table."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "trm_jax"

LEAVES = frozenset({"types", "numerics", "checks"})
ARRAYS = frozenset({"jax", "numpy", "jaxtyping"})


@dataclasses.dataclass(frozen=True)
class Room:
    """What the modules of one room may import, besides the standard library and themselves.

    Attributes:
      rooms: rooms of the package; a room includes its sub-rooms.
      third_parties: top-level names of other packages.
    """

    rooms: frozenset[str]
    third_parties: frozenset[str]


def _room(*rooms: str, third: frozenset[str] | set[str] = ARRAYS) -> Room:
    return Room(frozenset(rooms), frozenset(third))


# "" is trm_jax/__init__.py. A sub-room has a row of its own when its rights differ from those of the room around it.
TABLE: dict[str, Room] = {
    "types": _room(),
    "numerics": _room("types"),
    "checks": _room("types", "numerics"),
    "divergences": _room(*LEAVES),
    "bounds": _room(*LEAVES),
    "checkpoint": _room(third=ARRAYS | {"orbax"}),
    "ops": _room(*LEAVES, "divergences"),
    "correction": _room(*LEAVES, "divergences"),
    "losses": _room(*LEAVES),
    "models.pretrained": _room(third={"gguf", "jaxtyping", "jinja2", "numpy", "tokenizers"}),
    "models": _room("types", "numerics", "models.pretrained", third=ARRAYS | {"flax"}),
    "rollout": _room(*LEAVES, "models", third=ARRAYS | {"flax"}),
    "rescore": _room("types", "ops", "divergences", "models", third=ARRAYS | {"chex", "flax"}),
    "process_limits": _room(third=frozenset()),
    "data": _room("types", "checks", third={"grain", "jaxtyping", "math_verify", "numpy", "pyarrow", "reasoning_gym"}),
    "report": _room(
        *("types", "numerics", "divergences", "bounds", "correction"),
        third=ARRAYS | {"jinja2", "matplotlib", "rich", "tensorboardX"},
    ),
    "evaluation": _room("types", "models", "rollout", "data", "report", third=ARRAYS | {"flax", "rich"}),
    "train": _room(
        *(*LEAVES, "divergences", "bounds", "ops", "correction", "losses", "models", "rollout", "rescore"),
        *("checkpoint", "data", "report", "evaluation", "serve", "integrations.jetstream"),
        third=ARRAYS | {"cattrs", "flax", "optax", "orbax", "rich", "tyro"},
    ),
    "serve": _room(*LEAVES, "checkpoint", "models", "rollout", third=ARRAYS | {"flax", "google", "grpc"}),
    "integrations": _room(third=frozenset()),
    "integrations.jetstream": _room(
        *("models", "rollout", "serve", "types"),
        third=ARRAYS | {"flax", "grpc", "jetstream", "prometheus_client"},
    ),
    "integrations.openai": _room("models", "rescore", "rollout", "types", third=ARRAYS | {"flax"}),
    "cli": _room(
        *("", *LEAVES, "divergences", "bounds", "ops", "correction", "losses", "models", "rollout", "rescore"),
        *("data", "report", "evaluation", "train", "serve", "integrations.jetstream"),
        third={"rich", "tyro"},
    ),
    "__main__": _room("cli", third=frozenset()),
    "": _room(*LEAVES, "divergences", "bounds", "ops", "correction", "losses", third=frozenset()),
}

# Functions that import a module by its name: a call with a written-out name is an import like any other.
BY_NAME = frozenset({"__import__", "import_module", "import_extra"})


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, absolute and dotted, and where."""

    target: str
    path: Path
    line: int


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The absolute name of what ``from ... import`` reads, for code in ``module``."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _visit(node: ast.AST, path: Path, module: str, *, is_package: bool, inside: str = "") -> Iterator[Import]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside = node.name
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, path, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, module, is_package=is_package)
        # `from trm_jax.ops import x`: x may be a module or a name, so both are judged by the longer path.
        yield from (Import(f"{base}.{alias.name}", path, node.lineno) for alias in node.names)
    elif isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in BY_NAME and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, path, node.lineno)
            elif inside not in BY_NAME:  # such a function may itself call another with its own argument
                yield Import("<a computed name>", path, node.lineno)
    for child in ast.iter_child_nodes(node):
        yield from _visit(child, path, module, is_package=is_package, inside=inside)


def imports_of(path: Path, root: Path) -> list[Import]:
    """Every import of a file, those inside functions and by written-out name included."""
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return list(_visit(tree, path, module, is_package=is_package))


def room_of(target: str, table: dict[str, Room]) -> str | None:
    """The room of a dotted name inside the package: the longest row that contains it; None when no row does."""
    parts = target.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in table:
            return room
    return "" if len(parts) <= 1 else None  # trm_jax itself, or a name of its __init__


def _within(room: str, allowed: frozenset[str]) -> bool:
    return room in allowed or any(room.startswith(f"{other}.") for other in allowed if other)


def violations(root: Path, table: dict[str, Room]) -> list[str]:
    """Each breach of the table in ``root/trm_jax``, as ``file:line: rule``."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        shown = path.relative_to(root).as_posix()
        own_name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        own = room_of(own_name, table)
        if own is None or (own == "" and own_name not in (PACKAGE, f"{PACKAGE}.__main__")):
            found.append(f"{shown}:1: belongs to no room: give it a row in TABLE")
            continue
        rules = table[own]
        for item in imports_of(path, root):
            where = f"{shown}:{item.line}: {own or PACKAGE}"
            top = item.target.split(".")[0]
            if top != PACKAGE:
                if top not in sys.stdlib_module_names and top not in rules.third_parties:
                    found.append(f"{where} may not import {top}, only {sorted(rules.third_parties)}")
                continue
            other = room_of(item.target, table)
            if other is None:
                found.append(f"{where} imports {item.target}, which belongs to no room")
            elif other == own:
                continue
            elif not _within(other, rules.rooms):
                found.append(f"{where} may not import {other or PACKAGE}, only {sorted(rules.rooms)}")
            elif any(part.startswith("_") and not part.startswith("__") for part in item.target.split(".")):
                found.append(f"{where} imports {item.target}: private to {other}; take it from trm_jax.{other}")
    return found


def test_the_code_keeps_to_the_table() -> None:
    found = violations(ROOT, TABLE)
    assert not found, "\n" + "\n".join(found)


def test_every_row_is_a_room_that_exists() -> None:
    package = ROOT / PACKAGE
    missing = [
        room
        for room in TABLE
        if not (package / f"{room.replace('.', '/')}.py").is_file()
        and not (package / room.replace(".", "/") / "__init__.py").is_file()
    ]
    assert not missing, f"rows of TABLE without code: {missing}"


def test_the_table_names_its_own_rows_and_has_one_direction() -> None:
    for room, rules in TABLE.items():
        assert rules.rooms <= set(TABLE), (room, sorted(rules.rooms - set(TABLE)))
    # A room's rooms come before it in some order, or two of them could need each other.
    placed: set[str] = set()
    remaining = dict(TABLE)
    while remaining:
        ready = [room for room, rules in remaining.items() if rules.rooms <= placed]
        assert ready, f"a circle among {sorted(remaining)}"
        placed.update(ready)
        for room in ready:
            del remaining[room]


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("losses/_a.py", "from trm_jax.models import Transformer", "losses may not import models"),
        ("losses/_a.py", "import trm_jax.train.loop", "losses may not import train"),
        ("losses/_a.py", "def f():\n    import optax", "losses may not import optax"),
        ("losses/_a.py", "import jax\nimport flax.nnx as nnx", ":2: losses may not import flax"),
        ("losses/_a.py", "from ..rollout import engine", "losses may not import rollout"),
        ("losses/_a.py", "from .. import rollout", "losses may not import rollout"),
        ("losses/_a.py", "from trm_jax import rollout as r", "losses may not import rollout"),
        ("losses/_a.py", "import trm_jax", "losses may not import trm_jax"),
        ("losses/_a.py", "from trm_jax import __version__", "losses may not import trm_jax"),
        ("losses/_a.py", "import importlib\nimportlib.import_module('torch')", "losses may not import torch"),
        ("losses/_a.py", "def f(x):\n    return __import__(x)", "losses may not import <a computed name>"),
        (
            "losses/_a.py",
            "if True:\n    try:\n        import tools.bench\n    except ImportError:\n        pass",
            "tools",
        ),
        ("losses/_a.py", "import experiments", "losses may not import experiments"),
        ("data/grain.py", "import jax", "data may not import jax"),
        ("models/pretrained/a.py", "from trm_jax import models", "models.pretrained may not import models"),
        ("models/head.py", "import gguf", "models may not import gguf"),
        ("ops/a.py", "from trm_jax.divergences._kl import f", "private to divergences"),
        ("types.py", "from trm_jax.numerics import masked_mean", "types may not import numerics"),
        ("__init__.py", "from trm_jax import train", "trm_jax may not import train"),
        ("novelty/a.py", "import jax", "belongs to no room"),
        ("novelty.py", "import jax", "belongs to no room"),
        ("train/a.py", "from trm_jax.novelty.a import f", "which belongs to no room"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, source: str, rule: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    found = violations(tmp_path, TABLE)
    assert len(found) == 1, found
    assert rule in found[0]
    assert found[0].startswith(f"{PACKAGE}/{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses/__init__.py", "from trm_jax.losses._a import f as f"),
        (
            "losses/_a.py",
            "from __future__ import annotations\nimport math, jax.numpy as jnp\nfrom trm_jax import types",
        ),
        ("losses/_a.py", "from ._b import g\nfrom . import _c\nfrom ..numerics import masked_mean"),
        ("models/_load.py", "from trm_jax.models.pretrained import load\nimport flax"),
        ("models/pretrained/a.py", "import gguf"),
        ("rollout/engine.py", "from trm_jax.models.pretrained import load"),
        ("data/_x.py", "def import_extra(m):\n    return importlib.import_module(m)\nimport_extra('reasoning_gym')"),
        ("train/_loop.py", "import optax, orbax.checkpoint as ocp\nfrom trm_jax.losses import gspo"),
        ("__main__.py", "import sys"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    assert violations(tmp_path, TABLE) == []


HEAVY = (
    *("cattrs", "gguf", "grain", "grpc", "jetstream", "jinja2", "math_verify", "matplotlib", "orbax", "pyarrow"),
    *("reasoning_gym", "rich", "tensorboardX", "tensorflow", "tokenizers", "torch", "transformers", "tunix", "tyro"),
)


def test_importing_the_package_is_light_and_silent_and_touches_no_device() -> None:
    """In a process of its own. The device count can be set only before JAX makes a backend, hence the last lines."""
    rooms = [room for room in TABLE if _within(room, TABLE[""].rooms)]
    program = textwrap.dedent(
        f"""
        import sys, warnings
        warnings.simplefilter("error")
        import {PACKAGE}
        {"; ".join(f"import {PACKAGE}.{room}" for room in rooms)}
        heavy = sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r}))
        assert not heavy, f"import {PACKAGE} pulls in {{heavy}}"
        import jax
        jax.config.update("jax_num_cpu_devices", 3)
        assert jax.device_count() == 3, "import {PACKAGE} made a JAX backend"
        """
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONWARNINGS")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""
