"""Command lines that nobody means: each ends with a sentence, never with a traceback, and leaves other files alone."""

import io
import json
import os
import shlex
import shutil
import socket
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.text import Text

from icebear import build_index, load_model, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.app.cli.console import SafeConsole
from icebear.app.cli.main import main
from icebear.concepts import calibration

RECIPE = {"icebear_recipe": 2, "name": "r", "model_name": "tiny", "model_fingerprint": "", "edits": ["L1.ffn.3=2"]}

LINES = r"""
explain --model tiny ""
explain --model tiny "a" --target ""
explain --model tiny "a" --target "no such token at all"
explain --model tiny "a" --contrast "" --counterfactual ""
explain --model tiny "a" --counterfactual a
explain --model tiny "a" --span ""
explain --model tiny "a" --span "9:1"
explain --model tiny "a" --span "0:99999999999999999999999"
explain --model tiny "a" --method ""
explain --model tiny "a" --method "AttnLRP(linear=Gamma(1e400))"
explain --model tiny "a" --method "AttnLRP(linear=Gamma(nan))"
explain --model tiny "a" --method "Difference()"
explain --model tiny "a" --method "().__class__.__bases__[0].__subclasses__()"
explain --model tiny "a" --method "AttnLRP(AttnLRP(AttnLRP()))"
explain --model tiny "a" --method difference
explain --model tiny "a" --image none.png
explain --model tiny --image text.txt
explain --model tiny "a" --at nowhere
explain --model tiny "a" --target-text ""
explain --model tiny --messages deep.json
explain --model tiny --messages pipe
explain --model tiny --messages folder
explain --model tiny --messages loop
explain --model tiny "a" --html folder
explain --model tiny "a" --html no/where.html
explain --model tiny "a" --html /dev/full
explain --model tiny "a" --html loop
explain --model tiny "a" --html {long}
explain --model tiny "a" --json --top 99999999999999999999
explain --model tiny "\x00\x01\x02\x7f\u202e"
explain --model tiny "💥🧊🐻‍❄️" --contrast "🐻"
rank --model tiny "a" --site ffn,attn
rank --model tiny "a" --site ""
rank --model tiny "a" --site "ffn;drop table neurons"
rank --model tiny "a" --top 0
rank --model tiny "a" --top 1e3
rank --model tiny "a" --polarity x
rank --model tiny "a" --position 17
rank --model tiny "a" --position -17
rank --model tiny "a" --file none.jsonl
rank --model tiny --file deep.jsonl
rank --model tiny --file bytes.jsonl
rank --model tiny --file numbers.jsonl
rank --model tiny --file pipe
rank --model tiny --file empty
rank --model tiny "a" --store text.txt
rank --model tiny "a" --store empty
rank --model tiny "a" --store other.db
rank --model tiny "a" --store folder
rank --model tiny "a" --store pipe
rank --model tiny "a" --store {long}
rank --model tiny "a" --base-model tiny
rank --model tiny "a" --base-model none/such
rank --model tiny "a" --ablate
neuron --model tiny L1.ffn.99999999
neuron --model tiny L-1.ffn.0
neuron --model tiny "L1.ffn.3 "
neuron --model tiny L1.ffn.03
neuron --model tiny L٣.ffn.٤
neuron --model tiny L1.FFN.3
neuron --model tiny "L1.ffn.3\nL1.ffn.4"
neuron --model tiny L99999999999999999999.ffn.1
neuron --model tiny L0.q.1
steer --model tiny "a" --edit ""
steer --model tiny "a" --edit "L1.ffn.3=nan"
steer --model tiny "a" --edit "L1.ffn.3=inf"
steer --model tiny "a" --edit "L1.ffn.3=-1e308"
steer --model tiny "a" --edit "L1.ffn.3*1e39"
steer --model tiny "a" --edit "L1.ffn.3+"
steer --model tiny "a" --edit "L1.ffn.3=1max"
steer --model tiny "a" --edit "L1.ffn.3=1@99"
steer --model tiny "a" --edit "L1.ffn.3=1@-99999999999999"
steer --model tiny "a" --edit "L1.ffn.3=1~nan"
steer --model tiny "a" --edit "L1.ffn.3=1~-1"
steer --model tiny "a" --edit "L1.ffn.3=1" --edit "L1.ffn.3=2"
steer --model tiny "a" --edit "L1.ffn.3=0x10"
steer --model tiny "a" --edit "L1.ffn.3=1_000"
steer --model tiny "a" --edit "L1.router.3=1"
steer --model tiny "a" --edit "L1.head.3*2"
steer --model tiny "a" --edit "L1.ffn.3=1" --temperature -inf
steer --model tiny "a" --edit "L1.ffn.3=1" --temperature 1e-45
steer --model tiny "a" --edit "L1.ffn.3=1" --temperature 1e308
steer --model tiny "a" --edit "L1.ffn.3=1" --temperature NaN --seed 1
steer --model tiny "a" --edit "L1.ffn.3=1" --seed -1
steer --model tiny "a" --edit "L1.ffn.3=1" --seed 99999999999999999999999999
steer --model tiny "a" --edit "L1.ffn.3=1" --max-new-tokens 0
steer --model tiny "a" --edit "L1.ffn.3=1" --max-new-tokens 999999999
steer --model tiny "a" --recipe recipe.json
steer --model tiny "a" --recipe recipe-list.json
steer --model tiny "a" --recipe recipe-null.json
steer --model tiny "a" --recipe recipe-deep.json
steer --model tiny "a" --recipe recipe-twice.json
steer --model tiny "a" --recipe recipe-huge.json
steer --model tiny "a" --recipe utf16.json
steer --model tiny "a" --recipe pipe
steer --model tiny "a" --recipe folder
steer --model tiny "a" --recipe none.json
steer --model tiny "a" --recipe {long}
steer --model tiny "a" --recipe /dev/null
steer --model tiny --messages roles.json --edit "L1.ffn.3=1"
flip --model tiny "a" --to "b" --max-neurons 0
flip --model tiny "a" --to "b" --max-neurons 1 --held-out none.txt
flip --model tiny "a" --to "b" --max-neurons 1 --held-out empty
flip --model tiny "a" --to "b" --max-neurons 1 --held-out latin.txt
flip --model tiny "a" --to "b" --paraphrases bytes.jsonl
flip --model tiny "a" --to "b" --budget nan
flip --model tiny "a" --to "b" --budget -1
flip --model tiny "a" --suppress --to b
flip --model tiny "a" --suppress-phrase ""
flip --model tiny "a" --to "b" --source a
flip --model tiny "a" --to "b" --store empty
circuit --model tiny "a" --counterfactual b --nodes 0
circuit --model tiny "a b" --counterfactual "a"
circuit --model tiny "a" --counterfactual b --contrast c --sufficiency 0
circuit --model tiny "a" --counterfactual b --contrast c --sufficiency nan
circuit --model tiny "a" --counterfactual b --contrast c --sufficiency 2
circuit --model tiny "a" --counterfactual b --contrast c --nodes 4 --png folder
circuit --model tiny "a" --counterfactual b --contrast c --nodes 4 --png /dev/full
circuit --model tiny "a" --counterfactual b --contrast c --nodes 4 --neuronpedia no/where.json
circuit --model tiny --file deep.jsonl
explain --sources --model tiny "a" --max-new-tokens -1
explain --sources --model tiny --chat "a"
explain --sources --model tiny "a" --span "never said"
explain --model tiny "a" --counterfactual b --nodes 4 --html no/where.html
index --model tiny --corpus none.txt --store new.db
index --model tiny --corpus latin.txt --store new.db
index --model tiny --corpus utf16.json --store new.db
index --model tiny --corpus bytes.txt --store new.db
index --model tiny --corpus zeros.txt --store new.db
index --model tiny --corpus cut.txt.gz --store new.db
index --model tiny --corpus bad.parquet --store new.db
index --model tiny --corpus deep.json --store new.db
index --model tiny --corpus quotes.csv --store new.db
index --model tiny --corpus line.txt --store new.db
index --model tiny --corpus folder --store new.db
index --model tiny --corpus pipe --store new.db
index --model tiny --corpus loop --store new.db
index --model tiny --corpus empty --store new.db
index --model tiny --corpus "" --store new.db
index --model tiny --corpus "no such set" --store new.db
index --model tiny --corpus text.txt --column "" --store no/such/folder/new.db
index --model tiny --corpus text.txt --store /proc/new.db
index --model tiny --corpus text.txt --store text.txt
index --model tiny --corpus text.txt --store other.db
index --model tiny --corpus text.txt --store folder
index --model tiny --corpus text.txt --store pipe
index --model tiny --corpus text.txt --store loop
index --model tiny --corpus text.txt --store {long}
index --model tiny --corpus text.txt --store new.db --limit 0
index --model tiny --corpus text.txt --store new.db --k 0
index --model tiny --corpus text.txt --store new.db --site mlp
index --model tiny --corpus text.txt --store new.db --language "en; fr"
index --model tiny --corpus text.txt --store new.db --max-tokens 1
index --model tiny --corpus text.txt --store new.db --engine ray --workers 0
index --model tiny --corpus text.txt --store new.db --config x
neuron L1.ffn.3 --model tiny --store none.db
neuron L9.ffn.3 --model tiny --store good.db
neuron L1.ffn.3 --model tiny --store good.db --html /dev/full
neuron L1.ffn.3 --model tiny --store half.db
neuron --model tiny --store good.db
neuron L1.ffn.3 --significant --model tiny --store good.db
search "" --store good.db
search "'; DROP TABLE neurons; --" --store good.db
search "NEAR(a b) OR * ^ \" AND" --store good.db
search "%_%" --store good.db
search "🧊" --store good.db
search a --store good.db --top -1
search a --store newer.db
search a --store half.db
index --annotate L1.ffn.3 L1.ffn.3 nonsense --model tiny --store good.db
label L1.ffn.3 "<script>" --store none.db
label L1.ffn.99999 x --store good.db
label --auto --model tiny --store good.db --prompt ""
concept find x --with text.txt --without text.txt --model tiny --store good.db
concept find x --with empty --without text.txt --model tiny --store good.db
concept find "" --with text.txt --without latin.txt --model tiny --store good.db
concept find x --with text.txt --without other.txt --rank-by magic --model tiny
concept show none --store good.db
concept show deep.json
concept show unknown-way.json
concept measure none a --model tiny --store good.db
concept compare none deep.json --store good.db --model tiny
concept export none /dev/full --store good.db
recipe show deep.json
recipe show recipe.json /dev/null
recipe combine recipe.json recipe.json
recipe combine recipe.json --share nan
recipe export recipe.json --model tiny
recipe export recipe.json --gguf /dev/full --model tiny
recipe export deep.json --gguf x.gguf --model tiny
check none.yaml --model tiny
check deep.json --model tiny
check folder --model tiny
check text.txt --model tiny
rank a --model tiny --claim folder
label L1.ffn.3 x --claim c.yaml --store good.db
recipe check folder --model tiny
evaluate faithfulness --model tiny --methods "" --out out
evaluate faithfulness --model tiny --methods magic --samples 1 --out out
evaluate faithfulness --model tiny --data deep.json --samples 1 --out out
evaluate ablation --model tiny --tasks nothing --out out
evaluate ablation --model tiny --data deep.jsonl --samples 1 --out out
evaluate groundtruth --model tiny --data bytes.jsonl --samples 1 --out out
evaluate flips --model tiny --data roles.json --out text.txt
evaluate faithfulness --model tiny --samples 0 --out out
doctor --model none/such/model
doctor --model text.txt
doctor --model empty.gguf
doctor --model folder
doctor --model tiny --store text.txt
doctor --checksum text.txt
doctor --checksum pipe
doctor --model tiny --device gpu:7
doctor --model tiny --dtype float8
doctor --model tiny --bits 3
mcp --folder text.txt --model tiny
app --port 99999
app --port {port} --model tiny
models extra
nonsense --help
--nonsense
"""


