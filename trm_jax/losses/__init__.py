"""Losses to be minimised, as sums and counts; advantages from groups."""

from trm_jax.losses._advantages import group_advantages as group_advantages
from trm_jax.losses._clipped import clipped_surrogate as clipped_surrogate
from trm_jax.losses._clipped import gspo as gspo
from trm_jax.losses._token_terms import Aggregation as Aggregation
from trm_jax.losses._token_terms import Denominator as Denominator
from trm_jax.losses._unclipped import cispo as cispo
from trm_jax.losses._unclipped import dppo as dppo
from trm_jax.losses._unclipped import masked_surrogate as masked_surrogate
