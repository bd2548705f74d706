"""`hpc-train prepare text` on 1, 2 and 4 ranks, with the bytes tokenizer and with a small BPE.

    python -m benchmarks.prepare [--rounds 3] [--mb 400]

The text is the Python standard library's sources, copied until they have the size of --mb. Times
are those of the whole commands, from their start to their end. All folders must have the same
bytes. At the end a preparation on two ranks is killed in the middle, and the same command continues
it; that must give the same bytes, too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import harness

NAME = "prepare"
RANKS = (1, 2, 4)
SHARD_MB = {"bytes": 16, "bpe": 1}  # some 25 portions in either case
VOCAB = 4096


def write_texts(folder: Path, nbytes: int) -> int:
    """Write copies of the standard library's sources. Returns their bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [
        content
        for path in sorted(library.rglob("*.py"))
        if "site-packages" not in path.parts and _is_text(content := path.read_bytes())
    ]
    written = number = 0
    folder.mkdir()
    while written < nbytes:
        content = sources[number % len(sources)]
        (folder / f"{number}.py").write_bytes(content)
        written += len(content)
        number += 1
    return written


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode()) and b"\0" not in content
    except UnicodeDecodeError:
        return False


def train_tokenizer(texts: Path, path: Path) -> None:
    """Train a small BPE on a part of the texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(texts / f"{number}.py") for number in range(100)], trainer)
    made.save(str(path))


def command(folder: Path, tokenizer: str, ranks: int) -> list[str]:
    """The command that prepares the texts in a folder."""
    name = "bytes" if tokenizer == "bytes" else str(folder / "tokenizer.json")
    words = [sys.executable, "-m", "hpc_train", "prepare", "text", str(folder / "texts")]
    words += ["--tokenizer", name, "--shard_mb", str(SHARD_MB[tokenizer])]
    words += ["--out", str(folder / "out")]
    return [*harness.mpirun(ranks, bind=False), *words] if ranks > 1 else words


def measured(folder: Path, tokenizer: str, ranks: int, digests: set[str]) -> float:
    """Seconds of a whole preparation."""
    begin = time.perf_counter()
    words = command(folder, tokenizer, ranks)
    subprocess.run(words, env=harness.environ(), check=True, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - begin
    digests.add(harness.digest(folder / "out"))
    shutil.rmtree(folder / "out")
    return taken


def killed_and_continued(folder: Path, tokenizer: str) -> tuple[float, float, str]:
    """Kill a preparation, and continue it.

    Returns:
        The share that was finished when it was killed, the seconds of the second command, and the
        digest of the folder.
    """
    words = command(folder, tokenizer, 2)
    entries = ".out.partial/*/*-*.json"
    started = subprocess.Popen(words, env=harness.environ(), stdout=subprocess.DEVNULL)
    while len([*folder.glob(entries)]) < 4 and started.poll() is None:
        time.sleep(0.01)
    with suppress(psutil.NoSuchProcess):  # it has ended
        for process in psutil.Process(started.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    started.kill()
    started.wait()
    if (folder / "out").exists():
        raise RuntimeError("it was killed too late: give more --mb")
    finished = len([*folder.glob(entries)])
    begin = time.perf_counter()
    subprocess.run(words, env=harness.environ(), check=True, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - begin
    whole = len([path for path in (folder / "out").glob("*.h5") if path.stem.count("-") == 1])
    found = harness.digest(folder / "out")
    shutil.rmtree(folder / "out")
    return finished / whole, taken, found


def main() -> None:
    """Measure all numbers of ranks in turn, and print the results."""
    options = harness.arguments("prepare texts on many ranks", rounds=3, mb=400)
    ratios: dict[str, float] = {}
    middles: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for tokenizer in SHARD_MB:
            # A BPE is many times slower, so it gets less text.
            nbytes = (options.mb if tokenizer == "bytes" else options.mb // 10) * 10**6
            shutil.rmtree(folder / "texts", ignore_errors=True)
            nbytes = write_texts(folder / "texts", nbytes)
            if tokenizer != "bytes":
                train_tokenizer(folder / "texts", folder / "tokenizer.json")
            digests: set[str] = set()
            candidates = {
                f"{tokenizer}, {ranks} ranks": partial(measured, folder, tokenizer, ranks, digests)
                for ranks in RANKS
            }
            samples = harness.in_turn(candidates, options.rounds, warmup=0)
            share, taken, found = killed_and_continued(folder, tokenizer)
            if digests != {found}:
                raise RuntimeError(f"{tokenizer}: the folders have different bytes")
            first = f"{tokenizer}, 1 ranks"
            harness.show(f"{nbytes / 1e6:.0f} MB of text", "s", samples, first)
            for name, seconds in harness.medians(samples).items():
                print(f"{name}: {nbytes / 1e6 / seconds:.1f} MB/s")
                middles[name] = nbytes / 1e6 / seconds
                ratios[f"{first} / {name}"] = harness.paired_ratio(samples, first, name)
            print(f"{tokenizer}: killed at {share:.0%}, continued in {taken:.1f} s: same bytes")
            middles[f"{tokenizer}, continued after {share:.0%}, s"] = taken
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
