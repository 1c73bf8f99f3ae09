"""TPU kernels: one sweep over both heads for normalisers, entropies and KL, a second one for TV.

First sweep, with ``x = (z_θ - ref_θ) - (z_roll - ref_roll)``: beside each policy's online softmax it sums
``E_roll[x]`` and the curvature ``E_roll[expm1(x) - x]``, whose terms are non-negative, as two terms of a series for
small ``x`` and as ``w_θ - w_roll (1 + x)`` with the weights at hand otherwise, whichever is larger: no third
exponential. The policy's running reference is its top, the rollout's stands where ``x`` has a mean near 0: where it has
not, as about both tops where a likely token of a flat policy has moved, the curvature is much more than KL, and a
series exact to 6e-4 is not enough: what it leaves out of a tile is added, as the moments of that tile's ``x`` tell it,
and where there are few tiles the series is exact. New references move both sums exactly; how far they stand apart is
made of the last tile, and where a new top of either outweighs what was seen, they are both tops. The last ones stand at
their tops, or one of them below. Second sweep: ``½ Σ π_roll |expm1(x - normaliser)|``, or ``|π_θ - π_roll|`` where
those differ.

Both read each head once for every block of tokens and keep one tile of logits. Epilogues stand in the same basic block
as the products of other token columns, the only place where the scheduler overlaps the vector with the matrix unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from trm_jax.ops._online_softmax import Softmax, softmax_add, softmax_merge, softmax_start, softmax_update
from trm_jax.ops._operands import Operand, Tiling, by_name
from trm_jax.ops._partials import BANNED, Bans, moved
from trm_jax.ops._tiles import CHUNK, LANES, MASKED, UNSEEN, Units, fold_rows, is_token, logit_tile
from trm_jax.ops.linear_vocab_divergence._config import STATE, SUMS

__all__ = ["Static", "statistics_kernel", "tv_kernel"]

_ROUNDING = 2e-6
"""Above what rounding makes of ``w_θ - w_roll (1 + x)``, in units of ``w_roll``.

``x²/2 + x³/6`` never exceeds ``expm1(x) - x``, and neither does the difference less this: the larger of them is at most
6e-4 below, most where they meet, at ``|x| = 0.08``.
"""

_FEW_TILES = 16
"""Up to so many the curvature is exact."""

_LARGEST = 1e35
"""Of a difference of logits, whose products with weights are finite then."""

_TINY = 1 / 32
"""Below it the second sweep takes two terms of ``expm1``, exact to 2e-4 of it; above, ``π_θ - π_roll``."""


class Static(NamedTuple):
    """What a kernel knows when it is compiled."""

    vocabulary: int
    tiling: Tiling
    units: Units
    layout: tuple[Operand, ...]
    group: int
    biased: bool
    picks: bool

    @property
    def few_tiles(self) -> bool:
        """Whether the first tile, whose references stand at the tops, is much of the vocabulary."""
        return self.vocabulary <= _FEW_TILES * self.tiling.vocabulary

    def tiles(
        self, refs: dict[str, Any], columns: slice, first: Array, ragged: bool, beside: Iterator[None]
    ) -> tuple[Array, Array]:
        """Both policies' logits for some columns of the tokens, and ``beside`` run to its end."""
        rollout_head = "rollout_" if "rollout_head" in refs else "policy_"
        policy, rollout = (
            logit_tile(refs, prefix, head, columns, self.units, first, self.vocabulary, ragged=ragged, beside=beside)
            for prefix, head in (("policy_", "policy_"), ("rollout_", rollout_head))
        )
        for _ in beside:
            pass
        return policy, rollout

    def sweep(self, refs: dict[str, Any], held: Any, step: Any, finish: Any) -> None:
        """Runs the pieces of ``step(columns, first, tiles)`` on a tile's columns, and ``finish`` after the last tile.

        The last columns' logits are held over to the next tile, whose first product has nothing else beside it.
        """
        j, last = pl.program_id(1), pl.num_programs(1) - 1
        size, tokens = self.tiling.vocabulary, self.tiling.tokens
        first = j * size
        groups = [slice(start, start + self.group) for start in range(0, tokens, self.group)]

        @pl.when(j == 0)
        def _() -> None:
            held[...] = jnp.full_like(held, MASKED)  # adds nothing

        def tile(ragged: bool) -> None:
            waiting = groups[-1], first - size, (held[0], held[1])
            for columns in groups:
                tiles = self.tiles(refs, columns, first, ragged, step(*waiting))
                waiting = columns, first, tiles
            held[0], held[1] = waiting[2]

        def rest(k: Array, _: None) -> None:
            inside = pl.ds(pl.multiple_of(k * LANES, LANES), LANES)
            columns = pl.ds(pl.multiple_of(groups[-1].start + k * LANES, LANES), LANES)
            for _ in step(columns, first, (held[0, :, inside], held[1, :, inside])):
                pass

        if self.vocabulary % size:
            pl.when(j < last)(lambda: tile(False))
            pl.when(j == last)(lambda: tile(True))
        else:
            tile(False)

        @pl.when(j == last)
        def _() -> None:
            # A loop, because a branch of straight code would be made part of every step by predicates.
            jax.lax.fori_loop(0, self.group // LANES, rest, None)
            finish()


def _difference(t_gap: Array, r_gap: Array, units: Units) -> Array:
    """In logits, of logits that count from their references: these gaps are exact near them. Finite."""
    d = t_gap - r_gap
    if units.unit == 1.0:
        return d
    limit = _LARGEST / units.unit
    return (d if limit > -MASKED else jnp.clip(d, -limit, limit)) * units.unit


def _curvature(w: Array, v: Array, x: Array, vx: Array) -> Array:
    """``v (expm1(x) - x)`` to 6e-4, with ``w = v exp(x)``; ``vx`` is at hand."""
    series = vx * x * (0.5 + x * (1 / 6))
    return jnp.maximum(series, w - v * (x + (1.0 + _ROUNDING)))


def _exact_curvature(w: Array, v: Array, x: Array) -> Array:
    """The same to 3e-6, for half as much work again."""
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))
    return jnp.where(jnp.abs(x) < 0.35, v * (x * x) * series, w - v * (1.0 + x))


