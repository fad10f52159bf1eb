"""Command lines that nobody means: each ends with a sentence, never with a traceback, and leaves other files alone."""

import gzip
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import sqlite3
import tarfile
import zlib
from ast import literal_eval
from pathlib import Path

import pandas
import pytest
from click.testing import CliRunner
from rich.text import Text
from safetensors.torch import load_file, save_file

from icebear import Concept, build_index, load_model, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.app.cli.console import SafeConsole
from icebear.app.cli.main import main
from icebear.concepts.vocabulary import calibration
from icebear.records import Neuron

CONTROLS = set(map(chr, range(32))) - set("\n\t") | set(map(chr, range(0x7F, 0xA0))) | set("\u202e\u2066\u2067")
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
flip --model tiny "a" --suppress --to b
flip --model tiny "a" --suppress-phrase ""
flip --model tiny "a" --to "b" --source a
flip --model tiny "a" --to "b" --store empty
circuit --model tiny "a" --counterfactual b --nodes 0
circuit --model tiny "a b" --counterfactual "a"
circuit --model tiny "a" --counterfactual b --contrast c --nodes 4 --png folder
circuit --model tiny "a" --counterfactual b --contrast c --nodes 4 --png /dev/full
explain --sources --model tiny "a" --max-new-tokens -1
explain --sources --model tiny --chat "a"
explain --sources --model tiny "a" --span "never said"
explain --model tiny "a" --counterfactual b --html no/where.html
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
index --model tiny --corpus text.txt --store new.db --subset x
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
concept show none --store good.db
concept show deep.json
concept show unknown-way.json
concept measure none a --model tiny --store good.db
concept export none /dev/full --store good.db
recipe show deep.json
recipe show recipe.json /dev/null
recipe combine recipe.json recipe.json
recipe combine recipe.json --share nan
recipe export recipe.json --model tiny
check none.yaml --model tiny
check deep.json --model tiny
check folder --model tiny
check text.txt --model tiny
rank a --model tiny --claim folder
label L1.ffn.3 x --claim c.yaml --store good.db
evaluate faithfulness --model tiny --methods "" --out out
evaluate faithfulness --model tiny --methods magic --samples 1 --out out
evaluate faithfulness --model tiny --data deep.json --samples 1 --out out
evaluate groundtruth --model tiny --data bytes.jsonl --samples 1 --out out
evaluate groundtruth --model tiny --data deep.jsonl --samples 1 --out out
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

