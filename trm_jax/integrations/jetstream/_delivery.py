"""From a chunk's arrays to the samples that decode in its slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trm_jax.integrations.jetstream._work import Failure, Sample
from trm_jax.rollout import Chunk, Columns, SlotEngine
from trm_jax.serve import FinishReason

__all__ = ["deliver"]


def deliver(
    chunk: Chunk, running: dict[int, Sample], engine: SlotEngine, count_tokens: Callable[[int], None]
) -> list[int]:
    """Hands a chunk's tokens to their samples; waits until the device has made it.

    Args:
      chunk: from ``engine``.
      running: the sample of every slot that decodes.
      engine: for its vocabulary and end tokens.
      count_tokens: told how many tokens of a sample came, before they are sent on.

    Returns:
      Slots that are free now: their sample ended, or its request did, as where a log-prob is not finite.
    """
    columns = Columns.of(np.asarray(chunk.data))
    counts, alive = columns.valid.sum(axis=1).tolist(), columns.alive.tolist()
    sound = (np.isfinite(columns.logps) | (columns.valid == 0)).all(axis=1).tolist()
    wanted = {name for sample in running.values() for name in sample.extras}
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
