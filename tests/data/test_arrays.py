"""Arrays gives what h5py reads, for any shape, chunks, filters, types and windows."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
import time
import zlib
from itertools import product

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train import files
from hpc_train.data import Arrays, ArrayStatistics, Tile, Window
from hpc_train.data.arrays import filters, regions
from hpc_train.data.arrays import statistics as array_statistics
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder
from hpc_train.errors import DataError, RankError, UserError
from tests.data.fields import answers_here, field

CHEAP = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
TYPES = ("<f4", ">f4", "<f8", ">f8", "<f2", "i1", "u1", ">i2", "<i4", "<u4", ">i8", "bool")


@pytest.fixture
def here(monkeypatch):
    """The helper's answers are made in this process, which saves starting one for each example."""
    answers_here(monkeypatch)


def create(file, name, values, draw):
    """Write a variable in a random layout; returns what h5py reads."""
    options = {}
    if draw(st.booleans()):
        options["chunks"] = tuple(draw(st.integers(1, n + 1)) for n in values.shape)
        options["maxshape"] = (None,) * values.ndim
        options["shuffle"] = draw(st.booleans())
        options["fletcher32"] = draw(st.booleans())
        if draw(st.booleans()):
            options["compression"] = draw(st.sampled_from([1, 9]))
    variable = file.create_dataset(
        name, values.shape, values.dtype, fillvalue=values.flat[0], **options
    )
    if draw(st.integers(0, 4)):
        variable[...] = values
    else:  # most of it is never written
        variable[:1] = values[:1]
    return variable[()]


@CHEAP
@given(st.data())
def test_windows_and_tiles_are_those_of_h5py(tmp_path, here, data):
    draw = data.draw
    rest = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=2))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    whole = {f"g/v{n}": [] for n in range(len(kinds))}
    paths = []
    for number, count in enumerate(rows):
        paths.append(tmp_path / f"{number}.h5")
        block = draw(st.sampled_from([0, 512]))
        with h5py.File(paths[-1], "w", userblock_size=block) as file:
            for (name, read), kind in zip(whole.items(), kinds, strict=True):
                values = random.integers(0, 2 if kind == "bool" else 100, (count, *rest))
                read.append(create(file, name, values.astype(kind), draw).astype(np.float32))
    window = None
    if draw(st.booleans()):
        window = Window(*(draw(st.integers(low, 3)) for low in (1, 0, 1)), draw(st.booleans()))
    tile = None
    if rest and draw(st.booleans()):
        axes = draw(st.integers(1, len(rest)))
        tile = Tile(
            tuple(draw(st.integers(1, n)) for n in rest[-axes:]),
            tuple(draw(st.integers(1, n)) for n in rest[-axes:]),
        )
    expected = list(samples(whole, rows, rest, window, tile))
    try:
        arrays = Arrays(paths, ["/" + name for name in whole], window=window, tile=tile)
    except DataError as error:
        assert "window" in str(error)
        assert not expected
        return
    assert len(arrays) == len(expected)
    for index in draw(st.permutations(range(len(arrays))))[:20]:
        found = arrays[index]
        if window is not None and window.ahead:
            found = torch.cat(found)
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), expected[index])
    arrays.close()


def samples(whole, rows, rest, window, tile):
    """The samples as one would write them down with NumPy."""
    spec = window or Window(1)
    length = spec.steps + spec.ahead
    fields = [np.stack(some, 1) for some in zip(*whole.values(), strict=True)]
    if spec.continuous:
        fields = [np.concatenate(fields)]
    corners = [()]
    if tile is not None:
        lengths = rest[-len(tile.shape) :]
        strides = tile.stride
        corners = list(
            product(
                *(
                    range(0, n - m + 1, s)
                    for n, m, s in zip(lengths, tile.shape, strides, strict=True)
                )
            )
        )
    for values in fields:
        for begin in range(0, len(values) - length + 1, spec.stride):
            for corner in corners:
                sizes = tile.shape if tile else ()
                box = [slice(c, c + n) for c, n in zip(corner, sizes, strict=True)]
                found = values[begin : begin + length][(..., *box)]
                yield found if window else found[0]


