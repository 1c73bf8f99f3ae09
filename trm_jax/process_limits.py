"""What a process that runs hostile input takes from itself. Its program reads this file by its path, without JAX."""

from __future__ import annotations

import contextlib

__all__ = ["limit_memory_and_core", "limit_processor_time"]


def limit_memory_and_core(gibibytes: int) -> None:
    """So much address space, and no core file when the limit on processor time ends the process."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = gibibytes * 2**30 if most == resource.RLIM_INFINITY else min(gibibytes * 2**30, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_processor_time(seconds: int) -> None:
    """So many further seconds, after which the kernel ends the process."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
