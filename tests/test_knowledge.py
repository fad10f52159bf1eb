"""Flips over paraphrases, and edits measured as edits of knowledge."""

import json

import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model

from icebear.app.cli.main import main
from icebear.concepts.lrp.method import ATTNLRP
from icebear.errors import InputError
from icebear.steering import counterfacts, flip, steer
from icebear.steering.flipping.last_token import LastToken
from icebear.steering.flipping.paraphrases import Paraphrases

PROMPTS = ["The capital of France is", "The capital city of France is", "France's capital is"]


@pytest.mark.parametrize("method", [None, ATTNLRP])
def test_paraphrases_are_their_prompts(method):
    model = random_model(LLAMA, dtype=torch.float64)
    rows, edits = [[1, 2, 3, 4], [5, 6, 7]], {(1, 3, 0): 0.5}
    together, each = Paraphrases(model, rows), [LastToken(model, ids) for ids in rows]
    logits = together.logits([edits, {}])
    assert torch.equal(logits, torch.cat([one.logits([edits, {}]) for one in each], 1))
    found = together.slopes(edits, lambda x: x[0, 7] * 2 - x[1, 9], method)
    twin = each[0].slopes(edits, lambda x: 2 * x[0, 7], method) - each[1].slopes(edits, lambda x: x[0, 9], method)
    torch.testing.assert_close(found, twin)
    assert [together.before(number) for number in range(2)] == rows


def test_a_flip_does_it_for_all_paraphrases(smol):
    alone = flip(smol, PROMPTS[0], " Rome", "The capital of Italy is")
    together = flip(smol, PROMPTS[0], " Rome", "The capital of Italy is", paraphrases=PROMPTS[1:])
    with steer(smol, together):
        assert [smol.predict(prompt, 1)[0].text for prompt in PROMPTS] == [" Rome"] * 3
    assert together.provenance["paraphrases"] == PROMPTS[1:]
    assert "paraphrases" not in alone.provenance
    assert smol.predict(PROMPTS[1], 1)[0].text == " Paris"


def test_paraphrases_are_for_one_token(smol):
    for options in ({"to": " a cold desert"}, {"away": True}):
        with pytest.raises(InputError, match="Paraphrases"):
            flip(smol, PROMPTS[0], paraphrases=PROMPTS[1:], **options)


def test_cases_are_facts_that_the_model_says(smol):
    found, tried = counterfacts.cases(smol)
    assert tried == sum(len(of["objects"]) for of in counterfacts.RELATIONS.values())
    assert len(found) >= 30
    for case in found:
        objects = counterfacts.RELATIONS[case.relation]["objects"]
        assert objects[case.subject] == case.true != case.new == objects[case.like]
        assert not {case.subject, case.like} & set(case.neighbours)
        assert len(case.prompts()) >= 2 + counterfacts.SEARCHED
    assert counterfacts.cases(smol) == (found, tried)


def test_a_concept_for_an_object_writes_it(smol):
    new, true = smol.token_id(" Rome", "new"), smol.token_id(" Paris", "true")
    concept = counterfacts.of_object(smol, new, true)
    assert len(concept) == counterfacts.CONCEPT
    plain = smol.next_logits(PROMPTS[0])
    with steer(smol, concept.recipe(smol, 0.5, where="last")):
        turned = smol.next_logits(PROMPTS[0])
    assert turned[new] - turned[true] > plain[new] - plain[true] + 1


@pytest.mark.real
def test_evaluate_edits(smol, tmp_path, monkeypatch):
    monkeypatch.setattr(counterfacts, "CHOSEN", ("relevance",))
    monkeypatch.setattr(
        counterfacts, "METHODS", ("relevance", counterfacts.TOGETHER, counterfacts.LIKE_OBJECT, "nothing")
    )
    result = CliRunner().invoke(main, ["evaluate", "edits", "--cases", "1", "--out", str(tmp_path / "e"), "--json"])
    assert result.exit_code == 0, result.output
    assert "of 105" in result.output or "105 facts were tried" in (tmp_path / "e" / "table.md").read_text()
    (line,) = [json.loads(row) for row in (tmp_path / "e" / "samples.jsonl").read_text().splitlines()]
    nothing = line["methods"]["nothing"]
    assert nothing["found"] == nothing["efficacy"] == nothing["price"] == nothing["neurons"] == 0
    assert nothing["specificity"] == 1
    assert line["methods"]["relevance"]["efficacy"] == 1
