"""Rollout engines: the policy that samples, with its own weights, arithmetic and lag."""

from trm_jax.rollout._config import EngineConfig as EngineConfig
from trm_jax.rollout._config import RolloutNumerics as RolloutNumerics
from trm_jax.rollout._config import SamplingConfig as SamplingConfig
from trm_jax.rollout._engine import InProcessEngine as InProcessEngine
from trm_jax.rollout._protocol import Engine as Engine
from trm_jax.rollout._requests import Requests as Requests
from trm_jax.rollout._sampling import RowSampling as RowSampling
from trm_jax.rollout._sampling import draw_tokens as draw_tokens
from trm_jax.rollout._sampling import pack_support as pack_support
from trm_jax.rollout._sampling import row_support as row_support
from trm_jax.rollout._sampling import sample_rows as sample_rows
from trm_jax.rollout._slot_engine import SlotEngine as SlotEngine
from trm_jax.rollout._slot_engine import Start as Start
from trm_jax.rollout._slot_engine import chunk_steps as chunk_steps
from trm_jax.rollout._slot_engine import describe_numerics as describe_numerics
from trm_jax.rollout._slots import Chunk as Chunk
from trm_jax.rollout._slots import Columns as Columns
from trm_jax.rollout._slots import DecodeState as DecodeState
from trm_jax.rollout._slots import PolicyWeights as PolicyWeights
from trm_jax.rollout._slots import Prefix as Prefix
from trm_jax.rollout._slots import Recording as Recording
from trm_jax.rollout._stop import StopStrings as StopStrings
from trm_jax.rollout._stop import TextCodec as TextCodec
from trm_jax.rollout._weights import EngineWeights as EngineWeights
from trm_jax.rollout._weights import WeightLag as WeightLag
from trm_jax.rollout._weights import convert_weights as convert_weights
