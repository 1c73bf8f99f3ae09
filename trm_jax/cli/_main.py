"""Reads the command line and runs a command."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from typing import Annotated

import tyro

from trm_jax.cli._eval import Eval
from trm_jax.cli._lists import Fetch, Options, Tasks
from trm_jax.cli._serve import Serve
from trm_jax.cli._signals import STOPPED
from trm_jax.cli._train import Report, Train

__all__ = ["main"]


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Fetch, tyro.conf.subcommand("fetch")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
    | Annotated[Options, tyro.conf.subcommand("options")]
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; errors a user can mend are one line on standard error and exit status 2."""
    command = _parse(argv)
    try:
        return command.run()
    except BrokenPipeError:  # the reader of our output is gone; Python's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("trm-jax: interrupted", file=sys.stderr)
        return STOPPED
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if _is_internal(error):
            raise
        print(f"trm-jax: error: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> Train | Eval | Serve | Report | Fetch | Tasks | Options:
    """Overrides may also stand after options: ``trm-jax train FILE --resume steps=20``."""
    about = "LLM reinforcement learning when the policy that samples is not the policy that trains."
    command: Train | Eval | Serve | Report | Fetch | Tasks | Options
    _check_command(sys.argv[1:] if argv is None else argv)
    command, rest = tyro.cli(Command, prog="trm-jax", args=argv, description=about, return_unknown_args=True)
    if isinstance(command, Train | Serve) and all("=" in text and not text.startswith("-") for text in rest):
        return dataclasses.replace(command, overrides=(*command.overrides, *rest))
    if rest:
        command = tyro.cli(Command, prog="trm-jax", args=argv, description=about)  # says what is wrong, and ends
    return command


def _check_command(argv: list[str]) -> None:
    """Names a command that there is not; tyro would only say that one is missing."""
    known = ("train", "eval", "serve", "report", "fetch", "tasks", "options")
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        close = difflib.get_close_matches(argv[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
        print(f"trm-jax: error: there is no command {argv[0]!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)


def _is_internal(error: Exception) -> bool:
    """JAX's own errors keep their traceback; ours are sentences for the user."""
    return type(error).__module__.startswith(("jax", "jaxlib"))
