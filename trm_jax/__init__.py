"""Reinforcement learning of language models when the policy that samples is not the policy that trains.

The functional core: arrays in, arrays out. Importing it starts nothing and needs no extra.
"""

from importlib.metadata import version as _version

from trm_jax import bounds as bounds
from trm_jax import correction as correction
from trm_jax import divergences as divergences
from trm_jax import losses as losses
from trm_jax import ops as ops

__version__ = _version("trm-jax")
