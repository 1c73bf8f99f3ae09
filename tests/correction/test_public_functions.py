"""What every public mask and weight owes when it is called directly: one row a function, none may be missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trm_jax import correction, divergences, losses

B, T = 8, 8  # divisible by the simulated mesh
Arrays = dict[str, Any]

# x: log_ratio, kl, tv, p, q, mask; s: segment_ids or None. Thresholds are numbers as users write them.
SEQUENCE_MASKS: dict[str, Callable[[Arrays, Any], Any]] = {
    "max_kl_mask": lambda x, s: correction.max_kl_mask(x["kl"], x["mask"], threshold=np.float32(0.1), segment_ids=s),
    "mean_kl_mask": lambda x, s: correction.mean_kl_mask(x["kl"], x["mask"], threshold=0.03, segment_ids=s),
    "max_tv_mask": lambda x, s: correction.max_tv_mask(x["tv"], x["mask"], threshold=0.2, segment_ids=s),
    "sampled_mask": lambda x, s: correction.sampled_mask(
        x["log_ratio"], x["mask"], max_k2=0.1, mean_k3=0.05, segment_ids=s
    ),
    "length_neutral_mask": lambda x, s: correction.length_neutral_mask(
        x["log_ratio"], x["mask"], threshold=0.2, max_token_kl=1e-4, max_token_tv=5e-3, segment_ids=s
    ),
    "sequence_error_ratio_mask": lambda x, s: correction.sequence_error_ratio_mask(
        x["log_ratio"], x["mask"], threshold=0.2, segment_ids=s
    ),
    "geometric_mask": lambda x, s: correction.geometric_mask(
        x["log_ratio"], x["mask"], low=0.95, high=1.1, segment_ids=s
    ),
}
TOKEN_FORMS: dict[str, Callable[[Arrays, Any], Any]] = {
    "token_outlier_mask": lambda x, s: correction.token_outlier_mask(x["log_ratio"], x["mask"], max_abs_log_ratio=0.2),
    "unit_weights": lambda x, s: correction.unit_weights(x["log_ratio"], x["mask"]),
    "exact_weights": lambda x, s: correction.exact_weights(x["log_ratio"], x["mask"], low=0, high=1000),
    "truncated_weights": lambda x, s: correction.truncated_weights(x["log_ratio"], x["mask"], cap=1),
    "masked_weights": lambda x, s: correction.masked_weights(x["log_ratio"], x["mask"], low=0.8, high=1.2),
    "bernoulli_kl_weights": lambda x, s: correction.bernoulli_kl_weights(x["p"], x["q"], x["mask"], threshold=0.02),
    "calibrated_weights": lambda x, s: correction.calibrated_weights(x["p"], x["q"], x["mask"], cis_lambda=0.1),
    "sequence_truncated_weights": lambda x, s: correction.sequence_truncated_weights(
        x["log_ratio"], x["mask"], cap=1, segment_ids=s
    ),
    "sequence_masked_weights": lambda x, s: correction.sequence_masked_weights(
        x["log_ratio"], x["mask"], cap=np.int64(1), segment_ids=s
    ),
    "geometric_masked_weights": lambda x, s: correction.geometric_masked_weights(
        x["log_ratio"], x["mask"], low=0.95, high=1.1, token_weight="ratio", segment_ids=s
    ),
}
FORMS = SEQUENCE_MASKS | TOKEN_FORMS
ELSEWHERE = {  # in test_functional_contract.py: every weight, mask, preset and loss through correct
    *("correct", "preset", "effective_sample_fraction", "CorrectionConfig"),
    *("clipped_surrogate", "gspo", "cispo", "dppo", "masked_surrogate", "group_advantages"),
}


def make(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    p = -rng.gamma(0.7, 1.0, (B, T))
    q = np.minimum(p + 0.2 * rng.normal(size=(B, T)), -1e-3)
    mask = rng.random((B, T)) < 0.8
    mask[:, 0] = True
    arrays = {"p": p, "q": q, "log_ratio": p - q, "kl": rng.gamma(0.5, 0.05, (B, T)), "tv": rng.beta(1, 9, (B, T))}
    return {name: x.astype(np.float32) for name, x in arrays.items()} | {"mask": mask}


def run(x: Arrays, segments: Any = None) -> dict[str, Any]:
    return {name: form(x, segments) for name, form in FORMS.items()}


compiled = jax.jit(run)


def same(got: dict[str, Any], want: dict[str, Any], exact: bool = False) -> None:
    for name in FORMS:
        compare = np.testing.assert_array_equal if exact else np.testing.assert_allclose
        options = {} if exact else {"rtol": 2e-6, "atol": 1e-7}
        compare(np.asarray(got[name]), np.asarray(want[name]), err_msg=name, **options)


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    return compiled(make())


def test_no_public_function_lacks_a_row() -> None:
    public = {name for room in (correction, losses) for name, f in vars(room).items() if inspect.isfunction(f)}
    public.add("CorrectionConfig")
    assert public == set(FORMS) | ELSEWHERE


def test_every_form_decides_both_ways(baseline: dict[str, Any]) -> None:
    for name, out in baseline.items():
        assert out.shape == ((B,) if name in SEQUENCE_MASKS else (B, T)), name
        assert out.dtype == (bool if name.endswith("_mask") else np.float32), name
        assert np.unique(np.asarray(out)).size > 1, name


def test_jit_equals_eager(baseline: dict[str, Any]) -> None:
    same(run(make()), baseline)


def test_an_eager_call_compiles_once() -> None:
    run(make(1))
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compilations.append(event) if "backend_compile" in event else None
    )
    run(make(2))
    assert compilations == []


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, -1e9, 1e9])
def test_masked_slots_are_not_looked_at(baseline: dict[str, Any], garbage: float) -> None:
    x = make()
    dirty = {k: v if k == "mask" else np.where(x["mask"], v, np.float32(garbage)) for k, v in x.items()}
    same(compiled(dirty), baseline, exact=True)
    for name in TOKEN_FORMS:
        np.testing.assert_array_equal(np.asarray(baseline[name])[~x["mask"]], 0)


def test_padding_permutation_and_parts(baseline: dict[str, Any]) -> None:
    x = make()
    padded = compiled({k: np.pad(v, ((0, 0), (0, 5)), constant_values=False if k == "mask" else np.nan)
                       for k, v in x.items()})  # fmt: skip
    same({k: v if k in SEQUENCE_MASKS else v[:, :T] for k, v in padded.items()}, baseline)
    order = np.random.default_rng(0).permutation(B)
    same(compiled({k: v[order] for k, v in x.items()}), {k: v[order] for k, v in baseline.items()})
    parts = [compiled({k: v[i : i + 4] for k, v in x.items()}) for i in (0, 4)]
    same({name: np.concatenate([part[name] for part in parts]) for name in FORMS}, baseline)


def test_vmap_equals_a_loop() -> None:
    batches = [make(seed) for seed in range(3)]
    mapped = jax.jit(jax.vmap(run))({k: np.stack([x[k] for x in batches]) for k in batches[0]})
    for i, x in enumerate(batches):
        same({k: v[i] for k, v in mapped.items()}, compiled(x))


def test_packed_equals_unpacked(baseline: dict[str, Any]) -> None:
    packed = jax.jit(run)(
        {k: v.reshape(B // 2, 2 * T) for k, v in make().items()}, np.tile(np.repeat([7, 3], T), (B // 2, 1))
    )
    want = {k: np.repeat(v[:, None], T, 1) if k in SEQUENCE_MASKS else v for k, v in baseline.items()}
    same({k: np.asarray(v).reshape(B, T) for k, v in packed.items()}, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(("rows", None), marks=pytest.mark.slow),
        pytest.param((None, "tokens"), marks=pytest.mark.slow),
        ("rows", "tokens"),
    ],
)
def test_sharded_equals_unsharded(
    baseline: dict[str, Any], kind: AxisType, axes: tuple[str | None, str | None]
) -> None:
    mesh = jax.make_mesh((4, 2), ("rows", "tokens"), axis_types=(kind, kind))
    same(compiled(jax.device_put(make(), NamedSharding(mesh, PartitionSpec(*axes)))), baseline)


def test_decisions_are_constants() -> None:
    x = make()

    def total(values: Arrays) -> Any:
        return sum(jnp.sum(jnp.asarray(out, jnp.float32)) for out in run(values | {"mask": x["mask"]}).values())

    grads = jax.jit(jax.grad(total))({k: jnp.asarray(v) for k, v in x.items() if k != "mask"})
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, 0.0, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_arithmetic_is_float32_whatever_comes_in(dtype: Any) -> None:
    x = {k: v if k == "mask" else v.astype(dtype) for k, v in make().items()}
    widened = {k: v if k == "mask" else np.asarray(v, np.float32) for k, v in x.items()}
    same(compiled(x), compiled(widened), exact=True)


def test_nan_never_passes() -> None:
    x = make()
    for name in ("p", "q", "log_ratio", "kl", "tv"):
        x[name][2, 0] = np.nan
    out = compiled(x)
    for name in SEQUENCE_MASKS:
        assert not out[name][2], name
    for name in TOKEN_FORMS:
        assert out[name][2, 0] == 0, name


@pytest.mark.parametrize(
    "shape", [(0, 4), pytest.param((3, 0), marks=pytest.mark.slow), pytest.param((1, 1), marks=pytest.mark.slow)]
)
def test_empty_batches(shape: tuple[int, int]) -> None:
    x = {k: np.zeros(shape, v.dtype) for k, v in make().items()}
    for name, out in run(x).items():
        assert out.shape == (shape[:1] if name in SEQUENCE_MASKS else shape), name
        assert name not in SEQUENCE_MASKS or np.all(out), name
    for form in (losses.clipped_surrogate, losses.gspo, losses.cispo, losses.dppo):
        loss = form(x["p"], x["q"], np.zeros(shape[0], np.int32), x["mask"])
        assert (float(loss.value), float(loss.total)) == (0.0, 0.0), form.__name__


def test_shapes_alone_suffice() -> None:
    shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in make().items()}
    for name, out in jax.eval_shape(run, shapes).items():
        assert out.shape == ((B,) if name in SEQUENCE_MASKS else (B, T)), name


def test_inside_scan_checkpoint_and_shard_map() -> None:
    x = {k: jnp.asarray(v) for k, v in make().items()}
    want = compiled(x)
    scanned = jax.lax.scan(lambda carry, part: (carry, run(part)), 0, {k: v[None] for k, v in x.items()})[1]
    same({k: v[0] for k, v in scanned.items()}, want)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("rows")
    same(jax.jit(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows))(x), want)

    def loss(policy: Any) -> Any:
        weights = correction.calibrated_weights(policy, x["q"], x["mask"])
        return losses.clipped_surrogate(policy, x["p"], x["tv"], x["mask"], importance_weights=weights).value

    grads = [jax.jit(jax.grad(f))(x["p"]) for f in (loss, jax.checkpoint(loss))]
    np.testing.assert_allclose(*grads, rtol=1e-6)
    assert np.any(np.asarray(grads[0]) != 0)


def test_every_divergence_of_the_sampled_token_is_float32_and_elementwise() -> None:
    x = make()
    forms = {
        "k1": lambda p, q: divergences.k1(p - q),
        "k2": lambda p, q: divergences.k2(p - q),
        "k3": lambda p, q: divergences.k3(p - q),
        "binary_kl": divergences.binary_kl,
        "binary_tv": divergences.binary_tv,
        "log_odds_displacement": divergences.log_odds_displacement,
        "ratio_from_displacement": divergences.ratio_from_displacement,
    }
    of_the_vocabulary = {"topk_divergence", "vocab_divergence", "logits_divergence"}
    sums_of_the_vocabulary = {"softmax_statistics", "total_variation_of_sums", "difference_about_tops"}
    # Jitted functions are no plain functions; what is callable and no class counts.
    public = {n for n, f in vars(divergences).items() if callable(f) and not inspect.isclass(f)}
    assert public == set(forms) | of_the_vocabulary | sums_of_the_vocabulary
    for name, form in forms.items():
        whole = form(x["p"], x["q"])
        assert whole.dtype == jnp.float32, name
        np.testing.assert_allclose(jax.vmap(jax.vmap(form))(x["p"], x["q"]), whole, rtol=1e-6, atol=1e-7, err_msg=name)
        narrow = form(jnp.asarray(x["p"], jnp.bfloat16), jnp.asarray(x["q"], jnp.bfloat16))
        assert narrow.dtype == jnp.float32, name
