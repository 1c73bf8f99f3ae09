"""What serving rollouts needs whatever the server: slots with options of their own, requests, weights, wire, client."""

from trm_jax.serve import wire as wire
from trm_jax.serve._access import Access as Access
from trm_jax.serve._client import Connection as Connection
from trm_jax.serve._client import RolloutClient as RolloutClient
from trm_jax.serve._client import ServingError as ServingError
from trm_jax.serve._engine import SlotEngine as SlotEngine
from trm_jax.serve._engine import Start as Start
from trm_jax.serve._engine import describe_numerics as describe_numerics
from trm_jax.serve._programs import Chunk as Chunk
from trm_jax.serve._programs import Columns as Columns
from trm_jax.serve._programs import DecodeState as DecodeState
from trm_jax.serve._programs import PolicyWeights as PolicyWeights
from trm_jax.serve._programs import Prefix as Prefix
from trm_jax.serve._remote import RemoteEngine as RemoteEngine
from trm_jax.serve._requests import Completion as Completion
from trm_jax.serve._requests import FinishReason as FinishReason
from trm_jax.serve._requests import Limits as Limits
from trm_jax.serve._requests import SampleRequest as SampleRequest
from trm_jax.serve._requests import SamplingOptions as SamplingOptions
from trm_jax.serve._requests import TextCodec as TextCodec
from trm_jax.serve._sampling import RowSampling as RowSampling
from trm_jax.serve._sampling import row_support as row_support
from trm_jax.serve._sampling import sample_rows as sample_rows
from trm_jax.serve._weights import WeightDirectory as WeightDirectory
from trm_jax.serve._weights import WeightsRefused as WeightsRefused
