"""Kill commands at random times with SIGKILL, run them again until they are done, and compare with undisturbed runs.

The model is small and random. Commands run in forks of this process, which has imported everything. A store is compared
by `icebear doctor --checksum`, other files by their bytes; claims, which have dates, by what they claim. After each
kill every file must be complete: the old one or the new one. The last columns count files that an undisturbed run does
not leave, by whether `ls` shows them.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 20
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from icebear import Recipe, load_model, open_store
from icebear.app.cli.main import main as icebear
from icebear.claims.claims_files import read_claims
from icebear.errors import IcebearError

WORDS = (
    "ice bear desert camel water north cold snow warm sand river house city king song film book tree bird fish".split()
)
NEURONS = [f"L1.ffn.{number}" for number in range(6)]
EDITS = [f"L{layer}.ffn.{number}+0.5" for layer in (1, 2) for number in range(20)]
PAIR = [" ice bear", "--counterfactual", " ice king"]


@dataclass(frozen=True)
class Work:
    """A command, and what it leaves: `digest` of its folder is equal after every run that ended."""

    words: Sequence[str]
    digest: Callable[[Path], Any]
    reads_index: bool = False
    file: str = ""
    """The only file that it writes; it exists before, and each kill must leave it as it was."""


@dataclass
class Outcome:
    kills: int = 0
    rounds: int = 0
    different: int = 0
    broken: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    seconds: float = 0.0


def stores(folder: Path) -> Any:
    with open_store(folder / "s.db") as store:
        return store.checksum()


def files(folder: Path) -> Any:
    return [(folder / work.file).read_bytes() for work in WORKS.values() if (folder / work.file).is_file()]


def every_file(name: str) -> Callable[[Path], Any]:
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def claims(folder: Path) -> Any:
    return {(str(claim.what), claim.value, claim.control) for claim in read_claims(folder / "c.yaml")}


INDEX = ["index", "--corpus", "c.txt", "--store", "s.db", "--k", "4"]
WORKS = {
    "index": Work(INDEX, stores),
    "label --auto": Work(["label", "--auto", *NEURONS, "--store", "s.db"], stores, reads_index=True),
    "evaluate faithfulness": Work(
        ["evaluate", "faithfulness", "--corpus", "c.txt", "--samples", "12", "--methods", "gxi,random", "--out", "o"],
        every_file("o"),
    ),
    "circuit --html": Work(["circuit", *PAIR, "--nodes", "8", "--html", "x.html"], files, file="x.html"),
    "rank --claim": Work(["rank", *PAIR, "--top", "8", "--ablate", "--claim", "c.yaml"], claims, file="c.yaml"),
}


def make_model(folder: Path) -> None:
    """Save a random Llama with a byte-level tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(min_frequency=2, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" " + " ".join(WORDS) + " The lives in the"] * 2, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4)
    net.save_pretrained(folder)


def prepare(home: Path, lines: int) -> None:
    """Make what commands read: a model, a calibration, a corpus and a recipe."""
    make_model(home / "model")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(6, 14))).capitalize() + "." for _ in range(lines)]
    (home / "c.txt").write_text("\n".join(texts))
    model = load_model(str(home / "model"), device="cpu", dtype="float32")
    Recipe.for_model(model, "kills", EDITS).save(home / "r.json")


def started(words: Sequence[str], folder: Path, model: Path) -> int:
    """Run a command in a fork, quietly. Returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(folder)
        quiet = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        icebear([*words, "--model", str(model), "--device", "cpu"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def fresh(home: Path, work: Work, name: str) -> Path:
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in (home / "c.txt", home / "r.json", *(home / "indexed").glob("s.db*" if work.reads_index else "none")):
        shutil.copy(path, folder)
    return folder


def measure(home: Path, work: Work, kills: int, draw: random.Random) -> Outcome:
    """Kill a command at random times; start again in a new folder after it was done, until there were enough kills."""
    result, begun = Outcome(), time.monotonic()
    whole = fresh(home, work, "whole")
    code = ended(started(work.words, whole, home / "model"))
    duration = time.monotonic() - begun
    assert code == 0, (home / "log").read_text()[-1000:]
    expected = work.digest(whole)
    names = {str(path.relative_to(whole)) for path in whole.rglob("*")}
    while result.kills < kills:
        folder, done = fresh(home, work, "killed"), False
        if work.file:
            shutil.copy(whole / work.file, folder)
        result.rounds += 1
        while not done:
            process = started(work.words, folder, home / "model")
            if result.kills < kills:
                time.sleep(draw.uniform(0, duration))
                os.kill(process, signal.SIGKILL)
            code = ended(process)
            done = code == 0
            if code == -signal.SIGKILL:
                result.kills += 1
                result.broken += broken(folder, work, expected)
            elif code:
                result.broken.append(f"exit code {code} (see the log)")
                done = True
        result.different += work.digest(folder) != expected
        left = {str(path.relative_to(folder)) for path in folder.rglob("*")} - names
        hidden = {name for name in left if Path(name).name.startswith(".")}
        result.hidden |= hidden
        result.left |= left - hidden
    result.seconds = time.monotonic() - begun
    return result


def broken(folder: Path, work: Work, expected: Any) -> list[str]:
    """Return what is wrong with the files after a kill. A store, or an evaluation, may be unfinished or absent."""
    try:
        value = work.digest(folder)
    except IcebearError as error:
        return [] if "has no index yet" in str(error) or "There is no store" in str(error) else [str(error)]
    return [f"{work.file} was changed"] if work.file and value != expected else []


def main(arguments: Sequence[str]) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--lines", type=int, default=3000, help="Sentences of the corpus.")
    options.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS))
    chosen = options.parse_args(arguments)
    torch.set_num_threads(1)  # a fork does not have the other threads
    print("| command | kills | runs to the end | different then | broken by a kill | left | left, hidden | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["ICEBEAR_CACHE"] = str(home / "cache")
        prepare(home, chosen.lines)
        indexed = fresh(home, WORKS["index"], "indexed")
        assert ended(started(INDEX, indexed, home / "model")) == 0, (home / "log").read_text()[-2000:]
        for name in chosen.only:
            one = measure(home, WORKS[name], chosen.kills, random.Random(name))
            cells = [name, one.kills, one.rounds, one.different, len(one.broken), len(one.left), len(one.hidden)]
            print(f"| {' | '.join(map(str, cells))} | {one.seconds:.0f} |", flush=True)
            for what in {*one.broken, *one.left}:
                print(f"  {name}: {what}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
