"""How is it computed? in the app."""

from appview import fine, text, visit


def test_a_circuit_its_groups_and_its_checks(environment):
    page = fine(visit("circuit", contrast=" desert", nodes="10"))
    (groups,) = (choice for choice in page.get("button_group") if choice.key == "without")
    page.session_state["without"] = groups.options[0].replace("\\", "")
    page = fine(page.run())
    assert "Without this group the answer is" in text(page)
    page.toggle(key="measure").set_value(True)
    page = fine(page.run())
    (table,) = (frame.value for frame in page.dataframe)
    assert table[""].iloc[0] == "the 10 nodes"
    assert 0 < table["necessity"].iloc[0] < 1
    (send,) = (button for button in page.button if button.label == "Send this group to Steer")
    send.click()
    page.run()
    assert "@position:" in page.session_state["edits"]
    page = visit("circuit", prompt="The camel", counterfactual="The ice bear lives")
    assert "of 2 tokens" in text(page)
    assert "with the same number of tokens" in text(fine(visit("circuit", prompt="The camel")))
