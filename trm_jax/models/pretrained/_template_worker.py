"""Program of the process in which chat templates run: JSON lines in, JSON lines out, Jinja in a sandbox.

A template is a program from the file of a model. The sandbox keeps it from Python's objects; this process's limits on
memory and processor time, and its parent's patience, keep it from everything else.
"""

from __future__ import annotations

import datetime
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_limits = runpy.run_path(str(Path(__file__).parents[2] / "process_limits.py"))  # an import would bring JAX along
_GIBIBYTES = 1  # of address space


class _Refused(Exception):
    """A template's own ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which some templates mark the assistant's words, does nothing here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a plain class attribute

    def parse(self, parser: Any) -> Any:
        """The body as it stands."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As Transformers has it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def main(cpu_seconds: int, max_chars: int) -> None:
    """Answers ``{"template", "variables"}`` by ``{"text"}``, ``{"refused"}`` or ``{"error"}`` until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    environment = _environment()
    templates: dict[str, Any] = {}
    _limits["limit_memory_and_core"](_GIBIBYTES)
    replies.write(json.dumps({"text": ""}) + "\n")
    for line in sys.stdin:
        _limits["limit_processor_time"](cpu_seconds)
        replies.write(json.dumps(_answer(environment, templates, json.loads(line), max_chars)) + "\n")


def _answer(environment: Any, templates: dict[str, Any], request: dict[str, Any], max_chars: int) -> dict[str, str]:
    source = request["template"]
    try:
        if source not in templates:
            templates.clear()
            templates[source] = environment.from_string(source)
        parts, size = [], 0
        for part in templates[source].generate(**request["variables"]):
            parts.append(part)
            size += len(part)
            if size > max_chars:
                return {"error": f"it writes more than {max_chars} characters"}
        return {"text": "".join(parts)}
    except _Refused as error:
        return {"refused": str(error)}
    except (Exception, RecursionError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