def test_a_process_of_its_own_looks_into_the_file(tmp_path):
    expected = field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", "contiguous")
    np.testing.assert_array_equal(arrays.fetch([3, 0]).numpy(), expected[[3, 0]])
    assert torch.equal(arrays[-1], arrays[len(arrays) - 1])
    with pytest.raises(IndexError):
        arrays[len(arrays)]


def test_packed_values_become_numbers_and_what_is_missing_nan(tmp_path, here):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        packed = file.create_dataset("t", (3, 4), ">i2", chunks=(1, 4), fillvalue=-99)
        packed[:2] = np.arange(8).reshape(2, 4)
        packed.attrs["scale_factor"], packed.attrs["add_offset"] = np.float64(0.01), 273.15
        packed.attrs["_FillValue"], packed.attrs["missing_value"] = np.int16(-99), np.int16([5, 6])
        bytes_ = file.create_dataset("u", data=np.array([[-1, 1, -2]] * 3, "i1"))
        bytes_.attrs["_Unsigned"] = "true"
        bytes_.attrs["_FillValue"] = np.int8(-2)
    expected = np.arange(12, dtype=float).reshape(3, 4) * 0.01 + 273.15
    expected[1, 1:3] = expected[2] = np.nan
    arrays = Arrays(tmp_path / "a.nc", ["t", "u"], stack=False)
    found = arrays.fetch(range(3))
    np.testing.assert_array_equal(found["t"].numpy(), expected.astype(np.float32))
    np.testing.assert_array_equal(found["u"][0].numpy(), [255, 1, np.nan])
    refusing = Arrays(tmp_path / "a.nc", "t", missing="refuse")
    refusing.fetch([0])
    with pytest.raises(DataError, match=r"a.nc: variable t has missing values in rows 1 to 1"):
        refusing.fetch([0, 1])
    statistics = arrays.statistics()
    assert statistics.missing == {"t": 6, "u": 3}
    assert statistics.mean["t"] == pytest.approx(np.nanmean(expected), rel=1e-6)
    normal = Arrays(tmp_path / "a.nc", "t", normalise=statistics).fetch(range(2)).numpy()
    assert np.nanmean(normal) == pytest.approx(0, abs=1e-4)
    assert np.nanstd(normal) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("note", ["_NCProperties", "_nc3_strict", "_Netcdf4Dimid"])
def test_netcdf_has_a_default_for_what_nobody_has_written(tmp_path, here, note):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file.attrs[note] = 2
        file.create_dataset("t", (3, 4), "f4", chunks=(1, 4), fillvalue=9.96921e36)[0] = 1
        if note == "_Netcdf4Dimid":
            file["t"].attrs[note] = file.attrs.pop(note)
    assert np.isnan(Arrays(tmp_path / "a.nc", "t")[1].numpy()).all()


def test_netcdf_variables_have_the_rows_of_their_unlimited_dimension(tmp_path, here):
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.nc", "w") as file:
            file.attrs["_NCProperties"] = "version=2"
            made = {"time": 3, "t": 6, "u": 4, "never": 0}
            for name, rows in made.items():
                shape, most = ((rows,), (None,)) if name == "time" else ((rows, 2), (None, 2))
                values = np.full(shape, number)
                options = {"chunks": (4, 2)[: len(shape)], "fillvalue": 9.96921e36}
                one = file.create_dataset(name, data=values, dtype="f4", maxshape=most, **options)
                if name == "time":
                    one.make_scale("time")
                else:
                    one.dims[0].attach_scale(file["time"])
    paths = [tmp_path / f"{number}.nc" for number in range(2)]
    for name, rows in made.items():
        arrays = Arrays(paths, name, window=Window(6, continuous=True, stride=6))
        found = arrays.fetch(range(2)).numpy().reshape(2, 6, -1)[..., 0]
        for number in range(2):
            expected = [number] * rows + [np.nan] * (6 - rows)
            np.testing.assert_array_equal(found[number], np.array(expected, "f4"))


def test_netcdf_files_may_have_no_fill_value(tmp_path, here):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space, kind = h5py.h5s.create_simple((8,)), h5py.h5t.IEEE_F32LE
        library = ctypes.CDLL(h5py.h5p.__file__)
        assert (
            library.H5Pset_fill_value(ctypes.c_int64(plist.id), ctypes.c_int64(kind.id), None) == 0
        )
        variable = h5py.Dataset(h5py.h5d.create(file.id, b"v", kind, space, plist))
        variable[:4] = 1
        with pytest.raises(RuntimeError):
            variable.fillvalue  # noqa: B018
    np.testing.assert_array_equal(Arrays(tmp_path / "a.nc", "v").fetch(range(8)), [1] * 4 + [0] * 4)


