"""Plain loops over the sequences of a batch: what a `[B, T]` array holds, one sequence at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Slots = list[tuple[int, int]]


def float64(values: Any) -> Floats:
    """The numbers of any array (bfloat16 included) as float64: the oracle rounds nothing."""
    return np.asarray(values).astype(np.float64)


def sequences(response_mask: Any, segment_ids: Any = None) -> list[Slots]:
    """The response slots of every sequence, in order: one sequence a row, or one for each segment of a row."""
    mask = np.asarray(response_mask)
    found: list[Slots] = []
    for b in range(mask.shape[0]):
        if segment_ids is None:
            found.append([(b, t) for t in range(mask.shape[1]) if mask[b, t]])
            continue
        row = np.asarray(segment_ids)[b]
        for segment in dict.fromkeys(row.tolist()):
            found.append([(b, t) for t in range(mask.shape[1]) if mask[b, t] and row[t] == segment])
    return found


def decide(
    accept: Callable[..., bool], response_mask: Any, *arrays: Any, segment_ids: Any = None, **options: Any
) -> Bools:
    """`accept(values, ..., **options)` of every sequence: `[B]`, or for packed rows `[B, T]` at the response slots."""
    columns = [float64(array) for array in arrays]
    shape = np.shape(response_mask)
    keep = np.zeros(shape if segment_ids is not None else shape[:1], bool)
    for slots in sequences(response_mask, segment_ids):
        if not slots:
            continue  # an empty sequence has nothing to decide
        kept = accept(*[[float(column[slot]) for slot in slots] for column in columns], **options)
        for b, t in slots:
            keep[(b, t) if segment_ids is not None else (b,)] = kept
    return keep


def spread(weigh: Callable[..., Sequence[float]], response_mask: Any, *arrays: Any, **options: Any) -> Floats:
    """`weigh(values, ..., **options)` of every sequence, one value a token; 0 at the masked slots."""
    segment_ids = options.pop("segment_ids", None)
    columns = [float64(array) for array in arrays]
    out = np.zeros(np.shape(response_mask))
    for slots in sequences(response_mask, segment_ids):
        values = weigh(*[[float(column[slot]) for slot in slots] for column in columns], **options) if slots else []
        for slot, value in zip(slots, values, strict=True):
            out[slot] = value
    return out
