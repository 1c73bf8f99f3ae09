"""Nested dicts become sections, strictly: nothing is guessed, and every fault is a sentence that names its key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cattrs
from cattrs.gen import make_dict_structure_fn

from trm_jax.correction import CorrectionConfig

__all__ = ["closest", "dotted", "structured"]


def closest(key: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown key: the nearest known ones, or all."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}."


def dotted(where: str, key: str) -> str:
    """``where.key``, or the key alone at the top."""
    return f"{where}.{key}" if where else key


def structured(value: Any, hint: Any, where: str) -> Any:
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
        return "; ".join(f"unknown key {key}{closest(key, known)}" for key in sorted(error.extra_fields))
    if isinstance(error, KeyError):
        return "is missing"
    return str(error).removesuffix(".")


def _key_first(fault: str) -> str:
    """``message @ $.section.key`` as ``section.key: message``."""
    message, _, place = fault.rpartition(" @ ")
    place = place.removeprefix("$").removeprefix(".")
    message = message if message.endswith(("?", ".")) else f"{message}."
    return f"{place}: {message}" if place else message
