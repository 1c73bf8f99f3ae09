"""Blocks stay below the vector memory of every chip, and the largest are taken where they fit."""

from __future__ import annotations

import itertools

import pytest

from trm_jax.ops._vmem import CHIPS, Chip, chip_of, padded_bytes
from trm_jax.ops.linear_logps._config import gradient_bytes, logps_blocks, statistics_bytes
from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks, divergence_bytes

WIDTHS = (1, 64, 576, 2048, 4096, 5120)
TOKENS = (1, 300, 65_536)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("supported", [False, True])
def test_budgets_stay_below_the_limit(chip: Chip, supported: bool) -> None:
    for width, n, (hidden, head) in itertools.product(WIDTHS, TOKENS, ((2, 2), (4, 4), (2, 1), (4, 2))):
        if chip.name == "v4" and (hidden == 4 or width > 4096):
            continue  # 16 MiB: what does not fit is refused, below
        for heads in ((head,), (hidden, head)):
            kwargs = dict(widths=(width, width), hidden_itemsizes=(hidden, hidden), head_itemsizes=heads)
            blocks = divergence_blocks(chip, n, **kwargs, supported=supported)
            used = divergence_bytes(*blocks, **kwargs, supported=supported)
            assert used <= 0.9 * chip.vmem_bytes, (width, n, heads, blocks, used)
        for gradient, count in ((False, statistics_bytes), (True, gradient_bytes)):
            blocks = logps_blocks(chip, n, width, hidden, head, supported=supported, gradient=gradient)
            used = count(*blocks, width, hidden, head, supported)
            assert used <= 0.9 * chip.vmem_bytes, (width, n, blocks, used)
            assert blocks[0] % 128 == 0
            assert 1024 % blocks[1] == 0


def test_bytes_by_hand() -> None:
    # bfloat16, D = 4096, blocks of 512: hidden and head 4 MiB each, twice for the next block; a tile of logits 1 MiB.
    rows = 2 * (6 * 8 * 512 * 4 + 2 * 8 * 512 * 4 + 8 * 512 * 4)
    assert statistics_bytes(512, 512, 4096, 2, 2, False) == (4 * 4 + 2 * 1) * 2**20 + rows + 4 * 8 * 512 * 4
    assert padded_bytes(1, 129, 2) == 16 * 256 * 2


def test_large_blocks_where_they_fit() -> None:
    shape = dict(widths=(4096, 4096), hidden_itemsizes=(2, 2), head_itemsizes=(2,), supported=False)
    assert divergence_blocks(CHIPS["v6e"], 65_536, **shape) == (1024, 512)
    assert divergence_blocks(CHIPS["v6e"], 1, **shape) == (128, 512)
    assert divergence_blocks(CHIPS["v4"], 65_536, **shape)[0] < 512


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="implementation='chunked'"):
        logps_blocks(CHIPS["v4"], 4096, 65_536, 4, 4, supported=False, gradient=True)
    with pytest.raises(ValueError, match="choose one of v4"):
        chip_of("v99")
    assert chip_of(None).name == "v5p"  # the interpreter
