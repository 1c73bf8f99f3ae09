"""Small divergences keep their digits: the table of ``tools/bench/divergence_accuracy.py``, over Qwen's vocabulary."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from trm_jax import divergences, ops
from trm_jax.types import VocabDivergence

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "divergence_accuracy.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("divergence_accuracy", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_tv", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(name, marks=() if name == "peaked" else pytest.mark.slow)
        for name in (
            "peaked",
            "flat",
            "near_deterministic",
            "constant_offset",
            "large_offset",
            "huge_offset",
            "moved_top",
            "unrelated",
        )
    ],
)
def test_relative_errors(shape: str, with_tv: bool, tool: ModuleType) -> None:
    for target in (1.0,) if shape == "unrelated" else (4e-7, 2e-5, 1e-2, 1.0):
        line = tool.measure(shape, target, implementation="chunked", with_tv=with_tv, rows=2, vocabulary=151_936)
        assert line["kl_min"] >= 1e-7
        assert line["kl_error"] <= (1e-2 if line["kl_min"] < 1e-5 else 1e-3), line
        if with_tv:
            assert line["tv_min"] >= 1e-6
            assert line["tv_error"] <= 1e-3, line


@pytest.mark.parametrize(
    ("shape", "target", "forms"),
    [
        ("flat", 4e-12, ["vocab_divergence", "chunked"]),
        pytest.param("peaked", 1e-11, ["vocab_divergence", "chunked"], marks=pytest.mark.slow),
        pytest.param("constant_offset", 1e-11, ["vocab_divergence", "chunked"], marks=pytest.mark.slow),
        pytest.param("flat", 4e-12, ["pallas_tpu"], marks=pytest.mark.slow),
        pytest.param("peaked", 1e-11, ["pallas_tpu"], marks=pytest.mark.slow),
    ],
)
def test_total_variation_of_a_millionth(shape: str, target: float, forms: list[str], tool: ModuleType) -> None:
    sizes = {"with_tv": True, "rows": 2, "vocabulary": 151_936}
    for form in forms:
        line = tool.measure(shape, target, implementation=form, interpret=form == "pallas_tpu", **sizes)
        assert 9e-7 < line["tv_min"] < 4e-6, line
        assert line["tv_error"] <= 1e-3, line


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["flat", "large_offset", "huge_offset", "moved_top"])
def test_relative_errors_of_the_kernels(shape: str, tool: ModuleType) -> None:
    for target in (4e-7, 2e-5, 1e-2):
        line = tool.measure(
            shape, target, implementation="pallas_tpu", with_tv=True, rows=2, vocabulary=151_936, interpret=True
        )
        assert line["kl_min"] >= 1e-7
        assert line["kl_error"] <= (1e-2 if line["kl_min"] < 1e-5 else 1e-3), line
        assert line["tv_error"] <= 1e-3, line


@pytest.mark.parametrize("implementation", ["vocab_divergence", "chunked"])
def test_tops_far_apart_cost_no_digits(implementation: str, tool: ModuleType) -> None:
    """Logits about 12 and about 12 + 5 N(0, 1): their difference alone rounds by 5e-7, a hundredth of these gaps."""
    line = tool.measure("large_offset", 1e-8, implementation=implementation, with_tv=True, rows=8, vocabulary=151_936)
    assert line["tv_error"] <= 1e-3, line
    assert line["kl_error"] <= 2e-3, line


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("near_deterministic", {"implementation": "chunked"}),
        ("near_deterministic", {"implementation": "reference", "with_tv": False}),
        ("near_deterministic", {"implementation": "chunked", "with_tv": False}),
        pytest.param("near_deterministic", {"implementation": "pallas_tpu", "interpret": True}, marks=pytest.mark.slow),
        pytest.param("peaked", {"implementation": "pallas_tpu", "interpret": True}, marks=pytest.mark.slow),
    ],
)
def test_any_token_will_do(shape: str, form: dict[str, str | bool], tool: ModuleType) -> None:
    """A row's divergence does not depend on its token: the least likely one keeps the digits that a sample keeps."""
    for target in (4e-7, 2e-5):
        policy, rollout, _, kl, tv = tool.case(shape, target, 2, 151_936)
        check_rows(policy, rollout, rollout.argmin(-1), kl, tv, form)


