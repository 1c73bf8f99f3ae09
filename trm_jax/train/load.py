"""From a TOML file and command-line overrides to a checked ``RunConfig``; every mistake is named by its key."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trm_jax.correction import preset
from trm_jax.train._structured import closest, dotted, structured
from trm_jax.train.config import DEFAULT_CORRECTION, WARM_START, ArmConfig, RunConfig, TrainConfig

__all__ = ["build", "load_config", "parse_override"]

_TOP = ("title", "directory", "seeds", "arms")
_ARM = ("name", "description", "role")
_READ_BY = {
    "trm_max": ("max_token_kl",),
    "trm_avg": ("mean_token_kl",),
    "trm_tv": ("max_token_tv",),
    "trm_sample": ("max_k2", "mean_k3"),
    "ln_trm": ("ln_trm_threshold", "horizon_token_kl", "horizon_token_tv"),
    "ser": ("ser_threshold",),
    "geometric": ("geometric_low", "geometric_high"),
    "token_outlier": ("max_abs_log_ratio",),
    "exact": ("exact_low", "exact_high"),
    "tis": ("tis_cap",),
    "icepop": ("icepop_low", "icepop_high"),
    "kpop": ("kpop_threshold",),
    "seq_tis": ("seq_cap",),
    "seq_mis": ("seq_cap",),
    "geo_mis": ("geo_mis_low", "geo_mis_high", "geo_mis_token_weight"),
    "cis": ("cis_lambda", "cis_kappa"),
    "cis_two_sided": ("cis_lambda", "cis_kappa"),
}
"""Which thresholds each mask and weight reads."""
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
    arms = list(_arm_tables(tree))
    for override in overrides:
        keys, value = parse_override(override)
        if keys[0] == "arms" and len(keys) > 1 and keys[1] not in arms:
            raise ValueError(f"override {override!r}: there is no such arm{closest(keys[1], arms)}")
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
    if "\n" in raw or "\r" in raw:
        raise ValueError(f"override {text!r}: one value on one line; write one override for each key.")
    try:
        return keys, tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return keys, raw


def build(tree: Mapping[str, Any], *, default_title: str = "run") -> RunConfig:
    """Checks a configuration given as nested dicts (see ``load_config``)."""
    top = {key: tree[key] for key in _TOP if key in tree}
    base = {key: value for key, value in tree.items() if key not in _TOP}
    fields = dataclasses.fields(TrainConfig)
    known = (*_TOP, *(field.name for field in fields))
    sections = {field.name for field in fields if dataclasses.is_dataclass(field.default)}
    for key, value in base.items():
        if key not in known:
            raise ValueError(f"{key}: unknown key{closest(key, known)}")
        if key in sections and not isinstance(value, Mapping):
            raise ValueError(f"{key}: {value!r}: must be a table.")
    title = structured(top.get("title", default_title), str, "title")
    directory = structured(top.get("directory", f"runs/{default_title}"), str, "directory")
    if not directory.strip():
        raise ValueError(f"directory={directory!r}: name a directory for the run, or leave it out.")
    if "seed" in base and "seeds" in top:
        raise ValueError("seed and seeds are both given; write seeds=[...] alone.")
    seeds = structured(top.get("seeds", [base.get("seed", 0)]), tuple[int, ...], "seeds")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds={list(seeds)}: give at least one, each once.")
    if any(not 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"seeds={list(seeds)}: each must lie in [0, 2^32).")
    arms = []
    for slug, table in _arm_tables(tree).items():
        where = f"arms.{slug}"
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", slug):
            raise ValueError(f"{where}: a slug is lower-case letters, digits, '_' and '-'; it names a directory.")
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}: must be a table.")
        own = {key: value for key, value in table.items() if key not in _ARM}
        if "seed" in own:
            raise ValueError(f"{where}.seed: every arm runs every seed; write seeds=[...] at the top.")
        role = structured(table.get("role", ""), str, f"{where}.role")
        if role not in _ROLES:
            raise ValueError(f"{where}.role={role!r}: choose one of {', '.join(filter(None, _ROLES))}.")
        arms.append(
            ArmConfig(
                slug=slug,
                name=structured(table.get("name", slug), str, f"{where}.name"),
                description=structured(table.get("description", ""), str, f"{where}.description"),
                role=role,
                train=_arm_section(base, own, where if "arms" in top else ""),
            )
        )
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise ValueError(f"arms: two have the same name ({', '.join(names)}); tables and pictures tell them by it.")
    for arm in arms:
        if arm.name.startswith(WARM_START):
            raise ValueError(f"arms.{arm.slug}.name={arm.name!r}: what precedes the arms is called so; choose another.")
    return RunConfig(title=title, directory=directory, seeds=seeds, arms=tuple(arms))


def _arm_tables(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    tables = tree.get("arms", {"run": {}})
    if not isinstance(tables, Mapping) or not tables:
        raise ValueError("arms: write one table an arm, [arms.SLUG].")
    return tables


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


def _train_config(tree: Mapping[str, Any], where: str) -> TrainConfig:
    """Builds the sections strictly: unknown keys, wrong types and broken rules are errors that name the key."""
    tree = dict(tree)
    if isinstance(tree.get("correction"), Mapping):
        tree["correction"] = _expand_preset(tree["correction"], dotted(where, "correction"))
    return cast(TrainConfig, structured(tree, TrainConfig, where))


def _expand_preset(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A named correction's own values, under those given beside its name.

    Thresholds alone adjust the default correction; masks or a weight without a name make a correction of their own.
    A threshold that the correction does not read is refused.
    """
    values = dict(table)
    own = sorted({"masks", "weight"} & set(values))
    if "preset" in values and own:
        raise ValueError(
            f"{dotted(where, own[0])}: given beside preset={values['preset']!r}; name every part in the preset, joined "
            "by '+', or write masks and weight without a preset."
        )
    if not own:
        name = structured(values.pop("preset", DEFAULT_CORRECTION), str, dotted(where, "preset"))
        try:
            named = preset(name)
        except ValueError as error:
            raise ValueError(f"{dotted(where, 'preset')}: {error}") from error
        values = {**dataclasses.asdict(named), **values}
    parts = [values.get("weight", "none"), *(m for m in values.get("masks", ()) if isinstance(m, str))]
    for key in table:
        readers = [part for part, read in _READ_BY.items() if key in read]
        if readers and not set(readers) & set(parts):
            raise ValueError(
                f"{dotted(where, key)}: read by {' and '.join(readers)} only; this correction would ignore it."
            )
    return values
