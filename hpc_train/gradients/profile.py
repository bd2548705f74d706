"""What averaging has taken: for the log's last lines and for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Profile:
    """Totals over all buckets that this rank has averaged so far.

    Args:
        buckets: how many.
        nbytes: of gradients.
        wait: seconds from the moment that this rank's part was there until the last one's was.
        wire: seconds from then until the mean was there. Both may have passed while the rank
            computed: what it stood still for is in the metric comm_seconds.
        sent: bytes that this rank has sent to other nodes.
    """

    buckets: int = 0
    nbytes: int = 0
    wait: float = 0.0
    wire: float = 0.0
    sent: int = 0

    def add(self, wait: float, wire: float, nbytes: int) -> None:
        """One more bucket."""
        self.buckets += 1
        self.nbytes += nbytes
        self.wait += wait
        self.wire += wire

    @property
    def bandwidth(self) -> float:
        """Bytes of gradients averaged per second of wire time."""
        return self.nbytes / self.wire if self.wire else 0.0

    def describe(self) -> str:
        """One line for people; "" if nothing was averaged."""
        if not self.buckets:
            return ""
        line = (
            f"averaged {self.nbytes / 2**30:.2f} GiB of gradients in {self.buckets} buckets: "
            f"{self.wait:.1f} s until all ranks had theirs, {self.wire:.1f} s on the way "
            f"({self.bandwidth / 2**30:.2f} GiB/s)"
        )
        return line + (f", {self.sent / 2**30:.2f} GiB sent to other nodes" if self.sent else "")