def check_rows(
    policy: np.ndarray,
    rollout: np.ndarray,
    tokens: np.ndarray,
    kl: np.ndarray,
    tv: np.ndarray,
    form: dict[str, str | bool],
) -> None:
    unit = jnp.eye(len(policy))
    out = ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, tokens, **form)
    assert kl.min() >= 1e-7
    np.testing.assert_allclose(out.token_kl, kl, rtol=1e-2 if kl.min() < 1e-5 else 1e-3)
    if form.get("with_tv", True):
        np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3)


both_forms = pytest.mark.parametrize(
    "form", [{"implementation": "chunked"}, {"implementation": "pallas_tpu", "interpret": True}], ids=str
)


@pytest.mark.parametrize("offset", [pytest.param(40.0, marks=pytest.mark.slow), 1000.0])
@both_forms
def test_an_offset_costs_no_digits(offset: float, form: dict[str, str | bool], tool: ModuleType) -> None:
    """The difference of logits 1000 apart rounds by 3e-5, a tenth of these differences."""
    rng = np.random.default_rng(0)
    rollout = rng.normal(size=(2, 8001))
    policy, rollout = ((rollout + x).astype(np.float32) for x in (6e-4 * rng.normal(size=rollout.shape) + offset, 0.0))
    check_rows(policy, rollout, np.arange(2), *tool.exact(policy, rollout), form)


@pytest.mark.parametrize("moved", [0.08, 0.15])
@both_forms
def test_a_likeliest_token_that_moves(moved: float, form: dict[str, str | bool], tool: ModuleType) -> None:
    """All others then stand off it by much more than they stand apart: their mean is not KL."""
    rng = np.random.default_rng(0)
    rollout = rng.normal(size=(2, 32_001))
    policy = rollout + 1e-3 * rng.normal(size=rollout.shape)
    policy[np.arange(2), rollout.argmax(-1)] += moved
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    check_rows(policy, rollout, np.arange(2), *tool.exact(policy, rollout), form)


@both_forms
def test_a_top_that_has_all_mass(form: dict[str, str | bool], tool: ModuleType) -> None:
    """Beside its weight, 1, thousands of addends near 1e-11 are lost one by one; another token was sampled."""
    logits = np.random.default_rng(0).normal(size=(2, 16_001)).astype(np.float32)
    logits[:, 1234] = (24.0, 30.0)
    log_p = tool._log_softmax(logits)
    entropy, tokens = -(np.exp(log_p) * log_p).sum(-1), np.array([5, 15_000])
    unit = jnp.eye(2)
    one = ops.linear_logps(unit, logits.T, tokens, **form)
    both = ops.linear_vocab_divergence(unit, logits.T, unit, logits.T, tokens, **form)
    for got in (one.entropy, both.policy_entropy, both.rollout_entropy):  # 15 addends share the top's tile and sublane
        np.testing.assert_allclose(got, entropy, rtol=15 / 16_001)
    for got in (one.logps, both.policy_logps, both.rollout_logps):  # 1e-6: half a unit in the last place of 30
        np.testing.assert_allclose(got, log_p[[0, 1], tokens], atol=1e-6)


every_form = pytest.mark.parametrize(
    "form",
    [
        {"implementation": "reference"},
        {"implementation": "chunked"},
        {"implementation": "pallas_tpu", "interpret": True},
    ],
    ids=lambda form: str(form["implementation"]),
)


