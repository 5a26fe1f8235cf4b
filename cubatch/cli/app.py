"""
The command line: each command parses options, calls the library once, and prints tables or JSON.

Every command takes `--json FILE` (`-` is stdout).  Exit codes: 0 done, 1 the request failed, 2 the request makes no
sense, 130 interrupted.  Commands import heavy modules when they run, so that `cubatch --help` is fast.
"""

from __future__ import annotations

import errno
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cubatch import __version__, files
from cubatch.cli import (
    bench,
    candidates,
    console,
    devices,
    fleet,
    kernels,
    layers,
    memory,
    models,
    occupancy,
    predict,
    profile,
    refusals,
    serving,
    store,
    study,
    train,
    tune,
    watch,
)
from cubatch.errors import CubatchError

# A new command is a function in a module of its name, imported above and listed here. `--help` shows this order,
# groups last.
COMMANDS = (
    tune.tune, predict.predict, candidates.candidates, memory.memory, serving.serving, profile.profile, train.train,
    study.study, models.models, layers.layers, devices.devices, watch.watch, occupancy.occupancy, kernels.kernels,
)  # fmt: skip
GROUPS = {"store": store.app, "bench": bench.app, "fleet": fleet.app}


class _Group(TyperGroup):
    """A group of commands that turns errors and Ctrl-C into messages and exit codes: docs/reference/commands.md."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except CubatchError as error:
            console.say(f"cubatch: {refusals.message(error, self._command(ctx), sys.argv)}")
            raise typer.Exit(refusals.exit_code(error)) from error
        except typer.BadParameter as error:
            raise refusals.reword(error) from None
        except KeyboardInterrupt as stop:
            console.say("cubatch: interrupted")
            raise typer.Exit(console.INTERRUPTED) from stop

    def _command(self, ctx: typer.Context) -> Any:
        """Return the Typer command that the user gave: the inner command for a group such as `store`."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        inner = getattr(command, "commands", {})
        return next((inner[word] for word in sys.argv[1:] if word in inner), command)


_HELP = "Find the batch size at which a neural network runs fastest on a device, and the largest that fits."
app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=f"{_HELP}\n\nExample: cubatch tune mnist-cnn --mode training",
)
for command in COMMANDS:
    app.command()(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options that stand before the name of a command, as in `cubatch --version`."""


_STREAM_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF}


def main() -> None:
    """
    Run the command line.

    SIGTERM acts as Ctrl-C, so that timings are cached when a batch system ends the job.
    """
    console.plain_warnings()
    command = typer.main.get_command(app)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell ignores SIGINT in background jobs
            signal.signal(number, _interrupt)
    try:
        command(prog_name="cubatch")
    except OSError as error:
        if error.filename is not None or error.errno not in _STREAM_ERRORS:
            raise
        console.say(f"cubatch: stdout cannot be written: {files.reason(error)}")
        console.abandon_stdout()
        sys.exit(refusals.FAILED)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
