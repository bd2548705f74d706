"""Says what to do when a program has run out of memory, or torch.compile has failed."""

from __future__ import annotations

from hpc_train.errors import HpcTrainError

LESS = (
    "This rank has run out of memory. What needs less, the cheapest first: smaller micro-batches "
    "(data.micro_batch, in a loop epochs(accumulate=...)), memory.recompute, memory.zero. See "
    "docs/how-to/memory.md."
)
UNCOMPILED = (
    "torch.compile has failed on this rank. It needs a C++ compiler on each node, which the "
    "variable CXX names, and code that it can compile. Without run.compile nothing is compiled. "
    "See docs/how-to/gpus.md."
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted."""
    # torch, which has an OutOfMemoryError, is not loaded here: some programs do without it.
    told = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return told or "can't allocate memory" in str(error)


def note_remedy(error: BaseException) -> None:
    """Let the traceback of an error say what to do, if memory is exhausted or compiling failed."""
    if out_of_memory(error):
        error.add_note(LESS)
    elif _is_of_compiler(error):
        error.add_note(UNCOMPILED)


def _is_of_compiler(error: BaseException) -> bool:
    """Whether making code has failed.

    torch also raises its own error in place of one of ours that came while it made code.
    """
    ours = isinstance(error.__cause__ or error.__context__, HpcTrainError)
    return not ours and type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
