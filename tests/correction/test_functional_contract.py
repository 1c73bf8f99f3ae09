"""What every mask, weight, correction and loss owes: one suite over all of them.

All forms are evaluated by one function, so that each property compiles once and names the form that breaks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trm_jax import correction, losses
from trm_jax.types import ScoredBatch

B, T = 8, 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that any form reads; ``[B, T]`` but for the advantages ``[B]``."""

    policy: Any
    proximal: Any
    rollout: Any
    kl: Any
    tv: Any
    advantages: Any
    mask: Any
    segments: Any = None


def make(seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    proximal = -rng.gamma(0.7, 1.0, (B, T))
    mask = rng.random((B, T)) < 0.8
    mask[:, 0] = True

    def f32(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32)

    return Inputs(
        policy=f32(np.minimum(proximal + 0.2 * rng.normal(size=(B, T)), 0.0)),
        proximal=f32(proximal),
        rollout=f32(np.minimum(proximal + 0.2 * rng.normal(size=(B, T)), 0.0)),
        kl=f32(rng.gamma(0.5, 0.05, (B, T))),
        tv=f32(rng.beta(1.0, 9.0, (B, T))),
        advantages=f32(rng.normal(size=B)),
        mask=mask,
    )


def scored(x: Inputs) -> ScoredBatch:
    return ScoredBatch(
        proximal_logps=x.proximal,
        rollout_logps=x.rollout,
        response_mask=x.mask,
        token_kl=x.kl,
        token_tv=x.tv,
        segment_ids=x.segments,
    )


# Every weight once and every mask at least once; the rejections of each mask are in the metrics under its name.
CORRECTIONS = {
    "none": correction.preset("none + trm_max + trm_avg"),
    "exact": correction.preset("exact + trm_tv", max_token_tv=0.25),
    "tis": correction.preset("tis + trm_sample", tis_cap=1.2, max_k2=0.1, mean_k3=0.05),
    "icepop": correction.preset("icepop + ln_trm", icepop_low=0.8, icepop_high=1.3, ln_trm_threshold=0.2),
    "kpop": correction.preset("kpop + ser", kpop_threshold=0.02, ser_threshold=0.2),
    "seq_tis": correction.preset("seq_tis + geometric", geometric_low=0.9, geometric_high=1.1),
    "seq_mis": correction.preset("seq_mis + token_mask", max_abs_log_ratio=0.3),
    "geo_mis": correction.preset("geo_mis", geo_mis_low=0.9, geo_mis_high=1.1, geo_mis_token_weight="ratio"),
    "cis": correction.preset("cis + trm_combined + ser + token_mask", ser_threshold=0.2, max_abs_log_ratio=0.3),
    "cis_two_sided": correction.preset("cis_two_sided"),
}


def decisions(x: Inputs) -> dict[str, Any]:
    return {name: correction.correct(scored(x), config) for name, config in CORRECTIONS.items()}


def loss_totals(x: Inputs, policy: Any) -> dict[str, Any]:
    """Every loss under its own aggregation, and the clipped one under all: what aggregates is shared."""
    decided = correction.correct(scored(x), CORRECTIONS["cis"])

    def run(form: Callable[..., Any], **options: Any) -> Any:
        return form(
            policy,
            x.proximal,
            x.advantages,
            x.mask,
            sequence_keep=decided.sequence_keep,
            importance_weights=decided.importance_weights,
            token_keep=decided.token_keep,
            segment_ids=x.segments,
            **options,
        )

    out = {form.__name__: run(form) for form in (losses.gspo, losses.cispo, losses.dppo, losses.masked_surrogate)}
    for aggregation in ("token_mean", "sequence_mean", "constant_length"):
        for denominator in ("original", "kept"):
            options = {"aggregation": aggregation, "denominator": denominator, "constant_length": 16}
            out[f"clipped/{aggregation}/{denominator}"] = run(losses.clipped_surrogate, dual_clip=3.0, **options)
    return out


@jax.jit
def everything(x: Inputs) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Decisions, loss totals, and the gradient of every loss in the policy's log-probs."""
    policy = jnp.asarray(x.policy)
    names = list(jax.eval_shape(lambda p: loss_totals(x, p), policy))

    def stacked(p: Any) -> Any:
        totals = loss_totals(x, p)
        return jnp.stack([totals[name].total for name in names])

    return decisions(x), loss_totals(x, policy), dict(zip(names, jax.jacrev(stacked)(policy), strict=True))


def assert_same(got: Any, want: Any, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    got_leaves, want_leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    assert len(got_leaves) == len(want_leaves)
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


def per_token(x: Inputs, change: Callable[[np.ndarray, str], np.ndarray]) -> Inputs:
    fields = ("policy", "proximal", "rollout", "kl", "tv", "mask")
    return dataclasses.replace(x, **{name: change(getattr(x, name), name) for name in fields})


@pytest.fixture(scope="module")
def baseline() -> Any:
    return everything(make())


def test_the_case_decides_both_ways(baseline: Any) -> None:
    for name, out in baseline[0].items():
        for mask in CORRECTIONS[name].masks:
            if mask != "token_outlier":
                total, count = out.metrics[f"rejected/{mask}"]
                assert 0 < total < count, (name, mask)
        assert name == "none" or np.unique(out.importance_weights).size > 1
    assert all(np.any(np.asarray(g) != 0) for g in baseline[2].values())


def test_every_loss_is_the_same_op_by_op(baseline: Any) -> None:
    x = make()
    with jax.disable_jit():  # op by op
        assert_same(loss_totals(x, x.policy), baseline[1])


@pytest.mark.slow
def test_every_correction_is_the_same_op_by_op(baseline: Any) -> None:
    with jax.disable_jit():
        assert_same(decisions(make()), baseline[0])


def test_second_call_does_not_recompile() -> None:
    everything(make(3))
    before = everything._cache_size()
    everything(make(4))
    assert everything._cache_size() == before


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, -1e9, 1e9])
def test_masked_slots_reach_neither_value_nor_gradient(baseline: Any, garbage: float) -> None:
    clean = make()

    def fill(values: np.ndarray, name: str) -> np.ndarray:
        return values if name == "mask" else np.where(clean.mask, values, np.float32(garbage))

    got = everything(per_token(clean, fill))
    assert_same(got, baseline, rtol=0, atol=0)
    for name, grad in got[2].items():
        np.testing.assert_array_equal(np.asarray(grad)[~clean.mask], 0.0, err_msg=name)


