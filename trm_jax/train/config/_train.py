"""One run: all sections together, and the rules between them."""

from __future__ import annotations

import dataclasses

from trm_jax.correction import CorrectionConfig, preset
from trm_jax.models import TransformerConfig
from trm_jax.train.config._learning import MOST_STEPS, LossConfig, OptimizerConfig, WarmstartConfig
from trm_jax.train.config._policy import CheckpointConfig, MeshConfig, ModelConfig
from trm_jax.train.config._problems import EvalConfig, TaskConfig
from trm_jax.train.config._rollout import RolloutConfig
from trm_jax.train.config._rules import at_least, at_most, require

__all__ = ["DEFAULT_CORRECTION", "TrainConfig", "check_mixture"]

DEFAULT_CORRECTION = "trm_combined"
"""A trust region on the largest and the mean full-vocabulary KL of every sequence."""


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
        at_least(self, 1, "steps")
        at_most(self, MOST_STEPS, "steps")
        require(0 <= self.seed < 2**32, f"seed={self.seed}: must lie in [0, 2^32).")
        self._check_rows()
        self._check_overlap()
        self._check_correction()
        self._check_mismatch()
        self._check_shapes()

    def _check_rows(self) -> None:
        """Rows of a step divide into minibatches, microbatches and devices, and a prompt's samples make a group."""
        rollout, loss, mesh = self.rollout, self.loss, self.mesh
        rows = rollout.rows
        require(
            rows % loss.minibatches == 0,
            f"loss.minibatches={loss.minibatches} must divide prompts_per_step x samples_per_prompt = {rows}.",
        )
        per_update = rows // loss.minibatches
        micro = loss.microbatch_rows or per_update
        require(
            per_update % micro == 0,
            f"loss.microbatch_rows={micro} must divide the {per_update} rows of a minibatch.",
        )
        require(
            micro % mesh.data == 0,
            f"mesh.data={mesh.data} must divide the {micro} rows of a microbatch.",
        )
        require(
            rollout.samples_per_prompt > 1,
            "rollout.samples_per_prompt=1: the advantage is taken within a prompt's samples; at least 2 are needed.",
        )

    @property
    def ahead(self) -> int:
        """Batches sampled ahead of the one that is trained on, at most; 0 when sampling and training take turns."""
        rollout = self.rollout
        allowed = rollout.max_staleness // self.loss.minibatches
        least = 1 if rollout.schedule == "newest" and rollout.max_staleness else 0
        return rollout.queue or max(allowed, least)

    def _check_overlap(self) -> None:
        """What is sampled ahead can be trained on when its turn comes, and where it is sampled can do it."""
        rollout, updates = self.rollout, self.loss.minibatches
        if rollout.max_staleness and rollout.schedule == "fixed":
            oldest = max(self.ahead, 1) * updates
            require(
                oldest <= rollout.max_staleness,
                f"rollout.max_staleness={rollout.max_staleness}: a batch that is sampled {max(self.ahead, 1)} ahead is "
                f"{oldest} updates old when it is trained on (loss.minibatches={updates}), and would always be left "
                "out; raise max_staleness, or lower rollout.queue or loss.minibatches.",
            )
        require(
            not rollout.max_staleness or bool(rollout.address) or self.mesh.data * self.mesh.tensor == 1,
            "rollout.max_staleness: two threads that use several devices at once can wait for each other for ever; "
            "sample at an address (trm-jax serve), or on one device.",
        )

    def _check_mismatch(self) -> None:
        """The engine's numerics fit the policy, and what the correction needs is recorded."""
        rollout, model = self.rollout, self.model
        needs_hidden = {"trm_max", "trm_avg", "trm_tv"} & set(self.correction.masks)
        require(
            rollout.record_hidden or not needs_hidden,
            f"correction.masks {sorted(needs_hidden)} need the full-vocabulary divergence: set "
            "rollout.record_hidden=true, or use trm_sample, which needs only sampled log-probs.",
        )
        if not model.path:  # else as soon as its config.json is read
            check_mixture(self, model.scratch(vocab_size=1))

    def _check_shapes(self) -> None:
        """The policy fits its devices, its problems and the engine's format."""
        rollout, model, mesh = self.rollout, self.model, self.mesh
        require(
            not model.batch_invariant or (mesh.data == 1 and mesh.tensor == 1),
            "model.batch_invariant holds on one device (sums over a mesh depend on its layout): set mesh to 1 x 1.",
        )
        require(
            bool(model.path) == self.task.in_words,
            f"model.path={model.path!r} with task.kind={self.task.kind!r}: a pretrained policy goes with problems in "
            "words, such as 'gsm8k', one from scratch with 'reasoning_gym' (the task's own characters).",
        )
        if not model.path:
            widths = f"model.d_model={model.d_model} and model.d_ff={model.d_ff}"
            require(
                model.d_model % mesh.tensor == 0 and model.d_ff % mesh.tensor == 0,
                f"mesh.tensor={mesh.tensor} must divide {widths}.",
            )
            group = rollout.numerics.group_size
            require(
                rollout.numerics.weight_format != "int4" or (model.d_model % group == 0 and model.d_ff % group == 0),
                f"rollout.numerics.group_size={group} must divide {widths} (int4 scales are shared by a group).",
            )

    def _check_correction(self) -> None:
        """What a correction may ask of this trainer and of the loss that it feeds."""
        correction = self.correction
        require(
            correction.numerator == "proximal",
            f"correction.numerator={correction.numerator!r}: training compares the log-probs recomputed before the "
            "update ('proximal') with the rollout's.",
        )
        require(
            correction.non_finite == "drop",
            f"correction.non_finite={correction.non_finite!r}: a compiled step cannot raise; 'drop' rejects the "
            "sequence and counts it.",
        )
        unused = ["weight=" + correction.weight] * (correction.weight != "none")
        unused += ["masks=token_outlier"] * ("token_outlier" in correction.masks)
        require(
            self.loss.kind != "masked" or not unused,
            f"loss.kind='masked' weighs by policy/rollout and takes sequence masks alone; "
            f"correction.{', '.join(unused)} would be ignored: set loss.kind='clipped', or leave it out.",
        )


def check_mixture(config: TrainConfig, shape: TransformerConfig) -> None:
    """What is asked of a mixture of experts is asked of one.

    Raises:
      ValueError: ``shape`` is dense and an option would do nothing.
    """
    asked = {
        "rollout.numerics.routing_jitter": config.rollout.numerics.routing_jitter != 0,
        "rollout.numerics.experts": config.rollout.numerics.experts is not None,
        "model.experts": config.model.experts is not None,
        "model.replay_routes": config.model.replay_routes,
    }
    idle = [name for name, given in asked.items() if given]
    where = f"model.path={config.model.path!r} is dense" if config.model.path else "set model.n_experts or architecture"
    require(shape.n_experts > 0 or not idle, f"{', '.join(idle)} needs a mixture of experts; {where}.")
