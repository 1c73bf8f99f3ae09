"""Weights, tokenizer and shape of a real pretrained model, as NumPy arrays (extra ``pretrained``).

``fetch_smollm2()`` gets the file, ``load_smollm2(path)`` opens it; both deal in files and NumPy arrays alone.
"""

from trm_jax.models.pretrained.fetch import SMOLLM2_FILE as SMOLLM2_FILE
from trm_jax.models.pretrained.fetch import SMOLLM2_SHA256 as SMOLLM2_SHA256
from trm_jax.models.pretrained.fetch import SMOLLM2_SIZE as SMOLLM2_SIZE
from trm_jax.models.pretrained.fetch import ModelUnavailableError as ModelUnavailableError
from trm_jax.models.pretrained.fetch import cached_path as cached_path
from trm_jax.models.pretrained.fetch import fetch_smollm2 as fetch_smollm2
from trm_jax.models.pretrained.gguf_reader import SUPPORTED_FORMATS as SUPPORTED_FORMATS
from trm_jax.models.pretrained.gguf_reader import GGUFModel as GGUFModel
from trm_jax.models.pretrained.gguf_reader import LlamaConfig as LlamaConfig
from trm_jax.models.pretrained.gguf_reader import read_gguf as read_gguf
from trm_jax.models.pretrained.gguf_reader import unpermute_rope as unpermute_rope
from trm_jax.models.pretrained.smollm2 import SMOLLM2_135M as SMOLLM2_135M
from trm_jax.models.pretrained.smollm2 import load_smollm2 as load_smollm2
from trm_jax.models.pretrained.tokenizer import PretrainedTokenizer as PretrainedTokenizer
