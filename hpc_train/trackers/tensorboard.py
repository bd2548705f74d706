"""Writes event files for TensorBoard. Only looking at them takes the package tensorboard.

The formats are those of TensorFlow: records of tensorflow/core/lib/io/record_writer.h with messages
of event.proto and summary.proto, in Protocol Buffers' wire format. They have not changed since
2016. A session that begins after step S makes readers forget what earlier files have of later
steps.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from hpc_train.trackers.feed import MarkFile
from hpc_train.trackers.source import TrackedRun, numbers_of

_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits reversed
_STRING, _TENSOR_CLASS, _START = 7, 2, 1  # DT_STRING, DATA_CLASS_TENSOR, SessionLog.START


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _number(value: int) -> bytes:
    """A number of 0 or more as a varint."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _field(number: int, value: int | bytes) -> bytes:
    """A field with a number, or with bytes: text, or a message."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def _event(when: float, step: int, content: bytes) -> bytes:
    """An Event as a record of the file."""
    data = b"\x09" + struct.pack("<d", when) + _field(2, step) + content
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _scalars(values: dict[str, float]) -> bytes:
    every = (
        _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", _in_range(value)))
        for tag, value in values.items()
    )
    return _field(5, b"".join(every))


def _in_range(value: float) -> float:
    """A value that float32 has: infinity in place of what is too large."""
    return value if abs(value) < 3.4e38 else value * float("inf")


def _text(tag: str, text: str) -> bytes:
    plugin = _field(1, _field(1, b"text")) + _field(4, _TENSOR_CLASS)
    tensor = _field(1, _STRING) + _field(8, text.encode())
    return _field(5, _field(1, _field(1, tag.encode()) + _field(8, tensor) + _field(9, plugin)))


class TensorBoardFiles(MarkFile):
    """Writes an event file for each start of a run to the folder `tensorboard`.

    Args:
        run: the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.directory = run.folder / "tensorboard"
        super().__init__(self.directory / "mark.json")
        self._file: int | None = None
        self._after = self._has = 0
        self._rest = bytearray()

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if there is none."""
        mark = super().read_mark()
        self._has = mark.get("step", 0)
        return mark

    def begin(self, after: int) -> int:
        """Begin after a step, and drop later ones. Returns the step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._after = after
        if after < self._has:
            self._open()
        return after

    def _open(self) -> None:
        """Begin a file with a session, which makes readers forget later steps of other files."""
        path = self.directory / f"events.out.tfevents.{self._time():010d}.{os.uname().nodename}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        now = time.time()
        self._rest += _event(now, 0, _field(3, b"brain.Event:2"))
        self._rest += _event(now, self._after + 1, _field(7, _field(1, _START)))
        rows = (f"| {key} | {_in_a_cell(value)} |\n" for key, value in self.run.values().items())
        table = "| key | value |\n|---|---|\n" + "".join(rows)
        self._rest += _event(now, self._after, _text("config", table))

    def _time(self) -> int:
        """Seconds for the name of a new file. Readers take the files in the order of names."""
        there = [path.name.split(".")[3] for path in self.directory.glob("events.out.tfevents.*")]
        return max([int(time.time()), *(int(one) + 1 for one in there if one.isdecimal())])

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""
        if self._file is None:
            self._open()
        self._rest += _event(record["time"], record["step"], _scalars(numbers_of(record)))

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Write the events that are left, and then the mark."""
        while self._rest:
            assert self._file is not None
            del self._rest[: os.write(self._file, self._rest)]
        super().write_mark(mark)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
