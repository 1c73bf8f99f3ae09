"""Rollout engines: the policy that samples, with its own weights, arithmetic and lag."""

from trm_jax.rollout._config import EngineConfig as EngineConfig
from trm_jax.rollout._config import RolloutNumerics as RolloutNumerics
from trm_jax.rollout._config import SamplingConfig as SamplingConfig
from trm_jax.rollout._engine import InProcessEngine as InProcessEngine
from trm_jax.rollout._protocol import Engine as Engine
from trm_jax.rollout._sampling import nucleus as nucleus
from trm_jax.rollout._sampling import pack_support as pack_support
from trm_jax.rollout._sampling import sample as sample
from trm_jax.rollout._weights import EngineWeights as EngineWeights
from trm_jax.rollout._weights import WeightLag as WeightLag
from trm_jax.rollout._weights import convert_weights as convert_weights
