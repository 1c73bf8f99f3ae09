"""Rollout engines: the policy that samples, with its own weights, arithmetic and lag."""

from trm_jax.rollout._config import EngineConfig as EngineConfig
from trm_jax.rollout._config import RolloutNumerics as RolloutNumerics
from trm_jax.rollout._config import SamplingConfig as SamplingConfig
from trm_jax.rollout._engine import InProcessEngine as InProcessEngine
from trm_jax.rollout._programs import cache_into_slots as cache_into_slots
from trm_jax.rollout._programs import into_slots as into_slots
from trm_jax.rollout._programs import run_prompts as run_prompts
from trm_jax.rollout._protocol import Engine as Engine
from trm_jax.rollout._sampling import draw_tokens as draw_tokens
from trm_jax.rollout._sampling import nucleus as nucleus
from trm_jax.rollout._sampling import pack_support as pack_support
from trm_jax.rollout._sampling import sample as sample
from trm_jax.rollout._weights import EngineWeights as EngineWeights
from trm_jax.rollout._weights import WeightLag as WeightLag
from trm_jax.rollout._weights import convert_weights as convert_weights
