"""Programs that were trained into small transformers (`benchmarks/train_programs.py`), which come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.program import Program
from icebear.models.loading import hooked
from icebear.models.loading.hooked_config import HookedConfig
from icebear.models.model import Model
from icebear.models.text.words import Words

FOLDER = Path(__file__).with_name("trained")
SHAPE: dict[str, Any] = {
    **{"d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 64},
    **{"act_fn": "gelu", "normalization_type": "LN"},
}


def config_of(program: Program) -> HookedConfig:
    """Return the shape of a program's trained model; it has as many layers as the compiled one."""
    return HookedConfig(
        n_layers=program.circuitry().layers,
        n_ctx=program.length,
        d_vocab=len(program.words),
        d_vocab_out=len(program.outputs),
        attention_dir="causal" if program.causal else "bidirectional",
        **SHAPE,
    )


def trained(program: Program) -> Compiled:
    """Return the trained model of a program. What its neurons are for is not known by construction."""
    words, outputs = ({word: n for n, word in enumerate(some)} for some in (program.words, program.outputs))
    state = {name: x.float() for name, x in load_file(FOLDER / f"{program.name}.safetensors").items()}
    return Compiled(Model(hooked.network(config_of(program), state, words, outputs), Words(words), program.name))


def names() -> list[str]:
    """Return the programs that have a trained model."""
    return sorted(file.stem for file in FOLDER.glob("*.safetensors"))
