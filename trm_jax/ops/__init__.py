"""Operators on hidden states and heads that never hold ``[N, V]`` logits."""

from trm_jax.ops.linear_logps import LinearLogps as LinearLogps
from trm_jax.ops.linear_logps import linear_logps as linear_logps
from trm_jax.ops.linear_vocab_divergence import linear_vocab_divergence as linear_vocab_divergence