def test_filters_that_were_left_out_for_a_chunk(tmp_path, here):
    values = np.arange(200, dtype="<f4").reshape(10, 20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset(
            "v", (10, 20), "<f4", chunks=(5, 20), compression=1, shuffle=True
        )
        made.id.write_direct_chunk((0, 0), values[:5].tobytes(), filter_mask=0b11)
        shuffled = values[5:].view("u1").reshape(-1, 4).T.tobytes()
        made.id.write_direct_chunk((5, 0), zlib.compress(shuffled))
        np.testing.assert_array_equal(made[()], values)
    np.testing.assert_array_equal(Arrays(tmp_path / "a.h5", "v").fetch(range(10)), values)


def test_the_checksum_is_that_of_hdf5_for_any_length(tmp_path, here):
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 717, 70_001, 200_000):
        values = random.integers(0, 256, count, np.uint8) | 128
        with h5py.File(tmp_path / "a.h5", "w") as file:
            made = file.create_dataset("v", data=values, chunks=(count,), fletcher32=True)
            _, data = made.id.read_direct_chunk((0,))
        assert filters.fletcher32(data[:-4]) == int.from_bytes(data[-4:], "little")
    assert filters.fletcher32(bytes(6)) == 0


def test_filters_of_hdf5plugin(tmp_path, here):
    hdf5plugin = pytest.importorskip("hdf5plugin")
    values = np.arange(300, dtype="<f4").reshape(15, 20)
    made = {
        "blosc": hdf5plugin.Blosc(),
        "blosc2": hdf5plugin.Blosc2(),
        "bshuf": hdf5plugin.Bitshuffle(),
        "bzip2": hdf5plugin.BZip2(),
        "lz4": hdf5plugin.LZ4(),
        "zstd": hdf5plugin.Zstd(),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in made.items():
            file.create_dataset(name, data=values, chunks=(4, 20), fletcher32=True, **options)
    found = Arrays(tmp_path / "a.h5", list(made)).fetch(range(15))
    for channel in range(len(made)):
        np.testing.assert_array_equal(found[:, channel], values)


def test_threads_read_at_once(tmp_path, here, monkeypatch):
    """They share open files and decoded chunks. Few chunks are kept."""
    monkeypatch.setattr(regions, "MOST_OPEN", 1)
    monkeypatch.setattr(regions, "CACHE_BYTES", 10_000)
    expected = np.concatenate([field(tmp_path / f"{n}.h5", seed=n) for n in range(3)])
    paths = [tmp_path / f"{n}.h5" for n in range(3)]
    arrays = Arrays(paths, ["contiguous", "chunked"])
    wrong = []

    def look(seed):
        for _ in range(5):
            order = np.random.default_rng(seed).permutation(len(arrays))
            found = arrays.fetch(order).numpy()
            if not (found == expected[order][:, None]).all():
                wrong.append(seed)
            arrays.close()

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert copy.deepcopy(arrays) is arrays


def test_a_pickled_one_is_small_and_reads_the_same(tmp_path, here):
    expected = field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", ["chunked"], window=Window(2, 1))
    arrays.fetch(range(5))  # what it keeps for later does not go into the pickle
    data = pickle.dumps(arrays)
    assert len(data) < 4000
    past, ahead = pickle.loads(data)[4]
    np.testing.assert_array_equal(torch.cat([past, ahead])[:, 0], expected[4:7])


def test_the_loader_takes_it(tmp_path, here):
    expected = field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", "chunked")
    order = SampleOrder(len(arrays), 4, seed=1)
    loader = Loader(arrays, order, cut(4, 1, 0), first_step=1, last_step=8, workers=2)
    for step in loader:
        indices = order.indices(step.number, 0, 4)
        np.testing.assert_array_equal(step.micro_batches[0].data, expected[indices])
    loader.close()


def test_a_file_that_changes_is_noticed(tmp_path, here):
    field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", "contiguous")
    with (tmp_path / "a.h5").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"a.h5 has changed since it was indexed"):
        arrays.fetch([0])


