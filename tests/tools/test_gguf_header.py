"""A GGUF's header is read once for everything that is loaded from it, and nothing of that outlives the load."""

from __future__ import annotations

import threading

import pytest

from fastspec.errors import Unsupported
from fastspec.models import _read_once, load_model

gguf = pytest.importorskip("gguf")


@pytest.fixture
def path(tmp_path):
    """A file with a name for its architecture and one tensor."""
    import numpy

    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(2)
    writer.add_tensor("output_norm.weight", numpy.ones(4, dtype=numpy.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return tmp_path / "small.gguf"


def test_a_header_is_read_once_while_a_model_is_loaded(path):
    reader, table = gguf.GGUFReader, gguf.get_tensor_name_map
    with _read_once(True):
        first = gguf.GGUFReader(path)
        assert isinstance(first, reader) and gguf.GGUFReader(path) is first
        assert first.tensors[0].name == "output_norm.weight"
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (reader, table)


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
