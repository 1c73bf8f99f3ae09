"""From a chunk's arrays to the samples that decode in its slots, or to the records that keep them on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from trm_jax.integrations.jetstream._work import Failure, Sample
from trm_jax.rollout import Chunk, Columns, Recorder, SlotEngine
from trm_jax.serve import FinishReason

__all__ = ["deliver", "keep_prompts"]


def deliver(
    chunk: Chunk,
    running: dict[int, Sample],
    engine: SlotEngine,
    count_tokens: Callable[[int], None],
    launching: AbstractContextManager[Any],
) -> list[int]:
    """Hands a chunk's tokens to their samples; waits until the device has made it.

    Args:
      chunk: from ``engine``.
      running: the sample of every slot that decodes.
      engine: for its vocabulary and end tokens.
      count_tokens: told how many tokens of a sample came, before they are sent on.
      launching: held while a program is started.

    Returns:
      Slots that are free now: their sample ended, or its request did, as where a log-prob is not finite.
    """
    columns = Columns.of(np.asarray(chunk.data))
    counts, alive = columns.valid.sum(axis=1).tolist(), columns.alive.tolist()
    sound = (np.isfinite(columns.logps) | (columns.valid == 0)).all(axis=1).tolist()
    wanted = {name for sample in running.values() for name in sample.extras}
    _keep(chunk, running, launching)
    extras = {name: np.asarray(getattr(chunk, name)) for name in wanted}  # what nobody wants stays on the device
    freed = list[int]()
    for slot, sample in running.items():
        if not sound[slot]:
            message = f"the log-prob of a sampled token is not finite under policy version {columns.versions[slot]}"
            sample.work.fail(Failure(kind="internal", message=message))
        if sample.work.ended:
            freed.append(slot)
            continue
        stopped = sample.take(columns, slot, counts[slot], extras)
        count_tokens(counts[slot] if stopped is None else stopped)
        if stopped is not None or not alive[slot]:
            ended = stopped is not None or int(columns.tokens[slot, counts[slot] - 1]) in engine.eos_ids
            finish: FinishReason = "stop" if ended else "length"
            sample.work.send(sample.flush(finish, engine.shape.vocab_size))
            freed.append(slot)
        elif sample.due():
            sample.work.send(sample.flush("", engine.shape.vocab_size))
    return freed


def keep_prompts(started: Sequence[tuple[int, Sample]], launching: AbstractContextManager[Any]) -> None:
    """Puts the experts that ran on the prompts of new samples where their records are kept."""
    groups: dict[tuple[int, Recorder], tuple[Any, list[tuple[int, int]]]] = {}
    for _, sample in started:
        record = sample.work.record
        if sample.prompt is not None and record is not None:
            (routes, row), sample.prompt = sample.prompt, None
            _, starts = groups.setdefault((id(routes), record), (routes, []))
            starts.append((sample.work.rows[sample.index], row))
    for (_, record), (routes, starts) in groups.items():
        with launching:
            record.add_prompts(routes, starts)


def _keep(chunk: Chunk, running: dict[int, Sample], launching: AbstractContextManager[Any]) -> None:
    """Puts a chunk where the records of its samples are kept."""
    by_record: dict[Recorder, dict[int, int]] = {}
    for slot, sample in running.items():
        record = sample.work.record
        if record is not None and not sample.work.ended:
            by_record.setdefault(record, {})[slot] = sample.work.rows[sample.index]
    for record, rows in by_record.items():
        with launching:
            record.add(chunk, rows)
