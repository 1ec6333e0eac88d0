"""The command ``unidist``: one sub-command a job, each in the module that does the job.

A sub-command is a :class:`Command` in ``COMMANDS``: its name, its arguments, and what runs. What
runs imports what it needs when it runs, so that ``unidist --help`` loads neither torch nor an
engine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["main"]


@dataclass(frozen=True)
class Command:
    """A sub-command: ``run`` gets the parsed arguments and returns the exit status."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def _build_horovod_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without-mpi", action="store_true", help="build with Gloo only; needs no MPI"
    )
    parser.add_argument(
        "--force", action="store_true", help="build even if a fitting Horovod is there already"
    )
    parser.add_argument(
        "--wheel-only",
        "--no-install",
        action="store_true",
        help="do not install; print the path of the wheel",
    )
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers at a time (default: one a processor)"
    )


def _build_horovod(arguments: argparse.Namespace) -> int:
    from unidist.backends.horovod_build import BuildError, Progress, build_horovod

    try:
        wheel = build_horovod(
            # On stderr: with --wheel-only, stdout is the path and nothing else.
            Progress(sys.stderr),
            without_mpi=arguments.without_mpi,
            force=arguments.force,
            wheel_only=arguments.wheel_only,
            jobs=arguments.jobs,
        )
    except BuildError as error:
        print(f"unidist build-horovod: {error}", file=sys.stderr)
        return 1
    if arguments.wheel_only:
        print(wheel)
    return 0


COMMANDS = (
    Command(
        "build-horovod",
        "build and install Horovod 0.28.1 for the torch and the MPI of this environment",
        _build_horovod_arguments,
        _build_horovod,
    ),
)


def _version() -> str:
    try:
        return importlib.metadata.version("unidist-torch")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unidist", description="Horovod's API for PyTorch on three interchangeable engines."
    )
    parser.add_argument("--version", action="version", version=f"unidist {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        sub = commands.add_parser(command.name, help=command.summary, description=description)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status (1: it failed, 2: wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"\nunidist {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
