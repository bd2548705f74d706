from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.staging.listing import Item
from hpc_train.staging.stream import LEAST, MOST, Stream, chunk_bytes


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_the_chunks_have_each_byte_of_each_file_once_and_in_order(sizes, chunk):
    items = [Item(str(number), 0, 0, size) for number, size in enumerate(sizes)]
    items.insert(0, Item("second name", 0, 0, 30, "0"))  # its bytes are those of another
    stream = Stream(items, chunk)
    assert stream.total == sum(sizes)
    found = []
    for number in range(stream.chunks):
        place = 0
        for portion in stream.portions(number):
            assert portion.at == place
            place += portion.nbytes
            begin = portion.offset
            found += [(portion.item.path, begin + byte) for byte in range(portion.nbytes)]
        assert 0 < place == stream.nbytes(number) <= chunk
    assert found == [
        (str(number), byte) for number, size in enumerate(sizes) for byte in range(size)
    ]


@given(st.integers(0, 10**13), st.integers(1, 10**4))
def test_passing_on_the_first_chunk_takes_an_eighth_of_the_time(total, nodes):
    chunk = chunk_bytes(total, nodes)
    assert LEAST <= chunk <= MOST
    if chunk > LEAST:
        assert nodes * chunk <= total / 8
