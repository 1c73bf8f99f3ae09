"""Random inputs for every test of this folder, and how to compare: numbers in float64, decisions exactly."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

SCALES = [1e-4, 1e-2, 0.3, 3.0, 30.0]  # sd of the log ratio: near-identical engines to policies without overlap
GARBAGE = [np.nan, -np.inf, -1e9, np.inf, 1e9]  # what may stand at a masked slot
ROWS, LENGTH = 6, 7


class Batch(NamedTuple):
    """Log-probs and divergences `[B, T]`: a full row, rows with holes, an empty row and a row of one token."""

    proximal: Any
    rollout: Any
    policy: Any
    response_mask: Any
    segment_ids: Any
    token_kl: Any
    token_tv: Any
    advantages: Any
    rewards: Any
    rng: np.random.Generator

    @property
    def log_ratio(self) -> Any:
        return self.proximal - self.rollout

    @property
    def valid(self) -> Any:
        return self.response_mask


def response_mask(rng: np.random.Generator, rows: int = ROWS, length: int = LENGTH) -> Any:
    mask = rng.random((rows, length)) < 0.7
    mask[0], mask[2], mask[3] = True, False, False
    mask[3, length // 2] = True
    mask[1, :3] = [True, False, True]
    mask[4:, -1] = True
    return mask


def batch(seed: int, scale: float, dtype: Any = np.float32) -> Batch:
    rng = np.random.default_rng([seed, round(scale * 1e6)])
    mask = response_mask(rng)
    shape = mask.shape
    rollout = -rng.exponential(1.0, shape) * 10.0 ** rng.uniform(-5, 1, shape)  # p from 1 - 1e-5 down to e^-30
    rollout[0, 0] = -1.0
    nudge = rng.normal(size=shape) * scale
    proximal = np.minimum(rollout + nudge, rollout * 0.5)  # stays a log-prob
    policy = np.minimum(proximal + rng.normal(size=shape) * min(scale, 1.0), proximal * 0.5)
    kl = rng.exponential(1.0, shape) * scale**2
    breaks = np.sort(rng.integers(1, shape[1], (shape[0], 2)), axis=1)
    segments = (np.arange(shape[1]) >= breaks[:, :1]).astype(int) + (np.arange(shape[1]) >= breaks[:, 1:])

    def cast(x: Any) -> Any:
        return np.asarray(jnp.asarray(x.astype(np.float32), dtype))

    return Batch(
        cast(proximal),
        cast(rollout),
        cast(policy),
        mask,
        segments.astype(np.int32),
        cast(kl),
        cast(np.minimum(1.0, np.sqrt(kl / 2) * rng.uniform(0.3, 1.0, shape))),
        rng.normal(size=shape[0]).astype(np.float32),
        rng.integers(0, 2, shape[0]).astype(np.float32),
        rng,
    )


def spoil(values: Any, mask: Any, garbage: Any = None) -> Any:
    """The same values with garbage at the masked slots: a number, or every kind in turn."""
    kinds = np.resize(GARBAGE, values.shape) if garbage is None else garbage
    return np.where(mask, values, np.asarray(kinds, values.dtype))


def row(*values: float) -> Any:
    """A few tokens at the head of the first row; NaN in every other slot. One shape for all, so nothing recompiles."""
    out = np.full((ROWS, LENGTH), np.nan, np.float32)
    out[0, : len(values)] = values
    return out


def head(count: int) -> Any:
    """The response mask of `row` with so many values."""
    mask = np.zeros((ROWS, LENGTH), bool)
    mask[0, :count] = True
    return mask


def first(array: Any, count: int) -> list[float]:
    """The values of `row` again."""
    return np.asarray(array)[0, :count].tolist()


def close(actual: Any, expected: Any, *, relative: float, absolute: float = 0.0) -> None:
    """Equal within a tolerance, with equal infinities; the message shows both arrays."""
    np.testing.assert_allclose(
        np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64), rtol=relative, atol=absolute
    )
