"""The index that comes with icebear: what is packed is what is unpacked, and what the model computes."""

import collections
import json
import os
import shutil
import threading

import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model
from letters import Letters

from benchmarks import pack_index
from icebear import Model, Neuron, build_index, cache, open_store, read_corpus
from icebear.actmax.index.head_norms import HeadNorms, head_means
from icebear.actmax.shipped import shipped_index as module
from icebear.actmax.shipped.index_choice import choose_index, index_beside, replacement, store_name
from icebear.app.cli.main import main
from icebear.app.mcp.tools import searched
from icebear.app.session import Session
from icebear.app.web.shared import header, served
from icebear.app.web.shared.all_visitors import server_state
from icebear.app.web.shared.index_builds import APP_SITES
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.concepts.vocabulary import calibration
from icebear.db import search
from icebear.errors import DownloadError, StoreError

MOST_BYTES = 12_000_000


@pytest.fixture
def packed(model, corpus, tmp_path):
    """A packed index of a small model, beside the store that it is of. Its tokenizer reads no capitals."""
    (tmp_path / "lower.txt").write_text((tmp_path / "c.txt").read_text().lower())
    corpus = read_corpus(str(tmp_path / "lower.txt"))
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=pack_index.EXAMPLES + 3)
        pack_index.pack(store, tmp_path / "a.npz")
    return tmp_path / "a.npz"


def test_the_strongest_sentences_and_the_statistics_come_back(model, packed, tmp_path):
    module.unpack_index(packed, model, tmp_path / "b.db")
    with open_store(tmp_path / "a.db") as store, open_store(tmp_path / "b.db") as again:
        assert again.is_complete
        assert again.made_with()["index"]["shipped"]
        for row in store.database.execute("SELECT layer, site, idx FROM neurons").fetchall():
            neuron = Neuron(*row)
            kept = None if neuron.site == "head" else pack_index.EXAMPLES
            for polarity in "+-":
                before, after = store.examples(neuron, polarity, kept), again.examples(neuron, polarity)
                assert [(e.sentence, e.token) for e in after] == [(e.sentence, e.token) for e in before]
                assert [e.activation for e in after] == pytest.approx([e.activation for e in before], rel=1e-3)
            before, after = (s.neurons.statistics(neuron) for s in (store, again))
            assert after.histogram == before.histogram
            assert [after.mean, after.std, after.max] == pytest.approx(
                [before.mean, before.std, before.max], 1e-3, 1e-4
            )
        assert again.controls.get("kurtosis") == store.controls.get("kurtosis")
        assert again.similar(Neuron(0, "ffn", 3)) == store.similar(Neuron(0, "ffn", 3))
        assert {hit.by for hit in again.search("bear", 60)} <= {"sentences", "weights"}
        assert again.similar(Neuron(0, "ffn", 3), by="examples") == []


def test_other_texts_and_another_model_are_refused(model, packed, tmp_path):
    with pytest.raises(StoreError):
        module.unpack_index(
            packed, Model(random_model(LLAMA, dtype=torch.float32, seed=1).net, model.tokenizer), tmp_path / "b.db"
        )
    (tmp_path / "lower.txt").write_text("Other texts.\n" * 40)
    with pytest.raises(StoreError):
        module.unpack_index(packed, model, tmp_path / "c.db")


def test_a_model_of_another_name_has_none(model):
    for name in ("smollm2-136m", "/models/smollm2-135m"):
        assert module.shipped_index(name, lambda: model) is None
    with pytest.raises(StoreError):
        module.shipped_store(model)


# --- in the cache ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a packed index of the model a, and of a cache where it was prepared; and this model."""
    folder, model = tmp_path_factory.mktemp("home"), Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "a")
    lines = ("ice bear", "the camel eats sand", "a cold bear", "warm water", "north of the desert", "snow")
    (folder / "c.txt").write_text("\n".join(f"{line} {letter}." for line in lines for letter in "abcd"))
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        come_with_icebear(patch, folder)
        with open_store(folder / "a.db", create=True) as store:
            build_index(model, read_corpus(str(folder / "c.txt")), store, k=pack_index.EXAMPLES)
            pack_index.pack(store, folder / "a.npz")
        module.shipped_index("a", lambda: model)
    return folder, model