def test_padding_changes_nothing(baseline: Any) -> None:
    def pad(values: np.ndarray, name: str) -> np.ndarray:
        fill = False if name == "mask" else np.nan
        return np.pad(values, ((0, 0), (0, 3)), constant_values=fill)

    decided, totals, grads = everything(per_token(make(), pad))
    assert_same(totals, baseline[1])
    for name, out in decided.items():
        want = baseline[0][name]
        np.testing.assert_array_equal(out.sequence_keep, want.sequence_keep, err_msg=name)
        np.testing.assert_array_equal(out.token_keep[:, :T], want.token_keep, err_msg=name)
        np.testing.assert_allclose(out.importance_weights[:, :T], want.importance_weights, rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(out.importance_weights[:, T:], 0.0, err_msg=name)
        assert_same(out.metrics, want.metrics)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad[:, :T], baseline[2][name], rtol=1e-5, atol=1e-7, err_msg=name)
        np.testing.assert_array_equal(grad[:, T:], 0.0, err_msg=name)


def test_rows_may_be_permuted(baseline: Any) -> None:
    order = np.random.default_rng(0).permutation(B)
    x = jax.tree.map(lambda v: v[order], make())
    decided, totals, grads = everything(x)
    assert_same(totals, baseline[1])
    assert_same(grads, {name: np.asarray(g)[order] for name, g in baseline[2].items()})
    for name, out in decided.items():
        want = baseline[0][name]
        np.testing.assert_array_equal(out.sequence_keep, want.sequence_keep[order], err_msg=name)
        np.testing.assert_allclose(out.importance_weights, want.importance_weights[order], rtol=1e-6, err_msg=name)
        assert_same(out.metrics, want.metrics)