def test_a_file_that_changes_while_it_is_open_is_noticed(tmp_path, here):
    field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", "contiguous")
    arrays.fetch([0])
    time.sleep(2 * regions.OPEN_CHECK_SECONDS)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["contiguous"][...] = -1
    with pytest.raises(DataError, match=r"a.h5 has changed since it was indexed"):
        arrays.fetch([1])


def test_a_file_that_becomes_shorter_while_it_is_open(tmp_path, here):
    field(tmp_path / "a.h5")
    arrays = Arrays(tmp_path / "a.h5", "contiguous")
    arrays.fetch([0])
    with (tmp_path / "a.h5").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(DataError, match=r"a.h5 ends early"):
        arrays.fetch([len(arrays) - 1])


@pytest.mark.ranks(1, 2, 3, 4)
def test_statistics_have_the_same_bits_on_any_number_of_ranks(together, group, monkeypatch):
    monkeypatch.setattr(array_statistics, "PIECE_VALUES", 50)
    answers_here(monkeypatch)
    if group.rank == 0:
        values = field(together / "a.h5")
        values[3, 1, 2:4] = np.nan
        with h5py.File(together / "a.h5", "a") as file:
            file["chunked"][...] = values
        field(together / "b.h5", seed=1)
    paths = [together / "a.h5", together / "b.h5"]
    arrays = Arrays(paths, ["contiguous", "chunked"], group=group)
    found = arrays.statistics(group)
    assert found == arrays.statistics()
    both = np.concatenate([field(together / f"c{group.rank}.h5", seed=n) for n in range(2)])
    assert found.count == {"contiguous": both.size, "chunked": both.size - 2}
    assert found.missing == {"contiguous": 0, "chunked": 2}
    assert found.mean["contiguous"] == pytest.approx(both.mean(dtype="f8"), rel=1e-9)
    assert found.std["contiguous"] == pytest.approx(both.std(dtype="f8"), rel=1e-9)


@pytest.mark.ranks(2, 4)
def test_an_error_on_one_rank_is_raised_on_all(together, group, monkeypatch):
    answers_here(monkeypatch)
    with pytest.raises(DataError, match=r"no.h5: No such file") as caught:
        Arrays(together / "no.h5", "v", group=group)
    assert caught.value.agreed
    if group.rank == 0:
        field(together / "a.h5")
    arrays = Arrays(together / "a.h5", ["contiguous", "chunked"], group=group)
    monkeypatch.setattr(array_statistics, "PIECE_VALUES", 50)
    if group.rank == 1:
        monkeypatch.setattr(regions.BoxReader, "read", lambda *_: 1 / 0)
    with pytest.raises(RankError, match="rank 1: ZeroDivisionError"):
        arrays.statistics(group)


def test_statistics_of_float64_are_not_rounded(tmp_path):
    values = 1.7e9 + np.random.default_rng(0).standard_normal((50, 4))
    with h5py.File(tmp_path / "seconds.h5", "w") as file:
        file["time"] = values
    found = Arrays(tmp_path / "seconds.h5", "time").statistics()
    assert found.std["time"] == pytest.approx(values.std(), rel=1e-6)


def test_equal_values_have_no_deviation_and_infinite_ones_are_refused(tmp_path, here):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["same"] = np.full((10, 33, 57), 0.3)
        file["far"] = np.array([[1.0], [np.inf], [3.0]], "f4")
    found = Arrays(tmp_path / "a.h5", "same").statistics()
    assert (found.mean["same"], found.std["same"]) == (0.3, 0.0)
    with pytest.raises(DataError, match=r"variable far has infinite values.*missing_value"):
        Arrays(tmp_path / "a.h5", "far").statistics()


def test_statistics_are_written_and_read_with_all_digits(tmp_path):
    made = ArrayStatistics({"t": 1 / 3}, {"t": 0.1}, {"t": 10**12}, {"t": 0})
    made.write(tmp_path / "s.json")
    assert ArrayStatistics.read(tmp_path / "s.json") == made
    (tmp_path / "s.json").write_text('{"mean": {"t": []}}')
    with pytest.raises(DataError, match="holds no statistics"):
        ArrayStatistics.read(tmp_path / "s.json")