def few(patch):
    patch.setattr(calibration, "TEXTS", calibration.TEXTS[::30])
    patch.setattr(search, "CHANCE_NEURONS", 4)
    patch.setattr(search, "DIRECTIONS", 20)


def come_with_icebear(patch, folder):
    patch.setattr(module, "FOLDER", folder)
    patch.setattr(module, "ROOM", 1)
    patch.setenv("ICEBEAR_CACHE", str(folder / "cache"))


@pytest.fixture
def shipped(home, tmp_path, monkeypatch):
    """Calling it returns the index, which was prepared in a cache; `loads` counts when it was made again."""
    folder, model = home
    few(monkeypatch)
    come_with_icebear(monkeypatch, folder)
    shutil.copytree(folder / "cache", tmp_path / "cache")
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    prepare = lambda: module.shipped_index("a", lambda: prepare.loads.append(1) or model)  # noqa: E731
    prepare.loads = []
    return prepare


@pytest.fixture
def unprepared(shipped):
    shutil.rmtree(shipped().parent)
    return shipped


def results(path):
    with open_store(path) as store:
        return store.checksum(), store.search("bear", 20), store.similar("L0.ffn.3"), store.vocabulary("L1.ffn.2")


def flipped(data, place):
    place = min(place, len(data) - 1)
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


DAMAGES = {
    "missing": lambda file, data: file.unlink(),
    "empty": lambda file, data: file.write_bytes(b""),
    "a text": lambda file, data: file.write_text("This is not an index. " * 1000),
    "cut": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "a folder": lambda file, data: (file.unlink(), file.mkdir()),
    "a bit at 8192": lambda file, data: file.write_bytes(flipped(data, 8192)),
    "another file": lambda file, data: file.write_bytes(next(file.parent.glob("*.w_in.faiss")).read_bytes()),
}


@pytest.mark.parametrize("ending", ["", ".w_out.faiss", ".w_in.faiss", ".examples.faiss", ".tokens.faiss"])
def test_a_damaged_file_of_the_index_is_noticed(shipped, ending, generator):
    """Bits that are flipped anywhere, unless no result depends on them."""
    file = (path := shipped()).with_name(f"index.db{ending}")
    sound, data = results(path), file.read_bytes()
    for damage in DAMAGES.values():
        damage(file, data)
        assert ending == ".w_in.faiss" or module.prepared_index("a") is None
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        file.write_bytes(data)
        assert module.prepared_index("a") == path
    for _ in range(25):
        file.write_bytes(flipped(data, generator.randrange(len(data))))
        assert module.prepared_index("a") is None or results(path) == sound
    assert not shipped.loads


@pytest.mark.parametrize(("ending", "damage"), [("", "empty"), ("", "a folder"), (".w_out.faiss", "missing")])
def test_a_damaged_file_of_the_index_is_made_again(shipped, ending, damage, capsys):
    """What people added stays where it can be read."""
    path = shipped()
    sound = results(path)
    with open_store(path) as store:
        store.labels.set_manual("L0.ffn.1", "bears")
    file = path.with_name(f"index.db{ending}")
    DAMAGES[damage](file, file.read_bytes())
    assert shipped() == path
    assert "damaged" in capsys.readouterr().err
    with open_store(path) as store:
        assert store.labels.manual("L0.ffn.1")[0] == ("bears" if ending else None)
        store.labels.set_manual("L0.ffn.1", "")
    assert results(path) == sound
    assert len(shipped.loads) == 1


def test_a_whole_index_is_not_made_again(shipped, monkeypatch):
    """Also after somebody wrote to it, in a copied cache, and where the cache cannot be written."""
    path = shipped()
    with open_store(path) as store:
        store.labels.set_manual("L0.ffn.1", "bears")
    assert shipped() == module.prepared_index("a") == path
    assert cache.cached(path.parent)
    for file in path.parent.iterdir():
        os.utime(file, (1, 1))
    monkeypatch.setattr(cache, "_write", unwritable)
    monkeypatch.setattr(module, "write_manifest", unwritable)
    assert shipped() == path
    with open_store(path) as store:
        assert store.labels.manual("L0.ffn.1")[0] == "bears"
        store.labels.set_manual("L0.ffn.1", "ice bears")
    assert shipped() == path
    assert not shipped.loads


