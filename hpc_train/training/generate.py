"""`hpc-train generate`: text from a checkpoint, in one process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from hpc_train.checkpoint.catalogue import newest
from hpc_train.data import tokenizer
from hpc_train.errors import ConfigError, UserError
from hpc_train.models.language_shape import LanguageShape
from hpc_train.monitoring.records import RecordsFile
from hpc_train.mpi.group import Group
from hpc_train.training.device import choose_device
from hpc_train.training.trained import load_model


def load_language_model(
    checkpoint: str | Path,
) -> tuple[nn.Module, LanguageShape, tokenizer.Tokenizer]:
    """Load a checkpoint's model, its shape, and the tokenizer of the text it was trained on.

    Args:
        checkpoint: a checkpoint file, or a run directory, whose newest checkpoint is loaded.

    Raises:
        CheckpointError: the checkpoint is damaged.
        CheckpointMismatch: there is no checkpoint, or it does not hold a language model.
        UserError: its tokenizer is not known, or cannot be loaded.
    """
    trained = load_model(checkpoint, "text", choose_device(), Group())
    assert isinstance(trained.shape, LanguageShape)
    recorded = tokenizer.as_recorded(trained.about["tokenizer"], trained.shape.vocab)
    return trained.module, trained.shape, tokenizer.loads(recorded)


class SampleRecords:
    """Adds samples of text to samples.jsonl of the run that a checkpoint belongs to.

    Args:
        checkpoint: see `load_language_model`.

    Raises:
        CheckpointMismatch: there is no checkpoint.
        UserError: it does not lie in a run directory.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        path = newest(Path(checkpoint)).absolute()
        self.run, found = path.parent.parent, re.fullmatch(r"step-(\d+)", path.stem)
        if found is None or not (self.run / "config.yaml").exists():
            raise UserError(
                f"{path} does not lie in a run directory, so there is no samples.jsonl for it",
                "give a run directory, or leave --record out",
            )
        self.step = int(found[1])

    def add(self, prompt: str, text: str) -> None:
        """Add a sample.

        Args:
            prompt: the text that was continued.
            text: its continuation.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            with closing(RecordsFile(self.run / "samples.jsonl")) as file:
                file.write({"step": self.step, "prompt": prompt, "text": text})
        except OSError as error:
            raise UserError(
                f"{self.run / 'samples.jsonl'} cannot be written ({error.strerror})",
                "leave --record out, or free space",
            ) from None


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[str]:
    """Continue a prompt, token by token.

    Args:
        checkpoint: see `load_language_model`.
        prompt: text of at least one token. An empty line may have none: then the text begins where
            texts of the training began.
        tokens: number of tokens to write.
        temperature: divides the logits; 0 always takes the likeliest token.
        seed: seed of the random choice.

    Yields:
        The prompt, then each further piece of text.

    Raises:
        ConfigError: the prompt has no token, or the temperature or the seed is out of range.
        UserError: the model computes numbers that are not finite.
        HpcTrainError: as `load_language_model`.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature}", "give 0 or more")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"--seed is {seed}", "give a seed from 0 to below 2**63")
    prompt = prompt.encode(errors="replace").decode()  # a shell may pass bytes that are not text
    model, shape, codec = load_language_model(checkpoint)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    written = _tokens_of(prompt, codec)
    shown = codec.decode(written)  # which may differ from the prompt, for instance in blanks
    yield prompt
    for _ in range(tokens):
        context = torch.tensor([written[-shape.sequence :]], device=device)
        with torch.no_grad():
            logits = model(context)[0, -1, : codec.vocab]  # model.vocab may be larger
        if not logits.isfinite().all():
            raise UserError(
                f"the model of {checkpoint} computes numbers that are not finite",
                "give an older checkpoint; `hpc-train checkpoint list RUN` lists them",
            )
        if temperature < 1e-6:
            chosen = int(logits.argmax())
        else:
            weights = torch.softmax(logits / temperature, dim=-1)
            chosen = int(torch.multinomial(weights, 1, generator=generator))
        written.append(chosen)
        # The last token may end inside a character, so only complete characters are shown.
        text = codec.decode(written)
        if not text.endswith("\ufffd"):
            # A new token may change the text before it: "don '" becomes "don't".
            same = os.path.commonprefix([shown, text])  # noqa: RUF071  # by characters is right
            yield text[len(same) :]
            shown = text


def _tokens_of(prompt: str, codec: tokenizer.Tokenizer) -> list[int]:
    """The tokens of a prompt, at least one."""
    if tokens := list(codec.encode(prompt.encode())):
        return [*codec.front, *tokens]
    begin = codec.front or ([] if codec.separator is None else [codec.separator])
    if prompt == "\n" and begin:
        return list(begin)
    if not prompt:
        raise ConfigError("--prompt is empty", "give at least one character")
    raise ConfigError(f"the tokenizer makes no token of --prompt {prompt!r}", "give other text")
