"""The catalogue of metrics: every name, its unit, its meaning and how its parts combine.

The training loop, the writers, the pictures and the glossary of the report all read this one table; a name that is not
in it is an error, so that a misspelt metric cannot quietly become an empty panel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

__all__ = ["GROUP_TITLES", "METRICS", "Metric"]

Reduction = Literal["mean", "max", "min", "whole", "label"]
Scale = Literal["linear", "log"]

GROUP_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "": "Position",
        "reward": "Reward",
        "accuracy": "Accuracy",
        "mismatch": "Mismatch",
        "correction": "Correction",
        "optim": "Optimisation",
        "policy": "Policy",
        "rollout": "Rollout",
        "time": "Time",
        "memory": "Memory",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
      name: the key in a record, ``group/quantity``.
      label: what a picture or a table heading calls it.
      unit: its unit; empty for a pure number.
      meaning: one sentence for the glossary.
      reduction: how parts (microbatches, devices) combine. ``mean``: sum of totals over sum of denominators; ``max``:
        the largest; ``min``: the smallest; ``whole``: computed once over the whole batch, parts cannot be combined;
        ``label``: a word.
      scale: the axis that suits it.
    """

    name: str
    label: str
    unit: str
    meaning: str
    reduction: Reduction
    scale: Scale = "linear"

    @property
    def group(self) -> str:
        """The part of the name before the slash; empty for ``step``, ``version`` and ``stage``."""
        return self.name.rpartition("/")[0]


def _metric(name: str, label: str, unit: str, reduction: Reduction, meaning: str, *, log: bool = False) -> Metric:
    scale: Scale = "log" if log else "linear"
    return Metric(name=name, label=label, unit=unit, meaning=meaning, reduction=reduction, scale=scale)