MORE = r"""
explain --model tiny "a" --model none --model tiny --top 3 --top nan
explain --model tiny "a" --html page.html --html folder
explain --model tiny "a" --counterfactual "" --counterfactual ""
explain --model tiny "a" --counterfactual "b" --counterfactual "a"
explain --model tiny "a" --target b --target-text "b c"
explain --model tiny "a" --target-text "a" --contrast "a"
explain --model tiny "a" --target "\ud800"
explain --model tiny --pair b a
explain --model tiny --chat --pair b a
explain --model tiny --chat a --template-option =1
explain --model tiny --chat a --template-option enable
explain --model tiny a --template-option x=1
explain --model tiny --chat a --template-option messages=[]
explain --model chatty --chat a --template-option messages=7
explain --model chatty --chat a --template-option tokenize=true
explain --model chatty --chat a --template-option chat_template=nope
explain --model chatty --chat a --template-option add_generation_prompt=null
explain --model chatty --chat "" --system ""
explain --model chatty --chat "<|user|>" --system "</s><s>"
explain --model tiny a --number logit --contrast b --number log-odds
explain --model tiny a --prefix b
explain --model tiny a --at -1 --span all
explain --model tiny a --at 9223372036854775808
explain --model tiny a --span "3:1" --target b
explain --model tiny a --span "-1:"
explain --model tiny a --span "0:1" --max-new-tokens 3 --sources
explain --model tiny a --site mixer
explain --model tiny a --units document --json
explain --model tiny a --position 00
explain --model tiny a --position 1e9
explain --model tiny a --png x.png
explain --model tiny a --image cut.png
explain --model tiny --file prompts.jsonl --base-model tiny a
explain --model tiny a --base-model tiny --counterfactual b
explain --model tiny a --method "gxi@midpoint@midpoint"
explain --model tiny a --method "AttnLRP(linear=Epsilon(0))"
explain --model tiny a --method "Mean(AttnLRP(), AttnLRP(), n=99999999999999)"
explain --model tiny a --method "lambda: 1"
explain --model tiny a --method "{long}"
explain --model tiny "{tokens}"
explain --model tiny "\n\n\n"
explain --model tiny "شكرا \u2067 לילה" --target "ש"
explain --model tiny -- --help
explain --model tiny - --json
explain --model tiny a --store none.db
explain --model nan a
explain --model nan a --json --target b
explain --model tiny a --dtype float16 --attention flash_attention_9
explain --model tiny a --device meta
explain --model tiny a --device cpu:99
explain --model tiny a --device-map "{long}"
explain --model tiny a --device cpu --device-map cpu
explain --model tiny a --claim page.html
explain --model tiny a --claim claims-99.yaml
explain --model tiny a --claim good.db
explain --model circle-a a
explain --model "" a
explain --model . a
explain --model tiny/config.json a
explain --model "\udcff\udcfe" a
explain --model -tiny a
explain --model hf://a/b/c a
explain --model "../../../../../../etc" a
explain --model tiny --messages messages-empty.json
explain --model tiny --messages messages-object.json
explain --model chatty --messages messages-half.json
explain --model chatty --messages messages-parts.json
explain --model chatty --messages messages-ids.json
explain --model chatty --messages messages-negative.json
explain --model chatty --messages messages-surrogate.json
explain --model chatty --messages messages-roles.json
explain --model chatty --messages messages-answer.json
explain --model tiny --messages -dash.json
explain --model tiny --messages socket
explain --model tiny --messages circle-a/x.json
explain --model tiny --messages "b\udcff.json"
rank --model tiny a --base-model nan
rank --model tiny a --claim claims-anchor.yaml --ablate
rank --model tiny a --polarity + --polarity -
rank --model tiny a --by positive --by worst
rank --model tiny a --top 4294967296 --html /dev/null
rank --model tiny a --store circle-a
circuit --model tiny a --counterfactual "a b c" --nodes 2
circuit --model tiny "" --counterfactual "" --nodes 2
neuron L1.ffn.3+ --model tiny
neuron L1.ffn.3 --model tiny --base-model ""
neuron L1.ffn.3 --top 0 --model tiny
neuron --significant --model tiny --store none.db
neuron L1.ffn.3 L1.ffn.4 --model tiny
neuron "L1.ffn.\udcff" --model tiny
index --status --annotate --store good.db
index --lens --corpus text.txt --model tiny
index --annotate L1.ffn.3 --corpus text.txt --store good.db
explain --model tiny a --device-map "{{"
explain --model tiny a --html good.db --store good.db
explain --model tiny a --html tiny/config.json
explain --model tiny --messages /dev/zero
check /dev/zero --model tiny
index --model tiny --corpus /dev/zero --store {new}.db
index --model tiny --corpus /proc/self/mem --store {new}.db
recipe show /proc/self/mem
recipe show /dev/urandom
recipe show /dev/tty
recipe show .
recipe show /
recipe show /proc/self/environ
recipe show "good.db/../recipe.json"
recipe show tiny/../recipe.json
explain --model tiny --messages text.txt/
explain --model tiny a --html /dev/null/x.html
explain --model tiny a --html ""
explain --model tiny a --html " "
explain --model tiny a --html "-"
explain --model tiny a --html "a\nb.html"
explain --model tiny a --html "\udcff.html"
explain --model tiny a --html "\u202e.html"
explain --model tiny a --html socket
explain --model tiny a --html circle-a
recipe export recipe-own.json own.gguf --model tiny
recipe export recipe-vector.json own.gguf --model tiny
steer --model tiny a --recipe recipe-vector.json
steer --model tiny a --recipe recipe-own.json --max-new-tokens 1 --temperature inf
steer --model tiny a --recipe recipe-own.json --max-new-tokens 1 --temperature 1e400
steer --model chatty --chat a --edit "L1.ffn.3=1@turn:99" --max-new-tokens 1
steer --model chatty --chat a --edit "L1.ffn.3=1@step:5-2" --max-new-tokens 1
steer --model chatty --chat a --edit "L1.ffn.3=1@position:9999999999999" --max-new-tokens 1
chat --model chatty --temperature inf
chat --model chatty --system "{tokens}"
explain --model raises --chat a
explain --model silent --chat a
explain --model extended a
explain --model eos a --span all --max-new-tokens 2
neuron L1.ffn.3 --model tiny --store wrong-vectors.db
search bear --store wrong-vectors.db
neuron L1.ffn.3 --store good.db --model chatty
doctor --store wrong-vectors.db --model tiny
neuron L1.ffn.3 --store good.db --html good.db --model tiny
concept export cold good.db --store good.db
rank --model tiny a --top 1 --html "recipe.json/../x.html"
concept find x --with text.txt --without other.txt --save tiny/model.safetensors --model tiny
search a b --store good.db
search "\udcff" --store good.db
search "\"" --store good.db --json
search "\n" --store good.db
search "{tokens}" --store good.db --top 1
search a --store circle-a
search a --store "good.db?mode=memory"
search a --store good.db/x
index --model tiny --corpus null.jsonl --store {new}.db
index --model tiny --corpus numbers.csv --store {new}.db
index --model tiny --corpus twocolumns.csv --store {new}.db
index --model tiny --corpus twocolumns.csv --column a --column none --store {new}.db
index --model tiny --corpus nul.csv --store {new}.db
index --model tiny --corpus surrogate.jsonl --store {new}.db --column prompt
index --model tiny --corpus newlines.txt --store {new}.db
index --model tiny --corpus gz.gz --store {new}.db
index --model tiny --corpus text.tar.gz --store {new}.db
index --model tiny --corpus tail.txt.gz --store {new}.db
index --model tiny --corpus object.json --store {new}.db
index --model tiny --corpus integers.parquet --store {new}.db
index --model tiny --corpus png.parquet --store {new}.db
index --model tiny --corpus socket --store {new}.db
index --model tiny --corpus circle-b --store {new}.db
index --model tiny --corpus text.txt --store {new}.db --k 99999999999999999999
index --model tiny --corpus text.txt --store {new}.db --max-tokens 99999999
index --model tiny --status --store none.db
index --model tiny --corpus text.txt --annotate L1.ffn.3 --store {new}.db
index --model nan --corpus text.txt --store {new}.db
index --model nan-layer --corpus text.txt --store {new}.db
index --model tiny --corpus text.txt --store good.db
index --model tiny --corpus text.txt --store tiny
index L1.ffn.3 --model tiny --corpus text.txt --store {new}.db
label L1.ffn.3 --store good.db
label --auto L1.ffn.3 "x" --store good.db
label --auto --all --top 3 --model tiny --store good.db
label L1.ffn.3 "{tokens}" --store newer.db
label L1.ffn.3 x --score --store good.db --model nan
label L1.ffn.3 "\u202e\u2066" --store half.db
steer --model tiny a --edit "L1.ffn.3=1;L1.ffn.4=2"
steer --model tiny a --edit "L1.ffn.3=1@answer@last"
steer --model tiny a --edit "L1.ffn.0..99999999999=1"
steer --model tiny a --edit "L1.ffn.9..2=1"
steer --model tiny a --edit "L1.ffn.3=-0" --edit "L1.ffn.3*-0"
steer --model tiny a --edit "L0..99.ffn.3=1"
steer --model tiny a --edit "L1.ffn.3=1e400"
steer --model tiny a --edit "L1.ffn.3=१"
steer --model tiny a
steer --model tiny a --edit "L1.ffn.3=1" --recipe recipe.json
steer --model tiny a --recipe recipe.json --recipe recipe.json
steer --model tiny a --recipe recipe-name.json
steer --model tiny a --recipe recipe-format.json
steer --model tiny a --recipe recipe-print.json
steer --model nan a --edit "L1.ffn.3=1" --temperature 1
flip --model tiny a --to b --suppress
flip --model tiny a --to "" --max-neurons 1
flip --model tiny a --to b --held-out newlines.txt --max-neurons 1
flip --model tiny a --to b --top-k 0
flip --model nan a --to b --max-neurons 1
concept find x --with text.txt --without other.txt --site ffn,,attn --model tiny
concept find ../../x --with newlines.txt --without other.txt --model tiny
concept find x --with null.jsonl --without circle-a --model tiny
concept find "x\udcff" --with text.txt --without other.txt --model tiny --store good.db
concept find x --with text.txt --without other.txt --model tiny --save "b\udcff.json"
concept export "\udcff" x.json --store good.db
label L1.ffn.3 "\udcff" --store good.db
recipe show "\udcff"
concept list --store text.txt
concept show concept-nan.json
concept show concept-none.json
concept show concept-twice.json
concept show concept-flat.json
concept show "\udcff" --store good.db
concept show "" --store good.db
concept measure concept-far.json a --model tiny
concept measure concept-nan.json a --model tiny
concept measure concept-none.json a --model tiny
concept measure concept-flat.json a --model tiny
concept measure concept.json a --texts text.txt --model tiny
concept measure concept.json --model tiny
concept measure concept.json "" --model tiny
concept measure concept.json --texts newlines.txt --model tiny
concept measure concept.json a --model nan
concept steer concept.json a --strength nan --model tiny
concept steer concept.json a --strength 1 --kl 1 --model tiny
concept steer concept.json a --kl -1 --model tiny
concept steer concept.json a --kl 0 --model tiny
concept steer concept.json a --strength 1 --where nowhere --model tiny
concept steer concept.json a --strength inf --suppress --model tiny
concept export x folder --store good.db
recipe show recipe-format.json
recipe show recipe-name.json --json
recipe show recipe-print.json
recipe show recipe-bom.json
recipe show socket
recipe show circle-a
recipe combine recipe.json --share -0.1 --save s.json
recipe combine recipe.json --share 1e400 --save s.json
recipe combine recipe.json recipe-other.json --save folder
recipe combine --save s.json
recipe combine recipe.json recipe-other.json --save s.json
recipe export recipe.json folder --model tiny
recipe export recipe.json x.gguf --model tiny
check claims-anchor.yaml --model tiny
check claims-99.yaml --model tiny
check claims-none.yaml --model tiny
check claims-nan.yaml --model tiny
check claims-tag.yaml --model tiny
check claims-date.yaml --model tiny
check claims-kind.yaml --model tiny
check claims-more.yaml --model tiny
check claims-twice.yaml --model tiny
check claims-huge.yaml --model tiny
check claims-empty.yaml --model tiny
check claims-far.yaml --model tiny
check claims-store.yaml --model tiny
check claims-pipe.yaml --model tiny
check claims-tab.yaml --model tiny
check claims-bool.yaml --model tiny
check claims-escape.yaml --model tiny
check claims-good.yaml --model nan
check /dev/null --model tiny
check socket --model tiny
evaluate faithfulness --model tiny --out out-null --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-list --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-keys --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-nan --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-texts --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-bytes --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-more --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-folder --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-settings --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-pipe --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out out-results --samples 2 --methods gxi --corpus text.txt
evaluate faithfulness --model tiny --out circle-a --samples 1 --corpus text.txt
evaluate faithfulness --model tiny --out /dev/null --samples 1 --corpus text.txt
evaluate faithfulness --model tiny --out /proc/self/out --samples 1 --corpus text.txt
evaluate faithfulness --model tiny --out {long} --samples 1 --corpus text.txt
evaluate faithfulness --model tiny --out {new} --samples 1 --methods "gxi,gxi" --corpus text.txt
evaluate faithfulness --model tiny --out {new} --samples 1 --methods "gxi,,random" --corpus newlines.txt
evaluate faithfulness --model tiny --out {new} --samples 1e3 --corpus text.txt
evaluate faithfulness --model tiny --out {new} --samples 1 --task sva --corpus text.txt
evaluate groundtruth --model tiny --out {new} --data prompts.jsonl --samples 1
evaluate groundtruth --model tiny --out {new} --tokens nothing --samples 1
evaluate flips --model tiny --out {new} --data null.jsonl
evaluate
doctor --model nan
doctor --model chatty/chat_template.jinja
doctor --store good.db --checksum good.db --model tiny
doctor --checksum circle-a
doctor --checksum good.db.none
doctor --model "tiny/"
mcp --folder none --model tiny
mcp --folder folder --store none.db --model nan/none
app --store folder --port {port}
app --port 0
app --port 65536
chat --model tiny --messages messages-empty.json
chat --model tiny --temperature inf
chat --model chatty --messages messages-answer.json --max-new-tokens 1
COLUMNS=0 rank --model tiny a --top 2
COLUMNS=99999999 neuron L1.ffn.3 --model tiny
COLUMNS=wide explain --model tiny a
COLUMNS=-3 recipe show recipe.json
COLUMNS=1 explain --model tiny "a b"
LINES=0 TERM=dumb rank --model tiny a
FORCE_COLOR=1 rank --model tiny a --top 2
NO_COLOR=1 FORCE_COLOR=1 TERM=none explain --model tiny a
ICEBEAR_CACHE=text.txt explain --model tiny a
ICEBEAR_CACHE=text.txt explain a
ICEBEAR_CACHE=pipe index --model tiny --corpus text.txt --store {new}.db
ICEBEAR_CACHE=/dev/null/x doctor --model tiny
ICEBEAR_CACHE=/proc/x rank --model tiny a
ICEBEAR_CACHE=circle-a concept measure concept.json a --model tiny
ICEBEAR_CACHE= explain --model none a
ICEBEAR_CACHE=cache explain --model tiny a
HOME=/none explain --model tiny a --html "~/x.html"
HOME=text.txt recipe show "~/recipe.json"
HOME=/none recipe show "~nobody-such/recipe.json"
OMP_NUM_THREADS=many explain --model tiny a
OMP_NUM_THREADS=-1 rank --model tiny a
TMPDIR=/none rank --model tiny a --html p.html
HF_HOME=text.txt explain --model none/such a
PATH= doctor --model tiny
LC_ALL=xx_YY.ISO-8859-15 explain --model tiny "é"
ICEBEAR_DEBUG= recipe show none.json
PYTHONUTF8=x recipe show recipe.json
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What `icebear app` and `icebear mcp` set for the rest of their process."""
    for name, value in {"ICEBEAR_APP": "{}", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


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
        more_files(folder, load_model("tiny"))
    shutil.copy(folder / "good.db", folder / "newer.db")
    sqlite3.connect(folder / "newer.db").execute("PRAGMA user_version = 999").connection.close()
    (folder / "half.db").write_bytes((folder / "good.db").read_bytes()[:9000])
    return folder


CLAIM = """icebear_claims: 1
claims:
- what: {kind: answer, prompt: a, answer: b}
  threshold: 0.1
  control_below: 0.9
"""
CLAIMS = {
    "good": CLAIM,
    "anchor": CLAIM.replace("prompt: a", "prompt: &p a"),
    "99": CLAIM.replace("1", "99", 1),
    "none": "icebear_claims: 1\nclaims: []\n",
    "nan": CLAIM.replace("0.1", ".nan"),
    "tag": CLAIM.replace("prompt: a", "prompt: !!python/object/apply:os.system [id]"),
    "date": CLAIM.replace("answer: b", "answer: 2026-01-31"),
    "kind": CLAIM.replace("kind: answer", "kind: magic"),
    "more": CLAIM + '  "\\e[2J": 1\n',
    "twice": CLAIM + "  threshold: 0.2\n",
    "huge": CLAIM.replace("0.1", "1" + "0" * 400),
    "empty": CLAIM.replace("prompt: a", "prompt: ''").replace("answer: b", "answer: ''"),
    "far": CLAIM.replace("answer, prompt: a, answer: b", "effect, neuron: L99.ffn.1, raised: [a], lowered: [b]"),
    "store": CLAIM.replace(
        "answer, prompt: a, answer: b",
        "label, store: folder, neuron: L1.ffn.3, polarity: +, text: x, by: token, label: {kind: tokens, items: [x]}",
    ),
    "pipe": CLAIM.replace(
        "answer, prompt: a, answer: b",
        "label, store: pipe, neuron: L1.ffn.3, polarity: +, text: x, by: token, label: {kind: tokens, items: [x]}",
    ),
    "tab": CLAIM.replace("  threshold", "\tthreshold"),
    "bool": CLAIM.replace("0.1", "yes"),
    "escape": CLAIM.replace("prompt: a", 'prompt: "\\e]0;title\\a"'),
}
MESSAGES = {
    "empty": [],
    "object": {"messages": 7},
    "half": [{"role": "user"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
    "ids": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "ids": [10**9]}],
    "negative": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "ids": [-1]}],
    "surrogate": [{"role": "user", "content": "\ud800"}],
    "roles": [{"role": ["user"], "content": "a"}],
    "answer": [{"role": "assistant", "content": "b"}],
}
LINE = {"prompt": "a", "target": "b"}


