"""Corrections for a policy that samples and a policy that trains: trust region masks, mismatch weights, their sum."""

from trm_jax.correction._compose import correct as correct
from trm_jax.correction._config import CorrectionConfig as CorrectionConfig
from trm_jax.correction._config import MaskName as MaskName
from trm_jax.correction._config import WeightName as WeightName
from trm_jax.correction._divergence_masks import max_kl_mask as max_kl_mask
from trm_jax.correction._divergence_masks import max_tv_mask as max_tv_mask
from trm_jax.correction._divergence_masks import mean_kl_mask as mean_kl_mask
from trm_jax.correction._divergence_masks import sampled_mask as sampled_mask
from trm_jax.correction._metrics import effective_sample_fraction as effective_sample_fraction
from trm_jax.correction._presets import preset as preset
from trm_jax.correction._presets import presets as presets
from trm_jax.correction._ratio_masks import geometric_mask as geometric_mask
from trm_jax.correction._ratio_masks import length_neutral_mask as length_neutral_mask
from trm_jax.correction._ratio_masks import sequence_error_ratio_mask as sequence_error_ratio_mask
from trm_jax.correction._ratio_masks import token_outlier_mask as token_outlier_mask
from trm_jax.correction._sequence_weights import geometric_masked_weights as geometric_masked_weights
from trm_jax.correction._sequence_weights import sequence_masked_weights as sequence_masked_weights
from trm_jax.correction._sequence_weights import sequence_truncated_weights as sequence_truncated_weights
from trm_jax.correction._weights import bernoulli_kl_weights as bernoulli_kl_weights
from trm_jax.correction._weights import calibrated_weights as calibrated_weights
from trm_jax.correction._weights import exact_weights as exact_weights
from trm_jax.correction._weights import masked_weights as masked_weights
from trm_jax.correction._weights import truncated_weights as truncated_weights
from trm_jax.correction._weights import unit_weights as unit_weights
