"""Divergences between two policies: from the sampled token, from K tokens, from the whole vocabulary."""

from trm_jax.divergences._difference import difference_about_tops as difference_about_tops
from trm_jax.divergences._sampled import TopKDivergence as TopKDivergence
from trm_jax.divergences._sampled import binary_kl as binary_kl
from trm_jax.divergences._sampled import binary_tv as binary_tv
from trm_jax.divergences._sampled import k1 as k1
from trm_jax.divergences._sampled import k2 as k2
from trm_jax.divergences._sampled import k3 as k3
from trm_jax.divergences._sampled import log_odds_displacement as log_odds_displacement
from trm_jax.divergences._sampled import ratio_from_displacement as ratio_from_displacement
from trm_jax.divergences._sampled import topk_divergence as topk_divergence
from trm_jax.divergences._softmax import softmax_statistics as softmax_statistics
from trm_jax.divergences._vocab import logits_divergence as logits_divergence
from trm_jax.divergences._vocab import total_variation_of_sums as total_variation_of_sums
from trm_jax.divergences._vocab import vocab_divergence as vocab_divergence