def check_options(policy: np.ndarray, rollout: np.ndarray, form: dict[str, str | bool], tool: ModuleType, **options):
    """KL and TV under a temperature and a soft cap, of each row's own token."""
    temperature, cap = options["temperature"], options.get("logit_soft_cap")
    z = (x.astype(float) if cap is None else cap * np.tanh(x.astype(float) / cap) for x in (policy, rollout))
    kl, tv = tool.exact(*(x / temperature for x in z))
    unit = jnp.eye(len(policy))
    out = ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, np.arange(len(policy)), **options, **form)
    promised = tv >= 1e-6
    assert promised.mean() > 0.5
    np.testing.assert_allclose(np.asarray(out.token_tv)[promised], tv[promised], rtol=1e-3)
    np.testing.assert_allclose(np.asarray(out.token_kl)[kl >= 1e-7], kl[kl >= 1e-7], rtol=1e-2)
    return out


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.3, marks=pytest.mark.slow)])
@every_form
def test_a_temperature_costs_no_digits(temperature: float, form: dict[str, str | bool], tool: ModuleType) -> None:
    """Two tokens near 20 share all mass, 2e-5 apart from policy to policy: 33 has a last digit of 4e-6."""
    rng, rows = np.random.default_rng(3), np.arange(16)
    rollout = rng.normal(size=(16, 1001))
    for token in (rows, 20 + rows):
        rollout[rows, token] = 20 + rng.random(16)
    policy = rollout + 2e-5 * rng.normal(size=rollout.shape)
    policy[rows, rows] += 3e-5
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    out = check_options(policy, rollout, form, tool, temperature=temperature)
    raw = divergences.vocab_divergence(policy, rollout, rows, temperature=temperature)
    np.testing.assert_allclose(raw.token_tv, out.token_tv, rtol=1e-2)


@pytest.mark.parametrize(("cap", "temperature"), [(30.0, 0.6), pytest.param(50.0, 0.8, marks=pytest.mark.slow)])
@every_form
def test_a_soft_cap_costs_no_digits(
    cap: float, temperature: float, form: dict[str, str | bool], tool: ModuleType
) -> None:
    """Nearly deterministic rows: a top that is 1e-6 off itself would be their whole TV."""
    rng, rows = np.random.default_rng(0), np.arange(8)
    rollout = rng.normal(size=(8, 2001))
    policy = rollout + rng.uniform(0.2, 2, (8, 1)) * rng.normal(size=rollout.shape)
    rollout[rows, rows] = np.linspace(13, 16, 8)
    policy[rows, rows] = rollout[rows, rows] - rng.uniform(0, 2, 8)
    check_options(
        policy.astype(np.float32), rollout.astype(np.float32), form, tool, temperature=temperature, logit_soft_cap=cap
    )


@pytest.mark.parametrize("place", ["first", "middle", "last", "many"])
@pytest.mark.parametrize("moved", [0.12, 0.7, 4.0, -0.8, -5.0])
@both_forms
def test_tokens_that_move_alone(moved: float, place: str, form: dict[str, str | bool], tool: ModuleType) -> None:
    """Of flat policies, a likely token or 1 in 200: all others then stand apart by more than KL shows."""
    rng, vocabulary = np.random.default_rng(0), 16_001
    rollout = 0.3 * rng.normal(size=(2, vocabulary))
    column = {"first": [0], "middle": [8000], "last": [-1], "many": rng.permutation(vocabulary)[:80]}[place]
    if place != "many":
        rollout[:, column] = rollout.max() + 0.5
    policy = rollout + 1e-3 * rng.normal(size=rollout.shape)
    policy[:, column] += moved
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    check_rows(policy, rollout, np.array([7, 12_000]), *tool.exact(policy, rollout), form)


ON_A_MESH = {"mesh": jax.make_mesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2), "vocab_axis": "tensor"}
KERNELS = {"implementation": "pallas_tpu", "interpret": True}


