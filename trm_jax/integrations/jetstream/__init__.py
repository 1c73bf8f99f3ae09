"""Rollouts by JetStream: its driver around our engine, in this process or served with complete records over gRPC."""

from trm_jax.integrations.jetstream._driver import RolloutDriver as RolloutDriver
from trm_jax.integrations.jetstream._engine import PolicyBox as PolicyBox
from trm_jax.integrations.jetstream._engine import RolloutEngine as RolloutEngine
from trm_jax.integrations.jetstream._engine import RolloutTokens as RolloutTokens
from trm_jax.integrations.jetstream._in_process import JetStreamEngine as JetStreamEngine
from trm_jax.integrations.jetstream._server import RolloutServer as RolloutServer
from trm_jax.integrations.jetstream._server import ServerOptions as ServerOptions
from trm_jax.integrations.jetstream._state import Counters as Counters
from trm_jax.integrations.jetstream._state import Health as Health
from trm_jax.integrations.jetstream._state import QueueFull as QueueFull
from trm_jax.integrations.jetstream._state import Unavailable as Unavailable
from trm_jax.integrations.jetstream._work import Failure as Failure
from trm_jax.integrations.jetstream._work import Work as Work
