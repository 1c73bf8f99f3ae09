"""The command ``trm-jax``: a module a command."""

from trm_jax.cli._main import main as main