def unwritable(*_):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("at", ["folder", "file"])
def test_something_else_in_the_place_of_the_index_is_replaced(unprepared, at):
    folder = module.shipped_path("a").parent
    folder.mkdir() if at == "folder" else folder.write_text("something")
    assert unprepared().is_file()


@pytest.mark.usefixtures("unprepared")
def test_a_second_process_waits_for_the_index_and_uses_it(home):
    paths, loads = [], []

    def load(name):
        loads.append(name)
        second.start()
        second.join(0.5)  # it waits
        assert second.is_alive()
        return home[1]

    def prepare(name):
        paths.append(module.shipped_index("a", lambda: load(name)))

    second = threading.Thread(target=prepare, args=("second",))
    prepare("first")
    second.join(30)
    assert (loads, len(set(paths)), len(paths)) == (["first"], 1, 2)
    assert results(paths[0])


def test_a_killed_preparation_leaves_nothing_that_is_taken_for_an_index(unprepared):
    def killed(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("icebear.actmax.index.neuron_vectors.ensure_vectors", killed)
        unprepared()
    assert module.prepared_index("a") is None
    assert results(unprepared())


def test_why_the_cache_cannot_hold_the_index_is_named(unprepared, tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "disk_usage", lambda path: usage(10, 10, 0))
        with pytest.raises(DownloadError, match="disk space"):
            unprepared()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="ICEBEAR_CACHE"):
        unprepared()


@pytest.fixture
def verbs(home, unprepared, tmp_path, monkeypatch):
    """Commands without a store, for whom the model a is the default one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("icebear.app.cli.stores.example.MODEL", "a")
    monkeypatch.setattr("icebear.load_model", lambda *_, **__: home[1])
    monkeypatch.setattr("icebear.app.cli.options.ModelOptions.load", lambda *_: home[1])
    return lambda *words: CliRunner().invoke(main, words)


def test_a_command_says_why_there_is_no_index(verbs, tmp_path, monkeypatch):
    """A search, which needs one, fails; a card goes on without."""
    assert verbs("search", "bear").exit_code == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "file"))
    failed = verbs("search", "bear")
    assert failed.exit_code == 1
    assert "ICEBEAR_CACHE" in failed.stderr
    card = verbs("neuron", "L0.ffn.3", "--model", "a")
    assert card.exit_code == 0
    assert "ICEBEAR_CACHE" in card.stderr


def test_a_search_reads_the_index_of_the_model_that_is_named(verbs):
    """The folder's default model has an index; a model that is named and has none is not answered from that."""
    named = verbs("search", "bear", "--model", "without-an-index")
    assert named.exit_code == 1
    assert "icebear index" in named.stderr


def test_a_command_of_other_weights_asks_for_an_index(verbs, home, monkeypatch):
    other = Model(random_model(LLAMA, dtype=torch.float32, seed=1).net, home[1].tokenizer, "a")
    monkeypatch.setattr("icebear.app.cli.options.ModelOptions.load", lambda *_: other)
    failed = verbs("search", "bear")
    assert failed.exit_code == 1
    assert "icebear index" in failed.stderr


@pytest.mark.parametrize("left", ["database", "vectors"])
def test_the_mcp_server_opens_a_whole_index_only(shipped, home, left):
    """Not one of a process that was killed between the scan and the vectors."""
    session, path = Session("a"), shipped()
    session.model = home[1]
    with session.store("This call") as store:
        assert store.path == path
    if left == "database":
        for file in path.parent.glob("*.faiss"):
            file.unlink()
    else:
        path.unlink()
    with pytest.raises(StoreError, match="icebear search water"), session.store("This call"):
        pass
    with session.store() as store:
        assert store is None


def test_the_shipped_values_are_those_of_the_model(smol, generator):
    path = module.FOLDER / "smollm2-135m.npz"
    assert path.stat().st_size <= MOST_BYTES
    norms = HeadNorms.of(smol, head_means(smol))
    with module.shipped_store(smol) as store:
        assert store.facts.get("fingerprint") == smol.fingerprint
        for _ in range(6):
            site = generator.choice(("ffn", "head"))
            neuron = Neuron(generator.randrange(smol.layers), site, generator.randrange(smol.width(site)))
            example = generator.choice(store.examples(neuron))
            ids, read = smol.token_ids(example.sentence.text, 256), {}
            assert smol.pieces(ids) == example.sentence.tokens
            with torch.no_grad(), hooks(smol, [(neuron_site(site), neuron.layer)], lambda s, n, x: read.update({s: x})):
                smol.final_stream(smol.read([ids]))
            (x,) = read.values()
            value = (x if site == "ffn" else norms(neuron.layer, x))[0, example.token, neuron.index].item()
            assert value == pytest.approx(example.activation, rel=1e-3, abs=1e-3)


