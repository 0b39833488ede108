"""Headers of checkpoints, and every way in which a checkpoint can be broken."""

from __future__ import annotations

import json

import pytest
import torch
from loader_support import write_sharded
from safetensors.torch import save_file

from ndcompile.loader import CheckpointError
from ndcompile.loader.catalog import read_catalog

A, B = {"a": torch.arange(6.0).reshape(2, 3)}, {"b": torch.arange(4)}


def single(folder, tensors=None):
    path = folder / "model.safetensors"
    save_file(A if tensors is None else tensors, path)
    return path


def raw(folder, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_entries_point_at_the_bytes_of_their_tensors(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": A, "y.safetensors": B})
    catalog = read_catalog(tmp_path)
    assert {key: (entry.file_names, entry.dtype, entry.shape) for key, entry in catalog.items()} == {
        "a": ("x.safetensors", torch.float32, (2, 3)),
        "b": ("y.safetensors", torch.int64, (4,)),
    }
    for key, entry in catalog.items():
        (block,) = entry.blocks
        data = block.file.read_bytes()[block.offset : block.offset + block.nbytes]
        assert data == (A | B)[key].numpy().tobytes()


def test_a_folder_without_checkpoint_says_what_was_looked_for(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    message = r"looked for model.safetensors and model.safetensors.index.json; it holds pytorch_model.bin"
    with pytest.raises(CheckpointError, match=message):
        read_catalog(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.*does not exist"):
        read_catalog(tmp_path / "nowhere")


def test_a_missing_file_of_the_index_is_named(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": A, "y.safetensors": B})
    (tmp_path / "y.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names a file that is missing: y.safetensors"):
        read_catalog(tmp_path)


def test_a_truncated_file_names_the_tensors_that_are_cut_off(tmp_path):
    path = single(tmp_path, A | {"tail": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated: .*cut off: tail"):
        read_catalog(tmp_path)


def test_a_file_that_ends_in_its_header_is_truncated(tmp_path):
    path = single(tmp_path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="truncated: its header needs"):
        read_catalog(tmp_path)


def test_trailing_bytes_are_refused(tmp_path):
    path = single(tmp_path)
    path.write_bytes(path.read_bytes() + b"12345")
    with pytest.raises(CheckpointError, match="5 trailing bytes"):
        read_catalog(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00no", b"\x80" * 8])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt"):
        read_catalog(tmp_path)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "8 bytes do not hold shape"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "unknown dtype 'F99'"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "starts at byte"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, "do not hold"),
        (7, "corrupt header"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, item, message):
    raw(tmp_path, {"w": item}, bytes(12))
    with pytest.raises(CheckpointError, match=message):
        read_catalog(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path):
    item = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    raw(tmp_path, {"v": item, "w": item}, bytes(8))
    with pytest.raises(CheckpointError, match="starts at byte"):
        read_catalog(tmp_path)


def test_a_key_twice_in_one_header_is_refused(tmp_path):
    item = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    raw(tmp_path, b'{"w":' + item + b',"w":' + item + b"}", bytes(4))
    with pytest.raises(CheckpointError, match="duplicate key 'w'"):
        read_catalog(tmp_path)


def test_a_key_in_two_files_names_both(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": A | {"c": A["a"] + 1}, "y.safetensors": A | B})
    with pytest.raises(CheckpointError, match=r"'a' is in two files: .*x.safetensors and .*y.safetensors"):
        read_catalog(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"},
            "places key 'c' in y.safetensors, whose header",
        ),
        ({"a": "x.safetensors", "b": "x.safetensors", "z": "y.safetensors"}, "'b' in x.safetensors, it is in y.saf"),
        ({"a": "y.safetensors", "q": "x.safetensors"}, "key 'b' of y.safetensors is not in the index"),
    ],
)
def test_an_index_that_disagrees_with_the_headers_names_key_and_file(tmp_path, index, message):
    write_sharded(tmp_path, {"x.safetensors": A, "y.safetensors": B}, index)
    with pytest.raises(CheckpointError, match=message):
        read_catalog(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="no checkpoint index"):
        read_catalog(tmp_path)


def test_all_that_is_wrong_is_in_one_message(tmp_path):
    write_sharded(tmp_path, {"x.safetensors": A, "y.safetensors": B, "z.safetensors": {"c": torch.zeros(100)}})
    (tmp_path / "x.safetensors").unlink()
    header = {
        "b": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        "d": {"dtype": "F32", "shape": [4], "data_offsets": [8, 16]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "y.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    (tmp_path / "z.safetensors").write_bytes((tmp_path / "z.safetensors").read_bytes()[:-4])
    with pytest.raises(CheckpointError) as error:
        read_catalog(tmp_path)
    first, *lines = str(error.value).splitlines()
    assert first.endswith("is broken, nothing was loaded:")
    expected = [
        "names a file that is missing: x.safetensors",
        "y.safetensors has a corrupt header: key 'b': unknown dtype 'F99'",
        "y.safetensors has a corrupt header: key 'd': 8 bytes do not hold shape (4,) of torch.float32, which needs 16",
        "z.safetensors is truncated: ",
    ]
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line


@pytest.mark.parametrize("offsets", [[0, 1 << 50], [-8, 0], [8, 0]], ids=str)
def test_offsets_out_of_range_are_refused(tmp_path, offsets):
    raw(tmp_path, {"w": {"dtype": "U8", "shape": [max(offsets[1] - offsets[0], 0)], "data_offsets": offsets}}, bytes(8))
    with pytest.raises(CheckpointError, match=r"model.safetensors (is truncated|has a corrupt header: key 'w')"):
        read_catalog(tmp_path)


def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"truncated: its header needs 1000 bytes, 2 are there"):
        read_catalog(tmp_path)
