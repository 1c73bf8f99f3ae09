"""Everything a run can be told, as small frozen sections; a TOML table each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from trm_jax.correction import CorrectionConfig, preset
from trm_jax.rollout import RolloutNumerics

__all__ = [
    "ArmConfig",
    "CheckpointConfig",
    "EvalConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
    "WarmstartConfig",
]


DEFAULT_CORRECTION = "trm_combined"
"""A trust region on the largest and the mean full-vocabulary KL of every sequence."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _at_least(section: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value >= least, f"{name}={value}: must be at least {least}.")


def _positive(section: object, name: str) -> None:
    value = getattr(section, name)
    _require(0 < value < math.inf, f"{name}={value}: must be above 0 and finite.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is to be learnt: problems and their reward.

    Attributes:
      kind: "reasoning_gym" (procedurally generated, scored by the library) or "gsm8k" (JSONL with question and answer,
        scored by math-verify).
      name: for reasoning_gym, the task's name, e.g. "chain_sum"; `trm-jax tasks` lists them with what each needs.
      params: for reasoning_gym, the task's own parameters.
      train_size: for reasoning_gym, how many training problems are drawn.
      test_permille: share of prompts held out from training, in thousandths (a hash of the prompt decides).
      path: for gsm8k, the JSONL file to train on; empty takes the dozen problems that ship with the package.
      test_path: for gsm8k, the JSONL file to evaluate on; empty evaluates on the training file's held-out share.
      system_prompt: for gsm8k, the chat template's system message.
      drop_long_prompts: leave out prompts above the limit (counted, aloud) instead of refusing them.
    """

    kind: Literal["reasoning_gym", "gsm8k"] = "reasoning_gym"
    name: str = "chain_sum"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 50_000
    test_permille: int = 100
    path: str = ""
    test_path: str = ""
    system_prompt: str = "Solve the problem step by step. Put your final answer within \\boxed{}."
    drop_long_prompts: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "train_size")
        _require(0 <= self.test_permille < 1000, f"test_permille={self.test_permille}: must lie in [0, 1000).")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy.

    Attributes:
      source: "scratch" (random initial weights, the task's own characters as vocabulary) or "smollm2" (pretrained
        SmolLM2-135M-Instruct; fetch it once with `trm-jax fetch smollm2`).
      path: for smollm2, the GGUF file; empty takes it from the cache.
      d_model: for scratch, width of the residual stream.
      n_layers: for scratch, number of blocks.
      n_heads: for scratch, attention heads.
      d_ff: for scratch, width of the feed-forward layer, of each expert when there are experts.
      n_experts: for scratch, number of experts; 0 is dense.
      experts_per_token: for scratch, experts a token is sent to.
      dtype: type of activations in training, "float32" or "bfloat16" (parameters stay float32).
      batch_invariant: fixed-tile arithmetic on the training side (see rollout.numerics.batch_invariant).
      remat: recompute activations in the backward pass to save memory.
    """

    source: Literal["scratch", "smollm2"] = "scratch"
    path: str = ""
    d_model: int = 96
    n_layers: int = 2
    n_heads: int = 4
    d_ff: int = 256
    n_experts: int = 0
    experts_per_token: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_invariant: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "d_model", "n_layers", "n_heads", "d_ff")
        _require(self.d_model % self.n_heads == 0, f"n_heads={self.n_heads} must divide d_model={self.d_model}.")
        _require(
            (self.d_model // self.n_heads) % 2 == 0,
            f"d_model/n_heads={self.d_model // self.n_heads}: the width of a head must be even (rotary positions).",
        )
        _require(
            self.n_experts == 0 or 1 <= self.experts_per_token <= self.n_experts,
            f"experts_per_token={self.experts_per_token} must lie in 1..n_experts={self.n_experts}.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmstartConfig:
    """Supervised training on demonstrations before RL.

    Attributes:
      steps: optimizer steps; 0 leaves it out.
      batch_size: demonstrations a step.
      learning_rate: peak; linear warm-up, then cosine decay to a tenth.
      warmup_steps: length of the warm-up.
      corruption: probability that each intermediate result of a demonstration is wrong.
    """

    steps: int = 400
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    corruption: float = 0.3

    def __post_init__(self) -> None:
        _at_least(self, 0, "steps", "warmup_steps")
        _at_least(self, 1, "batch_size")
        _positive(self, "learning_rate")
        _require(0 <= self.corruption <= 1, f"corruption={self.corruption}: must lie in [0, 1].")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, and how the sampler differs from the trainer (``lag`` and ``numerics``).

    Attributes:
      prompts_per_step: prompts a step.
      samples_per_prompt: responses a prompt (the group of the advantage).
      temperature: logits are divided by it, on both sides.
      top_p: nucleus mass; below 1 the support is recorded and applied on both sides.
      max_prompt_length: longest prompt in tokens.
      max_response_length: longest response in tokens, the end token included.
      slots: sequences that decode together.
      prefill_rows: prompts in one prefill call.
      decode_chunk: decode steps between two looks at which slots are free.
      lag: updates by which the engine's weights are older than the trainer's.
      record_hidden: return final hidden states, from which the full-vocabulary KL and TV are computed.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_length: int = 16
    max_response_length: int = 16
    slots: int = 256
    prefill_rows: int = 32
    decode_chunk: int = 8
    lag: int = 0
    record_hidden: bool = True
    numerics: RolloutNumerics = RolloutNumerics()

    def __post_init__(self) -> None:
        _at_least(self, 1, "prompts_per_step", "max_prompt_length", "max_response_length", "slots", "prefill_rows")
        _at_least(self, 1, "decode_chunk", "samples_per_prompt")
        _at_least(self, 0, "lag")
        _positive(self, "temperature")
        _require(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1].")

    @property
    def rows(self) -> int:
        """Sequences a step."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss.

    Attributes:
      kind: "clipped" (PPO clip on policy/proximal, times the correction's weights) or "masked" (TRM's surrogate
        mean of M · A · Σ_t policy/rollout over all sequences).
      clip_low: the clip keeps the ratio above 1 - clip_low.
      clip_high: the clip keeps the ratio below 1 + clip_high.
      dual_clip: bound c > 1 on the loss of negative advantages, or 0 for none.
      aggregation: "token_mean", "sequence_mean" or "constant_length".
      denominator: divide by all ("original") or by what was kept ("kept").
      advantage: "std" (GRPO), "none" (Dr. GRPO) or "loo" (RLOO).
      advantage_scope: the group's baseline over "all" samples or over those "kept".
      minibatches: optimizer updates a rollout; above 1 the ratio policy/proximal leaves 1.
      microbatch_rows: rows of one gradient computation; 0 takes all rows of a minibatch at once.
    """

    kind: Literal["clipped", "masked"] = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    denominator: Literal["original", "kept"] = "original"
    advantage: Literal["std", "none", "loo"] = "std"
    advantage_scope: Literal["all", "kept"] = "all"
    minibatches: int = 1
    microbatch_rows: int = 0

    def __post_init__(self) -> None:
        _require(0 < self.clip_low < 1, f"clip_low={self.clip_low}: must lie in (0, 1).")
        _require(self.clip_high > 0, f"clip_high={self.clip_high}: must be above 0.")
        _require(self.dual_clip == 0 or self.dual_clip > 1, f"dual_clip={self.dual_clip}: must be 0 (off) or above 1.")
        _at_least(self, 1, "minibatches")
        _at_least(self, 0, "microbatch_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a clipped gradient.

    Attributes:
      learning_rate: peak learning rate of RL.
      warmup_steps: linear warm-up.
      decay: "constant" or "cosine" (to a tenth at the last step).
      b1: decay of the first moment.
      b2: decay of the second moment.
      weight_decay: decoupled weight decay.
      max_grad_norm: the gradient's global norm is clipped to it.
    """

    learning_rate: float = 2e-4
    warmup_steps: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "learning_rate")
        _at_least(self, 0, "warmup_steps", "weight_decay")
        _require(self.max_grad_norm > 0, f"max_grad_norm={self.max_grad_norm}: must be above 0.")
        for name in ("b1", "b2"):
            _require(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)}: must lie in [0, 1).")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out prompts, with the trainer's own arithmetic.

    Attributes:
      prompts: held-out prompts, one response each; 0 leaves evaluation out.
      every: steps between evaluations; the first and the last step are always evaluated.
      temperature: sampling temperature.
      greedy: take the most likely token instead.
    """

    prompts: int = 512
    every: int = 20
    temperature: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 0, "prompts")
        _at_least(self, 1, "every")
        _positive(self, "temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved.

    Attributes:
      every: steps between checkpoints; the last step is always saved.
      keep: newest checkpoints kept.
    """

    every: int = 20
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices: ``data`` x ``tensor``.

    Attributes:
      data: ways to split rows.
      tensor: ways to split heads, feed-forward and the vocabulary of the head.
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        _at_least(self, 1, "data", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: one policy, one seed, one correction.

    Attributes:
      steps: RL steps.
      seed: fixes initial weights, data order and sampling.
    """

    steps: int = 80
    seed: int = 0
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    rollout: RolloutConfig = RolloutConfig()
    correction: CorrectionConfig = preset(DEFAULT_CORRECTION)
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps")
        _require(0 <= self.seed < 2**32, f"seed={self.seed}: must lie in [0, 2^32).")
        rollout, model, loss, mesh = self.rollout, self.model, self.loss, self.mesh
        rows = rollout.rows
        _require(
            rows % loss.minibatches == 0,
            f"loss.minibatches={loss.minibatches} must divide prompts_per_step x samples_per_prompt = {rows}.",
        )
        per_update = rows // loss.minibatches
        micro = loss.microbatch_rows or per_update
        _require(
            per_update % micro == 0,
            f"loss.microbatch_rows={micro} must divide the {per_update} rows of a minibatch.",
        )
        _require(
            micro % mesh.data == 0,
            f"mesh.data={mesh.data} must divide the {micro} rows of a microbatch.",
        )
        _require(
            rollout.samples_per_prompt > 1,
            "rollout.samples_per_prompt=1: the advantage is taken within a prompt's samples; at least 2 are needed.",
        )
        self._check_correction()
        needs_hidden = {"trm_max", "trm_avg", "trm_tv"} & set(self.correction.masks)
        _require(
            rollout.record_hidden or not needs_hidden,
            f"correction.masks {sorted(needs_hidden)} need the full-vocabulary divergence: set "
            "rollout.record_hidden=true, or use trm_sample, which needs only sampled log-probs.",
        )
        _require(
            rollout.numerics.routing_jitter == 0 or model.n_experts > 0,
            "rollout.numerics.routing_jitter needs a mixture of experts; set model.n_experts.",
        )
        _require(
            not (model.batch_invariant or rollout.numerics.batch_invariant) or rollout.top_p == 1,
            "batch_invariant arithmetic is defined for top_p=1.",
        )
        _require(
            not model.batch_invariant or (mesh.data == 1 and mesh.tensor == 1),
            "model.batch_invariant holds on one device (sums over a mesh depend on its layout): set mesh to 1 x 1.",
        )
        _require(
            (model.source == "smollm2") == (self.task.kind == "gsm8k"),
            f"model.source={model.source!r} with task.kind={self.task.kind!r}: 'smollm2' goes with 'gsm8k' (words), "
            "'scratch' with 'reasoning_gym' (the task's own characters).",
        )
        if model.source == "scratch":
            widths = f"model.d_model={model.d_model} and model.d_ff={model.d_ff}"
            _require(
                model.d_model % mesh.tensor == 0 and model.d_ff % mesh.tensor == 0,
                f"mesh.tensor={mesh.tensor} must divide {widths}.",
            )
            group = rollout.numerics.group_size
            _require(
                rollout.numerics.weight_format != "int4" or (model.d_model % group == 0 and model.d_ff % group == 0),
                f"rollout.numerics.group_size={group} must divide {widths} (int4 scales are shared by a group).",
            )

    def _check_correction(self) -> None:
        """What a correction may ask of this trainer and of the loss that it feeds."""
        correction = self.correction
        _require(
            correction.numerator == "proximal",
            f"correction.numerator={correction.numerator!r}: training compares the log-probs recomputed before the "
            "update ('proximal') with the rollout's.",
        )
        _require(
            correction.non_finite == "drop",
            f"correction.non_finite={correction.non_finite!r}: a compiled step cannot raise; 'drop' rejects the "
            "sequence and counts it.",
        )
        unused = ["weight=" + correction.weight] * (correction.weight != "none")
        unused += ["masks=token_outlier"] * ("token_outlier" in correction.masks)
        _require(
            self.loss.kind != "masked" or not unused,
            f"loss.kind='masked' weighs by policy/rollout and takes sequence masks alone; "
            f"correction.{', '.join(unused)} would be ignored: set loss.kind='clipped', or leave it out.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmConfig:
    """One way of running the same experiment.

    Attributes:
      slug: its directory.
      name: its name in tables and pictures.
      description: a sentence for the report.
      role: "reference", "lag_only", "numerics_only", "uncorrected" or "corrected"; what the report compares it as.
      train: the complete configuration of the arm.
    """

    slug: str
    name: str
    description: str
    role: str
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole configuration file: arms, each for every seed.

    Attributes:
      title: headline of the report.
      directory: where everything is written.
      seeds: seeds of every arm.
      arms: the arms in order.
    """

    title: str
    directory: str
    seeds: tuple[int, ...]
    arms: tuple[ArmConfig, ...]