# --- beside a store in the folder ------------------------------------------------------------------------------


@pytest.fixture
def beside(home, shipped, tmp_path, monkeypatch):
    """Makes the folder's store, of this many documents (None: all) of the texts, or of others."""
    monkeypatch.chdir(tmp_path)
    shipped()

    def make(limit=None, texts=home[0] / "c.txt", model=home[1]):
        with open_store(tmp_path / "icebear.db", create=True) as store:
            build_index(model, read_corpus(str(texts), limit=limit), store, k=2)
        return tmp_path / "icebear.db"

    return make


def other_texts(folder):
    (folder / "other.txt").write_text("\n".join(f"a cold bear eats snow {letter}." for letter in "efgh"))
    return folder / "other.txt"


def test_the_index_with_more_documents_of_the_same_texts_is_read(beside, home, tmp_path):
    path = tmp_path / "icebear.db"
    assert choose_index(path, "a") == (True, "")
    assert choose_index(path, "b") == (False, "")
    choices = {limit: choose_index(beside(limit), "a") for limit in (3, 5)}
    assert [(choice.is_shipped, "icebear.db" in choice.note) for choice in choices.values()] == [(True, True)] * 2
    assert "3 documents" in choices[3].note
    path.unlink()
    assert not choose_index(beside(), "a").is_shipped


def test_an_index_of_other_texts_or_that_has_what_is_needed_is_read(beside, tmp_path):
    path = beside(3)
    assert not choose_index(path, "a", "attn").is_shipped
    assert choose_index(path, "a", "ffn").is_shipped
    path.unlink()
    choice = choose_index(beside(2, other_texts(tmp_path)), "a")
    assert (choice.is_shipped, "also show the index that comes with icebear" in choice.note) == (False, True)
    assert not replacement(tmp_path / "other.db", "a")


def test_an_unfinished_index_and_one_of_another_model_are_not_read(beside, tmp_path):
    path = beside()
    with open_store(path) as store:
        facts = store.facts.all()
        store.database.execute("DELETE FROM icebear WHERE name = 'finished'")
        store.database.commit()
    assert choose_index(path, "a").is_shipped
    with open_store(path) as store:
        store.facts.set({"finished": True, "fingerprint": "other"})
    assert not choose_index(path, "a").is_shipped  # which loading the model tells
    with open_store(path) as store:
        store.facts.set({"model": "b", "fingerprint": facts["fingerprint"]})
    assert not choose_index(path, "a").is_shipped  # the same weights by another name
    with open_store(path) as store:
        store.facts.set({"fingerprint": "other"})
    assert (choose_index(path, "a").is_shipped, "of b, not of a" in choose_index(path, "a").note) == (True, True)


def test_every_interface_reads_the_same_index(beside, home, verbs_beside, tmp_path, monkeypatch):
    """Cards, search, labels, MCP and the app; each says which, and `icebear index` what it replaces."""
    few_documents = "3 documents"

    def read():
        found = [json.loads(verbs_beside(*words, "--json").stdout) for words in READING]
        session = Session("a")
        session.model = home[1]
        with session.store() as store:
            found.append(store.made_with())
        with served.store() as store:
            found.append(store.made_with())
        return {row["index"].get("limit") for row in found}

    beside(3)
    assert read() == {None}
    card, search = (verbs_beside(*words) for words in READING)
    assert all(few_documents in done.stderr for done in (card, search))
    assert all("shipped with icebear" in done.stdout for done in (card, search))
    named = verbs_beside(*READING[1], "--store", "icebear.db")
    assert (few_documents in named.stdout, named.stderr) == (True, "")
    assert verbs_beside("label", "L0.ffn.3", "bears", "--model", "a").exit_code == 0
    with open_store("icebear.db") as mine, open_store(module.shipped_path("a")) as larger:
        assert [store.labels.manual("L0.ffn.3")[0] for store in (mine, larger)] == [None, "bears"]
    (tmp_path / "icebear.db").unlink()
    beside(2, other_texts(tmp_path))
    assert read() == {2}
    assert "other.txt,icebear.db" in "".join(verbs_beside(*READING[1]).stdout.split())  # a path, wrapped


