"""Values that are far from most others of their column, such as codes of missing ones.

They draw the mean away from the others. A model reads float32, whose numbers are dense around 0
alone, so it would take all others for one number. Therefore the center of such a column is in the
midst of the others.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.features import distinct_edges
from hpc_train.data.tables.schema import SHOWN_NAMES
from hpc_train.errors import plural

logger = logging.getLogger(__name__)

TOLD_APART = np.linspace(0, 1, 49)  # of the quantiles that should be told apart
MOST_WIDTHS = 1e27  # as a multiple of the width of half of these; then float32 has them all


class FarValues:
    """Finds columns with such values, and tells of them.

    The attribute `found` has one of these values for each feature that has any.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def scale(
        self, name: str, values: npt.NDArray[np.float64], center: float, scale: float
    ) -> tuple[float, float]:
        """A center and a scale with which float32 tells most quantiles of a feature apart.

        They are the given ones if these do so. Else the center is in the midst of that half of the
        different quantiles which lies closest together.

        Args:
            name: name of the feature.
            values: its finite values, not all of them equal, float64 (N,).
            center: the center that is wanted; it may have overflowed.
            scale: the scale that is wanted, likewise.

        Returns:
            The center and the scale. No edge should be larger than FAR_EDGE if `found` has the
            feature afterwards.
        """
        different = np.unique(np.quantile(values, TOLD_APART, method="inverted_cdf"))
        bins = len(different) - 1
        half = max(1, bins // 2)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (different - center) / scale
            widths = different[half:] - different[:-half]
        if 2 * (len(distinct_edges(scaled)) - 1) > bins:
            return center, scale
        first = int(widths.argmin())
        middle, width = float(different[first + half // 2]), float(widths[first])
        self.found[name] = float(
            max(different[0], different[-1], key=lambda one: abs(one - middle))
        )
        limits = [width * MOST_WIDTHS, float(np.finfo(np.float64).max)]
        return middle, min([*limits, scale] if scale == scale else limits)

    def warn(self) -> None:
        """Log the values that were found."""
        for name, value in [*self.found.items()][:SHOWN_NAMES]:
            logger.warning(
                "column %r: its value %r is far from most others, so these alone set its center; "
                "if this value stands for a missing one, mark it as missing",
                name,
                value,
            )
        if len(self.found) > SHOWN_NAMES:
            more = plural(len(self.found) - SHOWN_NAMES, "more column")
            logger.warning("%s with values that are far from most others", more)
