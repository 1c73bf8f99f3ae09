"""reasoning-gym's datasets by name, with everything about a request checked before a problem is drawn."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from trm_jax.data._compact import COMPACT_FORMS
from trm_jax.data._generated_task import ReasoningGymTask, gym_factory
from trm_jax.data._tokenizer import PRINTABLE_ASCII

__all__ = ["reasoning_gym_task", "reasoning_gym_tasks"]

# Found by drawing from every dataset of reasoning-gym 0.1.25 in several processes.
_UNSEEDED = ("list_functions",)
_HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")


def reasoning_gym_tasks() -> list[str]:
    """Names of all reasoning-gym datasets, those with a compact form first.

    Returns:
      The names.

    Raises:
      ImportError: reasoning-gym is not installed.

    Example:
      >>> reasoning_gym_tasks()[0]  # doctest: +SKIP
      'chain_sum'
    """
    names = set(gym_factory().DATASETS) - {"composite"}
    return [*COMPACT_FORMS, *sorted(names - set(COMPACT_FORMS))]


def reasoning_gym_task(
    name: str,
    *,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    test_permille: int = 100,
    alphabet: str | None = None,
    compact: bool = True,
) -> ReasoningGymTask:
    """A task over a reasoning-gym dataset (https://github.com/open-thought/reasoning-gym).

    Datasets in ``COMPACT_FORMS`` are written compactly, with a worked demonstration; every other dataset (and those,
    with ``compact=False``) has the question as its prompt and the bare answer as its demonstration.

    Args:
      name: the dataset's name, such as ``chain_sum``.
      params: the dataset's own parameters, such as ``{"max_terms": 4, "max_digits": 1}``; not seed and size.
      seed: fixes the problems, 0 or more.
      test_permille: share of prompts held out, in thousandths, in [0, 999].
      alphabet: characters of the tokenizer; the task's own by default.
      compact: write compactly where a compact form exists.

    Returns:
      The task.

    Raises:
      ValueError: an unknown name (with close matches), an unknown parameter (with the allowed ones), or a value that
        the dataset or the compact form refuses.
      ImportError: reasoning-gym is not installed.

    Example:
      >>> task = reasoning_gym_task("chain_sum", params={"min_terms": 4, "max_terms": 4, "max_digits": 1})
      >>> problem = task.train(1000)[0]
      >>> problem.prompt, problem.demonstration, task(problem, problem.demonstration)
      ...     # doctest: +SKIP
      ('3+7-1+9=', '10,9,18', 1.0)
    """
    params = dict(params or {})
    datasets = gym_factory().DATASETS
    if name not in datasets or name == "composite":
        close = difflib.get_close_matches(name, datasets, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "`trm-jax tasks` lists the names"
        if name == "composite":
            hint = "it mixes others, which are not told apart here; name one of them"
        raise ValueError(f"reasoning-gym has no task {name!r}; {hint}")
    allowed = sorted(f.name for f in dataclasses.fields(datasets[name][1]) if f.name not in ("seed", "size"))
    for key, value in params.items():
        if key in ("seed", "size"):
            raise ValueError(f"params must not name {key!r}: pass seed to reasoning_gym_task, size to train and test")
        if key not in allowed:
            raise ValueError(f"{name!r} has no parameter {key!r}; it has {', '.join(allowed)}")
        default = getattr(datasets[name][1](), key)
        if isinstance(default, bool | int | float | str):
            fits = type(value) is type(default) or (type(default) is float and type(value) is int)
            if not fits:
                kind = type(default).__name__
                raise ValueError(f"parameter {key!r} of {name!r} must be of type {kind}, given {value!r}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    if not 0 <= test_permille < 1000:
        raise ValueError(f"test_permille must be in [0, 999], got {test_permille}")
    if name in _UNSEEDED:
        raise ValueError(f"{name!r} does not follow its seed: it gives other problems in each run, none can be resumed")
    if name in _HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ValueError(
            f"{name!r} gives other problems in each process, because it draws from Python sets; set the environment "
            "variable PYTHONHASHSEED (to 0, say) before Python starts, so that a run can be resumed"
        )
    form = COMPACT_FORMS.get(name) if compact else None
    if form is not None:
        for key, (value, reason) in form.required.items():
            if params.get(key, value) != value:
                raise ValueError(f"the compact form of {name!r} needs {key}={value}: {reason}; or pass compact=False")
    own_alphabet = form.alphabet if form is not None else PRINTABLE_ASCII
    task = ReasoningGymTask(
        name, params=params, seed=seed, test_permille=test_permille, form=form, alphabet=alphabet or own_alphabet
    )
    missing = sorted(set(form.alphabet) - set(task.tokenizer().alphabet)) if form is not None else []
    if missing:
        raise ValueError(f"alphabet lacks {missing}, which the compact form of {name!r} uses: {alphabet!r}")
    return task