@pytest.fixture(scope="module")
def place(tiny_folder, tmp_path_factory):
    """A folder of files that nobody means."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "tiny").symlink_to(tiny_folder)
    music = json.loads((Path(__file__).parent.parent / "examples" / "music.json").read_text())
    texts = {
        "text.txt": "\n".join(f"The {word} bear lives in the north." for word in "ice big old sea".split()),
        "other.txt": "\n".join(f"The {word} camel lives in the desert." for word in "sad big old dry".split()),
        "deep.json": "[" * 100_000,
        "deep.jsonl": "[" * 100_000 + "\n",
        "numbers.jsonl": '{"prompt": 7}\n{"prompt": "a", "target": [1]}\n',
        "line.txt": "word " * 200_000,
        "quotes.csv": 'text\n"never closed ' + "a" * 200_000,
        "roles.json": json.dumps([{"role": "nobody", "content": 7}]),
        "recipe.json": json.dumps(RECIPE),
        "recipe-list.json": json.dumps([RECIPE]),
        "recipe-null.json": json.dumps({**RECIPE, "edits": None}),
        "recipe-deep.json": json.dumps(RECIPE)[:-1] + ', "provenance": ' + "[" * 100_000,
        "recipe-twice.json": json.dumps({**RECIPE, "edits": ["L1.ffn.3=2", "L1.ffn.3=3"]}),
        "recipe-huge.json": json.dumps({**RECIPE, "edits": ["L1.ffn.3=1e300"]}),
        "unknown-way.json": json.dumps({**music, "provenance": {**music["provenance"], "found_by": "magic"}}),
        "empty": "",
        "empty.gguf": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.txt").write_bytes("Der Eisbär lebt im Norden.\n".encode("latin-1") * 20)
    (folder / "utf16.json").write_text('["An ice bear."]', encoding="utf-16")
    for name in ("bytes.txt", "bytes.jsonl"):
        (folder / name).write_bytes(bytes(range(256)) * 9)
    (folder / "zeros.txt").write_bytes(bytes(4096))
    (folder / "cut.txt.gz").write_bytes(b"\x1f\x8b\x08\x00 not really")
    (folder / "bad.parquet").write_bytes(b"PAR1" + bytes(99) + b"PAR1")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    sqlite3.connect(folder / "other.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.MonkeyPatch.context() as patch, open_store(folder / "good.db", create=True) as store:
        patch.setattr(index, "SHARD", 4)
        patch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
        patch.chdir(folder)
        build_index(load_model("tiny"), read_corpus("text.txt"), store, k=2)
    shutil.copy(folder / "good.db", folder / "newer.db")
    sqlite3.connect(folder / "newer.db").execute("PRAGMA user_version = 999").connection.close()
    (folder / "half.db").write_bytes((folder / "good.db").read_bytes()[:9000])
    return folder


@pytest.fixture(scope="module")
def port():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        yield taken.getsockname()[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_hostile_line_gets_a_sentence(place, port, monkeypatch, line):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ICEBEAR_APP", "{}")  # which `icebear app` sets for the rest of its process
    monkeypatch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
    before = contents(place)
    words = [word.format(long="n" * 300, port=port) if "{" in word else word for word in shlex.split(line)]
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2), result.output
    assert "Traceback" not in result.output
    if result.exit_code == 1:
        last = result.stderr.strip().splitlines()[-1] if result.stderr.strip() else result.stdout
        assert last.startswith(("icebear: ", "error")) or "error" in result.stdout, result.output
    after = contents(place)
    made = {"good.db"} if line.startswith(("label", "index --annotate", "concept find")) else set()
    assert {name: after.get(name) for name in before if name not in made} == {
        name: data for name, data in before.items() if name not in made
    }


def test_a_token_cannot_steer_the_terminal():
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=80)
    console.print(Text("a\x1b]0;title\x07\x1b[2Jb\x9bc\x7f", "bold"))
    printed = console.file.getvalue()
    assert printed == "\x1b[1ma␛]0;title␛[2Jb\ufffdc␡\x1b[0m\n"