@pytest.mark.parametrize(
    ("form", "moved"),
    [
        *[({}, 0.5), ({"implementation": "chunked"}, 0.5), ({"implementation": "chunked"}, -4.0)],
        pytest.param({"implementation": "chunked", **ON_A_MESH}, 0.3, marks=pytest.mark.slow),
        pytest.param(KERNELS, 0.5, marks=pytest.mark.slow),
        pytest.param({**KERNELS, **ON_A_MESH}, 0.5, marks=pytest.mark.slow),
    ],
)
def test_one_token_of_a_flat_policy_that_moves(form: dict[str, Any], moved: float, tool: ModuleType) -> None:
    """All other log-ratios are equal and small beside it: a rounding that they share would be a percent of TV."""
    rollout = np.zeros((1, 151_936), np.float32)
    policy = rollout.copy()
    policy[0, 7] = moved
    kl, tv = tool.exact(policy, rollout)
    for token in (7, 9):
        if not form:
            out = divergences.vocab_divergence(policy, rollout, np.array([token]))
            np.testing.assert_allclose(out.token_kl, kl, rtol=1e-3)
            np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3)
        else:
            check_rows(policy, rollout, np.array([token]), kl, tv, form)


@every_form
def test_a_token_that_the_rollouts_bias_practically_bans(form: dict[str, str | bool], tool: ModuleType) -> None:
    """Mass that underflows in the rollout alone is in TV and KL as it is with ``-inf``."""
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(40, 4)).astype(np.float32)
    bias = np.where(np.arange(40) == 3, -100.0, 0.0).astype(np.float32)
    z = hidden.astype(float) @ head.T
    kl, tv = tool.exact(z, z + bias)
    out = ops.linear_vocab_divergence(hidden, head, hidden, head, np.arange(3), rollout_bias=bias, **form)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3)
    np.testing.assert_allclose(out.token_kl, kl, rtol=1e-3)


@both_forms
def test_a_sampled_token_that_the_rollout_all_but_excludes(form: dict[str, str | bool], tool: ModuleType) -> None:
    """It has 4% of the policy, and e^-62 to e^-140 of that of the rollout: the row counts it whichever token it has."""
    excluded, other = 5, 9
    policy = np.random.default_rng(0).normal(size=(12, 512)).astype(np.float32)
    policy[:, 301:] = -20.0
    mass = np.exp(np.delete(policy, excluded, axis=1).astype(float)).sum(-1)
    policy[:, excluded] = np.log(0.04 / 0.96 * mass)
    rollout = policy.copy()
    rollout[:, excluded] -= np.tile(np.float32([62, 80, 140]), 4)
    check_rows(policy, rollout, np.repeat([excluded, other], 6), *tool.exact(policy, rollout), form)


@pytest.mark.parametrize(
    "vocabulary", [pytest.param(128, marks=pytest.mark.slow), 512, pytest.param(2048, marks=pytest.mark.slow)]
)
def test_one_token_that_moves_among_few(vocabulary: int, tool: ModuleType) -> None:
    """The kernel's first tile, whose references stand at the tops, is then much or all of the vocabulary."""
    moves = np.array([0.05, 0.07, 0.08, 0.09, 0.1, 0.12, 0.15, 0.2, 0.3, -0.05, -0.1, -0.3])
    rollout = np.zeros((12, vocabulary), np.float32)
    policy = rollout.copy()
    policy[:, 3] += moves
    kl, tv = tool.exact(policy, rollout)
    unit = np.eye(12, dtype=np.float32)
    out = ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, np.full(12, vocabulary - 1), **KERNELS)
    assert kl.min() > 4e-7
    np.testing.assert_allclose(out.token_kl, kl, rtol=1e-3)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3)


def divergence_of_logits(policy: np.ndarray, rollout: np.ndarray, form: dict[str, Any]) -> VocabDivergence:
    """By an operator of a form, or from full logits without one; each row has a token of its own."""
    tokens = np.arange(len(policy))
    if not form:
        return divergences.vocab_divergence(policy, rollout, tokens)
    unit = np.eye(len(policy), dtype=np.float32)
    return ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, tokens, **form)


