"""Rescoring: the training model's log-probs and the full-vocabulary divergence of what an engine sampled."""

from trm_jax.rescore._layout import operator_layout as operator_layout
from trm_jax.rescore._policy import policy_logps as policy_logps
from trm_jax.rescore._policy import response_states as response_states
from trm_jax.rescore._rescore import rescore as rescore
from trm_jax.rescore._rows import training_rows as training_rows
