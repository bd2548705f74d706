"""Says what needs less memory when a program has run out of it."""

from __future__ import annotations

LESS = (
    "This rank has run out of memory. What needs less, the cheapest first: smaller micro-batches "
    "(data.micro_batch, in a loop epochs(accumulate=...)), memory.recompute, memory.zero. See "
    "docs/how-to/memory.md."
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted."""
    # torch, which has an OutOfMemoryError, is not loaded here: some programs do without it.
    told = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return told or "can't allocate memory" in str(error)


def note_memory(error: BaseException) -> None:
    """Let the traceback of an error say what needs less memory, if memory is exhausted."""
    if out_of_memory(error):
        error.add_note(LESS)
