"""Group baselines: by hand, against a loop, at groups without information."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import losses

REWARDS = np.array([1.0, 1.0, 0.0, 0.0])
ONE_GROUP = np.zeros(4, np.int32)
KEEP = np.array([True, False, True, True])


def test_by_hand_over_all_rows() -> None:
    # mean .5, std (ddof 1) √(4·.25/3) = .57735: ±.86603; leave-one-out: 1 - 1/3 = .66667
    for normalize, expected in (("std", 0.8660254), ("none", 0.5), ("loo", 2 / 3)):
        out = losses.group_advantages(REWARDS, ONE_GROUP, normalize=normalize)
        np.testing.assert_allclose(out, expected * np.array([1, 1, -1, -1]), rtol=1e-6)


def test_by_hand_with_a_rejected_row() -> None:
    # scope "all": the baseline is that of all four, the rejected row contributes nothing.
    out = losses.group_advantages(REWARDS, ONE_GROUP, scope="all", sequence_keep=KEEP)
    np.testing.assert_allclose(out, [0.8660254, 0.0, -0.8660254, -0.8660254], rtol=1e-6)
    # scope "kept": [1, -, 0, 0] has mean 1/3; std (ddof 1) √((4/9 + 1/9 + 1/9)/2) = .57735
    out = losses.group_advantages(REWARDS, ONE_GROUP, normalize="none", scope="kept", sequence_keep=KEEP)
    np.testing.assert_allclose(out, [2 / 3, 0.0, -1 / 3, -1 / 3], rtol=1e-6)
    out = losses.group_advantages(REWARDS, ONE_GROUP, normalize="std", scope="kept", sequence_keep=KEEP)
    np.testing.assert_allclose(out, [1.1547005, 0.0, -0.5773503, -0.5773503], rtol=1e-6)
    # leave-one-out over the kept: 1 - 0, 0 - 1/2, 0 - 1/2
    out = losses.group_advantages(REWARDS, ONE_GROUP, normalize="loo", scope="kept", sequence_keep=KEEP)
    np.testing.assert_allclose(out, [1.0, 0.0, -0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("normalize", ["std", "none", "loo"])
@pytest.mark.parametrize("scope", ["all", "kept"])
def test_against_a_loop(normalize: str, scope: str) -> None:
    rng = np.random.default_rng(0)
    rewards, ids, keep = rng.normal(size=40), rng.integers(-3, 4, 40) * 1000, rng.random(40) < 0.7
    expected = np.zeros(40)
    for i in np.flatnonzero(keep):
        group = rewards[(ids == ids[i]) & (keep if scope == "kept" else True)]
        if len(group) == 1:
            continue
        others = (group.sum() - rewards[i]) / (len(group) - 1)
        centred = rewards[i] - (others if normalize == "loo" else group.mean())
        expected[i] = centred / (group.std(ddof=1) if normalize == "std" else 1.0)
    out = jax.jit(losses.group_advantages, static_argnames=("normalize", "scope"))(
        rewards, ids, normalize=normalize, scope=scope, sequence_keep=keep
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalize", ["std", "none", "loo"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 7.7])
def test_groups_without_information_give_zero(normalize: str, reward: float) -> None:
    # Seven equal rewards of 0.1 have a float32 mean that is not 0.1: the difference must not be blown up to ±1.
    rewards = np.array([reward] * 7 + [reward + 5.0])
    ids = np.array([2] * 7 + [9])
    np.testing.assert_array_equal(losses.group_advantages(rewards, ids, normalize=normalize), 0.0)


def test_all_but_one_of_a_group_rejected() -> None:
    keep = np.array([True, False, False, False])
    np.testing.assert_array_equal(losses.group_advantages(REWARDS, ONE_GROUP, scope="kept", sequence_keep=keep), 0.0)


def test_rows_may_stand_in_any_order() -> None:
    rng = np.random.default_rng(1)
    rewards, ids = rng.normal(size=12), np.repeat([5, 1, 3], 4)
    order = rng.permutation(12)
    direct = np.asarray(losses.group_advantages(rewards, ids))
    np.testing.assert_allclose(losses.group_advantages(rewards[order], ids[order]), direct[order], rtol=1e-5)


def test_nan_reward_poisons_only_its_group_and_not_when_rejected() -> None:
    rewards, ids = np.array([np.nan, 1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 0, 1, 1])
    np.testing.assert_array_equal(np.isnan(losses.group_advantages(rewards, ids)), [True, True, True, False, False])
    keep = np.array([False, True, True, True, True])
    out = losses.group_advantages(rewards, ids, scope="kept", sequence_keep=keep, normalize="none")
    np.testing.assert_allclose(out, [0.0, 0.5, -0.5, 0.5, -0.5], rtol=1e-6)


def test_constant_for_the_gradient() -> None:
    grad = jax.grad(lambda r: jnp.sum(losses.group_advantages(r, ONE_GROUP) ** 2))(jnp.asarray(REWARDS, jnp.float32))
    np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_the_scale_of_rewards_does_not_matter(scale: float) -> None:
    rewards, groups = np.array([1.0, 0.0, 1.0, 0.5]), np.zeros(4, int)
    want = losses.group_advantages(rewards, groups)
    np.testing.assert_allclose(losses.group_advantages(scale * rewards, groups), want, rtol=1e-6)


@pytest.mark.usefixtures("without_run_time_types")
def test_refused_inputs() -> None:
    with pytest.raises(ValueError, match="scope='kept' needs sequence_keep"):
        losses.group_advantages(REWARDS, ONE_GROUP, scope="kept")
    with pytest.raises(ValueError, match="unknown normalize 'var': choose one of std, none, loo"):
        losses.group_advantages(REWARDS, ONE_GROUP, normalize="var")
    with pytest.raises(ValueError, match=r"must have one shape, given rewards \[4\], group_ids \[3\]"):
        losses.group_advantages(REWARDS, ONE_GROUP[:3])
