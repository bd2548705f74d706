"""Looks up where the values of HDF5 and NetCDF-4 files lie. It runs in a helper process.

The HDF5 library ends the process at some damaged files, so only the helper opens them. The helper
reads one line of JSON per file, {"path": ..., "names": [...] or null}. It answers each with one
line: {"variables": {name: ...}} or {"error": ...}. `stored.parse_variable` has the keys of a
variable. A variable that cannot be read without the HDF5 library is {"refused": reason}. It may
also have the key "remedy".

    python -m hpc_train.data.arrays.hdf5_index SECONDS     # requests on standard input
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import SequenceMatcher
from typing import Any

import numpy as np

MOST_VARIABLES = 10_000  # variables of one file
VARIABLES_SHOWN = 20
MOST_MISSING = 64  # values of a variable that stand for missing ones, in one attribute
MOST_CHUNKS = 1 << 22  # stored chunks of one variable; each takes 24 bytes on every rank
ROOM_BYTES = 4 << 30  # memory that the helper may take for a file
WIDTHS = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "b": (1,), "f": (2, 4, 8)}
GIVE_OTHER = "give one of them"
REWRITE = "write it again as an ordinary contiguous or chunked variable"


def main() -> None:
    """Answer the requests on standard input. The argument is the number of seconds for a file."""
    requests = iter(sys.stdin.buffer.readline, b"")
    answer_requests((json.loads(line) for line in requests), 1, int(sys.argv[1]))


def answer_requests(requests: Iterable[Any], descriptor: int, seconds: int) -> None:
    """Answer requests in this process, each with one line that is written to a descriptor.

    Args:
        requests: the requests.
        descriptor: where the answers are written.
        seconds: a signal ends this process if a file takes longer.
    """
    os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"  # file systems without locks can be read, too
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    for request in requests:
        signal.alarm(seconds)
        data = memoryview(json.dumps(answer(request["path"], request["names"])).encode() + b"\n")
        signal.alarm(0)
        while data:
            data = data[os.write(descriptor, data) :]


def _limit_memory() -> None:
    import h5py  # noqa: F401  # before the limit is set, which counts what is loaded

    with open("/proc/self/statm", encoding="utf-8") as file:  # noqa: PTH123  # in a helper that has to start fast
        limit = int(file.read().split()[0]) * resource.getpagesize() + ROOM_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def answer(path: str, names: list[str] | None) -> dict[str, Any]:
    """What a file says of its variables; None stands for all names. Never raises."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            wanted = _all_names(file) if names is None else names
            return {"variables": {name: _variable(file, path, name) for name in wanted}}
    except MemoryError:
        return {"error": "its tables need more memory than they may take"}
    except Exception as error:  # noqa: BLE001  # whatever h5py raises at a damaged file
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


def _all_names(file: Any) -> list[str]:
    import h5py

    found: list[str] = []

    def see(name: str, thing: Any) -> bool | None:
        if isinstance(thing, h5py.Dataset):
            found.append(name)
        return True if len(found) == MOST_VARIABLES else None

    file.visititems(see)
    return found


