"""`hpc-train train CONFIG.yaml [--section.key VALUE ...]`, on every rank of the job."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from hpc_train.cli.verb import show_help, wants_help
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.config import RunConfig
    from hpc_train.mpi.runtime import Runtime


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from hpc_train.config import file

    if wants_help(arguments):
        return show_help(file.config_parser(documented=True))
    path, given = file.split(arguments)
    if any(option.startswith("--print_config") for option in given):
        plain = [option for option in given if not option.startswith("--print_config")]
        file.load(path, plain, later=file.PATH_KEYS)  # checks the values
        file.load(path, given)  # the parser prints the configuration and exits
    from hpc_train.job.preemption import Interrupts, hold_signals

    hold_signals()  # a scheduler may ask us to stop while MPI and torch load, which takes seconds
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, Interrupts())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a warm start holds it back
    settings: RunConfig | Exception
    try:  # before MPI starts, because after that no process may be started
        if not arguments:
            raise UserError(
                "no configuration is given",
                "give CONFIG.yaml, or keys such as --data.path; --help lists all",
            )
        settings = file.load(path, given)
        if settings.data.workers:
            from hpc_train.data.fork_server import start_workers

            start_workers()
    except Exception as error:  # noqa: BLE001  # raised in `_train`, so that all ranks learn of it
        settings = error
    from hpc_train.job.program import run as run_program

    return run_program(lambda runtime: _train(settings, runtime))


def _train(settings: RunConfig | Exception, runtime: Runtime) -> None:
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        if isinstance(settings, Exception):
            raise settings
        # Load torch last: mistakes show at once.
        if settings.model.is_language:
            from hpc_train.training.gpt import train_gpt as train
        else:
            from hpc_train.training.tables import train_table as train
    train(settings, runtime)
