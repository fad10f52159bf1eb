"""Names of neurons, heads and arrays in TransformerLens and interp-engine."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import IDS
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from icebear import Edit, Neuron, attribute
from icebear.app.cli.main import main
from icebear.app.cli.tables.naming import renamed, renamed_document
from icebear.errors import InputError
from icebear.points import POINTS, in_names
from icebear.records import SITES


@given(st.integers(0, 99), st.sampled_from(["ffn", "head"]), st.integers(0, 10**6))
def test_a_name_of_transformer_lens_is_the_neuron_s(layer, site, index):
    neuron = Neuron(layer, site, index)
    assert Neuron.parse(neuron.to_transformer_lens()) == neuron == Neuron.parse(str(neuron))


def test_names_are_those_of_transformer_lens():
    assert Neuron.parse("blocks.29.mlp.hook_post[860]") == Neuron(29, "ffn", 860)
    assert Neuron(4, "head", 3).to_transformer_lens() == "blocks.4.attn.hook_z[3]"
    assert Edit("blocks.1.mlp.hook_post[3]", "scale", 0.0) == Edit.parse("L1.ffn.3*0")


@pytest.mark.parametrize("change", ["*0", "=-6.2", "+2std@last", '<-"A [1]*0"@position:2'])
@pytest.mark.parametrize(
    ("name", "ours"), [("blocks.23.attn.hook_z[4]", "L23.head.4"), ("mlp_act.21[780]", "L21.ffn.780")]
)
def test_an_edit_reads_the_names_of_neuron(name, ours, change):
    assert Edit.parse(name + change) == Edit.parse(ours + change)


def points(library):
    return json.loads((Path(__file__).parent / f"data/points-{library}.json").read_text())["points"]


def of_table(library):
    """Name of a point in the list of a library -> its site, by our table."""
    if library == "transformer-lens":
        return {f"blocks.0.{name}": point.site for point in POINTS for name in point.transformer_lens}
    return {f"{point.interp_engine}.5": point.site for point in POINTS if point.interp_engine}


@pytest.mark.parametrize("library", ["transformer-lens", "interp-engine"])
def test_each_point_of_a_library_is_a_neuron_s_or_refused_by_name(library):
    sites = of_table(library)
    assert set(sites) <= set(points(library))
    for name in points(library):
        if name in sites:
            assert Neuron.parse(f"{name}[7]") == Neuron(0 if name.startswith("blocks") else 5, sites[name], 7)
        else:
            with pytest.raises(InputError) as refused:
                Neuron.parse(f"{name}[7]")
            assert name in str(refused.value)
        with pytest.raises(InputError) as refused:
            Neuron.parse(name)  # without its index
        assert name in str(refused.value)


def test_a_result_is_printed_in_the_names_of_transformer_lens(tiny_folder):
    command = ["rank", "ice bear", "--model", tiny_folder, "--top", "6", "--site", "ffn", "--json"]
    plain, named = (CliRunner().invoke(main, [*command, *more]) for more in ([], ["--names", "transformerlens"]))
    assert plain.exit_code == named.exit_code == 0
    before, after = (json.loads(run.stdout)["ranking"] for run in (plain, named))
    assert [Neuron.parse(row["neuron"]) for row in after] == [Neuron.parse(row["neuron"]) for row in before]
    assert {row["neuron"].startswith("blocks.") for row in after} == {True}


def test_a_document_keeps_the_texts_of_others_in_other_names():
    ours = {"prompt": "L1.ffn.3", "question": "What does L1.ffn.3 do?", "rows": [{"text": "L1.ffn.3", "n": 2}]}
    edit, swap = "L2.head.4*0@last", 'L2.head.4<-"of L1.ffn.3"@last'
    ids = {"L1.ffn.3": ["L1.ffn.3", "L1.ffn.3 -", "L1.ffn.3@4", edit, swap, "L1.attn.3", None, 3]}
    theirs, head = "blocks.1.mlp.hook_post[3]", "blocks.2.attn.hook_z[4]"
    renamed_edits = [text.replace("L2.head.4", head) for text in (edit, swap)]
    expected = {**ours, theirs: [theirs, f"{theirs} -", f"{theirs}@4", *renamed_edits, "L1.attn.3", None, 3]}
    assert renamed_document({**ours, **ids}, in_names("transformerlens")) == expected


def test_a_table_keeps_its_styles_in_other_names():
    table, write = Table("neuron", caption="L1.ffn.3"), in_names("transformerlens")
    table.add_row(Text.assemble(("L1.ffn.3", "bold"), " and L2.attn.4", no_wrap=True))
    (cell,) = renamed(table, write).columns[0]._cells
    assert table.caption == "blocks.1.mlp.hook_post[3]"
    assert cell.no_wrap is True
    assert cell.plain == "blocks.1.mlp.hook_post[3] and L2.attn.4"
    assert [(span.start, span.end, span.style) for span in cell.spans] == [(0, 25, "bold")]


@pytest.mark.parametrize(
    "text",
    ["blocks.1.mlp.hook_pre[3]", "blocks.1.mlp.hook_post", "blocks.-1.mlp.hook_post[3]", "blocks.1.mlp.hook_post[3]x"],
)
def test_other_names_are_refused(text):
    with pytest.raises(InputError):
        Neuron.parse(text)


@pytest.mark.parametrize("site", sorted({*SITES} - {"ffn"}))
def test_neurons_without_one_index_have_no_such_name(site):
    with pytest.raises(InputError, match=rf"L1\.{site}\.3"):
        Neuron(1, site, 3).to_transformer_lens()


def test_arrays_are_the_relevance_by_name(llama):
    relevance = attribute(llama, IDS, sites=("ffn", "attn", "q", "k", "v"))
    ours, theirs = relevance.to_arrays(), relevance.to_arrays("transformer_lens")
    assert np.array_equal(theirs["hook_embed"], relevance.tokens.numpy())
    for layer in range(llama.layers):
        assert np.array_equal(theirs[f"blocks.{layer}.mlp.hook_post"], relevance.ffn[layer].numpy())
        z = theirs[f"blocks.{layer}.attn.hook_z"]
        assert z.shape == (len(IDS), llama.heads, llama.head_dim)
        assert np.allclose(z.sum(-1), relevance.heads()[layer].numpy(), atol=1e-6)
        assert theirs[f"blocks.{layer}.attn.hook_q"].shape == (len(IDS), 4, 6)
        assert theirs[f"blocks.{layer}.attn.hook_k"].shape == (len(IDS), 2, 6)
        assert np.array_equal(theirs[f"blocks.{layer}.attn.hook_v"].reshape(len(IDS), -1), ours["v"][layer])
    assert len(theirs) == 1 + 5 * llama.layers
    with pytest.raises(InputError):
        relevance.to_arrays("nnsight")
