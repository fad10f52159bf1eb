"""Names of neurons, heads and arrays in TransformerLens and interp-engine."""

import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import IDS
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from icebear import Edit, Neuron, Recipe, attribute, random_edit_control, steer
from icebear.app.cli.main import main
from icebear.app.cli.tables.naming import renamed, renamed_document
from icebear.errors import InputError
from icebear.points import FLAT, HOOKS, POINTS, Naming, in_names, model_id
from icebear.records import SITES, SITES_AND_HEADS

NEURONS = st.builds(Neuron, st.integers(0, 99), st.sampled_from(SITES_AND_HEADS), st.integers(0, 10**6))


@given(NEURONS.filter(lambda neuron: neuron.site in HOOKS))
def test_a_name_of_transformer_lens_is_the_neuron_s(neuron):
    assert Neuron.parse(neuron.to_transformer_lens()) == neuron == Neuron.parse(str(neuron))


@given(NEURONS, st.sampled_from(get_args(Naming)))
def test_what_is_printed_in_any_names_is_read_as_the_same_neuron(neuron, names):
    written = in_names(names)(str(neuron))
    assert Neuron.parse(written) == neuron
    assert Edit.parse(f"{written}*0@last") == Edit(neuron, "scale", 0.0, where="last")
    assert written.startswith("blocks.") is (names == "transformerlens" and neuron.site in HOOKS)


def test_names_are_those_of_transformer_lens():
    assert Neuron.parse("blocks.29.mlp.hook_post[860]") == Neuron(29, "ffn", 860)
    assert Neuron(4, "head", 3).to_transformer_lens() == "blocks.4.attn.hook_z[3]"
    assert Neuron(4, "attn", 70).to_transformer_lens() == "blocks.4.attn.hook_z.flatten(-2)[70]"
    assert Edit("blocks.1.mlp.hook_post[3]", "scale", 0.0) == Edit.parse("L1.ffn.3*0")


@pytest.mark.parametrize("change", ["*0", "=-6.2", "+2std@last", '<-"A [1]*0"@position:2'])
@pytest.mark.parametrize(
    ("name", "ours"), [("blocks.23.attn.hook_z[4]", "L23.head.4"), ("mlp_act.21[780]", "L21.ffn.780")]
)
def test_an_edit_reads_the_names_of_neuron(name, ours, change):
    assert Edit.parse(name + change) == Edit.parse(ours + change)


