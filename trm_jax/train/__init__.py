"""Training: configuration, the jitted update, the loop, checkpoints, and arms over seeds."""

from trm_jax.checkpoint import Checkpointer as Checkpointer
from trm_jax.checkpoint import CheckpointError as CheckpointError
from trm_jax.train.arms import ArmsFailed as ArmsFailed
from trm_jax.train.arms import Interrupted as Interrupted
from trm_jax.train.arms import check_arms as check_arms
from trm_jax.train.arms import run_experiment as run_experiment
from trm_jax.train.config import RunConfig as RunConfig
from trm_jax.train.config import TrainConfig as TrainConfig
from trm_jax.train.engines import SamplingError as SamplingError
from trm_jax.train.evidence import NonFiniteError as NonFiniteError
from trm_jax.train.experiment import Experiment as Experiment
from trm_jax.train.experiment import check_experiment as check_experiment
from trm_jax.train.experiment import open_experiment as open_experiment
from trm_jax.train.load import build as build
from trm_jax.train.load import load_config as load_config
from trm_jax.train.loop import TrainRun as TrainRun
from trm_jax.train.opened import is_run as is_run
from trm_jax.train.opened import open_run as open_run
from trm_jax.train.opened import run_config as run_config
from trm_jax.train.options import describe_options as describe_options
from trm_jax.train.state import TrainState as TrainState
from trm_jax.train.state import init_state as init_state
from trm_jax.train.state import make_optimizer as make_optimizer
from trm_jax.train.state import state_shardings as state_shardings
from trm_jax.train.step import UpdateBatch as UpdateBatch
from trm_jax.train.step import make_update as make_update
