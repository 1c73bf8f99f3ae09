"""Makes requirements/all.txt, dev.txt and tpu.txt anew from pyproject.toml: pinned, hashed, for Python 3.11 to 3.13.

    python3 tools/lock.py              # keeps every pin that still satisfies pyproject.toml
    python3 tools/lock.py --upgrade    # the newest of everything

Needs ``uv`` (``pip install uv``). ``all`` is the core, the ``[all]`` extra and the build tools, but not what JetStream
asks for without our needing it (``requirements/overrides.txt``); ``dev`` adds the test and lint tools, with the same
pins for the rest. ``tpu`` is the core with the TPU's compiler, for tests that compile ahead of time:
apart, because it is large, and JAX talks of it on every machine without a TPU. The resolution forks by Python where a
package does, as jax.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    *("--universal", "--python-version", "3.11", "--generate-hashes"),
    *("--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--quiet"),
    *("--custom-compile-command", "python3 tools/lock.py"),  # no paths of this machine in the header
)
SETS = {
    "all": ("--extra", "all", "--override", "requirements/overrides.txt"),
    "dev": (
        *("--extra", "all", "--extra", "dev"),
        *("--constraint", "requirements/all.txt", "--override", "requirements/overrides.txt"),
    ),
    "tpu": ("--extra", "tpu", "--constraint", "requirements/all.txt"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="ignore the present pins")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    uv = shutil.which("uv")
    if uv is None:
        print("lock.py needs uv on the PATH: pip install uv", file=sys.stderr)
        return 1
    for name, extras in SETS.items():
        target = f"requirements/{name}.txt"
        command = [uv, "pip", "compile", "pyproject.toml", *extras, "--group", "build", *FLAGS, *upgrade]
        subprocess.run([*command, "--output-file", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