def _left_out(total: Array, curvature: Array, moment: Array) -> Array:
    """What ``_curvature`` has left out of a tile whose sums these are, ``Σ v min(x⁴/24, 2e-6)``, nearly.

    Where KL is much less than the curvature, ``x`` has a mean ``m`` and little variance ``s``, and ``E[x⁴]`` is ``m⁴ +
    6 m² s`` where it spreads evenly and ``m⁴ + 3 m² s`` where a token of little mass has moved alone: 4.5 here, which
    is off by less than 1e-3 of KL in both, and by up to 5e-3 where ``m`` is within a few ``sqrt(s)`` of 0.083, so that
    the mean of the smaller is not the smaller of the means. ``s`` is made of the curvature, ``E[x²]/2 + E[x³]/6``.
    """
    scale = pl.reciprocal(jnp.maximum(total, 1e-30), approx=True)
    mean = moment * scale
    square = mean * mean
    fourth = square * (scale * curvature * (9 / 24) - square * (mean * (1.5 / 24) + 3.5 / 24))
    return total * jnp.minimum(fourth, _ROUNDING)


_DRIFT = 8.0
"""Logits by which the references may stand further apart than the tops do, or less."""

_OUTWEIGHS = 2.0
"""How many times a top's weight what was seen must have, that they do."""


