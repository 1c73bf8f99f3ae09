"""google-jetstream 0.2.2, imported so that it runs on current JAX and leaves the process as it found it.

Repairs, all made on JetStream's own module objects in this process:

* ``orchestrator.delete_pytree`` calls ``jax.tree_map``, which JAX 0.6 removed; it is replaced.
* Its ``JetThread`` kills the process when a thread's function raises, and the threads that detokenize keep a process
  from ending. Ours says what was raised and ends alone, and is a daemon; who uses the driver looks whether it lives.
* Importing the orchestrator sets the root logger to DEBUG and adds a handler to standard output; both are undone.
* Its tokenizers import seqio (hence TensorFlow, 2 GB) and tiktoken at the top of modules that the driver needs. Where
  these packages are not installed, modules with the four names it imports stand in for them during the import only; its
  own tokenizers, which we do not use, would fail.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["JetStream", "jetstream"]

_STAND_INS = {
    "seqio": (),
    "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
    "tiktoken": ("Encoding",),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


class JetStream:
    """JetStream's modules.

    Attributes:
      orchestrator: ``Driver``, ``ActiveRequest``.
      engine_api: ``Engine``, ``ResultTokens``.
    """

    def __init__(self, orchestrator: Any, engine_api: Any) -> None:
        self.orchestrator, self.engine_api = orchestrator, engine_api


@functools.cache
def jetstream() -> JetStream:
    """Imports and repairs JetStream; the same object at every call.

    Raises:
      ImportError: it, or what it needs, is not installed.
    """
    if importlib.util.find_spec("jetstream") is None:
        raise ImportError("JetStream's driver needs google-jetstream 0.2.2: pip install 'trm-jax[jetstream]'.")
    with _logging_kept(), _stand_ins(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_api = importlib.import_module("jetstream.engine.engine_api")
        orchestrator = importlib.import_module("jetstream.core.orchestrator")
    if not hasattr(orchestrator, "delete_pytree") or not hasattr(orchestrator.Driver, "_transfer_thread"):
        raise ImportError("this google-jetstream is not 0.2.2, whose driver is known: install google-jetstream==0.2.2.")
    vars(orchestrator).update(delete_pytree=_delete_pytree, JetThread=_Thread)
    return JetStream(orchestrator, engine_api)


class _Thread(threading.Thread):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "daemon": True})


def _delete_pytree(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    absent = {top for top in ("seqio", "tiktoken") if importlib.util.find_spec(top) is None}
    placed = [name for name in _STAND_INS if name.split(".")[0] in absent and name not in sys.modules]
    for name in placed:
        module = types.ModuleType(name)
        for attribute in _STAND_INS[name]:
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]
