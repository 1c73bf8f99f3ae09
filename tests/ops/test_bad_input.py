"""Input that a caller may well pass: ids that no vocabulary has, masks that are finite, arguments that are refused."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import ops
from trm_jax.checks import token_ids

N, D, V = 3, 4, 20
# Without the run-time types of the tests, which would refuse some of this first.
linear_logps, linear_vocab_divergence = map(inspect.unwrap, (ops.linear_logps, ops.linear_vocab_divergence))
FORMS: list[dict[str, Any]] = [
    {"implementation": "reference"},
    {"implementation": "chunked"},
    {"implementation": "pallas_tpu", "interpret": True},
]


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32), np.arange(N)


def test_an_id_beyond_32_bits_has_no_log_prob() -> None:
    hidden, head, _ = operands()
    far = np.array([2**32 + 3, np.iinfo(np.int64).min, 3])  # cut to 32 bits: the ids 3, 0 and 3
    logps = ops.linear_logps(hidden, head, far).logps
    both = ops.linear_vocab_divergence(hidden, head, hidden, head, far)
    for values in (logps, both.policy_logps, both.rollout_logps):
        np.testing.assert_array_equal(np.isnan(values), [True, True, False])
    with jax.enable_x64(True):  # JAX holds 64 bits
        np.testing.assert_array_equal(np.isnan(ops.linear_logps(hidden, head, jnp.asarray(far)).logps), np.isnan(logps))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_ids_are_ranged_before_they_are_cut(dtype: type) -> None:
    limits = np.iinfo(dtype)
    ids = token_ids(np.array([limits.min, 3, limits.max], dtype))
    fits = (-1 if limits.min < -(2**31) else limits.min), 3, (limits.max if limits.max < 2**31 else -1)
    np.testing.assert_array_equal(ids, np.array(fits, np.int32), strict=True)
