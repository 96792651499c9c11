"""Comparing data that is stored twice, without reading much of it."""

from support.badfiles import header

from introspect.check_record import Tie
from introspect.checkpoint import read_local
from introspect.stored_bytes import BLOCK_BYTES, SAMPLED_BYTES, _blocks, compare_bytes


def write(path, **tensors):
    entries, data = {}, b""
    for name, content in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    path.write_bytes(header(entries, data))


def test_ties_of_one_file(tmp_path):
    write(tmp_path / "model.safetensors", a=b"same", b=b"same", c=b"else")
    checkpoint = read_local(tmp_path)

    same, other = compare_bytes(checkpoint, (Tie(kept="a", tied="b"), Tie(kept="a", tied="c")))

    assert (same.equal, same.sampled) == (True, False)
    assert not other.equal
    assert same.second == ("model.safetensors", "b")


def test_names_in_two_files(tmp_path):
    write(tmp_path / "m-1-of-2.safetensors", a=b"same", b=b"1")
    write(tmp_path / "m-2-of-2.safetensors", a=b"same", b=b"2")

    found = {one.second[1]: one.equal for one in compare_bytes(read_local(tmp_path), ())}

    assert found == {"a": True, "b": False}


def test_a_difference_in_the_last_byte_of_a_large_tensor_is_seen(tmp_path):
    large = bytes(SAMPLED_BYTES + 1000)
    write(tmp_path / "model.safetensors", a=large, b=large[:-1] + b"\1", c=large)

    differs, equal = compare_bytes(read_local(tmp_path), (Tie(kept="a", tied="b"), Tie(kept="a", tied="c")))

    assert (differs.equal, equal.equal, equal.sampled) == (False, True, True)


def test_blocks_cover_small_tensors_and_both_ends_of_large_ones():
    small = list(_blocks(3 * BLOCK_BYTES + 7))
    large = list(_blocks(10**12))

    assert sum(length for _, length in small) == 3 * BLOCK_BYTES + 7
    assert [offset for offset, _ in small] == [0, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert sum(length for _, length in large) == SAMPLED_BYTES
    assert (large[0][0], large[-1][0] + large[-1][1]) == (0, 10**12)
    assert list(_blocks(0)) == []


def test_data_that_is_not_there_is_not_compared(tmp_path):
    write(tmp_path / "model.safetensors", a=b"same", b=b"same")
    checkpoint = read_local(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    assert compare_bytes(checkpoint, (Tie(kept="a", tied="b"),)) == ()
