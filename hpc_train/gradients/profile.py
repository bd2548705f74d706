"""Time and bytes that averaging has taken, for the end of the log and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Profile:
    """Totals over all buckets that this rank has averaged so far.

    Args:
        buckets: number of buckets.
        nbytes: bytes of gradients.
        wait: seconds from the moment when this rank had filled a bucket until all ranks had.
        wire: seconds from then until the mean was there. The rank may have computed during both
            times; the metric comm_seconds has the time in which it stood still.
        sent: bytes that this rank has sent to other nodes.
    """

    buckets: int = 0
    nbytes: int = 0
    wait: float = 0.0
    wire: float = 0.0
    sent: int = 0

    def add(self, wait: float, wire: float, nbytes: int) -> None:
        """Count one more bucket."""
        self.buckets += 1
        self.nbytes += nbytes
        self.wait += wait
        self.wire += wire

    @property
    def bandwidth(self) -> float:
        """Bytes of gradients averaged per second of wire time."""
        return self.nbytes / self.wire if self.wire else 0.0

    def describe(self) -> str:
        """The totals in one line of text; "" if nothing was averaged."""
        if not self.buckets:
            return ""
        line = (
            f"averaged {self.nbytes / 2**30:.2f} GiB of gradients in {self.buckets} buckets: "
            f"{self.wait:.1f} s until all ranks had them, then {self.wire:.1f} s until their means "
            f"were there ({self.bandwidth / 2**30:.2f} GiB/s)"
        )
        return line + (f", {self.sent / 2**30:.2f} GiB sent to other nodes" if self.sent else "")