def test_an_index_of_other_texts_is_shown_beside_the_shipped_one(beside, home, verbs_beside, tmp_path):
    """Each row with the name of its index; a named one is shown alone."""
    path = beside(2, other_texts(tmp_path))
    shipped = module.shipped_path("a")
    assert index_beside(path, "a") == shipped
    card, search = (json.loads(verbs_beside(*words, "--json").stdout) for words in READING)
    mine = {row["text"] for row in card["examples"]["+"]}
    others = {row["text"] for row in card["beside"][0]["examples"]["+"]}
    assert "a cold bear eats snow" in min(mine)
    assert "shipped with icebear" in card["beside"][0]["index"]
    assert others
    assert not mine & others
    assert "other.txt" in search["searched"]
    assert ["shipped with icebear" in row["searched"] for row in search["beside"]] == [True]
    named = [json.loads(verbs_beside(*words, "--store", "icebear.db", "--json").stdout) for words in READING]
    assert not any("beside" in row for row in named)
    table = verbs_beside(*READING[0]).stdout
    assert "24 documents of" in table
    assert "2 documents of" in table
    session = Session("a")
    session.model = home[1]
    with session.store() as store, session.beside(store) as other:
        assert (store.path.resolve(), other.path) == (path.resolve(), shipped)
        rows, _ = searched(store, "bear", 3)
        assert {row["index"] for row in rows} == {store_name(store)}
    with served.store() as store, served.beside(store) as other:
        assert (store.path.resolve(), other.path) == (path.resolve(), shipped)
    status = json.loads(verbs_beside("index", "--status", "--model", "a", "--json").stdout)
    assert status["store"] == "icebear.db"
    path.unlink()
    status = json.loads(verbs_beside("index", "--status", "--model", "a", "--json").stdout)
    assert status["store"] == str(shipped)


READING = (("neuron", "L0.ffn.3", "--model", "a"), ("search", "bear"))


@pytest.mark.parametrize(("limit", "replaces"), [(3, False), (None, True)])
def test_the_end_of_a_scan_says_what_it_replaces(beside, home, verbs_beside, limit, replaces):
    corpus = ("--corpus", str(home[0] / "c.txt"), *(["--limit", str(limit)] if limit else []), "--encoder", "none")
    done = verbs_beside("index", *corpus, "--model", "a")
    assert done.exit_code == 0, done.output
    assert ("instead of the index that comes with icebear" in done.stdout) is replaces
    assert ("is still read; to read yours: --store icebear.db" in done.stdout) is not replaces
    other = verbs_beside("index", *corpus, "--model", "a", "--store", "other.db")
    assert "comes with icebear" not in other.stdout


@pytest.fixture
def verbs_beside(home, monkeypatch):
    """Commands for whom the model a is the default one."""
    monkeypatch.setattr("icebear.app.example.MODEL", "a")
    monkeypatch.setattr("icebear.load_model", lambda *_, **__: home[1])
    monkeypatch.setattr("icebear.app.cli.options.ModelOptions.load", lambda *_: home[1])
    monkeypatch.setattr(server_state(), "prepared", set())
    return lambda *words: CliRunner().invoke(main, words)


@pytest.mark.parametrize(("count", "size", "offered"), [(300, 10033, 3000), (4000, 10033, 8000), (8000, 10033, 10033)])
def test_a_larger_index_that_the_app_offers_is_larger(count, size, offered):
    assert header.larger({"limit": count, "documents": size}) == offered
    assert header.larger({"limit": None, "documents": size}) is None


def test_a_larger_index_is_offered_only_where_it_can_be_written(beside, home, tmp_path):
    """Not over an index of other sites, such as one of the command line, and not over other texts."""
    path = beside(3)
    with open_store(module.shipped_path("a")) as store:
        facts = store.facts.all()
    assert header.can_hold(tmp_path / "none.db", facts)
    assert not header.can_hold(path, facts)
    with open_store(path) as store:
        store.facts.set({"sites": list(APP_SITES)})
    assert header.can_hold(path, facts)
    with open_store(path) as store:
        store.facts.set({"content": "other"})
    assert not header.can_hold(path, facts)
