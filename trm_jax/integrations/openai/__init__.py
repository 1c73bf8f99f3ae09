"""Rollouts from an OpenAI-compatible server (vLLM, SGLang, llama.cpp), asked in token ids and checked."""

from trm_jax.integrations.openai._agreement import Agreement as Agreement
from trm_jax.integrations.openai._agreement import agreement_of as agreement_of
from trm_jax.integrations.openai._agreement import measure_agreement as measure_agreement
from trm_jax.integrations.openai._engine import OpenAIEngine as OpenAIEngine
from trm_jax.integrations.openai._engine import open_engine as open_engine
from trm_jax.integrations.openai._http import ServerFailed as ServerFailed
from trm_jax.integrations.openai._options import Cuts as Cuts
from trm_jax.integrations.openai._options import DialectName as DialectName
from trm_jax.integrations.openai._options import LogpMode as LogpMode
from trm_jax.integrations.openai._options import ServerOptions as ServerOptions
from trm_jax.integrations.openai._samples import UnfitServer as UnfitServer
from trm_jax.integrations.openai._weights import Publish as Publish
