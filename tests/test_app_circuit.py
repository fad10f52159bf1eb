"""How is it computed? in the app."""

import pytest
from appview import fine, text, visit

from icebear import Neuron, circuit, load_model
from icebear.app.web.circuit import measured_record, measures, sentence
from icebear.app.web.shared import gallery, jobs
from icebear.app.web.shared.bars import Bar, bars
from icebear.concepts.nodes.controls import Ablation
from icebear.edits import parse_edits
from icebear.models.loading import loading


def buttons_of(page, label):
    return [button for button in page.button if button.label == label]


def test_a_circuit_its_groups_and_its_checks(first_visit, tiny_folder, few_contexts):
    """With the numbers of the library."""
    prompt, other = "B are", "A are"
    page = fine(visit("circuit", prompt=prompt, counterfactual=other, contrast="Rome", nodes="10", neurons="true"))
    assert "These 10 neurons" in text(page)
    assert "Lost without these neurons" in text(page)
    nodes = page.dataframe[0].value
    assert nodes[""].iloc[0] == "these 10 neurons"
    graph = circuit(load_model(tiny_folder), prompt, contrast=" Rome", counterfactual=other, nodes=10, heads=False)
    assert nodes["necessity"].iloc[0] == pytest.approx(100 * graph.ablation().necessity, abs=0.1)  # percent
    assert not nodes.isna().any().any()
    page.toggle(key="measure").set_value(True)
    edges = fine(page.run()).dataframe[0].value
    assert 0 < int(edges.iloc[0, 0].split()[1]) <= 60  # "the 40 strongest edges"
    assert not edges.isna().any().any()
    (groups,) = (choice for choice in page.get("button_group") if choice.key == "without")
    page.session_state["without"] = groups.options[0].replace("\\", "")
    page = fine(page.run())
    assert "Without this group the model continues with" in text(page)
    (send,) = buttons_of(page, "Set this group in Concepts & steering")
    send.click()
    page.run()
    assert "@position:" in page.session_state["edits"]


def test_the_circuit_of_a_finished_example_needs_no_model(environment, monkeypatch):
    """All of them; a node leads to its card, and a group to its edits."""
    jobs._load.clear()
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: pytest.fail("the model was loaded"))
    for example in map(gallery.example, gallery.NAMES):
        prompt, counterfactual = example.fields
        page = fine(visit("circuit", prompt=prompt, counterfactual=counterfactual))
        record = gallery.circuit(example)
        assert sentence(Ablation(**record["ablation"]), record["parts"], record["whole"]) in text(page)
        assert record["html"].count("<svg") == 1
        for neuron, sign, edits in record["actions"].values():
            assert sign in "+-"
            assert str(Neuron.parse(neuron)) in {str(edit.neuron) for edit in parse_edits(edits.splitlines())}


@pytest.mark.release
def test_a_recorded_circuit_is_what_is_found(whole_environment, smol):
    """Without the pictures of larger circuits, which take a minute."""
    shown = gallery.example("grammar").explanation
    pair = shown.target, shown.contrast
    graph = circuit(smol, shown.prompt, *pair, counterfactual=shown.counterfactual)
    record, recorded = measured_record(graph), gallery.circuit(gallery.example("grammar"))
    assert record["actions"].keys() == recorded["actions"].keys()
    assert record["ablation"] == pytest.approx(recorded["ablation"], abs=1e-3)


def test_prompts_without_a_circuit_say_what_to_do(environment):
    page = visit("circuit", prompt="The camel", counterfactual="The ice bear lives")
    assert "of 2 tokens" in text(page)
    assert fine(visit("circuit", prompt="The camel")).info


@pytest.mark.parametrize(
    ("share", "random", "little", "control"),
    [(0.6, 0.02, False, "2%"), (0.1, 0.02, True, "2%"), (-0.001, 0.0, True, "no more"), (0.5, 0.6, False, "no more")],
)
def test_a_circuit_that_recovers_little_says_so(share, random, little, control):
    said = sentence(Ablation("ffn", 25, share, 0.43, random, 0.01, 0.0, 0.0, 0.0, 5.0), "neurons")
    assert ("not in this picture" in said) is little
    assert control in said
    assert "43%" in said
    assert "-0%" not in said


def test_bars_stay_in_their_box():
    shares = measures(Ablation("ffn", 25, -0.5, 1.7, 0.25, 0.0, 0.0, 0.0, 0.0, 5.0), "neurons")
    assert [(bar.value, bar.number) for bar in shares] == [(0, "-50%"), (0.25, "25%"), (1, "170%"), (0, "0%")]
    html = bars([Bar("<b>", 3.0, "+3"), Bar("b", -1.0, "-1")])
    assert [float(part.split("%")[0]) for part in html.split('style="left:')[1:]] == [25, 0]
    assert [float(part.split("%")[0]) for part in html.split("%;width:")[1:]] == [75, 25]
    assert "&lt;b&gt;" in html