class _Sums(NamedTuple):
    """Running sums, ``[8, tokens]`` each, in the kernel's units; ``curvature`` and what follows as in the record."""

    policy: Softmax
    rollout: Softmax
    curvature: Array
    moment: Array
    bans: Bans | None

    @classmethod
    def of(cls, rows: Any, biased: bool) -> _Sums:
        bans = Bans(rows[10], rows[11]) if biased else None
        return cls(Softmax(*rows[:4]), Softmax(*rows[4:8]), rows[8], rows[9], bans)

    @property
    def shared(self) -> Array:
        """The rollout's total over the tokens that the policy does not ban."""
        return self.rollout.total if self.bans is None else self.rollout.total - self.bans.mass

    def about(self, policy_top: Array, rollout_top: Array, units: Units) -> _Sums:
        """The same sums referred to other references, near the tops or larger ones."""
        policy, policy_factor = softmax_update(self.policy, policy_top, units.exponent)
        rollout, rollout_factor = softmax_update(self.rollout, rollout_top, units.exponent)
        unseen = (self.policy.top <= UNSEEN) | (self.rollout.top <= UNSEEN)
        gap = (policy_top - self.policy.top) - (rollout_top - self.rollout.top)
        step = jnp.where(unseen, 0.0, gap * units.unit)
        sums = self.curvature, self.moment, self.shared
        curvature, moment = moved(*sums, policy.total, policy_factor, rollout_factor, step)
        bans = None if self.bans is None else self.bans.moved(rollout_factor, step)
        return _Sums(policy, rollout, curvature, moment, bans)

    def plus(self, tile: Sequence[Array]) -> _Sums:
        """With the sums of a tile about the same references: totals and moments of both, and the others."""
        policy, rollout = softmax_add(self.policy, *tile[:2]), softmax_add(self.rollout, *tile[2:4])
        bans = None if self.bans is None else Bans(*(a + b for a, b in zip(self.bans, tile[6:], strict=True)))
        return _Sums(policy, rollout, self.curvature + tile[4], self.moment + tile[5], bans)

    def _centre(self, units: Units) -> Array:
        """How far apart references stand with which ``x`` would have a mean of 0, nearly; NaN before any column."""
        gained = self.curvature + self.moment
        gained = gained if self.bans is None else gained - self.bans.mass
        growth = gained * pl.reciprocal(self.rollout.total, approx=True)
        out: Array = (self.policy.top - self.rollout.top) + jnp.log(jnp.maximum(1.0 + growth, 1e-3)) * (1 / units.unit)
        return out

    def outlook(self, t_max: Array, r_max: Array, units: Units) -> tuple[Array, Array, Array]:
        """How far apart the next tile's references stand, and below which new tops of both policies they do."""
        centre, tops = self._centre(units), t_max - r_max
        near = jnp.abs(centre - tops) < _DRIFT / units.unit
        r_limit = jnp.log(self.rollout.total * (1.0 / _OUTWEIGHS)) * (1 / units.unit) + self.rollout.top
        return jnp.where(near, centre, tops), r_limit + tops, r_limit

    def merged(self, t_max: Array, r_max: Array, units: Units) -> list[Array]:
        """The rows of the output, the eight sublanes as one."""
        shape = self.moment.shape
        t_max, r_max = (jnp.max(x, axis=0, keepdims=True) for x in (t_max, r_max))
        apart = self._centre(units) - (t_max - r_max)
        near = jnp.abs(apart) < _DRIFT / units.unit
        mass = jnp.where(near, self.rollout.total * jnp.exp2(units.exponent * (self.rollout.top - r_max)), 0.0)
        mass, pull = (jnp.sum(x, axis=0, keepdims=True) for x in (mass, mass * jnp.where(near, apart, 0.0)))
        apart = jnp.where(mass > _OUTWEIGHS, pull / jnp.maximum(mass, 1.0), 0.0)
        tops = t_max + jnp.minimum(apart, 0.0), r_max - jnp.maximum(apart, 0.0)
        alike = self.about(jnp.broadcast_to(tops[0], shape), jnp.broadcast_to(tops[1], shape), units)
        rows: list[Array] = []
        for old, new, top in ((self.policy, alike.policy, tops[0]), (self.rollout, alike.rollout, tops[1])):
            rows += softmax_merge(new, top, old.top == top)
        bans = alike.bans or Bans(*[jnp.zeros(shape, jnp.float32)] * 2)
        return rows + [jnp.sum(x, axis=0, keepdims=True) for x in (alike.curvature, alike.moment, *bans)]


