"""What a job asks its scheduler for: nodes, ranks, time, GPUs, memory and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_train.errors import UserError

NUMBERS = ("nodes", "ranks", "ranks_per_node", "threads", "cores", "gpus", "memory_gb")


@dataclass(frozen=True)
class Resources:
    """What a job asks for. 0 and "" leave a choice to the scheduler.

    Args:
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        threads: cores of each rank.
        seconds: time limit; an MPIJob has none.
        gpus, memory_gb: GPUs and memory of each node.
        cores_per_gpu: cores that have to be asked for with each GPU.
        account, queue, qos, constraint, reservation: as the scheduler knows them.
        exclusive: ask for nodes that no other job uses.
        mail: address that is told of the job's end.
        text: what PBS is asked for, in place of the usual nodes and ranks.
        directives: further directives, as the scheduler spells them.
        account_option: the option by which PBS is given the account.
        queue_option, gpu_option: the options by which SLURM is given the queue and the GPUs.
    """

    nodes: int
    ranks_per_node: int
    threads: int = 1
    seconds: int = 3600
    gpus: int = 0
    memory_gb: int = 0
    cores_per_gpu: int = 0
    account: str = ""
    queue: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclusive: bool = False
    mail: str = ""
    text: str = ""
    directives: Sequence[str] = ()
    account_option: str = "-A"
    queue_option: str = "--partition"
    gpu_option: str = "--gpus-per-node="

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that a site's lines may contain, as {nodes} and the like."""
        gpus = self.nodes * self.gpus
        cores = max(self.ranks * self.threads, gpus * self.cores_per_gpu)
        values = (self.nodes, self.ranks, self.ranks_per_node, self.threads, cores)
        whole = (gpus, self.nodes * self.memory_gb)
        return dict(zip(NUMBERS, (*values, *whole), strict=True))


def filled(words: Sequence[str], numbers: Mapping[str, int | str], what: str) -> list[str]:
    """Words with the numbers of a job in place of {nodes} and the like.

    Args:
        words: the words.
        numbers: the numbers, by name.
        what: what the words are, for the message.

    Raises:
        UserError: the braces of a word have something else.
    """
    known = ", ".join(f"{{{name}}}" for name in numbers)
    try:
        return [word.format(**numbers) for word in words]
    except KeyError as error:
        raise UserError(f"{what} has {{{error.args[0]}}}", f"use {known}") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(
            f"{what} has braces that cannot be filled ({error})",
            f"use {known}, and write {{{{ and }}}} for braces of your own",
        ) from None


def with_numbers(asked: Resources, options: Mapping[str, object]) -> Resources:
    """Put the job's numbers into the text of its resources.

    Args:
        asked: what the job asks for.
        options: values of --gpus and --memory, by name. They have to have a place in the text.

    Raises:
        UserError: it contains an unknown number, or has no place for a number that was given.
    """
    text = asked.text
    for option, number in (("gpus", "{gpus}"), ("memory", "{memory_gb}")):
        if options[option] and number not in text:
            raise UserError(
                f"--{option} is given, but the resources are {text!r}",
                f"give --resources with {number} in it, or leave out --{option}",
            )
    return replace(asked, text=filled([text], asked.numbers, "--resources")[0])