@pytest.mark.parametrize(
    ("form", "absolute"),
    [({}, 0.0), ({"implementation": "chunked"}, 0.0), pytest.param(KERNELS, 4e-8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("top", [0.0, 1e-4])
def test_tokens_that_have_one_logit_in_both_policies(
    form: dict[str, Any], absolute: float, top: float, tool: ModuleType
) -> None:
    """Distances from tops that differ would be rounded apart, and all of these tokens add to TV."""
    rng = np.random.default_rng(0)
    rollout = -np.log(1.0 + rng.permuted(np.tile(np.arange(16_001), (16, 1)), axis=1)) + 0.3 * rng.normal(
        size=(16, 16_001)
    )
    policy = rollout + np.where(rng.random(rollout.shape) < 0.02, rng.choice([-1e-4, 1e-4], rollout.shape), 0.0)
    policy[np.arange(16), rollout.argmax(-1)] += top
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    _, tv = tool.exact(policy, rollout)
    out = divergence_of_logits(policy, rollout, form)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3 if absolute else 1e-5, atol=absolute)


@pytest.mark.parametrize(
    ("form", "absolute"),
    [({}, 0.0), ({"implementation": "chunked"}, 0.0), pytest.param(KERNELS, 4e-7, marks=pytest.mark.slow)],
)
def test_a_likeliest_token_that_moves_beside_one_logit(form: dict[str, Any], absolute: float, tool: ModuleType) -> None:
    """All other tokens are rounded alike, and an offset takes one policy's over a power of two."""
    rng = np.random.default_rng(0)
    level, moved = rng.uniform(8, 12, (32, 1)), 10 ** rng.uniform(-5, -3, 32)
    rollout = np.tile(-level, (1, 8001))
    rollout[:, 5] = 0.0
    policy = rollout + rng.choice([0.4, 3.0, 7.0], (32, 1))
    policy[:, 5] += moved
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    kl, tv = tool.exact(policy, rollout)
    out = divergence_of_logits(policy, rollout, form)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3 if absolute else 1e-5, atol=absolute)
    if not absolute:
        np.testing.assert_allclose(out.token_kl, kl, rtol=1e-3)  # of 1e-11


@pytest.mark.parametrize(("tops", "temperature"), [((1058.9277, 58.548775), 0.1), ((15.821223, 18.821098), 1e-3)])
@pytest.mark.parametrize("token", [77, 5])
def test_an_offset_alone_is_no_distance(tops: tuple[float, float], temperature: float, token: int) -> None:
    """References that stand further from 0 than all digits of their distance reach are rounded again."""
    rollout = np.zeros((1, 4000), np.float32)
    rollout[0, 77] = tops[1]
    policy = np.where(rollout > 0, np.float32(tops[0]), np.float32(tops[0]) - np.float32(tops[1]))
    unit = np.eye(1, dtype=np.float32)
    out = ops.linear_vocab_divergence(
        unit, policy.T, unit, rollout.T, np.array([token]), temperature=temperature, **KERNELS
    )
    assert float(out.token_tv[0]) < 1e-9  # the rest has no probability
    assert float(out.token_kl[0]) < 1e-9


@pytest.mark.parametrize(("offset", "temperature"), [(30.0, 0.1), (1000.0, 0.6)])
@both_forms
def test_an_offset_and_a_temperature(
    offset: float, temperature: float, form: dict[str, str | bool], tool: ModuleType
) -> None:
    """The second sweep's reference is rounded once: made again by other operations it would be another one."""
    rng = np.random.default_rng(0)
    rollout = rng.normal(size=(64, 2304)).astype(np.float32)
    policy = (rollout + offset + 10 ** rng.uniform(-4, -2, size=(64, 1)) * rng.normal(size=rollout.shape)).astype(
        np.float32
    )
    unit, tokens = np.eye(64, dtype=np.float32), rollout.argmax(-1)
    _, tv = tool.exact(policy.astype(float) / temperature, rollout.astype(float) / temperature)
    out = ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, tokens, temperature=temperature, **form)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3)


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e4])
@every_form
def test_references_are_as_fine_as_the_temperature(
    temperature: float, form: dict[str, str | bool], tool: ModuleType
) -> None:
    """An offset of 300 temperatures is less than a thousandth of a logit at 1e-6."""
    rng = np.random.default_rng(0)
    rollout = (rng.normal(size=(4, 2000)) * temperature).astype(np.float32)
    policy = rollout + np.float32(300 * temperature)
    policy[:, 5] += np.float32(0.01 * temperature)
    out = check_options(policy, rollout, form, tool, temperature=temperature)
    raw = divergences.vocab_divergence(policy, rollout, np.arange(4), temperature=temperature)
    _, tv = tool.exact(*(x.astype(float) / temperature for x in (policy, rollout)))
    for got in (raw.token_tv, *([] if "interpret" in form else [out.token_tv])):
        np.testing.assert_allclose(got, tv, rtol=1e-5)


