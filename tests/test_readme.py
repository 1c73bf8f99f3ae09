"""The Python of the README runs as it stands, on arrays as a trainer has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_loss_in_your_own_trainer() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    rng = np.random.default_rng(0)
    b, t, d, v = 3, 4, 5, 11

    def f32(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    logps = -np.abs(f32(b, t))
    given: dict[str, Any] = {
        "policy_hidden": f32(b * t, d),
        "policy_head": f32(v, d),
        "tokens": rng.integers(0, v, b * t),
        "policy_logps": logps,
        "proximal_logps": logps,
        "rollout_logps": logps,
        "response_mask": np.ones((b, t), bool),
        "advantages": f32(b),
    }
    given |= {"rollout_hidden": given["policy_hidden"], "rollout_head": given["policy_head"]}
    exec(code, given)
    # One policy on both sides: nothing is rejected, every ratio is 1, and the loss is minus the mean advantage.
    np.testing.assert_allclose(given["loss"].value, -given["advantages"].mean(), rtol=1e-5)
    assert np.asarray(given["corrected"].sequence_keep).all()
