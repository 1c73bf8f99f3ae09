"""From a TOML file and command-line overrides to a checked ``RunConfig``; every mistake is named by its key."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trm_jax.correction import CorrectionConfig, preset
from trm_jax.train.config import ArmConfig, RunConfig, TrainConfig

__all__ = ["build", "describe_options", "load_config", "parse_override"]

_TOP = ("title", "directory", "seeds", "arms")
_ARM = ("name", "description", "role")
_ROLES = ("reference", "lag_only", "numerics_only", "uncorrected", "corrected", "")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration file.

    The file's own tables (``[task]``, ``[model]``, ...) are the base; ``[arms.SLUG]`` tables change single keys of it.
    Overrides ``section.key=value`` change the base, ``arms.SLUG.section.key=value`` one arm.

    Args:
      path: a TOML file.
      overrides: values as TOML writes them; a bare word is a string.

    Returns:
      The checked configuration; a file without arms has one, named "run".

    Raises:
      ValueError: missing file, malformed TOML, unknown key (with the closest known ones), value of a wrong type or
        out of range, contradictory options. Nothing has been compiled by then.
    """
    path = Path(path)
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"there is no configuration file {str(path)!r}; configs/ holds examples.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read the configuration file {str(path)!r}: {error.strerror}") from error
    for override in overrides:
        keys, value = parse_override(override)
        _assign(tree, keys, value, override)
    return build(tree, default_title=path.stem)


def parse_override(text: str) -> tuple[list[str], Any]:
    """Splits ``section.key=value``; the value is TOML, or a string when it is no TOML value.

    >>> parse_override("optimizer.learning_rate=1e-4")
    (['optimizer', 'learning_rate'], 0.0001)
    >>> parse_override("rollout.weight_format=int4")
    (['rollout', 'weight_format'], 'int4')
    """
    key, sign, raw = text.partition("=")
    keys = key.strip().removeprefix("--").split(".")
    if not sign or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in keys):
        raise ValueError(f"override {text!r}: write section.key=value, e.g. optimizer.learning_rate=1e-4")
    try:
        return keys, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return keys, raw


def build(tree: Mapping[str, Any], *, default_title: str = "run") -> RunConfig:
    """Checks a configuration given as nested dicts (see ``load_config``)."""
    top = {key: tree[key] for key in _TOP if key in tree}
    base = {key: value for key, value in tree.items() if key not in _TOP}
    known = (*_TOP, *(f.name for f in dataclasses.fields(TrainConfig)))
    for key in base:
        if key not in known:
            raise ValueError(f"{key}: unknown key{_closest(key, known)}.")
    title = _typed(top.get("title", default_title), str, "title")
    directory = _typed(top.get("directory", f"runs/{default_title}"), str, "directory")
    seeds = _typed(top.get("seeds", [base.get("seed", 0)]), tuple[int, ...], "seeds")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds={list(seeds)}: give at least one, each once.")
    if any(not 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds={list(seeds)}: each must lie in [0, 2^32).")
    tables = top.get("arms", {"run": {}})
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError("arms: write one table an arm, [arms.SLUG].")
    arms = []
    for slug, table in tables.items():
        where = f"arms.{slug}"
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", slug):
            raise ValueError(f"{where}: a slug is lower-case letters, digits, '_' and '-'; it names a directory.")
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}: must be a table.")
        own = {key: value for key, value in table.items() if key not in _ARM}
        role = _typed(table.get("role", ""), str, f"{where}.role")
        if role not in _ROLES:
            raise ValueError(f"{where}.role={role!r}: choose one of {', '.join(filter(None, _ROLES))}.")
        arms.append(
            ArmConfig(
                slug=slug,
                name=_typed(table.get("name", slug), str, f"{where}.name"),
                description=_typed(table.get("description", ""), str, f"{where}.description"),
                role=role,
                train=_section(TrainConfig, _merge(base, own), where if "arms" in top else ""),
            )
        )
    return RunConfig(title=title, directory=directory, seeds=seeds, arms=tuple(arms))


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` over ``base``, table by table; a correction preset replaces the base's whole correction."""
    out = dict(base)
    for key, value in own.items():
        both_tables = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        replaces = key == "params" or (key == "correction" and both_tables and "preset" in value)
        out[key] = _merge(out[key], value) if both_tables and not replaces else value
    return out


def _assign(tree: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"override {text!r}: {key!r} is a value, not a table.")
    tree[keys[-1]] = value


def _closest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known keys: {', '.join(known)}"


def _dot(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _section(cls: Any, table: Any, where: str) -> Any:
    """Builds one section strictly: unknown keys and wrong types are errors that name the key."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: must be a table, got {table!r}.")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values = dict(table)
    base_preset: CorrectionConfig | None = None
    if cls is CorrectionConfig and "preset" in values:
        name = _typed(values.pop("preset"), str, _dot(where, "preset"))
        base_preset = _named(lambda: preset(name), _dot(where, "preset"))
    for key, value in values.items():
        if key not in names:
            extra = ("preset",) if cls is CorrectionConfig else ()
            raise ValueError(f"{_dot(where, key)}: unknown key{_closest(key, [*names, *extra])}.")
        values[key] = _typed(value, hints[key], _dot(where, key))
    if base_preset is not None:
        kept = base_preset
        return _named(lambda: dataclasses.replace(kept, **values), where)
    return _named(lambda: cls(**values), where)


def _named(make: Any, where: str) -> Any:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _typed(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint`` says, without guessing: no string becomes a number and no number a bool."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _section(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _typed(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}={value!r}: choose one of {', '.join(map(str, args))}.")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}={value!r}: must be a list.")
        return tuple(_typed(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r}: must be a table.")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where}={value!r}: must be of type {hint.__name__}.")
    return value


def describe_options() -> list[tuple[str, str, str, str]]:
    """Every option as ``(key, type, default, meaning)``, read from the sections themselves."""
    rows: list[tuple[str, str, str, str]] = []

    def visit(cls: Any, instance: Any, where: str) -> None:
        hints = typing.get_type_hints(cls)
        meanings = _meanings(cls)
        for field in dataclasses.fields(cls):
            key, value = _dot(where, field.name), getattr(instance, field.name)
            if dataclasses.is_dataclass(value):
                visit(type(value), value, key)
            else:
                rows.append((key, _type_name(hints[field.name]), repr(value), meanings.get(field.name, "")))

    visit(TrainConfig, TrainConfig(), "")
    rows.append(("correction.preset", "str", "", "start from a named correction, e.g. 'trm_combined + cis'"))
    return rows


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    return re.sub(
        r"typing\.|<class '|'>", "", str(hint) if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))
    )


def _meanings(cls: Any) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring, by name."""
    text = inspect.getdoc(cls) or ""
    _, _, body = text.partition("Attributes:")
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", body, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", meaning).strip() for name, meaning in found}