def _variable(file: Any, path: str, name: str) -> dict[str, Any]:
    import h5py

    try:
        thing = file.get(name)
        if not isinstance(thing, h5py.Dataset):
            known = _told(_all_names(file), name)
            return {"refused": f"the file has no such variable. {known}", "remedy": GIVE_OTHER}
        return _described(file, path, thing)
    except _Refused as reason:
        return {"refused": str(reason)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # one damaged variable leaves the others readable
        return {"refused": f"the HDF5 library says: {' '.join(str(error).split())[:300]}"}


def _told(known: list[str], name: str) -> str:
    """A sentence with the variables of a file. Of many it has those whose names are most alike."""
    if len(known) <= VARIABLES_SHOWN:
        return f"Its variables are: {', '.join(known) or 'none'}"
    alike = sorted(known, key=lambda one: -SequenceMatcher(None, one, name).ratio())
    return f"It has {len(known)} others, among them: {', '.join(alike[:VARIABLES_SHOWN])}"


class _Refused(Exception):
    pass


def _described(file: Any, path: str, variable: Any) -> dict[str, Any]:
    import h5py

    dtype = variable.dtype
    if dtype.kind in "SV":
        about, truth = _texts_or_rows(variable), _truth_fields(dtype)
    else:
        _check_number(dtype, variable.id.get_type())
        about, truth = {}, [None] if dtype.kind == "b" else []
        if truth:
            dtype = np.dtype("u1")
    if not variable.shape:
        raise _Refused("it has no axes; give a variable with a time or sample axis")
    if variable.is_virtual or variable.external:
        raise _Refused(f"its values are in other files; {REWRITE}")
    if os.path.realpath(variable.file.filename) != os.path.realpath(path):
        raise _Refused("it is a link into another file; give that file")
    told = {
        "shape": [_extent(file, variable), *map(int, variable.shape[1:])],
        "dtype": dtype.str,
        "fill": _fill(variable),
        "truth": truth,
        **(about or _conventions(file, variable, dtype)),
    }
    layout = variable.id.get_create_plist().get_layout()
    if layout == h5py.h5d.CHUNKED:
        return told | _chunked(file, path, variable)
    if layout != h5py.h5d.CONTIGUOUS:
        raise _Refused(f"its values are in its header (layout compact); {REWRITE}")
    offset = variable.id.get_offset()
    return told | {"offset": None if offset is None else int(offset)}


def _check_number(dtype: np.dtype[Any], kind: Any) -> None:
    import h5py

    if dtype.itemsize not in WIDTHS.get(dtype.kind, ()):
        told = f"its type is {str(dtype)[:80]}"
        if h5py.check_string_dtype(dtype) is not None:  # fixed ones are no object
            told = "its texts have no fixed length"
        raise _Refused(
            f"{told}. Only whole numbers and floats are read, and in tables "
            "texts of fixed length, such as type S20"
        )
    if not kind.equal(h5py.h5t.py_create(dtype)):
        raise _Refused("its numbers have an unusual format; write them in an ordinary one")


def _texts_or_rows(variable: Any) -> dict[str, Any]:
    """What is told of texts of fixed length, or of a table whose rows have several fields."""
    import h5py

    dtype, kind = variable.dtype, variable.id.get_type()
    plist = variable.id.get_create_plist()
    defined = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    if defined and np.asarray(variable.fillvalue).tobytes().strip(b"\0"):
        raise _Refused("it has a fill value of its own; write it without one")
    told: dict[str, Any] = {"missing": [], "scale": 1.0, "add": 0.0, "fill": None}
    if dtype.kind == "S":
        return told
    if dtype.names is None:
        raise _Refused(f"its type is {str(dtype)[:80]}. Only numbers and texts are read")
    fields = []
    for number in range(kind.get_nmembers()):
        name = kind.get_member_name(number).decode("utf-8", "replace")
        base, shape = dtype[number].subdtype or (dtype[number], (1,))
        of = kind.get_member_type(number)
        of = of.get_super() if dtype[number].subdtype else of
        if len(shape) != 1:
            raise _Refused(f"its field {name[:80]} has several axes")
        if base.kind != "S":
            _check_number(base, of)
        stored = "|u1" if base.kind == "b" else base.str
        fields.append([name, stored, int(shape[0]), int(kind.get_member_offset(number))])
    return told | {"dtype": fields, "row_bytes": int(kind.get_size())}


def _truth_fields(dtype: np.dtype[Any]) -> list[str | None]:
    return [name for name in dtype.names or () if dtype[name].base.kind == "b"]


def _conventions(file: Any, variable: Any, dtype: np.dtype[Any]) -> dict[str, Any]:
    """What the CF conventions' attributes say of the values."""
    import h5py

    attributes = variable.attrs
    missing = _numbers(attributes, "_FillValue", 1)
    by_default = not missing and dtype.itemsize > 1
    missing += _numbers(attributes, "missing_value", MOST_MISSING)
    plist = variable.id.get_create_plist()
    filled = plist.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    if filled and by_default and _is_netcdf(file, variable):
        # NetCDF fills what nobody has written with a default value, and has no attribute for it.
        missing += [value for value in [_fill(variable)] if value is not None]
    unsigned = attributes.get("_Unsigned")
    if dtype.kind == "i" and str(getattr(unsigned, "decode", lambda: unsigned)()).lower() == "true":
        told_as = dtype.str.replace("i", "u")
        size = 1 << 8 * dtype.itemsize
        missing = [m % size if isinstance(m, int) else m for m in missing]
    else:
        told_as = dtype.str
    [scale] = _numbers(attributes, "scale_factor", 1) or [1.0]
    [add] = _numbers(attributes, "add_offset", 1) or [0.0]
    return {"dtype": told_as, "missing": missing, "scale": float(scale), "add": float(add)}


def _is_netcdf(file: Any, variable: Any) -> bool:
    """Whether the NetCDF library wrote a file. Before 2016 it left no note of itself."""
    of_file, of_variable = (
        ("_NCProperties", "_nc3_strict"),
        ("_Netcdf4Dimid", "_Netcdf4Coordinates"),
    )
    return any(one in file.attrs for one in of_file) or any(
        one in variable.attrs for one in of_variable
    )


def _extent(file: Any, variable: Any) -> int:
    """Number of rows of a variable. Those behind what is stored were never written.

    The NetCDF library extends a variable only as far as it was written. In NetCDF's own terms, all
    variables with an unlimited dimension have its length, which is that of the longest one.
    """
    stored = int(variable.shape[0])
    if variable.chunks is None or variable.maxshape[0] is not None:
        return stored
    if not _is_netcdf(file, variable):
        return stored
    found = [stored]
    with suppress(Exception):  # a copy may have lost what is referred to
        listed = variable.attrs.get("DIMENSION_LIST")
        scale = variable if listed is None else file[listed[0][0]]
        found.append(int(scale.shape[0]))
        for reference, axis in scale.attrs.get("REFERENCE_LIST", ()):
            found.append(int(file[reference].shape[axis]))
    return max(found)


def _numbers(attributes: Any, name: str, most: int) -> list[float | int]:
    """The numbers of an attribute; none if it is not there."""
    if name not in attributes:
        return []
    found = np.asarray(attributes[name])
    if not 1 <= found.size <= most or found.dtype.kind not in "iufb":
        wanted = "one number" if most == 1 else f"1 to {most} numbers"
        told = " ".join(str(found.tolist()).split())[:40]
        if found.dtype.kind in "OSU":
            told = f"the text {told.removeprefix('b')}"
        raise _Refused(
            f"its attribute {name} is {told}, and not {wanted}; "
            "correct the attribute, for instance by ncatted"
        )
    values = found.reshape(-1).tolist()
    return [int(value) for value in values] if found.dtype.kind == "b" else values


def _fill(variable: Any) -> float | int | None:
    """The value of what nobody has written; None if the file has none (NetCDF's NOFILL)."""
    import h5py

    undefined = h5py.h5d.FILL_VALUE_UNDEFINED
    if variable.id.get_create_plist().fill_value_defined() == undefined:
        return None
    return _number(variable.fillvalue)


def _number(value: Any) -> float | int | None:
    """A single number of an attribute; None if it is something else."""
    found = np.asarray(value)
    if found.size != 1 or found.dtype.kind not in "iufb":
        return None
    number = found.reshape(-1)[0].item()
    return int(number) if found.dtype.kind == "b" else number


def _chunked(file: Any, path: str, variable: Any) -> dict[str, Any]:
    plist = variable.id.get_create_plist()
    filters = []
    for n in range(plist.get_nfilters()):
        code, _, values, name = plist.get_filter(n)
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        filters.append([int(code), [int(value) for value in values], text[:40]])
    grid = [
        -(-length // chunk) for length, chunk in zip(variable.shape, variable.chunks, strict=True)
    ]
    if math.prod(grid) > 1 << 62:
        raise _Refused("it has more chunks than any file can hold")
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    rows: list[tuple[int, int, int, int]] = []

    def see(info: Any) -> bool | None:
        places = zip(info.chunk_offset, variable.chunks, strides, strict=True)
        number = sum(begin // chunk * stride for begin, chunk, stride in places)
        rows.append((number, info.byte_offset, info.size, info.filter_mask))
        return True if len(rows) > MOST_CHUNKS else None

    each_chunk(variable, see)
    if len(rows) > MOST_CHUNKS:
        raise _Refused(f"it has more than {MOST_CHUNKS} chunks; write it with larger ones")
    table = np.array(sorted(rows), np.uint64).reshape(-1, 4)
    table[:, 1] += np.uint64(_shift(file, path, variable, rows))
    return {
        "chunk": [int(length) for length in variable.chunks],
        "filters": filters,
        "table": {
            name: base64.b64encode(column.astype(kind).tobytes()).decode()
            for name, column, kind in zip(
                ("numbers", "offsets", "sizes", "masks"),
                table.T,
                ("<i8", "<i8", "<u4", "<u4"),
                strict=True,
            )
        },
    }


def each_chunk(variable: Any, see: Callable[[Any], bool | None]) -> None:
    """Call a function with each stored chunk, until it returns True."""
    if hasattr(variable.id, "chunk_iter"):
        variable.id.chunk_iter(see)
        return
    for n in range(variable.id.get_num_chunks()):  # HDF5 before 1.12.3 has no faster way
        if see(variable.id.get_chunk_info(n)):
            return


def _shift(file: Any, path: str, variable: Any, rows: list[tuple[int, int, int, int]]) -> int:
    """Bytes to add to the offsets of chunks, which some versions count from behind a user block."""
    block = int(file.userblock_size)
    if not block or not rows:
        return 0
    number, offset, size, _ = rows[0]
    grid = [
        -(-length // chunk) for length, chunk in zip(variable.shape, variable.chunks, strict=True)
    ]
    place = np.unravel_index(number, grid)
    begin = tuple(int(n) * chunk for n, chunk in zip(place, variable.chunks, strict=True))
    _, wanted = variable.id.read_direct_chunk(begin)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for shift in (0, block):
            if os.pread(descriptor, size, offset + shift) == bytes(wanted):
                return shift
    finally:
        os.close(descriptor)
    raise _Refused("this version of HDF5 tells wrong places of its chunks; use a newer one")


if __name__ == "__main__":
    main()
