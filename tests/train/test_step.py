"""The update: sums over microbatches, what leaves the state alone, and weights of exactly one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from trm_jax.correction import correct, preset
from trm_jax.models import ComputeConfig, Transformer, TransformerConfig
from trm_jax.rescore import policy_logps
from trm_jax.train import TrainState, UpdateBatch, init_state, make_optimizer, make_update
from trm_jax.train.config import LossConfig, OptimizerConfig
from trm_jax.types import CorrectedBatch, RolloutBatch, ScoredBatch

B, P, T, V = 8, 4, 5, 14
LENGTHS = np.array([5, 1, 3, 0, 2, 5, 4, 1])  # 21 tokens, unevenly spread; one row is empty
PRESETS = [
    "none", "exact", "tis", "icepop", "kpop", "seq_tis", "seq_mis", "geo_mis", "cis", "cis_two_sided", "trm_max",
    "trm_avg", "trm_combined", "trm_tv", "trm_sample", "ln_trm", "ser", "geometric", "token_mask", "trm_combined + cis",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = TransformerConfig(vocab_size=V, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=16)
    return Transformer(shape, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def rollout() -> RolloutBatch:
    rng = np.random.default_rng(0)
    prompt_lengths = rng.integers(1, P + 1, B)
    return RolloutBatch(
        prompt_tokens=jnp.asarray(rng.integers(0, V, (B, P)), jnp.int32),
        prompt_mask=jnp.arange(P) < prompt_lengths[:, None],
        response_tokens=jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        response_mask=jnp.arange(T) < LENGTHS[:, None],
        rollout_logps=jnp.zeros((B, T)),
        versions=jnp.zeros((B, T), jnp.int32),
        finished=jnp.ones((B,), bool),
        group_ids=jnp.arange(B) // 4,
    )


@pytest.fixture(scope="module")
def logps(model: Transformer, rollout: RolloutBatch) -> Any:
    graphdef, params = nnx.split(model)
    score = jax.jit(lambda p, r: policy_logps(nnx.merge(graphdef, p), r, compute=ComputeConfig())[0])
    return score(params, rollout)


ADVANTAGES = jnp.array([0.5, -1.5, 1.0, 2.0, -0.25, 0.75, -1.0, 0.5])


@pytest.fixture(scope="module")
def batch(rollout: RolloutBatch, logps: Any) -> UpdateBatch:
    """Off-policy: the proximal log-probs differ from the current ones, and so do the weights from one."""
    rng = np.random.default_rng(1)
    shift = jnp.asarray(rng.normal(0, 0.3, (B, T)), jnp.float32)
    scored = ScoredBatch(
        proximal_logps=jnp.minimum(logps + shift, -1e-3),
        rollout_logps=rollout.rollout_logps,
        response_mask=rollout.response_mask,
    )
    corrected = CorrectedBatch(
        sequence_keep=jnp.array([True, True, False, True, True, True, True, True]),
        token_keep=rollout.response_mask.at[0, 2].set(False),
        importance_weights=jnp.where(rollout.response_mask, jnp.asarray(rng.uniform(0.2, 2, (B, T)), jnp.float32), 0),
        metrics={},
    )
    return UpdateBatch(rollout=rollout, scored=scored, corrected=corrected, advantages=ADVANTAGES)


def jitted_update(model: Transformer, optimizer: Any, loss: LossConfig | None = None, **options: Any) -> Any:
    graphdef = nnx.graphdef(model)
    return jax.jit(make_update(graphdef, optimizer, loss or LossConfig(), compute=ComputeConfig(), **options))


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def values(metrics: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (float(a), float(b)) for name, (a, b) in metrics.items()}


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(),
        LossConfig(aggregation="sequence_mean", denominator="kept"),
        LossConfig(kind="masked"),
    ],
)
@pytest.mark.slow
def test_accumulated_microbatches_are_the_whole_batch(model, batch, loss):
    # Plain gradient descent at rate 1: the parameters move by the gradient itself.
    optimizer = optax.sgd(1.0)
    state = init_state(nnx.state(model), optimizer)
    step = jitted_update(model, optimizer, loss)
    whole, metrics = step(state, batch)
    moved = [np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(
        jax.tree.leaves(whole.params), jax.tree.leaves(state.params), strict=True)]  # fmt: skip
    assert min(moved) > 1e-4
    # The step taken is the gradient of the reported loss: along it, the loss changes by its squared norm.
    gradient = jax.tree.map(lambda a, b: a - b, state.params, whole.params)
    square = sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in jax.tree.leaves(gradient))

    def loss_at(h: float) -> float:
        params = jax.tree.map(lambda p, g: p + h * g, state.params, gradient)
        total, count = values(step(dataclasses.replace(state, params=params), batch)[1])["optim/loss"]
        return total / count

    # Float32 losses near 1 are off by 1e-7: over 2h = 1e-3 that is 1e-4, of slopes near 5. Curvature cancels.
    assert (loss_at(5e-4) - loss_at(-5e-4)) / 1e-3 == pytest.approx(square, rel=5e-3)
    assert values(metrics)["grad_norm"][0] == pytest.approx(square**0.5, rel=1e-5)
    accumulated, sums = jitted_update(model, optimizer, loss, microbatches=4)(state, batch)
    for a, b in zip(jax.tree.leaves(accumulated), jax.tree.leaves(whole), strict=True):
        # Gradients of size 0.1 to 1; float32 sums of 21 tokens in another order differ in the last bits.
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert values(sums).keys() == values(metrics).keys()
    for name, pair in values(metrics).items():
        np.testing.assert_allclose(values(sums)[name], pair, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_rematerialisation_changes_nothing_but_memory(model, batch):
    optimizer = optax.sgd(1.0)
    state = init_state(nnx.state(model), optimizer)
    plain, _ = jitted_update(model, optimizer)(state, batch)
    again, _ = jitted_update(model, optimizer, remat=True)(state, batch)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # recomputed sums may be fused in another order


def on_policy(rollout: RolloutBatch, logps: Any) -> ScoredBatch:
    zeros = jnp.zeros((B, T))
    return ScoredBatch(
        proximal_logps=logps,
        rollout_logps=logps,
        response_mask=rollout.response_mask,
        token_kl=zeros,
        token_tv=zeros,
    )


@pytest.fixture(scope="module")
def adam(model: Transformer, batch: UpdateBatch) -> tuple[Any, TrainState]:
    """AdamW with weight decay, and a state whose moments are not zero: applying it would be seen."""
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), optax.constant_schedule(1e-2))
    update = jitted_update(model, optimizer)
    state, metrics = update(init_state(nnx.state(model), optimizer), batch)
    assert values(metrics)["skipped"] == (0, 1)
    assert int(state.version) == 1
    return update, dataclasses.replace(state, params=nnx.state(model))


def test_the_reported_loss_is_the_mean_over_tokens(adam, rollout, logps):
    scored = on_policy(rollout, logps)
    plain = dataclasses.replace(correct(scored, preset("none")), metrics={})
    batch = UpdateBatch(rollout=rollout, scored=scored, corrected=plain, advantages=ADVANTAGES)
    update, state = adam
    _, metrics = update(state, batch)
    # Ratio 1 everywhere: the sum is -Σ A_i len_i
    #   = -(0.5·5 - 1.5·1 + 1·3 + 2·0 - 0.25·2 + 0.75·5 - 1·4 + 0.5·1) = -3.75, over 21 tokens.
    total, count = values(metrics)["optim/loss"]
    assert count == 21
    assert total == pytest.approx(-3.75, abs=1e-5)
    assert values(metrics)["skipped"] == (0, 1)


def changed(batch: UpdateBatch, what: str) -> UpdateBatch:
    scored, corrected = batch.scored, batch.corrected
    none = jnp.zeros((B, T), bool)
    match what:
        case "nothing sampled":
            return dataclasses.replace(
                batch,
                rollout=dataclasses.replace(batch.rollout, response_mask=none),
                scored=dataclasses.replace(scored, response_mask=none),
                corrected=dataclasses.replace(corrected, token_keep=none),
            )
        case "every advantage zero":
            return dataclasses.replace(batch, advantages=jnp.zeros((B,)))
        case "every sequence rejected":
            part = dataclasses.replace(corrected, sequence_keep=jnp.zeros((B,), bool))
        case "every token rejected":
            part = dataclasses.replace(corrected, token_keep=none)
        case "every weight zero":
            part = dataclasses.replace(corrected, importance_weights=jnp.zeros((B, T)))
        case "kept rows without advantage":  # keep and advantage never meet
            keep = jnp.arange(B) < 4
            batch = dataclasses.replace(batch, advantages=jnp.where(keep, 0.0, 1.0))
            part = dataclasses.replace(corrected, sequence_keep=keep)
    return dataclasses.replace(batch, corrected=part)


@pytest.mark.parametrize(
    "what",
    [
        "nothing sampled",
        "every advantage zero",
        "every sequence rejected",
        "every token rejected",
        "every weight zero",
        "kept rows without advantage",
    ],
)
def test_with_nothing_to_train_on_the_state_is_untouched_to_the_bit(adam, batch, what):
    update, state = adam
    after, metrics = update(state, changed(batch, what))
    assert bits(after) == bits(state)
    assert values(metrics)["skipped"] == (1, 1)
    assert values(metrics)["nonfinite"] == (0, 1)
    assert values(metrics)["grad_norm"] == (0, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_and_leaves_the_state_alone(adam, batch, value):
    update, state = adam
    after, metrics = update(state, dataclasses.replace(batch, advantages=ADVANTAGES.at[1].set(value)))
    assert bits(after) == bits(state)
    assert values(metrics)["nonfinite"] == (1, 1)
    assert values(metrics)["skipped"] == (1, 1)


def test_what_stands_at_masked_slots_does_not_matter(adam, batch):
    update, state = adam
    mask = batch.scored.response_mask
    dirty = dataclasses.replace(
        batch,
        rollout=dataclasses.replace(
            batch.rollout,
            response_tokens=jnp.where(mask, batch.rollout.response_tokens, V - 1),
            rollout_logps=jnp.where(mask, batch.rollout.rollout_logps, jnp.nan),
        ),
        scored=dataclasses.replace(
            batch.scored,
            proximal_logps=jnp.where(mask, batch.scored.proximal_logps, -jnp.inf),
            rollout_logps=jnp.where(mask, batch.scored.rollout_logps, jnp.nan),
        ),
    )
    assert bits(update(state, dirty)[0]) == bits(update(state, batch)[0])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("trm_combined", "cis", "seq_tis") else pytest.param(name, marks=pytest.mark.slow)
        for name in PRESETS[1:]
    ],
)
def test_on_policy_every_correction_gives_the_uncorrected_update_to_the_bit(adam, rollout, logps, name):
    update, state = adam
    scored = on_policy(rollout, logps)

    def updated(name: str) -> list[bytes]:
        corrected = dataclasses.replace(correct(scored, preset(name)), metrics={})
        assert bool(jnp.all(corrected.importance_weights == scored.response_mask))
        batch = UpdateBatch(rollout=rollout, scored=scored, corrected=corrected, advantages=ADVANTAGES)
        return bits(update(state, batch)[0])

    plain = updated("none")
    assert plain != bits(state)
    assert updated(name) == plain


def test_the_masked_surrogate_divides_by_all_sequences(model, rollout, logps):
    scored = on_policy(rollout, logps)
    keep = jnp.arange(B) % 2 == 0
    corrected = dataclasses.replace(correct(scored, preset("none")), sequence_keep=keep, metrics={})
    batch = UpdateBatch(rollout=rollout, scored=scored, corrected=corrected, advantages=ADVANTAGES)
    optimizer = optax.sgd(1.0)
    update = jitted_update(model, optimizer, LossConfig(kind="masked"))
    _, metrics = update(init_state(nnx.state(model), optimizer), batch)
    # Rows 0, 2, 4, 6 are kept: -(0.5·5 + 1·3 - 0.25·2 - 1·4) = -1; the denominator counts the 7 rows with a response.
    total, count = values(metrics)["optim/loss"]
    assert count == 7
    assert total == pytest.approx(-1.0, abs=1e-5)
