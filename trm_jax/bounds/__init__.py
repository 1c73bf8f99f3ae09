"""Bounds on the error of the surrogate, certificates from samples, and an exact oracle to check both."""

from trm_jax.bounds._adaptive import adaptive_bound as adaptive_bound
from trm_jax.bounds._certificate import Certificate as Certificate
from trm_jax.bounds._certificate import Term as Term
from trm_jax.bounds._certificate import certify as certify
from trm_jax.bounds._lemmas import advantage_bound as advantage_bound
from trm_jax.bounds._lemmas import context_shift_bound as context_shift_bound
from trm_jax.bounds._tabular import TabularPair as TabularPair
from trm_jax.bounds._tabular import TabularSample as TabularSample
from trm_jax.bounds._unified import UnifiedBound as UnifiedBound
from trm_jax.bounds._unified import unified_bound as unified_bound
from trm_jax.bounds._worst_case import classical_bound as classical_bound
from trm_jax.bounds._worst_case import coupling_bound as coupling_bound
from trm_jax.bounds._worst_case import mixed_bound_kl as mixed_bound_kl
from trm_jax.bounds._worst_case import mixed_bound_tv as mixed_bound_tv
from trm_jax.bounds._worst_case import pinsker_marginal_bound_kl as pinsker_marginal_bound_kl
from trm_jax.bounds._worst_case import pinsker_marginal_bound_tv as pinsker_marginal_bound_tv
