"""
The command line: options in, one library call, a grid or JSON out.

Every command takes `--json FILE` (`-` is stdout) and exits with 0 when done, 1 when what was asked could
not be done, 2 when it makes no sense, 130 when interrupted.  Everything heavy is imported inside the commands, so
that `cubatch --help` comes at once.
"""

from __future__ import annotations

import errno
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cubatch import __version__
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
    store,
    study,
    train,
    tune,
    watch,
)
from cubatch.errors import CubatchError

# A new command is a function of its name in a file of its name beside this one, imported above and listed here;
# `--help` keeps the order, groups last.
COMMANDS = (
    kernels.kernels, occupancy.occupancy, predict.predict, tune.tune, candidates.candidates, memory.memory,
    profile.profile, models.models, layers.layers, devices.devices, watch.watch, train.train,
    study.study,
)  # fmt: skip
GROUPS = {"store": store.app, "bench": bench.app, "fleet": fleet.app}


class _Group(TyperGroup):
    """Turn errors and interruptions into the exit codes of docs/reference/api.md, the same for every command."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except CubatchError as error:
            console.say(f"cubatch: {refusals.sentence(error, self._called(ctx))}")
            raise typer.Exit(refusals.exit_code(error)) from error
        except typer.BadParameter as error:
            raise refusals.reworded(error) from None
        except KeyboardInterrupt as stop:
            console.say("cubatch: interrupted")
            raise typer.Exit(console.INTERRUPTED) from stop

    def _called(self, ctx: typer.Context) -> Any:
        """Find the command that was given; one of a group by the word behind the group's."""
        found = self.commands.get(ctx.invoked_subcommand or "")
        within = getattr(found, "commands", {})
        return next((within[word] for word in sys.argv[1:] if word in within), found)


_HELP = "Find the batch size at which a neural network runs fastest, and what fits."
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


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Hold what comes before the command."""


def main() -> None:
    """
    Run the command line.

    SIGTERM is treated as Ctrl-C, so that a batch system's end of time keeps what was measured.
    """
    console.plain_warnings()
    command = typer.main.get_command(app)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job that a shell began in the background
            signal.signal(number, _interrupt)
    try:
        command(prog_name="cubatch")
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        console.say(f"cubatch: {console.lost(error)}")  # of --help, which the library of the command line writes
        sys.exit(refusals.FAILED)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