@pytest.mark.parametrize("form", [{}, {"implementation": "reference"}, {"implementation": "chunked"}])
def test_logits_near_the_largest_number(form: dict[str, str], tool: ModuleType) -> None:
    policy, rollout = np.array([[1e36, 1e36, 5e35]], np.float32), np.array([[0.0, 0.0, -1.0]], np.float32)
    kl, tv = tool.exact(policy.astype(float), rollout.astype(float))
    out = divergence_of_logits(policy, rollout, form)
    np.testing.assert_allclose(out.token_kl, kl, rtol=1e-6)
    np.testing.assert_allclose(out.token_tv, tv, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [1500, pytest.param(2304, marks=pytest.mark.slow)])
def test_mass_that_comes_after_a_token_that_the_policy_alone_likes(vocabulary: int, tool: ModuleType) -> None:
    """References that suited the tiles before it would stand off all of the mass, and its own rounding hide KL."""
    kinds = [(low, gain, noise) for low in (-15, -20, -25) for gain in (0, -2, -4) for noise in (0.0, 1e-3)]
    rng = np.random.default_rng(0)
    rollout = np.tile([[float(low)] for low, _, _ in kinds], (1, vocabulary))
    rollout[:, -256:-128] = 0.0
    policy = rollout + np.array([noise for _, _, noise in kinds])[:, None] * rng.normal(size=rollout.shape)
    policy[:, 42] = [gain for _, gain, _ in kinds]
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    tokens = np.full(len(kinds), vocabulary - 1)
    for one, other in ((policy, rollout), (rollout, policy)):
        check_rows(one, other, tokens, *tool.exact(one, other), KERNELS)


def test_a_deterministic_rollout_of_a_policy_that_also_likes_another_token(tool: ModuleType) -> None:
    """About the references of the tiles in between, the curvature is ten thousand times the mass that is left of it."""
    kinds = [
        (low, gain, places) for low in (-30, -60, -90) for gain in (-2, -4, -7) for places in ((42, 2003), (2003, 42))
    ]
    rng = np.random.default_rng(0)
    rollout = np.array([[float(low)] for low, _, _ in kinds]) + 0.5 * rng.normal(size=(len(kinds), 2304))
    policy = rollout.copy()
    for row, (_, gain, (hot, other)) in enumerate(kinds):
        rollout[row, hot] = policy[row, hot] = 0.0
        policy[row, other] = gain
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    tokens = np.array([other for _, _, (_, other) in kinds])
    check_rows(policy, rollout, tokens, *tool.exact(policy, rollout), KERNELS)