def more_files(folder, model):
    """Files that are nearly right, and others that nobody would name."""
    concept = Concept.of(model, "cold", {(Neuron(1, "ffn", 3), "+"): 1.0}).to_dict()
    (part,) = concept["parts"]
    concepts = {
        "concept": concept,
        "concept-nan": {**concept, "parts": [{**part, "weight": math.nan}]},
        "concept-none": {**concept, "parts": []},
        "concept-twice": {**concept, "parts": [part, part]},
        "concept-flat": {**concept, "parts": [{**part, "std": 0.0}]},
        "concept-far": {**concept, "parts": [{**part, "neuron": "L99.ffn.3"}]},
        "recipe-own": {**RECIPE, "model_fingerprint": model.fingerprint},
        "recipe-vector": {**RECIPE, "model_fingerprint": model.fingerprint, "edits": [{"layer": 1, "vector": [1.0]}]},
        "recipe-name": {**RECIPE, "name": {"a": 1}},
        "recipe-format": {**RECIPE, "icebear_recipe": 2.5},
        "recipe-print": {**RECIPE, "model_fingerprint": 7},
        "recipe-other": {**RECIPE, "edits": ["L1.ffn.3+2", "L2.attn.1*0"]},
        **{f"messages-{name}": data for name, data in MESSAGES.items()},
        "object": {"text": "a bear"},
    }
    lines = {
        "prompts": [LINE, LINE],
        "null": [{"prompt": None, "text": None}, None],
        "mixed": [LINE, ["a"], "a"],
        "surrogate": [{"prompt": "\ud800"}],
    }
    texts = {
        **{f"claims-{name}.yaml": text for name, text in CLAIMS.items()},
        **{f"{name}.json": json.dumps(data) for name, data in concepts.items()},
        **{f"{name}.jsonl": "".join(json.dumps(line) + "\n" for line in data) for name, data in lines.items()},
        "twice.jsonl": '{"prompt": "a", "prompt": "b"}\n',
        "recipe-bom.json": "\ufeff" + json.dumps(RECIPE),
        "-dash.json": json.dumps(MESSAGES["answer"]),
        "b\udcff.json": "[]",
        "numbers.csv": "1\n2\n3\n",
        "twocolumns.csv": "a,b\nThe bear,the ice\n",
        "nul.csv": "text\nThe\0 bear\n",
        "newlines.txt": "\n" * 99,
        "cut.png": "\x89PNG",
        "page.html": "<p>",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    packed = gzip.compress((folder / "text.txt").read_bytes())
    (folder / "gz.gz").write_bytes(gzip.compress(packed))
    (folder / "tail.txt.gz").write_bytes(packed[:-4])
    with tarfile.open(folder / "text.tar.gz", "w:gz") as archive:
        archive.add(folder / "text.txt", "text.txt")
    pandas.DataFrame({"text": [1, 2, 3]}).to_parquet(folder / "integers.parquet")
    (folder / "png.parquet").write_bytes(b"\x89PNG" + bytes(99))
    (folder / "circle-a").symlink_to("circle-b")
    (folder / "circle-b").symlink_to("circle-a")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    for name in ("chatty", "nan", "nan-layer"):
        shutil.copytree(folder / "tiny", folder / name)
    (folder / "chatty" / "chat_template.jinja").write_text(TEMPLATE)
    for name, weight in {"nan": "model.norm.weight", "nan-layer": "model.layers.1.mlp.up_proj.weight"}.items():
        weights = load_file(folder / name / "model.safetensors")
        weights[weight].fill_(math.nan)
        save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
    for name, template in TEMPLATES.items():
        shutil.copytree(folder / "tiny", folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    shutil.copytree(folder / "tiny", folder / "eos")
    (folder / "eos" / "generation_config.json").write_text('{"eos_token_id": [99999, -1]}')
    for path in folder.glob("good.db*"):
        shutil.copy(path, folder / path.name.replace("good", "wrong-vectors"))
    for path in folder.glob("wrong-vectors.db.*.faiss"):
        path.write_bytes(b"IxF2" + bytes(99))
    damaged_results(folder)


TEMPLATES = {
    "raises": "{{ raise_exception('\x1b[2J' * 999) }}",
    "silent": "",
    "extended": "{% extends 'a' %}{% include '/etc/passwd' %}",
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


def damaged_results(folder):
    """Folders of an evaluation of which somebody changed the results."""
    words = "evaluate faithfulness --model tiny --out out-good --samples 2 --methods gxi --corpus text.txt"
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    line = json.loads((folder / "out-good" / "samples.jsonl").read_text().splitlines()[0])
    lines = {
        "null": b"null\nnull\n",
        "list": b"[]\n{}\n",
        "keys": json.dumps({**line, "methods": {"none": {}}}).encode() + b"\n",
        "nan": json.dumps(line).replace("0.", "NaN, 0.", 1).encode() + b"\n",
        "texts": json.dumps({**line, "methods": "many"}).encode() + b"\n",
        "bytes": bytes(range(256)) * 9 + b"\n",
        "more": (json.dumps(line).encode() + b"\n") * 5,
    }
    for name, data in lines.items():
        shutil.copytree(folder / "out-good", folder / f"out-{name}")
        (folder / f"out-{name}" / "samples.jsonl").write_bytes(data)
    for name, file in {"folder": "samples.jsonl", "settings": "settings.json", "results": "index.html"}.items():
        shutil.copytree(folder / "out-good", folder / f"out-{name}")
        (folder / f"out-{name}" / file).unlink()
        (folder / f"out-{name}" / file).mkdir()
    shutil.copytree(folder / "out-good", folder / "out-pipe")
    (folder / "out-pipe" / "samples.jsonl").unlink()
    os.mkfifo(folder / "out-pipe" / "samples.jsonl")


@pytest.fixture(scope="module")
def port():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        yield taken.getsockname()[1]


def versions(folder):
    """Of the files that no command may write: when each was written, its size and its number in the file system."""
    paths = [path for where in (folder, folder / "tiny", folder / "chatty") for path in where.iterdir()]
    facts = {path: path.stat() for path in paths if path.is_file() and path.suffix != ".lock"}
    return {path: (fact.st_mtime_ns, fact.st_size, fact.st_ino) for path, fact in facts.items()}


def words_of(line, **values):
    """The environment and the words of a line, with escapes such as \\udcff, a stray byte."""
    words = [re.sub(r"\\u....|\\n", lambda code: literal_eval(f"'{code[0]}'"), word) for word in shlex.split(line)]
    words = [word.format(**values) if "{" in word else word for word in words]
    number = next(number for number, word in enumerate(words) if not re.match("[A-Z_0-9]+=", word))
    return dict(word.split("=", 1) for word in words[:number]), words[number:]


@pytest.mark.parametrize("line", [*LINES.strip().splitlines(), *MORE.strip().splitlines()])
def test_a_hostile_line_gets_a_sentence(place, port, monkeypatch, line):
    monkeypatch.chdir(place)
    monkeypatch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
    new = f"new-{zlib.crc32(line.encode())}"
    environment, words = words_of(line, long="n" * 300, port=port, tokens="bear " * 10_000, new=new)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = versions(place)
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2), result.output
    assert "Traceback" not in result.output
    assert not CONTROLS & set(re.sub("\x1b\\[[0-9;]*m" if "FORCE_COLOR" in line else "$^", "", result.output))
    if result.exit_code == 1:
        last = result.stderr.strip().splitlines()[-1] if result.stderr.strip() else result.stdout
        known = "error" in result.stdout or "of 1 claims passed" in result.stdout
        assert last.startswith(("icebear: ", "error")) or known, result.output
    if line.startswith(("label", "index --annotate", "concept find")):
        del before[place / "good.db"]
    after = versions(place)
    assert {path.name for path in before if after.get(path) != before[path]} == set()


CAUSES = {
    "explain --model tiny/config.json a": "is a file",
    "explain --model circle-a a": "no folder",
    "explain --model chatty --chat a --template-option messages=7": "sets messages itself",
    "explain --model tiny a --html good.db --store good.db": "database",
    "explain --model tiny a --html tiny/config.json": "file of a model",
    "explain --model tiny a --html circle-a": "symbolic links",
    "explain --model tiny a --html socket": "socket",
    "explain --model tiny a --claim claims-99.yaml": "version 99",
    "rank --model tiny a --base-model nan": "NaN",
    "rank --model tiny a --top 4294967296": "from 1 to",
    "neuron L1.ffn.3 --model tiny --base-model ''": "not a path",
    "flip --model nan a --to b --max-neurons 1": "NaN",
    "index --model nan --corpus text.txt --store {new}.db": "NaN",
    "index --model nan-layer --corpus text.txt --store {new}.db": "NaN",
    "index --model tiny --corpus newlines.txt --store {new}.db": "no text",
    "index --lens --corpus text.txt --model tiny": "exclude",
    "label --auto --all --top 3 --model tiny --store good.db": "at least 75",
    "recipe show recipe-format.json": "version 2.5",
    "check claims-twice.yaml --model tiny": "'threshold'",
    "check claims-none.yaml --model tiny": "no claim",
    "evaluate faithfulness --model tiny --out out-pipe --samples 2 --methods gxi --corpus text.txt": "a pipe",
}


@pytest.mark.parametrize("line", CAUSES)
def test_a_hostile_line_gets_the_true_cause(place, monkeypatch, line):
    monkeypatch.chdir(place)
    _, words = words_of(line, new=f"cause-{zlib.crc32(line.encode())}")
    result = CliRunner().invoke(main, words)
    assert result.exit_code in (1, 2), repr(result.exception)
    assert CAUSES[line] in result.stderr.strip().splitlines()[-1]


def test_a_token_cannot_steer_the_terminal():
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=80)
    console.print(Text("a\x1b]0;title\x07\x1b[2Jb\x9bc\x7f", "bold"))
    printed = console.file.getvalue()
    assert printed == "\x1b[1ma␛]0;title␛[2Jb\ufffdc␡\x1b[0m\n"
