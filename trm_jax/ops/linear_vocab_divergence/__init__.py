"""Full-vocabulary divergences of two linear heads: dispatch, specification, portable chunked form, TPU kernels."""

from trm_jax.ops.linear_vocab_divergence._api import linear_vocab_divergence as linear_vocab_divergence
