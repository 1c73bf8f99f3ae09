"""Full-vocabulary comparison of two policies from their logits.

Both logits count from their largest, near which float32 differences are exact; for their difference from short numbers,
which keep it exact where the two are close. With ``x = z_θ - z_roll`` of these and
``u = E_roll[expm1 x]``,

    ``log Σ e^z_θ - log Σ e^z_roll = log1p(u)``,  ``d = log π_θ - log π_roll = x - log1p(u)``,
    ``KL(π_roll ‖ π_θ) = Σ π_roll (expm1(d) - d)``  and  ``TV = ½ Σ π_roll |expm1 d|``:

sums of terms that are not negative, where ``log1p(u) - E_roll[x]`` and the difference of two softmaxes would carry the
rounding of both normalisers. Policies far apart (``|u| >= 1/2``) take the difference of the normalisers as it stands.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax.checks import required, same_shape, shape_of, static_temperature, token_ids
from trm_jax.divergences._difference import difference_about_tops
from trm_jax.divergences._softmax import Softmax, softmax_statistics, take_token
from trm_jax.numerics import AnyArray, absent_values, expm1_minus_identity
from trm_jax.types import VocabDivergence

__all__ = ["logits_divergence", "total_variation_of_sums", "vocab_divergence"]

_FAR_APART = 0.5
_ROUNDING = 1e-3
"""Terms that sum to more are no rounding: of policies without a common token, say."""


def total_variation_of_sums(
    absolute: Float[Array, "*S"], off: Float[Array, "*S"], slope: Float[Array, "*S"]
) -> Float[Array, "*S"]:
    """``½ Σ |t|`` of ``t = π_θ - π_roll``, without the rounding that all log-ratios share.

    Both softmaxes sum to 1, so the terms do to 0: what they do sum to is the rounding of ``log1p(u)``, by which every
    ``d`` is too large, and TV by ``½ slope · off``.

    Args:
      absolute: ``Σ |t|``.
      off: ``Σ t``.
      slope: ``Σ sign(t) π_θ`` over the tokens whose term is made of ``d``.

    >>> float(total_variation_of_sums(jnp.float32(0.5), jnp.float32(0.0), jnp.float32(1.0)))
    0.25
    """
    return jnp.clip(0.5 * (absolute - slope * jnp.where(jnp.abs(off) < _ROUNDING, off, 0.0)), 0.0, 1.0)


@functools.partial(jax.jit, static_argnames=("with_tv", "temperature"))
def logits_divergence(
    policy_logits: Float[Array, "*S V"],
    rollout_logits: Float[Array, "*S V"],
    tokens: Int[Array, "*S"],
    *,
    with_tv: bool,
    temperature: float = 1.0,
) -> VocabDivergence:
    """``vocab_divergence`` on float32 logits without its checks; the specification of the fused operators too.

    Args:
      policy_logits: ``[..., V]`` float32; ``-inf`` marks tokens outside the support.
      rollout_logits: ``[..., V]`` float32, likewise.
      tokens: ``[...]`` sampled token ids in ``[0, V)``.
      with_tv: also the total variation (static).
      temperature: of both (static).

    Returns:
      ``VocabDivergence`` as ``vocab_divergence``; ``token_tv`` is None without ``with_tv``.

    >>> logits = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> out = logits_divergence(*logits, jnp.array(0), with_tv=False)
    >>> print(round(float(out.token_kl), 4), out.token_tv)
    0.1308 None
    """
    return _divergence(policy_logits, rollout_logits, tokens, with_tv, temperature)


class _Compared(NamedTuple):
    """Both softmaxes at every token, ``[..., V]``, with the digits that a difference of two softmaxes has lost.

    Attributes:
      log_p: ``log π_θ``, 0 outside its support; ``log_q`` is of the rollout.
      p: ``π_θ``; ``q`` is the rollout's.
      d: ``log π_θ - log π_roll``, 0 where one of them is 0.
      excess: ``π_θ - π_roll``.
    """

    log_p: Float[Array, "*S V"]
    log_q: Float[Array, "*S V"]
    p: Float[Array, "*S V"]
    q: Float[Array, "*S V"]
    d: Float[Array, "*S V"]
    excess: Float[Array, "*S V"]


def _both(policy_logits: Array, rollout_logits: Array) -> Array:
    """Tokens that both policies have; NaN logits compare False and must still reach the result."""
    has = (policy_logits > -jnp.inf) & (rollout_logits > -jnp.inf)
    return has | jnp.isnan(policy_logits) | jnp.isnan(rollout_logits)


def _log_ratio(
    logits: tuple[Array, Array], policy: Softmax, rollout: Softmax, both: Array, temperature: float
) -> tuple[Array, Array, Array, Array, Array]:
    """``d``, ``π_θ - π_roll``, where that is ``π_roll expm1(d)``, ``π_roll``; and a number that is NaN where undefined.

    Far from 0, and where one side has no such token, it is the difference of the two probabilities.
    """
    weight = rollout.unnormalised / rollout.total[..., None]  # π_roll
    tops = [jnp.max(z, axis=-1, initial=-jnp.inf) for z in logits]
    policy_top, rollout_top = (jnp.where(jnp.isinf(top), 0.0, top) for top in tops)
    x = jnp.where(both, difference_about_tops(*logits, policy_top, rollout_top), 0.0) / temperature

    def less_one(log_ratio: Array, probability: Array) -> tuple[Array, Array]:
        near = both & (log_ratio <= 1.0)
        return jnp.where(near, weight * jnp.expm1(jnp.where(near, log_ratio, 0.0)), probability - weight), near

    u = jnp.sum(less_one(x, policy.unnormalised / rollout.total[..., None])[0], axis=-1)
    plain = jnp.log(policy.total) - jnp.log(rollout.total)
    difference = jnp.where(jnp.abs(u) < _FAR_APART, jnp.log1p(jnp.clip(u, -_FAR_APART, _FAR_APART)), plain)
    empty = jnp.isneginf(rollout.logsumexp) | jnp.isneginf(policy.logsumexp)
    difference = jnp.where(empty & ~jnp.isnan(plain), 0.0, difference)
    d = jnp.where(both, x - difference[..., None], 0.0)
    excess, near = less_one(d, policy.unnormalised / policy.total[..., None])
    return d, excess, near, weight, u + plain


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _compared(policy_logits: Array, rollout_logits: Array, temperature: float) -> _Compared:
    """Of rows that all have a softmax."""
    none = jnp.zeros(policy_logits.shape[:-1], jnp.int32)
    logits = policy_logits, rollout_logits
    policy, rollout = (softmax_statistics(z, none, temperature=temperature) for z in logits)
    log_p, log_q = (
        jnp.where(z > -jnp.inf, side.gap / temperature - jnp.log(side.total)[..., None], 0.0)
        for z, side in zip(logits, (policy, rollout), strict=True)
    )
    d, excess, _, q, _ = _log_ratio(logits, policy, rollout, _both(*logits), temperature)
    return _Compared(log_p, log_q, policy.unnormalised / policy.total[..., None], q, d, excess)


@_compared.defjvp
def _compared_jvp(
    temperature: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[_Compared, _Compared]:
    """The textbook derivatives: of values that select by equality, a trace's would be wrong at ties."""
    out: _Compared = _compared(*primals, temperature)

    def of_one(z: Array, pi: Array, dz: Array) -> Array:
        inside = z > -jnp.inf
        safe = jnp.where(inside, dz, 0.0) / temperature
        return jnp.where(inside, safe - jnp.sum(pi * safe, axis=-1, keepdims=True), 0.0)

    of_p, of_q = (of_one(z, pi, dz) for z, pi, dz in zip(primals, out[2:4], tangents, strict=True))
    between = jnp.where(_both(*primals), of_p - of_q, 0.0)
    # p - q changes by p of_p - q of_q: where they are near, by what does not cancel.
    excess = jnp.where(_both(*primals), out.excess * of_p + out.q * between, out.p * of_p - out.q * of_q)
    return out, _Compared(of_p, of_q, out.p * of_p, out.q * of_q, between, excess)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _divergence(
    policy_logits: Array, rollout_logits: Array, tokens: Array, with_tv: bool, temperature: float
) -> VocabDivergence:
    policy = softmax_statistics(policy_logits, tokens, temperature=temperature)
    rollout = softmax_statistics(rollout_logits, tokens, temperature=temperature)
    both = _both(policy_logits, rollout_logits)
    d, terms, near, weight, defined = _log_ratio((policy_logits, rollout_logits), policy, rollout, both, temperature)
    far = jnp.where(near, 0.0, terms) - jnp.where(both & ~near, weight * d, 0.0)
    small = weight * expm1_minus_identity(jnp.where(near, d, 0.0))
    kl, tv = jnp.sum(jnp.where(near, small, far), axis=-1), None
    if with_tv:
        slope = jnp.sum(jnp.where(near, jnp.sign(terms) * (weight + terms), 0.0), axis=-1)
        tv = total_variation_of_sums(jnp.sum(jnp.abs(terms), axis=-1), jnp.sum(terms, axis=-1), slope)
    lost = (rollout_logits > -jnp.inf) & jnp.isneginf(policy_logits)
    kl = jnp.where(jnp.any(lost, axis=-1), jnp.inf, jnp.maximum(kl, 0.0))
    kl = jnp.where(jnp.isneginf(rollout.logsumexp), 0.0, kl)  # no token that the rollout could sample
    undefined = jnp.isnan(defined)
    return VocabDivergence(
        policy_logps=policy.logps,
        rollout_logps=rollout.logps,
        token_kl=jnp.where(undefined, jnp.nan, kl),
        token_tv=None if tv is None else jnp.where(undefined, jnp.nan, tv),
        policy_entropy=policy.entropy,
        rollout_entropy=rollout.entropy,
    )


