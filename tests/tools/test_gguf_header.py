"""A GGUF's header is read once for everything that is loaded from it, and nothing of that outlives the load."""

from __future__ import annotations

import threading

import numpy
import pytest

from fastspec.errors import Unsupported
from fastspec.models import _read_once, fast_reader, load_model

gguf = pytest.importorskip("gguf")


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def path(tmp_path):
    """A file with a name for its architecture and one tensor."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_tensor("output_norm.weight", numpy.ones(4, dtype=numpy.float32))
    write(writer)
    return tmp_path / "small.gguf"


def test_a_header_is_read_once_while_a_model_is_loaded(path):
    reader, table = gguf.GGUFReader, gguf.get_tensor_name_map
    with _read_once(True):
        first = gguf.GGUFReader(path)
        assert isinstance(first, reader) and gguf.GGUFReader(path) is first
        assert first.tensors[0].name == "output_norm.weight"
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, table)


def test_a_reader_that_someone_else_put_there_is_asked(path, monkeypatch):
    """A function, of which no class can be made."""
    asked, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *given: asked.append(given) or reader(*given))
    with _read_once(True):
        assert gguf.GGUFReader(path).tensors and gguf.GGUFReader(path) is gguf.GGUFReader(path)
    assert len(asked) == 1


def test_other_models_are_loaded_as_ever():
    reader = gguf.GGUFReader
    with _read_once(False):
        assert gguf.GGUFReader is reader


@pytest.mark.parametrize("cut", [None, 4], ids=["without a tokenizer", "cut off"])
def test_a_file_that_is_no_model_leaves_the_reader_as_it_was(path, cut):
    path.write_bytes(path.read_bytes()[:cut])
    reader = gguf.GGUFReader
    with pytest.raises(Unsupported, match="could not load the model"):
        load_model(str(path))
    assert gguf.GGUFReader is reader


def test_two_threads_do_not_read_for_each_other(path):
    reader, seen = gguf.GGUFReader, []

    def read() -> None:
        with _read_once(True):
            seen.append(gguf.GGUFReader(path))

    with _read_once(True):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and not seen
    thread.join(10)
    assert len(seen) == 1 and gguf.GGUFReader is reader


@pytest.fixture(params=["LITTLE", "BIG"])
def varied(request, tmp_path):
    """A file with fields of every type, in either order of bytes."""
    writer = gguf.GGUFWriter(tmp_path / "varied.gguf", "llama", endianess=gguf.GGUFEndian[request.param])
    writer.add_token_list(["", "a", "ü", "word" * 63, *map(str, range(65))])
    writer.add_token_types([1, 2, 3] * 21)
    writer.add_token_scores([0.5, -1.0, float("nan")])
    writer.add_array("some.flags", [True, False, True])
    writer.add_array("some.one", [-7])
    writer.add_array("some.lists", [["a", "b"], ["c"]])
    writer.add_array("some.numbers", [[1, 2], [3, 4]])
    for name, add in (("u8", "uint8"), ("i16", "int16"), ("u64", "uint64"), ("f64", "float64"), ("f32", "float32")):
        getattr(writer, f"add_{add}")(f"some.{name}", 5)
    writer.add_bool("some.bool", True)
    writer.add_tensor("output_norm.weight", numpy.arange(63, dtype=numpy.float32))
    write(writer)
    return tmp_path / "varied.gguf"


def test_a_header_that_is_read_whole_is_what_is_read_part_by_part(varied):
    slow, fast = gguf.GGUFReader(varied), fast_reader(gguf.GGUFReader)(varied)
    assert list(slow.fields) == list(fast.fields) and len(slow.fields) > 15
    for name, field in slow.fields.items():
        other = fast.fields[name]
        assert (field.offset, field.data, field.types) == (other.offset, other.data, other.types), name
        assert len(field.parts) == len(other.parts)
        for a, b in zip(field.parts, other.parts, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name
        assert repr(field.contents()) == repr(other.contents())
    assert (slow.data_offset, slow.alignment, slow.byte_order) == (fast.data_offset, fast.alignment, fast.byte_order)
    for a, b in zip(slow.tensors, fast.tensors, strict=True):
        assert a.name == b.name and a.tensor_type == b.tensor_type and a.data.tobytes() == b.data.tobytes()


def test_a_list_that_is_cut_off_fails_as_ever(varied, tmp_path):
    whole, fast = varied.read_bytes(), fast_reader(gguf.GGUFReader)
    for end in range(24, gguf.GGUFReader(varied).data_offset, 37):
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(Exception) as slow:
            gguf.GGUFReader(tmp_path / "cut.gguf")
        with pytest.raises(type(slow.value)):
            fast(tmp_path / "cut.gguf")
