"""Checkpoints on benchmarks: ask every problem, judge every answer, say how sure the accuracy is."""

from trm_jax.evaluation._answers import Answer as Answer
from trm_jax.evaluation._answers import ask as ask
from trm_jax.evaluation._answers import read_answers as read_answers
from trm_jax.evaluation._interval import bootstrap_interval as bootstrap_interval
from trm_jax.evaluation._ledger import Ledger as Ledger
from trm_jax.evaluation._policy import Policy as Policy
from trm_jax.evaluation._policy import open_policy as open_policy
from trm_jax.evaluation._results import evaluation_table as evaluation_table
from trm_jax.evaluation._results import summarize as summarize
from trm_jax.evaluation._run import run_evaluation as run_evaluation
from trm_jax.evaluation._settings import EvaluationSettings as EvaluationSettings
from trm_jax.evaluation._settings import EvaluationTask as EvaluationTask
from trm_jax.evaluation._settings import parse_task as parse_task