@pytest.mark.parametrize("tile", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_mass_in_one_tile_whose_likeliest_token_moves(tile: int, tool: ModuleType) -> None:
    """The others of its tile then stand off both tops by the same, and KL is a small part of what the kernel sums."""
    kinds = [(moved, noise) for moved in (0.05, 0.08, 0.1, -0.08) for noise in (0.0, 0.01)]
    places, rng = np.arange(4096), np.random.default_rng(0)
    ranks = -1.5 * np.log((places + 100) if tile == 0 else np.abs(places - 128 * tile - 64) + 100)
    rollout = np.concatenate([[ranks], [np.where(places // 128 == tile, 0.0, -20.0)]]).repeat(len(kinds), axis=0)
    policy = rollout + np.array([noise for _, noise in kinds] * 2)[:, None] * rng.normal(size=rollout.shape)
    policy[np.arange(len(policy)), rollout.argmax(-1)] += [moved for moved, _ in kinds] * 2
    policy, rollout = policy.astype(np.float32), rollout.astype(np.float32)
    for rows in np.split(np.arange(len(policy)), len(policy)):
        check_rows(policy[rows], rollout[rows], np.array([4000]), *tool.exact(policy[rows], rollout[rows]), KERNELS)


@pytest.mark.parametrize(("cap", "temperature"), [(500.0, 1e-6), (1e9, 1.0)])
def test_a_ban_beside_a_cap_that_caps_nothing(cap: float, temperature: float, tool: ModuleType) -> None:
    logits = (temperature * np.random.default_rng(0).normal(size=(1, 300))).astype(np.float32)
    bias = np.where(np.arange(300) == 5, -np.inf, 0.0).astype(np.float32)
    unit = np.eye(1, dtype=np.float32)
    out = ops.linear_vocab_divergence(
        *(unit, logits.T, unit, logits.T, np.array([3])),
        rollout_bias=bias,
        logit_soft_cap=cap,
        temperature=temperature,
        **KERNELS,
    )
    scaled = logits.astype(float) / temperature
    kept = np.delete(scaled, 5)
    want = np.log(np.exp(scaled).sum()) - np.log(np.exp(kept).sum())  # the rollout is the policy without that token
    np.testing.assert_allclose(out.token_kl, want, rtol=1e-3)
    np.testing.assert_allclose(out.token_tv, -np.expm1(-want), rtol=1e-3)


@both_forms
def test_an_entropy_is_never_negative(form: dict[str, str | bool]) -> None:
    """One token has all mass but e^-30: the kernel's reference may lie below it, by as much as the mean gap is."""
    rng, rows = np.random.default_rng(10), np.arange(12)
    rollout = rng.normal(size=(12, 512)).astype(np.float32)
    policy = rollout.copy()
    policy[rows, rng.integers(0, 512, 12)] += np.linspace(40, 80, 12, dtype=np.float32)
    unit, tokens = np.eye(12, dtype=np.float32), np.where(rows % 2, policy.argmax(-1), 7)
    out = ops.linear_vocab_divergence(unit, policy.T, unit, rollout.T, tokens, **form)
    assert np.all((out.policy_entropy >= 0) & (out.policy_entropy < 1e-6)), out.policy_entropy


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"implementation": "reference"}, marks=pytest.mark.slow),
        {"implementation": "chunked"},
        {"implementation": "chunked", **ON_A_MESH},
        KERNELS,
        pytest.param({**KERNELS, **ON_A_MESH}, marks=pytest.mark.slow),
    ],
)
def test_a_token_that_the_policys_bias_practically_bans(form: dict[str, Any], tool: ModuleType) -> None:
    """Its mass is all of TV, and what the normaliser loses: less than the rounding of its own log-ratio, the ban."""
    banned, mass = 17, np.array([0.0256, 0.0256, 1e-4, 1e-5])  # two rows alike, of which one samples the banned token
    logits = np.tile((2 * np.random.default_rng(0).normal(size=1000)).astype(np.float32), (4, 1))
    others = np.exp(np.delete(logits, banned, axis=1).astype(float)).sum(-1)
    logits[:, banned] = np.log(mass / (1 - mass) * others)
    unit, head, tokens = np.eye(4, dtype=np.float32), logits.T.copy(), np.array([3, banned, 3, 4])
    for ban in (-29.0, -1e4, -1e6, -1e8, -1e10):
        bias = np.where(np.arange(1000) == banned, ban, 0.0).astype(np.float32)
        kl, tv = tool.exact(logits + bias, logits)
        np.testing.assert_allclose(tv, mass, rtol=1e-4)
        out = ops.linear_vocab_divergence(unit, head, unit, head, tokens, policy_bias=bias, **form)
        np.testing.assert_allclose(out.token_tv, tv, rtol=1e-3, err_msg=str(ban))
        np.testing.assert_allclose(out.token_kl, kl, rtol=1e-5, err_msg=str(ban))