@_divergence.defjvp
def _divergence_jvp(
    with_tv: bool, temperature: float, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[VocabDivergence, VocabDivergence]:
    """The textbook derivatives in ``z``; a row that is not finite has none, and keeps NaN to itself.

    ``dKL = Σ (π_θ - π_roll) dz_θ + Σ π_roll (log π_roll/π_θ - KL) dz_roll``; of TV with ``sign(0) = 0``.
    """
    *logits, tokens = primals
    out: VocabDivergence = _divergence(*primals, with_tv, temperature)
    tops = [jnp.max(z, axis=-1, keepdims=True) for z in logits]
    alive = [jnp.isfinite(top) for top in tops]  # NaN stays in a maximum
    logits = [jnp.where(a, z, 0.0) for a, z in zip(alive, logits, strict=True)]
    dz = [
        jnp.where(a & (z > -jnp.inf), t, 0.0) / temperature for a, z, t in zip(alive, logits, tangents[:2], strict=True)
    ]
    at = _compared(*logits, temperature)

    def along(slope: Array, dz: Array) -> Array:
        return jnp.sum(slope * dz, axis=-1)

    def of_one(pi: Array, log_pi: Array, dz: Array) -> tuple[Array, Array]:
        entropy = -jnp.sum(pi * log_pi, axis=-1, keepdims=True)
        return take_token(dz, tokens) - along(pi, dz), along(-pi * (log_pi + entropy), dz)

    dlogps, dentropy = of_one(at.p, at.log_p, dz[0])
    rollout_dlogps, rollout_dentropy = of_one(at.q, at.log_q, dz[1])
    finite = alive[0][..., 0] & alive[1][..., 0] & jnp.isfinite(out.token_kl)
    kl = jnp.where(finite, out.token_kl, 0.0)[..., None]
    dkl = jnp.where(finite, along(at.excess, dz[0]) - along(at.q * (at.d + kl), dz[1]), 0.0)
    dtv = None
    if with_tv:

        def of_signs(pi: Array) -> Array:
            """``½ π_v (sign_v - E_π[sign])`` by the mass of the other signs: near ±1 the difference is lost."""
            more, less, same = (
                jnp.sum(jnp.where(where, pi, 0.0), axis=-1, keepdims=True)
                for where in (at.excess > 0, at.excess < 0, at.excess == 0)
            )
            of_same = 0.5 * (less - more)
            side = jnp.where(at.excess > 0, less + 0.5 * same, -(more + 0.5 * same))
            return pi * jnp.where(at.excess == 0, of_same, side)

        dtv = along(of_signs(at.p), dz[0]) - along(of_signs(at.q), dz[1])
        dtv = jnp.where(alive[0][..., 0] & alive[1][..., 0], dtv, 0.0)
    return out, VocabDivergence(
        policy_logps=dlogps,
        rollout_logps=rollout_dlogps,
        token_kl=dkl,
        token_tv=dtv,
        policy_entropy=dentropy,
        rollout_entropy=rollout_dentropy,
    )


def vocab_divergence(
    policy_logits: Float[AnyArray, "*S V"],
    rollout_logits: Float[AnyArray, "*S V"],
    tokens: Int[AnyArray, "*S"],
    *,
    temperature: float = 1.0,
) -> VocabDivergence:
    """KL(π_roll ‖ π_θ), total variation, entropies and token log-probs from full logits (TRM 2.3).

    Args:
      policy_logits: ``[..., V]``, before the temperature; ``-inf``, or at most -1e29 as masks often are, marks tokens
        outside the support (top-k, top-p).
      rollout_logits: ``[..., V]``, likewise; the two supports may differ.
      tokens: ``[...]`` sampled token ids in ``[0, V)``; any other gives NaN log-probs. Divergences do not depend on it.
      temperature: static, at least 1e-6; both logits are divided by it.

    Returns:
      ``VocabDivergence`` of float32 ``[...]`` arrays, nats. KL is ``+inf`` where the rollout can sample a token that
      the policy cannot; identical logits give exactly 0; a NaN logit gives NaN. Over 151,936 tokens KL and TV are right
      to 2e-5 of their values from KL = 1e-7 on (``experiments/divergence_accuracy``). All are differentiable in both
      logits: total variation with a slope of 0 where the two probabilities round alike, and with no slope where KL is
      infinite or a row has no softmax (a NaN in it, or no token), which a mask of the loss then keeps out.

    Raises:
      ValueError: on shapes that do not match or a temperature below 1e-6.
      TypeError: on what is no array, tokens that are not integers, or a temperature that is traced or no number.

    >>> out = vocab_divergence(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75])), jnp.array(0))
    >>> [round(float(x), 4) for x in (out.token_kl, out.token_tv, out.policy_logps)]
    [0.1308, 0.25, -0.6931]
    """
    required(policy_logits=policy_logits, rollout_logits=rollout_logits, tokens=tokens)
    shape = same_shape(policy_logits=policy_logits, rollout_logits=rollout_logits)
    if not shape or shape[-1] == 0:
        raise ValueError(f"logits must be [..., V], with V at least 1, given {list(shape)}")
    if (given := shape_of("tokens", tokens)) != shape[:-1]:
        raise ValueError(
            f"tokens must be {list(shape[:-1])}, the logits without their last axis, given {list(given)}: give each "
            "row of logits one token"
        )
    ids, divisor = token_ids(tokens), static_temperature(temperature)
    policy, rollout = (absent_values(jnp.asarray(z).astype(jnp.float32)) for z in (policy_logits, rollout_logits))
    out: VocabDivergence = logits_divergence(policy, rollout, ids, with_tv=True, temperature=divisor)
    return out
