"""Files that git-lfs left as pointers are named as such."""

import shutil

import pytest

from icebear import build_index, open_store, read_corpus
from icebear.errors import StoreError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_a_pointer_in_the_place_of_a_file_of_an_index(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, read_corpus(corpus.facts["corpus"], limit=20), store, k=2)
        paths = [store.vectors.path(name) for name in ("tokens", "w_out")]
    for path in paths:
        shutil.copy(path, tmp_path / "kept")
        path.write_text(POINTER)
        with open_store(tmp_path / "a.db") as store, pytest.raises(StoreError, match="git lfs pull"):
            store.vectors.get(path.name.removesuffix(".faiss").rpartition(".")[2])
        shutil.copy(tmp_path / "kept", path)
    (tmp_path / "b.db").write_text(POINTER)
    with pytest.raises(StoreError, match="git lfs pull"), open_store(tmp_path / "b.db") as store:
        store.facts.all()
