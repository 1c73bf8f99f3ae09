"""Problems, tasks, tokenizers, streams and rewards.

Importing this room is cheap: Grain, reasoning-gym and math-verify are imported by the functions that use them.
"""

from trm_jax.data._answers import MarkedAnswer as MarkedAnswer
from trm_jax.data._answers import boxed_answer as boxed_answer
from trm_jax.data._answers import gsm8k_answer as gsm8k_answer
from trm_jax.data._answers import marked_answer as marked_answer
from trm_jax.data._benchmarks import BENCHMARKS as BENCHMARKS
from trm_jax.data._benchmarks import Benchmark as Benchmark
from trm_jax.data._benchmarks import benchmark as benchmark
from trm_jax.data._benchmarks import read_benchmark as read_benchmark
from trm_jax.data._benchmarks import read_gsm8k as read_gsm8k
from trm_jax.data._corruption import corrupt_demonstration as corrupt_demonstration
from trm_jax.data._encode import encode_prompts as encode_prompts
from trm_jax.data._generated_task import ReasoningGymTask as ReasoningGymTask
from trm_jax.data._number_reward import number_reward as number_reward
from trm_jax.data._option_reward import exact_reward as exact_reward
from trm_jax.data._option_reward import option_reward as option_reward
from trm_jax.data._problem import BatchReward as BatchReward
from trm_jax.data._problem import Problem as Problem
from trm_jax.data._problem import RewardFunction as RewardFunction
from trm_jax.data._problem import TaskSpec as TaskSpec
from trm_jax.data._problem import score_batch as score_batch
from trm_jax.data._prompts import PROMPT_FORMATS as PROMPT_FORMATS
from trm_jax.data._prompts import format_prompt as format_prompt
from trm_jax.data._readers import read_problems as read_problems
from trm_jax.data._readers import shipped_problems as shipped_problems
from trm_jax.data._reasoning_gym import reasoning_gym_task as reasoning_gym_task
from trm_jax.data._reasoning_gym import reasoning_gym_tasks as reasoning_gym_tasks
from trm_jax.data._rewards import RewardKind as RewardKind
from trm_jax.data._rewards import open_reward as open_reward
from trm_jax.data._split import held_out as held_out
from trm_jax.data._streams import Stream as Stream
from trm_jax.data._streams import SupervisedBatch as SupervisedBatch
from trm_jax.data._streams import drop_long_prompts as drop_long_prompts
from trm_jax.data._streams import prompt_stream as prompt_stream
from trm_jax.data._streams import supervised_stream as supervised_stream
from trm_jax.data._tokenizer import PRINTABLE_ASCII as PRINTABLE_ASCII
from trm_jax.data._tokenizer import CharTokenizer as CharTokenizer
from trm_jax.data._tokenizer import Tokenizer as Tokenizer
from trm_jax.data._verifier import MathVerifier as MathVerifier
from trm_jax.data._verifier import Verdict as Verdict
from trm_jax.data._verifier import VerifierCounts as VerifierCounts
