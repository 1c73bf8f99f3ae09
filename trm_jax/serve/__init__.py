"""What serving rollouts needs whatever the server: requests, weights, wire, client."""

from trm_jax.rollout import SamplingConfig as SamplingOptions  # noqa: F401 - a request's options are the engine's
from trm_jax.rollout import SlotEngine as SlotEngine
from trm_jax.serve import wire as wire
from trm_jax.serve._access import Access as Access
from trm_jax.serve._access import read_token as read_token
from trm_jax.serve._client import Connection as Connection
from trm_jax.serve._client import RolloutClient as RolloutClient
from trm_jax.serve._client import ServingError as ServingError
from trm_jax.serve._remote import RemoteEngine as RemoteEngine
from trm_jax.serve._remote import check_server as check_server
from trm_jax.serve._requests import Completion as Completion
from trm_jax.serve._requests import FinishReason as FinishReason
from trm_jax.serve._requests import Limits as Limits
from trm_jax.serve._requests import SampleRequest as SampleRequest
from trm_jax.serve._weights import WeightDirectory as WeightDirectory
from trm_jax.serve._weights import WeightsRefused as WeightsRefused