_ALL = (
    _metric("step", "step", "steps", "whole", "Position in the run; one record a step."),
    _metric("version", "policy version", "updates", "whole", "Optimizer updates that the policy has had."),
    _metric("stage", "stage", "", "label", "warmstart (supervised) or rl (reinforcement learning)."),
    _metric("reward/mean", "training reward", "", "mean", "Mean reward of the responses sampled at this step."),
    _metric(
        "reward/solved_groups",
        "groups solved",
        "fraction",
        "mean",
        "Share of prompts for which at least one sampled response got the full reward.",
    ),
    _metric(
        "accuracy/heldout",
        "held-out accuracy",
        "fraction",
        "mean",
        "Share of held-out problems answered correctly; measured at evaluation steps only.",
    ),
    _metric(
        "accuracy/validation",
        "validation accuracy",
        "fraction",
        "mean",
        "Share of the validation problems answered correctly in the warm start; apart from the held-out problems.",
    ),
    _metric(
        "mismatch/ppl_gap",
        "PPL gap",
        "nats/token",
        "mean",
        "Mean over sequences of (mean recomputed log-prob − mean rollout log-prob); 0 when the policies agree.",
    ),
    _metric(
        "mismatch/token_kl_mean",
        "mean token KL",
        "nats",
        "mean",
        "KL(rollout ‖ recomputed) over the whole vocabulary, mean over sampled positions.",
        log=True,
    ),
    _metric(
        "mismatch/token_kl_max",
        "largest token KL",
        "nats",
        "max",
        "The largest token KL of the step; over sampled positions only, so a lower bound of the true maximum.",
        log=True,
    ),
    _metric(
        "mismatch/token_tv_mean",
        "mean token TV",
        "",
        "mean",
        "Total variation between both policies over the whole vocabulary, in [0, 1], mean over sampled positions.",
        log=True,
    ),
    _metric("mismatch/token_tv_max", "largest token TV", "", "max", "The largest token TV of the step.", log=True),
    _metric(
        "mismatch/log_ratio_max_abs",
        "largest |log ratio|",
        "nats",
        "max",
        "Largest absolute difference between the recomputed and the rollout log-prob of a sampled token.",
        log=True,
    ),
    _metric(
        "mismatch/log_ratio_sd",
        "sd of log ratio",
        "nats",
        "whole",
        "Standard deviation over tokens of recomputed − rollout log-prob.",
        log=True,
    ),
    _metric(
        "mismatch/bitwise_equal_fraction",
        "equal to the bit",
        "fraction",
        "mean",
        "Share of sampled tokens whose rollout and recomputed log-prob are the same float32 number.",
    ),
    _metric(
        "mismatch/recorded_logp_error",
        "error of the record",
        "nats",
        "max",
        "Largest difference between a recorded rollout log-prob and the one its recorded hidden state and head give; "
        "above rounding, the record is not what was sampled from.",
        log=True,
    ),
    _metric(
        "correction/sequence_keep_fraction",
        "sequences kept",
        "fraction",
        "mean",
        "Share of sampled sequences that the sequence masks keep; a weight of 0 does not count as a mask.",
    ),
    _metric(
        "correction/token_keep_fraction",
        "tokens kept",
        "fraction",
        "mean",
        "Share of sampled tokens that the sequence and token masks keep; a weight of 0 does not count as a mask.",
    ),
    _metric(
        "correction/weight_zero_fraction",
        "weights at 0",
        "fraction",
        "mean",
        "Share of sampled tokens to which the weight itself gives 0 (icepop, kpop and masked weights do).",
    ),
    _metric(
        "correction/non_finite_fraction",
        "not finite",
        "fraction",
        "mean",
        "Share of sampled sequences that were rejected for a log-prob that is NaN or no log-probability.",
    ),
    _metric(
        "correction/ratio_raw_mean",
        "mean raw ratio",
        "",
        "mean",
        "Mean of p/q (recomputed over rollout probability) before any cap or mask; 1 in expectation.",
    ),
    _metric(
        "correction/weight_mean",
        "mean weight",
        "",
        "mean",
        "Mean importance weight of the sampled tokens after its cap, whether or not a mask then keeps the token.",
    ),
    _metric("correction/weight_max", "largest weight", "", "max", "The largest weight of this step.", log=True),
    _metric(
        "correction/weight_min",
        "smallest weight",
        "",
        "min",
        "The smallest weight above 0 of this step.",
        log=True,
    ),
    _metric(
        "correction/weight_capped_fraction",
        "weights capped",
        "fraction",
        "mean",
        "Share of sampled tokens whose raw ratio stood above the cap of the weight.",
    ),
    _metric(
        "correction/ess_fraction",
        "effective sample size",
        "fraction",
        "whole",
        "(Σw)²/(n Σw²) of the weights before masks: the share of the tokens that still counts by their weights.",
    ),
    _metric("optim/loss", "loss", "", "mean", "The surrogate loss that was minimised."),
    _metric("optim/grad_norm", "gradient norm", "", "whole", "Global gradient norm before clipping.", log=True),
    _metric("optim/learning_rate", "learning rate", "", "whole", "Learning rate of this update."),
    _metric(
        "optim/clip_fraction",
        "ratios clipped",
        "fraction",
        "mean",
        "Share of tokens for which the clipped side of the policy-ratio surrogate was active.",
    ),
    _metric(
        "optim/skipped",
        "update skipped",
        "0/1",
        "whole",
        "1 when nothing was left to train on (all rejected, or no advantage) and the optimizer was left untouched.",
    ),
    _metric("policy/entropy", "policy entropy", "nats", "mean", "Mean entropy of the training policy a token."),
    _metric("rollout/entropy", "rollout entropy", "nats", "mean", "Mean entropy of the sampling policy a token."),
    _metric(
        "rollout/staleness_mean",
        "staleness",
        "updates",
        "mean",
        "How many updates old the weights were that sampled a token, mean over tokens.",
    ),
    _metric(
        "rollout/staleness_max",
        "largest staleness",
        "updates",
        "max",
        "How many updates old the weights behind the oldest token of this step were, dropped samples included.",
    ),
    _metric(
        "rollout/dropped_groups",
        "prompts dropped",
        "prompts",
        "whole",
        "Prompts left out of this step because one of their samples was older than rollout.max_staleness.",
    ),
    _metric("rollout/response_length_mean", "response length", "tokens", "mean", "Mean tokens in a response."),
    _metric(
        "rollout/truncated_fraction",
        "responses truncated",
        "fraction",
        "mean",
        "Share of responses that ran into the length limit.",
    ),
    _metric("time/rollout_s", "sampling time", "s", "max", "Time spent sampling; the slowest process counts."),
    _metric(
        "time/wait_s",
        "waiting for samples",
        "s",
        "max",
        "Time for which the step waited for its samples: all of the sampling when it is done in turn.",
    ),
    _metric("time/rescore_s", "rescoring time", "s", "max", "Time spent recomputing log-probs and divergences."),
    _metric("time/update_s", "update time", "s", "max", "Time spent in the optimizer step, gradients included."),
    _metric("time/tokens_per_s", "throughput", "tokens/s", "mean", "Sampled tokens over the time of the whole step."),
    _metric("memory/peak_rss_gib", "peak memory", "GiB", "max", "Largest resident memory of a process so far."),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Every metric by name, in the order of the glossary."""
