"""Files and their backends, as MMEngine's documentation of input and output shows them."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import mmengine
import mmengine.fileio as fileio
from mmengine.fileio import (
    BaseFileHandler,
    BaseStorageBackend,
    FileClient,
    HTTPBackend,
    LocalBackend,
    dict_from_file,
    dump,
    get_file_backend,
    list_from_file,
    load,
    register_backend,
    register_handler,
)

DATA = {"name": "cat", "box": [1, 2, 3], "nested": {"a": 0.5}}


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml", "pkl", "pickle"])
def test_data_is_dumped_and_loaded_by_suffix(tmp_path, suffix):
    path = str(tmp_path / f"data.{suffix}")
    dump(DATA, path)
    assert load(path) == DATA
    assert mmengine.load(Path(path)) == DATA


@pytest.mark.parametrize("file_format", ["json", "yaml"])
def test_data_is_dumped_to_a_string(file_format):
    text = dump(DATA, file_format=file_format)
    assert isinstance(text, str)
    assert load(io.StringIO(text), file_format=file_format) == DATA


def test_pickles_are_dumped_to_bytes():
    assert load(io.BytesIO(dump(DATA, file_format="pkl")), file_format="pkl") == DATA


def test_data_is_dumped_to_an_open_file(tmp_path):
    with open(tmp_path / "data.json", "w") as file:
        dump(DATA, file, file_format="json")
    with open(tmp_path / "data.json") as file:
        assert load(file, file_format="json") == DATA


def test_json_takes_arrays_and_numbers_of_numpy():
    values = {"array": np.arange(3), "number": np.float32(0.5), "set": {1}, "whole": np.int64(4)}
    assert json.loads(dump(values, file_format="json")) == {"array": [0, 1, 2], "number": 0.5, "set": [1], "whole": 4}


def test_an_unknown_format_is_a_type_error(tmp_path):
    with pytest.raises(TypeError):
        dump(DATA, str(tmp_path / "data.xyz"))
    with pytest.raises(TypeError):
        load(str(tmp_path / "data.xyz"))
    with pytest.raises((TypeError, ValueError)):
        dump(DATA)


def test_dump_creates_folders(tmp_path):
    path = tmp_path / "new" / "folder" / "data.json"
    dump(DATA, str(path))
    assert json.loads(path.read_text()) == DATA


def test_a_handler_of_ones_own(tmp_path):
    @register_handler("documentedtxt")
    class TextHandler(BaseFileHandler):
        def load_from_fileobj(self, file):
            return file.read().split()

        def dump_to_fileobj(self, obj, file):
            file.write(" ".join(obj))

        def dump_to_str(self, obj, **kwargs):
            return " ".join(obj)

    path = str(tmp_path / "words.documentedtxt")
    dump(["a", "b"], path)
    assert load(path) == ["a", "b"]


def test_a_handler_of_bytes_says_so(tmp_path):
    @register_handler(["documentednpy"])
    class ArrayHandler(BaseFileHandler):
        str_like = False

        def load_from_fileobj(self, file, **kwargs):
            return np.load(file)

        def dump_to_fileobj(self, obj, file, **kwargs):
            np.save(file, obj)

        def dump_to_str(self, obj, **kwargs):
            with io.BytesIO() as file:
                np.save(file, obj)
                return file.getvalue()

    path = str(tmp_path / "array.documentednpy")
    dump(np.eye(3), path)
    np.testing.assert_array_equal(load(path), np.eye(3))


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("a\nb\nc\nd\n")
    return str(path)


def test_lines_of_a_file(listed):
    assert list_from_file(listed) == ["a", "b", "c", "d"]
    assert list_from_file(listed, offset=2) == ["c", "d"]
    assert list_from_file(listed, max_num=2) == ["a", "b"]
    assert list_from_file(listed, prefix="/img/") == ["/img/a", "/img/b", "/img/c", "/img/d"]
    assert mmengine.list_from_file(listed, offset=1, max_num=1) == ["b"]


def test_a_file_of_keys_and_values(tmp_path):
    path = tmp_path / "map.txt"
    path.write_text("1 cat\n2 dog cow\n3 panda\n")
    assert dict_from_file(str(path)) == {"1": "cat", "2": ["dog", "cow"], "3": "panda"}
    assert dict_from_file(str(path), key_type=int)[3] == "panda"


# Backends.


def test_files_on_a_disk(tmp_path):
    backend = LocalBackend()
    path = tmp_path / "folder" / "x.txt"
    backend.put(b"bytes", path)
    assert backend.get(path) == b"bytes"
    backend.put_text("text", path)
    assert backend.get_text(path) == "text"
    assert backend.exists(path)
    assert backend.isfile(path)
    assert backend.isdir(path.parent)
    assert Path(backend.join_path(str(tmp_path), "folder", "x.txt")) == path
    backend.remove(path)
    assert not backend.exists(path)


def test_a_local_copy_is_the_file_itself(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with LocalBackend().get_local_path(tmp_path / "x.txt") as path:
        assert Path(path).read_text() == "x"
    assert (tmp_path / "x.txt").exists()


def test_files_and_folders_are_copied(tmp_path):
    backend = LocalBackend()
    backend.put_text("one", tmp_path / "a" / "one.txt")
    assert Path(backend.copyfile(tmp_path / "a" / "one.txt", tmp_path / "two.txt")).read_text() == "one"
    backend.copytree(tmp_path / "a", tmp_path / "b")
    assert backend.get_text(tmp_path / "b" / "one.txt") == "one"
    backend.copyfile_from_local(tmp_path / "two.txt", tmp_path / "c.txt")
    backend.copyfile_to_local(tmp_path / "two.txt", tmp_path / "d.txt")
    assert backend.exists(tmp_path / "c.txt")
    backend.copytree_from_local(tmp_path / "a", tmp_path / "e")
    backend.copytree_to_local(tmp_path / "a", tmp_path / "f")
    assert backend.isdir(tmp_path / "e")
    backend.rmtree(tmp_path / "b")
    assert not backend.exists(tmp_path / "b")
    with pytest.raises(FileExistsError):
        backend.copytree(tmp_path / "a", tmp_path / "e")
    assert backend.copy_if_symlink_fails(tmp_path / "two.txt", tmp_path / "link.txt") in (True, False)
    assert backend.get_text(tmp_path / "link.txt") == "one"


def test_a_folder_is_listed(tmp_path):
    backend = LocalBackend()
    for name in ("a.txt", "b.jpg", "sub/c.txt"):
        backend.put_text("", tmp_path / name)
    assert sorted(backend.list_dir_or_file(tmp_path)) == ["a.txt", "b.jpg", "sub"]
    assert sorted(backend.list_dir_or_file(tmp_path, list_dir=False)) == ["a.txt", "b.jpg"]
    assert sorted(backend.list_dir_or_file(tmp_path, list_file=False)) == ["sub"]
    found = backend.list_dir_or_file(tmp_path, list_dir=False, suffix=".txt", recursive=True)
    assert sorted(found) == ["a.txt", str(Path("sub", "c.txt"))]
    with pytest.raises(TypeError):
        list(backend.list_dir_or_file(tmp_path, list_dir=True, suffix=".txt"))


def test_the_same_by_functions(tmp_path):
    path = str(tmp_path / "folder" / "x.txt")
    fileio.put(b"x", path)
    fileio.put_text("y", path)
    assert (fileio.get(path), fileio.get_text(path)) == (b"y", "y")
    assert fileio.exists(path)
    assert fileio.isfile(path)
    assert fileio.isdir(str(tmp_path))
    assert fileio.join_path("a", "b") == str(Path("a", "b"))
    fileio.copyfile(path, str(tmp_path / "z.txt"))
    fileio.copytree(str(tmp_path / "folder"), str(tmp_path / "other"))
    assert sorted(fileio.list_dir_or_file(str(tmp_path))) == ["folder", "other", "z.txt"]
    with fileio.get_local_path(path) as local:
        assert Path(local).read_text() == "y"
    fileio.remove(path)
    fileio.rmtree(str(tmp_path / "other"))
    assert not fileio.exists(str(tmp_path / "other"))
    fileio.copyfile_to_local(str(tmp_path / "z.txt"), str(tmp_path / "w.txt"))
    fileio.copyfile_from_local(str(tmp_path / "w.txt"), str(tmp_path / "v.txt"))


def test_a_backend_is_found_by_the_address():
    assert isinstance(get_file_backend("/a/b.jpg"), LocalBackend)
    assert isinstance(get_file_backend("http://host/b.jpg"), HTTPBackend)
    assert isinstance(get_file_backend("https://host/b.jpg"), HTTPBackend)
    assert isinstance(get_file_backend(backend_args={"backend": "local"}), LocalBackend)
    assert get_file_backend("/a", enable_singleton=True) is get_file_backend("/b", enable_singleton=True)


def test_a_backend_of_ones_own(tmp_path):
    class Memory(BaseStorageBackend):
        files = {"documented://a.txt": b"hello"}

        def get(self, filepath):
            return self.files[str(filepath)]

        def get_text(self, filepath, encoding="utf-8"):
            return self.get(filepath).decode(encoding)

    register_backend("documented_memory", Memory, prefixes="documented", force=True)
    assert fileio.get("documented://a.txt") == b"hello"
    assert fileio.get_text("documented://a.txt") == "hello"
    assert list_from_file("documented://a.txt") == ["hello"]
    with pytest.raises(ValueError):
        register_backend("documented_memory", Memory)
    with pytest.raises((TypeError, ValueError)):
        register_backend("documented_wrong", int)


def test_a_file_client_is_the_older_form(tmp_path):
    (tmp_path / "x.txt").write_text("old")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = FileClient(backend="disk")
        assert client.get_text(tmp_path / "x.txt") == "old"
        assert client.get(tmp_path / "x.txt") == b"old"
        assert FileClient.infer_client(uri=str(tmp_path)).exists(tmp_path / "x.txt")
