"""Token log-probs of a linear head: dispatch, readable specification, portable chunked form, TPU kernels."""

from trm_jax.ops.linear_logps._api import linear_logps as linear_logps
from trm_jax.ops.linear_logps._types import LinearLogps as LinearLogps
