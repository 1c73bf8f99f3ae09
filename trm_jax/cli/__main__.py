"""``python -m trm_jax.cli``."""

import sys

from trm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
