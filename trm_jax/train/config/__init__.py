"""Everything a run can be told, as small frozen sections; a TOML table each."""

from trm_jax.train.config._learning import LossConfig as LossConfig
from trm_jax.train.config._learning import OptimizerConfig as OptimizerConfig
from trm_jax.train.config._learning import WarmstartConfig as WarmstartConfig
from trm_jax.train.config._policy import CheckpointConfig as CheckpointConfig
from trm_jax.train.config._policy import MeshConfig as MeshConfig
from trm_jax.train.config._policy import ModelConfig as ModelConfig
from trm_jax.train.config._problems import EvalConfig as EvalConfig
from trm_jax.train.config._problems import TaskConfig as TaskConfig
from trm_jax.train.config._rollout import RolloutConfig as RolloutConfig
from trm_jax.train.config._run import WARM_START as WARM_START
from trm_jax.train.config._run import ArmConfig as ArmConfig
from trm_jax.train.config._run import RunConfig as RunConfig
from trm_jax.train.config._train import DEFAULT_CORRECTION as DEFAULT_CORRECTION
from trm_jax.train.config._train import TrainConfig as TrainConfig
from trm_jax.train.config._train import check_mixture as check_mixture