def test_boxes_with_gaps_are_read_in_one_call_or_run_by_run(tmp_path, here, monkeypatch):
    expected = field(tmp_path / "a.h5")
    calls = []
    real = files.read_into
    monkeypatch.setattr(
        files, "read_into", lambda fd, memory, at: calls.append(len(memory)) or real(fd, memory, at)
    )
    arrays = Arrays(tmp_path / "a.h5", "contiguous", tile=Tile((3, 2)))
    for limit, count in ((regions.SMALL_SPAN, 1), (0, 3)):
        monkeypatch.setattr(regions, "SMALL_SPAN", limit)
        monkeypatch.setattr(regions, "GAPS", 1)
        calls.clear()
        np.testing.assert_array_equal(arrays[1], expected[0, :3, 2:4])
        assert len(calls) == count


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ("no", {}, r"variable no: the file has no such variable. It has 35 others, among them: "),
        ([], {}, "no variable is given"),
        (["chunked", "chunked"], {}, "a variable is given twice"),
        ("shorx", {}, "It has 35 others, among them: short, .*: give one of them"),
        ("rowless", {}, "variable rowless has no rows: give files with some rows"),
        ("flat", {}, "variable flat cannot be read: an axis has the length 0: leave it out"),
        ("chunked", {"missing": "zero"}, "missing is 'zero'"),
        ("chunked", {"window": Window(0)}, "is not possible"),
        ("chunked", {"window": Window(30, 3)}, "no file has a window of 33 rows; .* up to 32"),
        ("chunked", {"window": Window(30, 3, continuous=True)}, "32 rows in all: not one window"),
        ("chunked", {"tile": Tile((9, 1))}, "is larger than a row"),
        ("chunked", {"tile": Tile((1, 1, 1))}, "is larger than a row|is not possible"),
        ("chunked", {"tile": Tile((0,))}, "is not possible"),
        (["chunked", "label"], {}, "different shapes.* give stack=False"),
        (["chunked", "short"], {"stack": False}, "different numbers of rows"),
        (
            "text",
            {},
            "variable text: its texts have no fixed length. Only whole numbers and floats are read",
        ),
        ("scalar", {}, "it has no axes"),
        ("compact", {}, "in its header"),
        ("lzf", {}, r"variable lzf .*: its filter lzf \(32000\) is not supported: write it with"),
        (
            "zstd",
            {},
            r"variable zstd cannot be read: its filter zstd \(32015\) needs .* hdf5plugin",
        ),
        ("soft", {}, "it is a link into another file|HDF5 library says"),
        ("virtual", {}, "its values are in other files"),
        ("complex", {}, "its type is complex64"),
        (
            "worded",
            {},
            r"variable worded: its attribute scale_factor is the text 0.1, and not one number",
        ),
        ("marked", {}, r"attribute missing_value is .*, and not 1 to 64 numbers"),
    ],
)
def test_mistakes_are_one_line(tmp_path, here, monkeypatch, variables, options, message):
    monkeypatch.setattr(filters, "_plugins", dict.fromkeys(filters.OF_PLUGINS))
    path = tmp_path / "a.h5"
    values = field(path)
    with h5py.File(path, "a") as file:
        file["short"], file["label"], file["scalar"] = values[:5], values[:, 0, 0], 1.0
        file["text"], file["complex"] = ["a", "b"], values.astype("c8")
        file["worded"], file["marked"] = values, values
        file["worded"].attrs["scale_factor"] = "0.1"
        file["marked"].attrs["missing_value"] = np.zeros(65)
        file.create_dataset("lzf", data=values, compression="lzf")
        file["rowless"], file["flat"] = values[:0], values[:, :0]
        for number in range(20):
            file[f"x{number}"] = 1.0
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, space, plist)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(file.id, b"zstd", h5py.h5t.NATIVE_FLOAT, space, plist)
        file["soft"] = h5py.ExternalLink("b.h5", "/contiguous")
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource("b.h5", "label", (4,))
        file.create_virtual_dataset("virtual", layout)
    field(tmp_path / "b.h5")
    with pytest.raises((DataError, UserError), match=message) as caught:
        Arrays(path, variables, **options)
    assert "\n" not in str(caught.value)
