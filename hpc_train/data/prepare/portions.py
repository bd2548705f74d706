"""Cuts all input into portions, each for about one shard, that ranks make by themselves.

Where it is cut depends on the input and the options only, so any number of ranks makes the same
shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpc_train.data.prepare.foreign import cut_tokens, read_tokens
from hpc_train.data.prepare.inputs import InputFile, InputPart, Tell, TokenRecipe
from hpc_train.data.prepare.texts import cut_text, read_text
from hpc_train.data.tokenizer import Tokenizer

SAMPLED_BYTES = 1 << 15  # of a file, to see how many tokens its bytes make; less than is sniffed
SAMPLED_FILES = 16
TEXTS = ("text", "jsonl")


def whole_parts(given: Sequence[InputFile]) -> list[InputPart]:
    """Each file as one part."""
    return [InputPart(file, 0, file.nbytes) for file in given]


def split_inputs(given: Sequence[InputFile], validation: float) -> dict[str, list[InputPart]]:
    """Split files: the first ones are for validation, the rest for training.

    The file at the border is cut, and both of its parts are documents. A compressed file is not
    cut, but belongs whole to the split in which its middle lies.
    """
    border = int(sum(file.nbytes for file in given) * validation)
    held_out, rest = cut_stream(whole_parts(given), [border])
    if held_out:
        held_out[-1] = replace(held_out[-1], last=True)
    if rest:
        rest[0] = replace(rest[0], first=True)
    return {"train": rest, "validation": held_out}


def cut_portions(parts: Sequence[InputPart], nbytes: float) -> list[list[InputPart]]:
    """Cut a stream of parts into portions of about as many bytes each."""
    total = sum(part.nbytes for part in parts)
    count = max(1, round(total / nbytes))
    portions = cut_stream(parts, [number * total // count for number in range(1, count)])
    return [portion for portion in portions if portion]


def cut_stream(parts: Sequence[InputPart], positions: Sequence[int]) -> list[list[InputPart]]:
    """Cut a stream of parts at ascending positions, or soon behind them.

    Args:
        parts: the parts, one behind the other.
        positions: bytes of the stream.

    Returns:
        One list of parts more than there are positions. A list may be empty.
    """
    made: list[list[InputPart]] = [[]]
    wanted = [*reversed(positions)]
    begin = 0  # of the part in the stream
    for part in parts:
        end = begin + part.nbytes
        left: InputPart | None = part
        while left is not None and wanted and wanted[-1] < end:
            place = _cut(left, part.begin + wanted.pop() - begin)
            if place > left.begin:
                made[-1].append(_ended(left, place))
            made.append([])
            left = _begun(left, place) if place < left.end else None
        if left is not None:
            made[-1].append(left)
        begin = end
    return made + [[] for _ in wanted]


def _ended(part: InputPart, place: int) -> InputPart:
    return part if place == part.end else replace(part, end=place, last=False)


def _begun(part: InputPart, place: int) -> InputPart:
    return part if place == part.begin else replace(part, begin=place, first=False)


def _cut(part: InputPart, position: int) -> int:
    if position <= part.begin:
        return part.begin
    if part.file.compressed or part.file.format == "arrow":
        return part.end if 2 * position > part.begin + part.end else part.begin
    cut = cut_text if part.file.format in TEXTS else cut_tokens
    return min(part.end, cut(part.file, position))


def read_part(
    part: InputPart, recipe: TokenRecipe, codec: Tokenizer | None, tell: Tell
) -> Iterator[tuple[np.ndarray, bool]]:
    """The tokens of a part. `texts.read_text` and `foreign.read_tokens` describe it."""
    if part.file.format in TEXTS:
        assert codec is not None
        return read_text(part, recipe, codec, tell)
    return read_tokens(part, recipe, tell)


def bytes_per_token(
    parts: Sequence[InputPart], recipe: TokenRecipe, codec: Tokenizer | None
) -> float:
    """How many bytes of the stream make a token, estimated from the first bytes of some parts."""
    nbytes = tokens = 0

    def tell(count: int) -> None:
        nonlocal nbytes
        nbytes += count

    for part in parts[:: max(1, len(parts) // SAMPLED_FILES)]:
        [sample] = cut_stream([part], [SAMPLED_BYTES])[0] or [part]
        limit = nbytes + SAMPLED_BYTES
        for made, _ in read_part(sample, recipe, codec, tell):
            if nbytes >= limit:
                break
            tokens += len(made)
    return nbytes / tokens if nbytes and tokens else 1.0
