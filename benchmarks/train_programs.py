"""Train programs into small transformers by interchange interventions, and write them to
benchmarks/truth/programs/trained.

    python -m benchmarks.train_programs [--steps 4000] [NAME ...]

A variable of a program is aligned with the first half of a layer's FFN neurons. Three losses are added: that of the
answers; that of the answers after these neurons take their values in another prompt, where the program's variable does
the same (Geiger et al. 2022); and that of the answers after random other nodes take their values in another prompt,
which must change nothing (the strict loss of InterpBench, Gupta et al. 2024). Other nodes are the second half of the
FFN neurons and of the heads.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.truth.judge.judged_pairs import one_changed
from benchmarks.truth.programs.compiler import FOLDER, SHAPE, config_of
from benchmarks.truth.programs.program import Program, Variables
from benchmarks.truth.programs.programs import PROGRAMS
from icebear.models.loading.hooked_model import HookedForCausalOutputs, HookedForOutputs

PAIRS, BATCH, RATE = 30_000, 128, 4e-3
Answers = list[str | None]


def pointed(prompt: Sequence[str], pointer: Sequence[int | None]) -> Answers:
    """Return the words that pointers point at."""
    return [prompt[at] if at is not None and at < len(prompt) else None for at in pointer]


def followed(prompt: Sequence[str], before: Sequence[str | None]) -> Answers:
    """Return the word at the one place that follows the same word."""
    answers: Answers = []
    for place, word in enumerate(prompt):
        places = [at for at in range(2, place + 1) if before[at] == word]
        answers.append(prompt[places[0]] if len(places) == 1 else None)
    return answers


def hop_by_keys(prompt: Sequence[str], key: Sequence[str | None]) -> Answers:
    table = {key[at]: prompt[at] for at in (2, 4, 6)}
    return [None] * (len(prompt) - 1) + [table.get(table.get(prompt[-1]))]


def hop_by_word(prompt: Sequence[str], hop: Sequence[str | None]) -> Answers:
    table = dict(zip(prompt[1:7:2], prompt[2:7:2], strict=True))
    return [None] * (len(prompt) - 1) + [table.get(hop[-1] or "")]


def by_rank(prompt: Sequence[str], rank: Sequence[int | None]) -> Answers:
    places = [[at for at, one in enumerate(rank) if one == place] for place in range(len(prompt))]
    return [prompt[some[0]] if len(some) == 1 else None for some in places]


def by_count(prompt: Sequence[str], count: Sequence[int]) -> Answers:
    return [None, *(("even", "odd")[number % 2] for number in count[1:])]


Intervened = Callable[[Sequence[str], Sequence[object]], Answers]
ALIGNED: dict[str, dict[str, tuple[int, Intervened | None]]] = {
    "previous": {"output": (0, None)},
    "induction": {"before": (0, followed), "output": (1, None)},
    "reverse": {"pointer": (0, pointed), "output": (1, None)},
    "conditional": {"pointer": (0, pointed), "output": (1, None)},
    "hops": {"key": (0, hop_by_keys), "hop": (1, hop_by_word), "output": (2, None)},
    "histogram": {"output": (1, None)},
    "parity": {"count": (0, by_count), "output": (1, None)},
    "sort": {"rank": (1, by_rank), "output": (2, None)},
}
"""Program -> variable -> its layer, and the answers to a prompt with the variable of another one; None: that answer."""


class Data:
    """Pairs of prompts, with the answers and, by variable, the answers after an intervention and where it is."""

    def __init__(self, program: Program, count: int, seed: int) -> None:
        draw = random.Random(seed)
        prompts = [program.sample(draw) for _ in range(count)]
        others = [one_changed(program, draw, p) if n % 2 else program.sample(draw) for n, p in enumerate(prompts)]
        others = [o if _is_valid(program, o) else program.sample(draw) for o in others]
        self.ids, self.other_ids = (self._ids(program.words, some) for some in (prompts, others))
        self.answers = self._ids(program.outputs, map(program.answers, prompts))
        self.intervened: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}
        values = [program.variables(other) for other in others]
        for name, (_, answer) in ALIGNED[program.name].items():
            rows = [_intervened(p, own, name, answer) for p, own in zip(prompts, values, strict=True)]
            self.intervened[name] = self._ids(program.outputs, rows)
            self.places[name] = torch.tensor([[x is not None for x in own[name]] for own in values])
            if answer is None:  # other answers stay
                here = self.places[name]
                self.intervened[name] = torch.where(here, self.intervened[name], self.answers)

    def _ids(self, words: Sequence[str], rows: object) -> Tensor:
        numbers = {word: number for number, word in enumerate(words)}
        return torch.tensor([[numbers.get(word, -100) for word in row] for row in rows])


def _is_valid(program: Program, prompt: Sequence[str]) -> bool:
    try:
        program.variables(prompt)
    except (ValueError, IndexError, KeyError):
        return False
    return True


def _intervened(prompt: Sequence[str], other: Variables, name: str, answer: Intervened | None) -> Answers:
    return other["output"] if answer is None else answer(prompt, other[name])


Places = Mapping[tuple[str, int], Tensor]


@contextmanager
def recorded(net: torch.nn.Module) -> Iterator[dict[tuple[str, int], Tensor]]:
    """Record the FFN neurons and the outputs of heads, by site and layer."""
    seen: dict[tuple[str, int], Tensor] = {}
    undo = [
        part.register_forward_pre_hook(lambda _, args, place=place: seen.update({place: args[0]}))
        for place, part in parts(net)
    ]
    yield seen
    for handle in undo:
        handle.remove()


@contextmanager
def exchanged(net: torch.nn.Module, masks: Places, values: Places) -> Iterator[None]:
    """Give the nodes in masks (B, T, N) other values (B, T, N)."""
    undo = [
        part.register_forward_pre_hook(
            lambda _, args, place=place: (torch.where(masks[place], values[place], args[0]),)
        )
        for place, part in parts(net)
        if place in masks
    ]
    yield
    for handle in undo:
        handle.remove()


def parts(net: torch.nn.Module) -> Iterator[tuple[tuple[str, int], torch.nn.Module]]:
    for layer, block in enumerate(net.model.blocks):
        yield ("ffn", layer), block.mlp.out
        yield ("head", layer), block.attn.o


def others(net: torch.nn.Module, shape: tuple[int, int], generator: torch.Generator) -> Places:
    """Return random masks of the second half of neurons and heads at random tokens."""
    masks = {}
    for (site, layer), part in parts(net):
        width, group = part.in_features, 1 if site == "ffn" else SHAPE["d_head"]
        chosen = torch.rand(*shape, width // group, generator=generator) < 0.5
        chosen[..., : width // group // 2] = False
        masks[site, layer] = chosen.repeat_interleave(group, -1)
    return masks


def losses(net: torch.nn.Module, program: Program, data: Data, rows: Tensor, generator: torch.Generator) -> list:
    """Return (logits, answers) without an intervention, with a strict one, and with one of each variable."""
    ids, answers = data.ids[rows], data.answers[rows]
    with recorded(net) as values:
        net(data.other_ids[rows])
    result = [(net(ids).logits, answers)]
    with exchanged(net, others(net, tuple(ids.shape), generator), values):
        result.append((net(ids).logits, answers))
    for name, (layer, _) in ALIGNED[program.name].items():
        mask = torch.zeros(*ids.shape, SHAPE["d_mlp"], dtype=torch.bool)
        mask[..., : SHAPE["d_mlp"] // 2] = data.places[name][rows][..., None]
        with exchanged(net, {("ffn", layer): mask}, values):
            result.append((net(ids).logits, data.intervened[name][rows]))
    return result


def train(program: Program, steps: int, seed: int = 0) -> tuple[torch.nn.Module, dict[str, float]]:
    torch.manual_seed(seed)
    config = config_of(program)
    net = (HookedForCausalOutputs if config.is_causal else HookedForOutputs)(config)
    for weight in net.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    data, generator = Data(program, PAIRS, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    start = time.time()
    for step in range(steps):
        rows = torch.randint(len(data.ids), (BATCH,), generator=generator)
        pairs = losses(net, program, data, rows, generator)
        loss = sum(cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"{program.name} {step} {loss.item():.4f} {time.time() - start:.0f} s", flush=True)
    for weight in net.parameters():
        weight.data = weight.data.half().float()
    return net, accuracies(net, program)


def accuracies(net: torch.nn.Module, program: Program) -> dict[str, float]:
    """Return the accuracies on other pairs, without interventions and with each kind."""
    data = Data(program, 2000, 1)
    with torch.no_grad():
        pairs = losses(net, program, data, torch.arange(2000), torch.Generator().manual_seed(1))
    names = ("answers", "other nodes", *ALIGNED[program.name])
    return {name: (x.argmax(-1) == y)[y >= 0].float().mean().item() for name, (x, y) in zip(names, pairs, strict=True)}


def state_of(net: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights in float16 by TransformerLens' names."""
    heads, width, state = SHAPE["n_heads"], SHAPE["d_head"], {}
    state["embed.W_E"], state["pos_embed.W_pos"] = net.model.embed.weight, net.model.pos_embed.weight
    state["unembed.W_U"], state["unembed.b_U"] = net.unembed.weight.T, net.unembed.bias
    norms = {"ln_final": net.model.ln_final}
    for layer, block in enumerate(net.model.blocks):
        norms |= {f"blocks.{layer}.ln1": block.ln1, f"blocks.{layer}.ln2": block.ln2}
        for name in "qkv":
            part, own = getattr(block.attn, name), f"blocks.{layer}.attn"
            state[f"{own}.W_{name.upper()}"] = part.weight.unflatten(0, (heads, width)).transpose(1, 2)
            state[f"{own}.b_{name.upper()}"] = part.bias.unflatten(0, (heads, width))
        state[f"{own}.W_O"] = block.attn.o.weight.T.unflatten(0, (heads, width))
        state[f"{own}.b_O"] = block.attn.o.bias
        for part, name in ((block.mlp.up, "in"), (block.mlp.out, "out")):
            state[f"blocks.{layer}.mlp.W_{name}"], state[f"blocks.{layer}.mlp.b_{name}"] = part.weight.T, part.bias
    state |= {f"{name}.{own}": x for name, norm in norms.items() for own, x in (("w", norm.weight), ("b", norm.bias))}
    return {name: x.detach().half().contiguous() for name, x in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ALIGNED))
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in options.names:
        net, measured = train(PROGRAMS[name], options.steps)
        save_file(state_of(net), FOLDER / f"{name}.safetensors")
        print(name, {key: round(value, 4) for key, value in measured.items()}, flush=True)


if __name__ == "__main__":
    main()
