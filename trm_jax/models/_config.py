"""The shape of a transformer."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["LatentConfig", "TransformerConfig", "YarnConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from one vector.

    Of a head's ``head_dim`` query and key coordinates the last ``rope_dim`` carry the position; that part of the key is
    shared by all heads. The cache holds ``kv_rank + rope_dim`` numbers a token instead of ``2 · n_heads · head_dim``.

    Attributes:
      kv_rank: width of the latent that keys and values are made from.
      rope_dim: rotary coordinates of a head; even, below ``head_dim``.
      value_dim: width of one head's value.
      query_rank: width of the latent that queries are made from; None projects them from the stream at once.
      norm_eps: epsilon of the norms of the latents (the model's own 1e-6, whatever that of the stream is).
    """

    kv_rank: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_dim", "value_dim", "query_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"latent.{name}={value}: must be at least 1.")
        if self.rope_dim % 2:
            raise ValueError(f"latent.rope_dim={self.rope_dim} must be even: rotary positions turn pairs.")
        if self.norm_eps <= 0:
            raise ValueError(f"latent.norm_eps={self.norm_eps}: must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN (Peng et al., arXiv 2309.00071): rotary frequencies for contexts longer than those of pretraining.

    With ``m(s) = 1 + 0.1 s ln(factor)``, rotated coordinates are multiplied by ``m(mscale) / m(mscale_all_dim)``, and
    attention scores by ``m(mscale_all_dim)²``.

    Attributes:
      factor: longest context over that of pretraining; at least 1.
      original_length: context of pretraining, tokens.
      beta_fast: frequencies that turn more often than this within ``original_length`` stay.
      beta_slow: those that turn less often are divided by ``factor``; between the two a linear ramp.
      mscale: see above.
      mscale_all_dim: see above; 0 leaves the scores alone.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if not self.factor >= 1 or self.original_length < 1:
            raise ValueError(f"yarn: factor={self.factor} and original_length={self.original_length}: at least 1 each.")
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"yarn: 0 < beta_slow={self.beta_slow} < beta_fast={self.beta_fast} is required.")

    def magnitude(self, scale: float) -> float:
        """``1 + 0.1 · scale · ln(factor)``."""
        return 1.0 + 0.1 * scale * math.log(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape of a decoder-only transformer: RMSNorm, rotary positions, SwiGLU, and the parts that are chosen here.

    The defaults give the Llama block. Qwen2.5 sets ``qkv_bias``; Qwen3 ``qk_norm``; Qwen3-MoE also ``n_experts``;
    Qwen2-MoE ``qkv_bias``, ``n_experts``, ``d_ff_shared``, ``shared_router``; DeepSeek-V2 ``latent``, ``yarn``,
    ``n_experts``, ``d_ff_shared`` and ``n_dense_layers``.

    Attributes:
      vocab_size: ``V``, number of token ids.
      d_model: ``D``, width of the residual stream.
      n_layers: number of blocks.
      n_heads: query heads.
      n_kv_heads: key/value heads; divides ``n_heads``. Equal to it with ``latent``.
      head_dim: width of one head's query and key; even (rotary positions turn pairs).
      d_ff: width of the gated feed-forward layer (of each expert when ``n_experts > 0``).
      qkv_bias: query, key and value projections have a bias.
      qk_norm: RMSNorm over ``head_dim`` on every query and key before it is rotated.
      latent: keys and values from a latent vector; None is grouped-query attention.
      n_experts: number of experts; 0 makes every block dense.
      experts_per_token: experts a token is sent to, 1 .. ``n_experts``.
      normalize_experts: the chosen experts' weights sum to 1 (softmax over them); False leaves the softmax over all.
      expert_scale: factor on the experts' weights.
      d_ff_shared: width of the feed-forward layer that runs beside the experts on every token; 0 is none.
      shared_router: that layer's output is multiplied by ``sigmoid(x · w)``.
      n_dense_layers: leading blocks without experts; below ``n_layers``.
      d_ff_dense: feed-forward width of those.
      rope_theta: base of the rotary frequencies.
      yarn: their extension to long contexts; None is plain.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: the output head is the input embedding.

    Raises:
      ValueError: for a shape that cannot be built, naming field, value and rule.

    >>> TransformerConfig(vocab_size=16, n_heads=4, n_kv_heads=3)
    Traceback (most recent call last):
      ...
    ValueError: n_kv_heads=3 must divide n_heads=4.
    """

    vocab_size: int
    d_model: int = 96
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 24
    d_ff: int = 256
    qkv_bias: bool = False
    qk_norm: bool = False
    latent: LatentConfig | None = None
    n_experts: int = 0
    experts_per_token: int = 2
    normalize_experts: bool = True
    expert_scale: float = 1.0
    d_ff_shared: int = 0
    shared_router: bool = False
    n_dense_layers: int = 0
    d_ff_dense: int = 0
    rope_theta: float = 10_000.0
    yarn: YarnConfig | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of coordinates.")
        if not (0 < self.rope_theta < math.inf and 0 < self.norm_eps < math.inf):
            raise ValueError(f"rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be positive and finite.")
        self._check_experts()
        self._check_latent()

    def _check_experts(self) -> None:
        for name in ("n_experts", "d_ff_shared", "n_dense_layers", "d_ff_dense"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 (none) or more.")
        if not self.n_experts:
            for name in ("d_ff_shared", "n_dense_layers", "d_ff_dense", "shared_router"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} needs a mixture of experts; set n_experts.")
            return
        if not 1 <= self.experts_per_token <= self.n_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must lie in 1..n_experts={self.n_experts}.")
        if self.shared_router and not self.d_ff_shared:
            raise ValueError("shared_router=True weighs a shared layer; set its width, d_ff_shared.")
        if self.n_dense_layers >= self.n_layers:
            raise ValueError(
                f"n_dense_layers={self.n_dense_layers} must be below n_layers={self.n_layers}; "
                "for a dense model set n_experts=0."
            )
        if bool(self.n_dense_layers) != bool(self.d_ff_dense):
            raise ValueError(
                f"n_dense_layers={self.n_dense_layers} and d_ff_dense={self.d_ff_dense}: set both or neither."
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if self.qkv_bias or self.qk_norm:
            raise ValueError("latent attention has neither qkv_bias nor qk_norm; leave both False.")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"latent attention has a key for each of n_heads={self.n_heads} heads; set n_kv_heads to it."
            )
        if self.latent.rope_dim >= self.head_dim:
            raise ValueError(f"latent.rope_dim={self.latent.rope_dim} must be below head_dim={self.head_dim}.")

    @property
    def moe_layers(self) -> int:
        """Blocks with experts."""
        return self.n_layers - self.n_dense_layers if self.n_experts else 0
