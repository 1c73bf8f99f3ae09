"""Weights, tokenizer and shape of pretrained models, as files and NumPy arrays alone.

``open_safetensors(directory)`` and ``write_safetensors(...)`` need NumPy only; ``read_gguf(path)``, ``fetch_smollm2()``
and ``load_smollm2(path)`` the extra ``pretrained``. ``trm_jax.models.load_pretrained`` makes models of them.
"""

from trm_jax.models.pretrained.chat_template import render_template as render_template
from trm_jax.models.pretrained.fetch import SMOLLM2_FILE as SMOLLM2_FILE
from trm_jax.models.pretrained.fetch import SMOLLM2_SHA256 as SMOLLM2_SHA256
from trm_jax.models.pretrained.fetch import SMOLLM2_SIZE as SMOLLM2_SIZE
from trm_jax.models.pretrained.fetch import ModelUnavailableError as ModelUnavailableError
from trm_jax.models.pretrained.fetch import cached_path as cached_path
from trm_jax.models.pretrained.fetch import fetch_smollm2 as fetch_smollm2
from trm_jax.models.pretrained.gguf_reader import SUPPORTED_FORMATS as SUPPORTED_FORMATS
from trm_jax.models.pretrained.gguf_reader import GGUFModel as GGUFModel
from trm_jax.models.pretrained.gguf_reader import read_gguf as read_gguf
from trm_jax.models.pretrained.gguf_reader import unpermute_rope as unpermute_rope
from trm_jax.models.pretrained.gguf_tensors import LlamaConfig as LlamaConfig
from trm_jax.models.pretrained.safetensors_reader import SafetensorsDirectory as SafetensorsDirectory
from trm_jax.models.pretrained.safetensors_reader import StoredTensor as StoredTensor
from trm_jax.models.pretrained.safetensors_reader import open_safetensors as open_safetensors
from trm_jax.models.pretrained.safetensors_writer import write_safetensors as write_safetensors
from trm_jax.models.pretrained.smollm2 import SMOLLM2_135M as SMOLLM2_135M
from trm_jax.models.pretrained.smollm2 import load_smollm2 as load_smollm2
from trm_jax.models.pretrained.smollm2 import open_smollm2 as open_smollm2
from trm_jax.models.pretrained.tokenizer import PretrainedTokenizer as PretrainedTokenizer
from trm_jax.models.pretrained.tokenizer import load_tokenizer as load_tokenizer
