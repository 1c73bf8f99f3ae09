"""Every option with its type, default and meaning, read from the sections themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from typing import Any, Literal

from trm_jax.train._structured import dotted
from trm_jax.train.config import DEFAULT_CORRECTION, ArmConfig, RunConfig, TrainConfig

__all__ = ["describe_options"]


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
            key, value = dotted(where, field.name), getattr(instance, field.name)
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
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join("None" if part is type(None) else _type_name(part) for part in typing.get_args(hint))
    return re.sub(
        r"typing\.|<class '|'>", "", str(hint) if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))
    )


def _meanings(cls: Any) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring, by name."""
    text = inspect.getdoc(cls) or ""
    _, _, body = text.partition("Attributes:")
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", body, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", meaning).strip() for name, meaning in found}
