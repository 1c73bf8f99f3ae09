"""JetStream imported: repaired, and the process left as it was found."""

from __future__ import annotations

import importlib.util
import logging
import sys
from unittest import mock

import jax.numpy as jnp
import pytest

from trm_jax.integrations.jetstream._library import jetstream


def test_its_function_that_current_jax_breaks_works():
    first, second = jnp.ones(3), jnp.ones(2)
    second.delete()
    jetstream().orchestrator.delete_pytree({"a": first, "b": [second, 3, None]})
    assert first.is_deleted()


def test_logging_is_left_alone_and_nothing_heavy_comes_in():
    jetstream.__wrapped__()
    root = logging.getLogger()
    assert root.level != logging.DEBUG
    assert not [h for h in root.handlers if isinstance(h, logging.StreamHandler) and h.stream is sys.stdout]
    if importlib.util.find_spec("seqio") is None:
        assert not {"seqio", "seqio.vocabularies", "tensorflow"} & set(sys.modules)


def test_what_is_missing_is_said():
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(ImportError, match=r"pip install 'trm-jax\[jetstream\]'"),
    ):
        jetstream.__wrapped__()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.delattr(jetstream().orchestrator, "delete_pytree")
    with pytest.raises(ImportError, match=r"install google-jetstream==0\.2\.2"):
        jetstream.__wrapped__()
