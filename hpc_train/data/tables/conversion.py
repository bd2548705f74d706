"""The values of a column become raw numbers and texts; those that cannot are told with a cause.

Numbers in a categorical column become texts. A csv file's text stays as it is. In the other formats
equal values have the same text, whatever their type: a whole number is written without a point, so
1 and 1.0 are both "1"; other numbers are written as Python's str() does, truth values as True and
False. Dates are in ISO 8601, without a time at midnight and without zeros at the end of a fraction.

Blanks around a text that stands for a missing value do not matter. A number or a date that is equal
to such a text is missing, too, however it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.features import Categories
from hpc_train.data.tables.schema import ColumnKind
from hpc_train.errors import DataError

# Causes of wrong rows; 0 stands for a right one.
NO_NUMBER, NO_DATE, NOT_UTF8, HAS_NUL, FIELDS, QUOTES = range(1, 7)
CAUSES = {
    NO_NUMBER: "is no number",
    NO_DATE: "is no date of ISO 8601",
    NOT_UTF8: "is not UTF-8",
    HAS_NUL: "has a NUL byte",
    FIELDS: "another number of fields",
    QUOTES: "a quote in a wrong place",
}
TRUTH = {"true": 1.0, "false": 0.0}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHOWN = 40  # characters of a wrong value that a message has
WIDEST = 1 << 64  # no column of whole numbers has a larger one
LAST_CHARACTER = 0x10FFFF
_COARSE = ("Y", "M", "W", "D", "h", "m")  # units of dates above a second
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}(\.0*)?")
_MIDNIGHT = "T00:00:00"
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True, eq=False)
class ColumnValues:
    """The values of a column.

    Args:
        raw: the values of N rows, as in `RawColumns`.
        causes: a cause for each row whose value is wrong and 0 for the others, int8 (N,); None: all
            are right.
        given: the different values as the file has them.
        codes: place of each row's value in `given`.
    """

    raw: npt.NDArray[np.float64] | Categories
    causes: npt.NDArray[np.int8] | None = None
    given: Sequence[Any] = ()
    codes: npt.NDArray[np.int32] | None = None


def shortened(value: Any) -> str:
    """A value as it is shown in a message."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return ascii(text) if len(text) <= SHOWN else f"{text[:SHOWN]!a}..."


def from_different(
    given: Sequence[Any], codes: np.ndarray, kind: ColumnKind, missing: Sequence[str]
) -> ColumnValues:
    """Convert texts, each different one once.

    Args:
        given: the different texts: str, or bytes that should be UTF-8, or None.
        codes: place of each row's text in `given`, (N,); -1 where there is none.
        kind: numeric, categorical or date.
        missing: texts that stand for a missing value.
    """
    count = len(given)
    known = {text.strip() for text in missing}
    causes = np.zeros(count + 1, np.int8)  # one more for rows without a text, which have code -1
    texts: list[str | None] = []
    for place, value in enumerate(given):
        text, cause = _decoded(value)
        causes[place] = cause
        lost = cause or text is None or text.strip() in known
        texts.append(None if lost else text)
    codes = np.asarray(codes, np.int32)
    raw: npt.NDArray[np.float64] | Categories
    if kind == "categorical":
        raw = merged_categories(texts, codes)
    else:
        number = _seconds if kind == "date" else _number
        numbers = np.full(count + 1, np.nan)
        for place, text in enumerate(texts):
            if text is not None:
                try:
                    numbers[place] = number(text.strip())
                except ValueError:
                    causes[place] = NO_DATE if kind == "date" else NO_NUMBER
        raw = without_missing(numbers, kind, missing)[codes]
    if not causes.any():
        return ColumnValues(raw)
    of_rows = causes[codes]
    return ColumnValues(raw, of_rows if of_rows.any() else None, given, codes)