def statistics_kernel(static: Static, *refs: Any) -> None:
    """The first sweep: of each policy the rows of ``softmax_merge``, the sums of both, and their tokens' logits."""
    named, (out, state, held) = by_name(static.layout, refs)
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        start = softmax_start(state.shape[1:])
        for i, value in enumerate((*start, *start)):
            state[i] = value
        state[8:SUMS] = jnp.zeros_like(state[8:SUMS])
        for i, value in enumerate((start.top, start.top, start.total, start.top, start.top), SUMS):
            state[i] = value
        if static.picks:
            state[STATE:] = jnp.zeros_like(state[STATE:])

    def step(columns: Any, first: Array, tiles: tuple[Array, Array]) -> Iterator[None]:
        t_tile, r_tile = tiles
        tokens = named["tokens"][:, columns]
        old = _Sums.of([state[i, :, columns] for i in range(SUMS)], static.biased)
        t_max, r_max, offset, t_limit, r_limit = (state[i, :, columns] for i in range(SUMS, STATE))
        t_max = jnp.maximum(t_max, jnp.max(fold_rows(t_tile, 0, size), axis=0))
        r_max = jnp.maximum(r_max, jnp.max(fold_rows(r_tile, 0, size), axis=0))
        apart = (t_max < t_limit) & (r_max < r_limit)
        r_top = jnp.where(apart, jnp.maximum(r_max - _DRIFT / units.unit, t_max - offset), r_max)
        rows = [jnp.zeros_like(t_max)] * 8  # as in plus
        picked = [jnp.zeros_like(t_max)] * 2
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            own = is_token(tokens, first, start, CHUNK)
            t_gap, r_gap = (z - jnp.where(own, -MASKED, top) for z, top in ((t, t_max), (r, r_top)))  # weighs 0
            w, v = jnp.exp2(units.exponent * t_gap), jnp.exp2(units.exponent * r_gap)
            x = _difference(t_gap, r_gap, units)
            if static.biased:
                banned = ((x < BANNED) | (t <= UNSEEN)) & (r_gap > UNSEEN)
                rows[6] += jnp.sum(jnp.where(banned, v, 0.0), axis=0)
                ban = jnp.where(t <= UNSEEN, jnp.inf, v * (-1.0 - x))
                rows[7] += jnp.sum(jnp.where(banned, ban, 0.0), axis=0)
                x = jnp.where(banned, 0.0, x)
            vx = v * x
            curvature = _exact_curvature(w, v, x) if static.few_tiles else _curvature(w, v, x, vx)
            for i, value in enumerate((w, w * t_gap, v, v * r_gap, curvature, vx)):
                rows[i] += jnp.sum(value, axis=0)
            if static.picks:
                picked = [a + jnp.sum(jnp.where(own, z, 0.0), axis=0) for a, z in zip(picked, (t, r), strict=True)]
            yield
        if not static.few_tiles:
            rows[4] += _left_out(rows[2], rows[4], rows[5])
        sums = old.about(t_max, r_top, units).plus(rows)
        for i, value in enumerate(jax.tree.leaves(sums)):
            state[i, :, columns] = value
        for i, value in enumerate((t_max, r_max, *sums.outlook(t_max, r_max, units)), SUMS):
            state[i, :, columns] = value
        if static.picks:
            for i, value in enumerate(picked, STATE):
                state[i, :, columns] += value

    def finish() -> None:
        sums = _Sums.of([state[i] for i in range(SUMS)], static.biased)
        rows = sums.merged(state[SUMS], state[SUMS + 1], units)
        if static.picks:
            rows += [jnp.sum(state[i], axis=0, keepdims=True) for i in (STATE, STATE + 1)]
        for i, value in enumerate(rows):
            out[i : i + 1, :] = value

    static.sweep(named, held, step, finish)


def tv_kernel(static: Static, *refs: Any) -> None:
    """The second sweep: one row of total variation, the sampled tokens left out."""
    named, (out, state, held) = by_name(static.layout, refs)
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    def step(columns: Any, first: Array, tiles: tuple[Array, Array]) -> Iterator[None]:
        t_tile, r_tile = tiles
        rows = ("policy_top", "policy_total", "rollout_top", "rollout_total", "normaliser")
        t_top, t_total, r_top, r_total, normaliser = (named[name][:, columns] for name in rows)
        tokens, total = named["tokens"][:, columns], state[:, columns]
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            t_gap, r_gap = t - t_top, r - r_top
            p, q = jnp.exp2(units.exponent * (t_gap - t_total)), jnp.exp2(units.exponent * (r_gap - r_total))
            d = _difference(t_gap, r_gap, units) - normaliser
            gap = jnp.where(jnp.abs(d) < _TINY, q * d * (1.0 + 0.5 * d), p - q)
            total += jnp.sum(jnp.where(is_token(tokens, first, start, CHUNK), 0.0, jnp.abs(gap)), axis=0)
            yield
        state[:, columns] = total

    def finish() -> None:
        out[...] = 0.5 * jnp.sum(state[...], axis=0, keepdims=True)

    static.sweep(named, held, step, finish)
