"""How examples/ice-bear-to-desert.json was found: rank, compare with a source prompt, set.

A neuron is a candidate by its first-order effect: d(logit[wanted] - logit[current]) / d(activation), taken from
AttnLRP, times the activation it has in the source prompt minus the one it has here.

    python examples/find_recipe.py "The ice bear lives in the" "The camel lives in the" " desert" recipe.json
"""

import sys

from concepts import Neuron, attribute, load_model
from steering import Edit, Recipe, steer


def find(model, prompt: str, source: str, wanted: str, count: int = 10, strength: float = 2.0) -> Recipe:
    here = attribute(model, prompt, target=wanted, contrast=model.predict(prompt, 1)[0].id, sites=("ffn",))
    there = attribute(model, source, sites=("ffn",))
    now, then = here.activation("ffn")[:, -1], there.activation("ffn")[:, -1]  # (L, F) at the last token
    effect = (here.ffn[:, -1] / now).nan_to_num(0, 0, 0) * (then - now)
    edits = []
    for place in effect.flatten().topk(count).indices.tolist():
        layer, index = divmod(place, effect.shape[1])
        value = now[layer, index] + strength * (then - now)[layer, index]
        edits.append(Edit(Neuron(layer, "ffn", index), "set", round(value.item(), 2), where="last"))
    return Recipe.for_model(
        model, f"{prompt} ->{wanted}", edits, prompt=prompt, like=source, to=wanted, found_by="examples/find_recipe.py"
    )


if __name__ == "__main__":
    prompt, source, wanted, path = sys.argv[1:5]
    model = load_model()
    for strength in (1.0, 1.5, 2.0, 2.5, 3.0):
        recipe = find(model, prompt, source, wanted, strength=strength)
        with steer(model, recipe):
            first = model.predict(prompt, 1)[0]
        print(f"strength {strength}: {first.text!r} {first.probability:.2f}")
        if first.text == wanted and first.probability > 0.3:
            recipe.save(path)
            break