def without_missing(
    numbers: npt.NDArray[np.float64], kind: ColumnKind, missing: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Numbers or dates, with NaN in place of those that are equal to a text for a missing value."""
    lost = []
    for text in missing:
        with suppress(ValueError):
            lost.append(_seconds(text.strip()) if kind == "date" else float(text))
    lost = [value for value in lost if value == value]  # NaN is missing in any case
    return np.where(np.isin(numbers, lost), np.nan, numbers) if lost else numbers


def _decoded(value: Any) -> tuple[str | None, int]:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            return None, NOT_UTF8
    return (None, HAS_NUL) if value is not None and "\0" in value else (value, 0)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        if (truth := TRUTH.get(text.lower())) is None:
            raise
        return truth


def exact_number(text: str) -> int | float:
    """A text of a numeric column as a number. A whole number has all its digits.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else _number(text)


def _seconds(text: str) -> float:
    date = datetime.fromisoformat(text)
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return float(_to_seconds(np.array([(date - EPOCH) // timedelta(microseconds=1)]), "us")[0])


def _to_seconds(whole: np.ndarray, unit: str) -> npt.NDArray[np.float64]:
    scale = PER_SECOND[unit]
    seconds: npt.NDArray[np.float64] = whole // scale + whole % scale / scale
    return seconds


def merged_categories(texts: Sequence[str | None], codes: npt.NDArray[np.int32]) -> Categories:
    """Categories of texts. Some of the texts may be equal."""
    places: dict[str, int] = {}
    new = [-1 if text is None else places.setdefault(text, len(places)) for text in texts]
    if len(places) == len(texts):
        return Categories(codes, tuple(places))
    return Categories(np.array([*new, -1], np.int32)[codes], tuple(places))


def canonical_text(value: Any) -> str | None:
    """The text of a number or a truth value in a categorical column; None for None and NaN."""
    if value is None or value != value:
        return None
    if isinstance(value, Decimal):
        near = float(value)
        if Decimal(str(near)) != value and value != int(value):  # it has more digits than a float
            return format(value.normalize(), "f")
        value = near if value != int(value) else int(value)
    whole = isinstance(value, float) and abs(value) < WIDEST and value == int(value)
    return str(int(value)) if whole else str(value)


def from_array(values: np.ndarray, kind: ColumnKind, missing: Sequence[str]) -> ColumnValues:
    """Convert a NumPy array (N,) of numbers, truth values, dates or fixed-length texts.

    Values that are masked in a masked array are missing.

    Raises:
        DataError: an array of this type cannot be of this kind.
    """
    of = values.dtype.kind
    if of not in "biufMSU":
        raise DataError(f"is of type {values.dtype}", "give it the kind ignored in the schema")
    if of == "U" and not _is_unicode(values):
        raise DataError("has characters that Unicode has not", "write the file again")
    missed = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    values = np.asarray(values)
    if kind == "numeric" and of in "biuf":
        numbers = values.astype(np.float64)
        return ColumnValues(numbers if missed is None else np.where(missed, np.nan, numbers))
    if kind == "date" and of == "M":
        return ColumnValues(_dates(values))
    if of not in "SU" and kind != "categorical":
        raise DataError(f"is of type {values.dtype}, not {kind}", "change its kind in the schema")
    different, codes = np.unique(values, return_inverse=True)
    codes = codes if missed is None else np.where(missed, -1, codes)
    if of in "SU":
        return from_different(different.tolist(), codes, kind, missing)
    return from_different(_canonical(different), codes, kind, ())


def _canonical(different: np.ndarray) -> list[str | None]:
    """The texts of numbers, truth values or dates in a categorical column; None for no value."""
    if different.dtype.kind == "M":
        if np.datetime_data(different.dtype)[0] in _COARSE:
            different = different.astype("datetime64[s]")
        return [_date_text(one) for one in np.datetime_as_string(different).tolist()]
    if different.dtype.kind == "f" and different.itemsize < 8:
        exact = different.astype(np.float64)
        written = different.astype(str).astype(np.float64)  # 0.1 in place of 0.10000000149
        different = np.where(exact == np.trunc(exact), exact, written)
    return [canonical_text(one) for one in different.tolist()]


def _date_text(text: str) -> str | None:
    """A date as NumPy writes it, without what its unit alone has added; None for no date."""
    if text == "NaT":
        return None
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.removesuffix(_MIDNIGHT)


def _dates(values: np.ndarray) -> npt.NDArray[np.float64]:
    """The seconds since 1970 of dates, NaN where there is none."""
    unit, count = np.datetime_data(values.dtype)
    if unit not in PER_SECOND or count != 1:
        values, unit = values.astype("datetime64[s]"), "s"
    seconds = _to_seconds(values.astype(np.int64), unit)
    return np.where(np.isnat(values), np.nan, seconds)


def _is_unicode(values: np.ndarray) -> bool:
    """Whether all code points of texts are characters, which NumPy does not check."""
    codes = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="))).view(np.uint32)
    return not ((codes > LAST_CHARACTER) | ((codes >= 0xD800) & (codes < 0xE000))).any()


def from_arrow(array: Any, kind: ColumnKind, missing: Sequence[str]) -> ColumnValues:
    """Convert an Arrow array.

    Raises:
        DataError: an array of this type cannot be of this kind.
    """
    import pyarrow as pa

    of = array.type
    if pa.types.is_null(of):  # so is a column without a value in the whole file
        return from_different((), np.full(len(array), -1), kind, ())
    if pa.types.is_dictionary(of):
        if kind == "categorical" or _is_text(pa, of.value_type):
            return _from_dictionary(pa, array, kind, missing)
        return from_arrow(array.dictionary_decode(), kind, missing)
    if kind == "date" and _is_date(pa, of):
        return ColumnValues(_dates(_moments(array)))
    if kind == "numeric" and _is_number(pa, of):
        return ColumnValues(_floats(pa, array))
    if _is_text(pa, of) or (kind == "categorical" and (_is_date(pa, of) or _is_number(pa, of))):
        return _from_dictionary(pa, array.dictionary_encode(), kind, missing)
    raise DataError(
        f"is of type {of}, not {kind}", "change its kind in the schema; ignored suits any type"
    )


def _from_dictionary(pa: Any, array: Any, kind: ColumnKind, missing: Sequence[str]) -> ColumnValues:
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    different = array.dictionary
    if _is_text(pa, different.type):
        try:
            return from_different(different.to_pylist(), codes, kind, missing)
        except UnicodeDecodeError:
            return from_different(different.cast(pa.binary()).to_pylist(), codes, kind, missing)
    if _is_date(pa, different.type):
        return from_different(_canonical(_moments(different)), codes, kind, ())
    if not _is_number(pa, different.type):
        raise DataError(f"is of type {array.type}", "give it the kind ignored in the schema")
    if pa.types.is_float16(different.type) or pa.types.is_float32(different.type):
        return from_different(_canonical(different.to_numpy()), codes, kind, ())
    return from_different([canonical_text(v) for v in different.to_pylist()], codes, kind, ())


def _moments(array: Any) -> np.ndarray:
    """Arrow's dates as NumPy's."""
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found


def _is_date(pa: Any, of: Any) -> bool:
    return bool(pa.types.is_timestamp(of) or pa.types.is_date(of))


def _is_text(pa: Any, of: Any) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_string(of)
        or kinds.is_large_string(of)
        or kinds.is_binary(of)
        or kinds.is_large_binary(of)
        or kinds.is_fixed_size_binary(of)
        or getattr(kinds, "is_string_view", lambda of: False)(of)
    )


def _is_number(pa: Any, of: Any) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_boolean(of)
        or kinds.is_integer(of)
        or kinds.is_floating(of)
        or kinds.is_decimal(of)
    )


def _floats(pa: Any, array: Any) -> npt.NDArray[np.float64]:
    if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        found = array.to_numpy(zero_copy_only=False)
        if not array.null_count:
            return found.astype(np.float64)  # type: ignore[no-any-return]
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.string())  # Arrow's own cast to a float rounds twice
    # Without `safe=False` whole numbers that no float is equal to would be refused.
    cast = array.cast(pa.float64(), safe=False)
    return cast.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
