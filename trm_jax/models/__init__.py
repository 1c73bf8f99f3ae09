"""Transformers in Flax NNX, with logical axis names; hidden states and output head are exposed apart."""

from trm_jax.models._block import RematPolicy as RematPolicy
from trm_jax.models._cache import KVCache as KVCache
from trm_jax.models._cache import TransformerOutput as TransformerOutput
from trm_jax.models._cache import init_cache as init_cache
from trm_jax.models._compute import ComputeConfig as ComputeConfig
from trm_jax.models._compute import ExpertImplementation as ExpertImplementation
from trm_jax.models._config import LatentConfig as LatentConfig
from trm_jax.models._config import TransformerConfig as TransformerConfig
from trm_jax.models._config import YarnConfig as YarnConfig
from trm_jax.models._export import export_pretrained as export_pretrained
from trm_jax.models._head import head_log_probs as head_log_probs
from trm_jax.models._head import head_token_logps as head_token_logps
from trm_jax.models._head import restrict_log_probs as restrict_log_probs
from trm_jax.models._hf_config import config_from_hf as config_from_hf
from trm_jax.models._hf_config_write import config_to_hf as config_to_hf
from trm_jax.models._pretrained import load_pretrained as load_pretrained
from trm_jax.models._quantize import QuantizedArray as QuantizedArray
from trm_jax.models._quantize import WeightFormat as WeightFormat
from trm_jax.models._quantize import dequantize as dequantize
from trm_jax.models._quantize import quantize as quantize
from trm_jax.models._sharding import RULES as RULES
from trm_jax.models._sharding import make_mesh as make_mesh
from trm_jax.models._sharding import param_shardings as param_shardings
from trm_jax.models._smollm2 import find_smollm2 as find_smollm2
from trm_jax.models._smollm2 import load_smollm2_model as load_smollm2_model
from trm_jax.models._transformer import Transformer as Transformer