INDEXED = {
    "blocks.21.mlp.hook_post[:, -1, 780]": "L21.ffn.780*0@last",
    "blocks.21.mlp.hook_post[0, 3, 780]": "L21.ffn.780*0@position:3",
    "blocks.21.mlp.hook_post[ : , : , 780 ]": "L21.ffn.780*0",
    "blocks.21.mlp.hook_post[-1, 780]": "L21.ffn.780*0@last",
    "blocks.21.mlp.hook_post[..., 780]": "L21.ffn.780*0",
    "mlp_act.21[:, -1, 780]": "L21.ffn.780*0@last",
    "z.23[-1, 266]": "L23.attn.266*0@last",
    "blocks.23.attn.hook_z.flatten(-2)[:, -1, 266]": "L23.attn.266*0@last",
    "blocks.23.attn.hook_z[0, -1, 4]": "L23.head.4*0@last",
    "blocks.23.attn.hook_z[:, :, 4, :]": "L23.head.4*0",
    "blocks.23.attn.hook_z[..., 4, :]": "L23.head.4*0",
    "L23H4": "L23.head.4*0",
    "L21N780": "L21.ffn.780*0",
    "21-ffn-plus/780": "L21.ffn.780*0",
    "21-ffn-minus/780": "L21.ffn.780*0",
    "21/780": "L21.ffn.780*0",
    "21-mlp/780": "L21.ffn.780*0",
    "smollm2-135m/21-ffn-plus/780": "L21.ffn.780*0",
    "https://www.neuronpedia.org/smollm2-135m/21-ffn-plus/780": "L21.ffn.780*0",
    "neuronpedia.org/smollm2-135m/21-attn-plus/780": "L21.attn.780*0",
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_of_positions_is_where_an_edit_acts(name):
    edit = Edit.parse(INDEXED[name])
    assert Neuron.parse(name) == edit.neuron
    assert Edit.parse(f"{name}*0") == Edit(name, "scale", 0.0) == edit


@given(NEURONS.filter(lambda neuron: neuron.site == "ffn"), st.integers(0, 10**6))
def test_an_index_of_brackets_is_numpy_s(neuron, position):
    """The last axis counts neurons, the one before positions."""
    point = neuron.to_transformer_lens().partition("[")[0]
    for index in (f":, {position}, {neuron.index}", f"0,{position},{neuron.index}", f"{position}, {neuron.index}"):
        expected = Edit(neuron, "scale", 0.0, where=f"position:{position}")
        assert Edit.parse(f"{point}[{index}]*0") == expected


@pytest.mark.parametrize(("change", "value"), [("+8", -8.0), ("-8", 8.0), ("=2", -2.0), ("*3", 3.0), ("=0", 0.0)])
def test_a_value_of_a_source_at_negative_activation_is_the_activation_times_minus_one(change, value):
    edit = Edit.parse(f"21-ffn-minus/780{change}")
    sign = -1 if value < 0 else 1  # also of 0
    assert (edit.neuron, edit.value, math.copysign(1, edit.value)) == (Neuron(21, "ffn", 780), value, sign)
    assert Edit.parse(str(edit)) == edit


def test_two_places_of_an_edit_are_refused():
    name = "blocks.21.mlp.hook_post[:, -1, 780]"
    assert Edit.parse(f"{name}*0@last") == Edit.parse(f"{name}*0")
    assert Edit.from_prompt("L23H4", "a") == Edit.from_prompt("blocks.23.attn.hook_z[0, -1, 4]", "a")
    with pytest.raises(InputError, match="generated"):
        Edit.parse(f"{name}*0@generated")


@pytest.mark.parametrize("name", ["gpt2-small/0-ffn-plus/3", "https://www.neuronpedia.org/gpt2-small/0/3"])
def test_a_neuron_of_another_model_is_refused(name, model, tiny_folder):
    edit = f"{name}*0"
    refused = (
        lambda: model.check(name),
        lambda: Neuron.parse(name, model.name),
        lambda: Edit.parse(edit, model.name),
        lambda: Recipe.for_model(model, "none", [edit]),
        lambda: steer(model, edit).__enter__(),
        lambda: random_edit_control(model, IDS, edit, 3),
    )
    for call in refused:
        with pytest.raises(InputError, match="gpt2-small"):
            call()
    assert Neuron.parse(name, "gpt2-small") == Edit.parse(edit, "gpt2-small").neuron == Neuron(0, "ffn", 3)
    for words in (["neuron", name], ["steer", "ice", "--edit", f"{name}*0"], ["label", name, "ice"]):
        result = CliRunner().invoke(main, [*words, "--model", tiny_folder])
        assert (result.exit_code, "gpt2-small" in result.stderr) == (1, True)
    assert model.check(f"{model_id(model.name)}/0-ffn-plus/3") == Neuron(0, "ffn", 3)


def points(library):
    return json.loads((Path(__file__).parent / f"data/points-{library}.json").read_text())["points"]


def of_table(library):
    """Name of a point in the list of a library -> its site, by our table."""
    if library == "transformer-lens":
        names = [(name, point.site) for point in POINTS for name in point.transformer_lens]
        assert {name.removesuffix(FLAT) for name, _ in names} <= {
            name.removeprefix("blocks.0.") for name in points(library)
        }
        return {f"blocks.0.{name}": site for name, site in names if not name.endswith(FLAT)}
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


@pytest.mark.parametrize("site", ["ffn", "attn", "head", "v"])
def test_a_result_is_printed_in_the_names_of_transformer_lens(site, tiny_folder):
    command = ["rank", "ice bear", "--model", tiny_folder, "--top", "6", "--site", site, "--json"]
    plain, named = (CliRunner().invoke(main, [*command, *more]) for more in ([], ["--names", "transformerlens"]))
    assert plain.exit_code == named.exit_code == 0
    before, after = (json.loads(run.stdout)["ranking"] for run in (plain, named))
    assert [Neuron.parse(row["neuron"]) for row in after] == [Neuron.parse(row["neuron"]) for row in before]
    assert {row["neuron"].startswith("blocks.") for row in after} == {True}


def test_a_document_keeps_the_texts_of_others_in_other_names():
    ours = {"prompt": "L1.ffn.3", "question": "What does L1.ffn.3 do?", "rows": [{"text": "L1.ffn.3", "n": 2}]}
    edit, swap = "L2.head.4*0@last", 'L2.head.4<-"of L1.ffn.3"@last'
    ids = {"L1.ffn.3": ["L1.ffn.3", "L1.ffn.3 -", "L1.ffn.3@4", edit, swap, "L1.mixer.3", None, 3]}
    theirs, head = "blocks.1.mlp.hook_post[3]", "blocks.2.attn.hook_z[4]"
    renamed_edits = [text.replace("L2.head.4", head) for text in (edit, swap)]
    expected = {**ours, theirs: [theirs, f"{theirs} -", f"{theirs}@4", *renamed_edits, "L1.mixer.3", None, 3]}
    assert renamed_document({**ours, **ids}, in_names("transformerlens")) == expected


def test_a_table_keeps_its_styles_in_other_names():
    table, write = Table("neuron", caption="L1.ffn.3"), in_names("transformerlens")
    table.add_row(Text.assemble(("L1.ffn.3", "bold"), " and L2.mixer.4", no_wrap=True))
    (cell,) = renamed(table, write).columns[0]._cells
    assert table.caption == "blocks.1.mlp.hook_post[3]"
    assert table.columns[0].no_wrap
    assert cell.no_wrap is True
    assert cell.plain == "blocks.1.mlp.hook_post[3] and L2.mixer.4"
    assert [(span.start, span.end, span.style) for span in cell.spans] == [(0, 25, "bold")]


@pytest.mark.parametrize(
    "text",
    [
        "blocks.1.mlp.hook_pre[3]",
        "blocks.1.mlp.hook_post",
        "blocks.-1.mlp.hook_post[3]",
        "blocks.1.mlp.hook_post[3]x",
        "blocks.1.mlp.hook_post[1, 0, 3]",  # of another prompt
        "blocks.1.mlp.hook_post[0, -2, 3]",
        "blocks.1.mlp.hook_post[0, 1:3, 3]",
        "blocks.1.mlp.hook_post[0, 1, -3]",
        "blocks.1.mlp.hook_post[0, 0, 0, 3]",
        "blocks.1.mlp.hook_post[...]",
        "blocks.1.mlp.hook_post.flatten(-2)[3]",
        "blocks.1.attn.hook_z[..., 4]",  # a component of each head
        "blocks.1.attn.hook_z[4, 10]",
        "blocks.1.attn.hook_z[0, -1, 4, 10]",
        "blocks.1.attn.hook_q[3]",
        "6-res-jb/3",
        "gemma-2-2b/20-gemmascope-res-16k/3",
        "21-ffn-both/3",
        "21-ffn-plus/",
    ],
)
def test_other_names_are_refused(text):
    with pytest.raises(InputError):
        Neuron.parse(text)


def test_a_component_of_a_head_is_refused_with_its_name():
    """For a head of 64 components, the most frequent number."""
    with pytest.raises(InputError) as refused:
        Neuron.parse("blocks.23.attn.hook_z[4, 10]")
    assert "[266]" in str(refused.value)
    assert Neuron.parse("blocks.23.attn.hook_z.flatten(-2)[266]") == Neuron(23, "attn", 4 * 64 + 10)


@pytest.mark.parametrize("site", sorted({*SITES} - {*HOOKS}))
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
