"""From a TOML file and command-line overrides to a checked ``RunConfig``; every mistake is named by its key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import cattrs
from cattrs.gen import make_dict_structure_fn

from trm_jax.correction import CorrectionConfig, preset
from trm_jax.train.config import DEFAULT_CORRECTION, ArmConfig, RunConfig, TrainConfig

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
    arms = list(tree.get("arms", {"run": {}}))
    for override in overrides:
        keys, value = parse_override(override)
        if keys[0] == "arms" and len(keys) > 1 and keys[1] not in arms:
            raise ValueError(f"override {override!r}: there is no such arm{_closest(keys[1], arms)}")
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
            raise ValueError(f"{key}: unknown key{_closest(key, known)}")
    title = _structured(top.get("title", default_title), str, "title")
    directory = _structured(top.get("directory", f"runs/{default_title}"), str, "directory")
    if "seed" in base and "seeds" in top:
        raise ValueError("seed and seeds are both given; write seeds=[...] alone.")
    seeds = _structured(top.get("seeds", [base.get("seed", 0)]), tuple[int, ...], "seeds")
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
        if "seed" in own:
            raise ValueError(f"{where}.seed: every arm runs every seed; write seeds=[...] at the top.")
        role = _structured(table.get("role", ""), str, f"{where}.role")
        if role not in _ROLES:
            raise ValueError(f"{where}.role={role!r}: choose one of {', '.join(filter(None, _ROLES))}.")
        arms.append(
            ArmConfig(
                slug=slug,
                name=_structured(table.get("name", slug), str, f"{where}.name"),
                description=_structured(table.get("description", ""), str, f"{where}.description"),
                role=role,
                train=_arm_section(base, own, where if "arms" in top else ""),
            )
        )
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise ValueError(f"arms: two have the same name ({', '.join(names)}); tables and pictures tell them by it.")
    return RunConfig(title=title, directory=directory, seeds=seeds, arms=tuple(arms))


def _arm_section(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Any:
    """The arm's configuration; a mistake in the tables that all arms share is not blamed on the arm."""
    try:
        return _train_config(_merge(base, own), where)
    except ValueError as error:
        try:
            _train_config(base, "")
        except ValueError as shared:
            if str(error).replace(f"{where}.", "").replace(f"{where}: ", "") == str(shared):
                raise shared from None
        raise


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
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}."


def _dot(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _train_config(tree: Mapping[str, Any], where: str) -> TrainConfig:
    """Builds the sections strictly: unknown keys, wrong types and broken rules are errors that name the key."""
    tree = dict(tree)
    if isinstance(tree.get("correction"), Mapping):
        tree["correction"] = _expand_preset(tree["correction"], _dot(where, "correction"))
    return cast(TrainConfig, _structured(tree, TrainConfig, where))


def _expand_preset(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A named correction's own values, under those given beside its name.

    Thresholds alone adjust the default correction; masks or a weight without a name make a correction of their own.
    """
    values = dict(table)
    if "preset" not in values and {"masks", "weight"} & set(values):
        return values
    name = _structured(values.pop("preset", DEFAULT_CORRECTION), str, _dot(where, "preset"))
    try:
        return {**dataclasses.asdict(preset(name)), **values}
    except ValueError as error:
        raise ValueError(f"{_dot(where, 'preset')}: {error}") from error


def _structured(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint``, or a ValueError with one sentence a fault."""
    try:
        return _converter().structure(value, hint)
    except (cattrs.BaseValidationError, ValueError, TypeError) as error:
        faults = cattrs.transform_error(error, path=where or "$", format_exception=_in_words)
        raise ValueError("; ".join(_key_first(fault) for fault in faults)) from error


@functools.cache
def _converter() -> cattrs.Converter:
    """A converter that refuses unknown keys and never guesses: no string becomes a number, no number a bool."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook_func(lambda hint: hint is Any, lambda value, _: value)
    converter.register_structure_hook_func(lambda hint: _origin(hint) is Literal, _one_of)
    converter.register_structure_hook_func(lambda hint: _origin(hint) is dict, _table)

    def section(cls: Any) -> Any:
        make = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)
        return lambda value, hint: make(_table(value, hint), hint)

    def items(value: Any, hint: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r}: must be a list")
        return tuple(converter.structure(item, typing.get_args(hint)[0]) for item in value)

    converter.register_structure_hook_factory(dataclasses.is_dataclass, section)
    converter.register_structure_hook_func(lambda hint: _origin(hint) is tuple, items)
    return converter


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint)


def _one_of(value: Any, hint: Any) -> Any:
    choices = typing.get_args(hint)
    if value not in choices:
        raise ValueError(f"{value!r}: choose one of {', '.join(map(str, choices))}")
    return value


def _table(value: Any, _: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r}: must be a table")
    return dict(value)


def _exactly(value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r}: must be of type {kind.__name__}")
    return value


def _in_words(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in dataclasses.fields(error.cl)]
        known += ["preset"] if error.cl is CorrectionConfig else []
        return "; ".join(f"unknown key {key}{_closest(key, known)}" for key in sorted(error.extra_fields))
    return str(error).removesuffix(".")


def _key_first(fault: str) -> str:
    """``message @ $.section.key`` as ``section.key: message``."""
    message, _, place = fault.rpartition(" @ ")
    place = place.removeprefix("$").removeprefix(".")
    message = message if message.endswith(("?", ".")) else f"{message}."
    return f"{place}: {message}" if place else message


def describe_options() -> list[tuple[str, str, str, str]]:
    """Every option as ``(key, type, default, meaning)``, read from the sections themselves."""
    of_run, of_arm = _meanings(RunConfig), _meanings(ArmConfig)
    rows: list[tuple[str, str, str, str]] = [
        ("title", "str", "the file's name", of_run["title"]),
        ("directory", "str", "runs/ and the file's name", of_run["directory"]),
        ("seeds", "list[int]", "[0]", of_run["seeds"]),
        ("arms.SLUG.name", "str", "SLUG", of_arm["name"]),
        ("arms.SLUG.description", "str", "''", of_arm["description"]),
        ("arms.SLUG.role", "str", "''", of_arm["role"]),
        ("arms.SLUG.KEY", "", "", "any key below, for this arm alone"),
    ]

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
    rows.append(
        (
            "correction.preset",
            "str",
            repr(DEFAULT_CORRECTION),
            "start from a named correction, e.g. 'trm_combined + cis'",
        )
    )
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