def test_microbatches_add_up(baseline: Any) -> None:
    whole = make()
    parts = [everything(jax.tree.map(lambda v, i=i: v[i : i + 2], whole)) for i in range(0, B, 2)]
    for name, want in baseline[1].items():
        pieces = [part[1][name] for part in parts]
        np.testing.assert_allclose(sum(p.total for p in pieces), want.total, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(sum(p.denominator for p in pieces), want.denominator, rtol=1e-6, err_msg=name)
        add_up(name, [p.aux for p in pieces], want.aux)
        np.testing.assert_allclose(
            np.concatenate([part[2][name] for part in parts]), baseline[2][name], rtol=1e-5, atol=1e-7, err_msg=name
        )
    for name, want in baseline[0].items():
        add_up(name, [part[0][name].metrics for part in parts], want.metrics)


def add_up(name: str, parts: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    for key, (total, count) in whole.items():
        counted = [part[key] for part in parts if float(part[key][1]) > 0]
        combine = {"max": max, "min": min}.get(key.split("/")[0], sum)
        got = combine(float(part) for part, _ in counted)
        np.testing.assert_allclose(got, total, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {key}")
        if combine is sum:
            np.testing.assert_allclose(sum(float(n) for _, n in counted), count, err_msg=f"{name}: {key}")


@pytest.mark.slow
def test_packed_equals_unpacked(baseline: Any) -> None:
    """Two sequences in a row of twice the length; advantages per token, decisions per segment."""
    flat = make()

    def pack(values: np.ndarray, _: str) -> np.ndarray:
        return values.reshape(B // 2, 2 * T)

    packed = dataclasses.replace(
        per_token(flat, pack),
        advantages=pack(np.repeat(flat.advantages[:, None], T, axis=1), ""),
        segments=np.tile(np.repeat([7, 3], T), (B // 2, 1)),
    )
    decided, totals, grads = everything(packed)
    assert_same(totals, baseline[1])
    assert_same(grads, {name: np.asarray(g).reshape(B // 2, 2 * T) for name, g in baseline[2].items()})
    for name, out in decided.items():
        want = baseline[0][name]
        keep = np.asarray(out.sequence_keep).reshape(B, T)
        np.testing.assert_array_equal(keep, np.repeat(want.sequence_keep[:, None], T, 1), err_msg=name)
        weights = np.asarray(out.importance_weights).reshape(B, T)
        np.testing.assert_allclose(weights, want.importance_weights, rtol=1e-5, err_msg=name)
        assert_same(out.metrics, want.metrics)


@pytest.mark.slow
def test_vmap_equals_a_loop() -> None:
    batches = [make(seed) for seed in range(3)]
    mapped = jax.jit(jax.vmap(lambda x: (decisions(x), loss_totals(x, jnp.asarray(x.policy)))))(
        jax.tree.map(lambda *v: np.stack(v), *batches)
    )
    for i, x in enumerate(batches):
        assert_same(jax.tree.map(lambda v, i=i: v[i], mapped), everything(x)[:2])


@pytest.mark.slow
def test_sharded_equals_unsharded(baseline: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    assert_same(everything(jax.device_put(make(), rows)), baseline)


def test_decisions_are_constants() -> None:
    x = make()

    def total(p: Any, q: Any, kl: Any, tv: Any) -> Any:
        out = decisions(dataclasses.replace(x, proximal=p, rollout=q, kl=kl, tv=tv))
        return sum(jnp.sum(d.importance_weights) + d.metrics["ratio/raw_mean"][0] for d in out.values())

    grads = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*map(jnp.asarray, (x.proximal, x.rollout, x.kl, x.tv)))
    for grad in grads:
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_policy_nothing_is_corrected(dtype: Any) -> None:
    x = make()
    logps = jnp.asarray(x.proximal, dtype)
    zeros = np.zeros((B, T), np.float32)
    same = dataclasses.replace(x, policy=logps, proximal=logps, rollout=logps, kl=zeros, tv=zeros)
    for name, out in jax.jit(decisions)(same).items():
        assert np.all(out.sequence_keep), name
        np.testing.assert_array_equal(out.token_keep, x.mask, err_msg=name)
        np.testing.assert_array_equal(out.importance_weights, x.mask.astype(np.float32), err_msg=name)
        for metric in ("kl/k1_mean", "kl/k3_mean", "max/k2", "logps/ppl_gap", "weight/capped_fraction"):
            assert float(out.metrics[metric][0]) == 0, (name, metric)
        assert float(out.metrics["ratio/raw_mean"][0]) == x.mask.sum(), name


def test_on_policy_at_any_length() -> None:
    logps = -np.random.default_rng(5).gamma(0.5, 1.0, (3, 40)).astype(np.float32)
    mask, zeros = np.arange(40) < np.array([[1], [3], [40]]), np.zeros_like(logps)
    x = Inputs(policy=logps, proximal=logps, rollout=logps, kl=zeros, tv=zeros, advantages=zeros[:, 0], mask=mask)
    for name in ("cis", "seq_tis", "geo_mis"):
        out = correction.correct(scored(x), CORRECTIONS[name])
        assert np.all(out.sequence_keep), name
        np.testing.assert_array_equal(out.importance_weights, mask.astype(np.float32), err_msg=name)


def test_nan_at_a_response_token_never_passes() -> None:
    x = make()
    proximal = x.proximal.copy()
    proximal[2, 0] = np.nan
    for name, out in everything(dataclasses.replace(x, proximal=proximal))[0].items():
        assert not out.sequence_keep[2], name
        assert out.importance_weights[2, 0] == 0, name
