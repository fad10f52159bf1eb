"""A message as words to click on: one component of Streamlit, which draws text as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import streamlit as st

Word = tuple[str, int, int]
"""A text, and its tokens, half open."""

SHOW = r"""
export default function ({ data, parentElement, setTriggerValue }) {
  const place = parentElement.querySelector(".words");
  const said = JSON.stringify(data.words);
  if (place.dataset.said !== said) {
    place.dataset.said = said;
    const texts = data.words.map(([text]) => text);
    place.dir = /^\P{L}*[\u0590-\u08ff]/u.test(texts.join("")) ? "rtl" : "ltr";
    place.replaceChildren(...drawn(texts));
  }
  const buttons = [...place.querySelectorAll("button")];
  const [from, to] = data.marked ?? [0, 0];
  const alone = data.words.some(([, start, stop]) => start === from && stop === to);
  const first = Math.max(0, data.words.findIndex(([, start]) => data.marked && start >= from));
  buttons.forEach((button, at) => {
    const [, start, stop] = data.words[at];
    const marked = start < to && stop > from;
    button.setAttribute("aria-pressed", String(marked));
    button.tabIndex = at === first ? 0 : -1;
    button.onclick = (event) => {
      const second = place.dataset.pointer === "touch" && alone && !marked;
      const whole = data.marked && (event.shiftKey || second);
      const [low, high] = whole ? [Math.min(from, start), Math.max(to, stop)] : [start, stop];
      const inside = data.words.filter(([, begin, end]) => begin >= low && end <= high);
      setTriggerValue("picked", [low, high, inside.map(([text]) => text).join("")]);
    };
  });
  place.onpointerdown = (event) => { place.dataset.pointer = event.pointerType; };
  place.onkeydown = (event) => {
    place.dataset.pointer = "keys";
    const at = buttons.indexOf(event.target);
    const goal = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || !buttons[goal]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    buttons[goal].tabIndex = 0;
    buttons[goal].focus();
  };
}

// Buttons; those of one word in a group, which is not broken where it fits a line. A box has no direction for the text
// around it, so marks stand beside those of scripts from right to left. Spaces and line breaks are outside.
function drawn(texts) {
  const nodes = [];
  let before = "";
  for (const text of texts) {
    const breaks = /\n\s*$/.exec(text)?.[0] ?? "";
    const rest = text.slice(0, text.length - breaks.length);
    const space = rest.trim() ? /^ */.exec(rest)[0] : "";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = (rest.slice(space.length) + breaks.replace(/[^\n]/g, "")).replaceAll("\n", "⏎");
    button.className = rest.trim() ? "" : "blank";
    if (!joined(before, text)) {
      const group = document.createElement("span");
      const mark = /[\u0590-\u08ff]/.test(text) ? "\u200f" : "";
      group.dir = "auto";
      nodes.push(space, mark, group, mark);
    }
    nodes.findLast((node) => node.nodeType).append(button);
    nodes.push(breaks);
    before = text;
  }
  return nodes;
}

function joined(before, text) {
  const parted = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u;
  return /\S$/.test(before) && /^\S/.test(text) && !parted.test(before.slice(-1) + text[0]);
}
"""
STYLE = """
.words{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75}
span{display:inline-block;max-width:100%}
button{font:inherit;color:inherit;background:none;border:0;border-radius:.2rem;padding:0;margin:0;max-width:100%;
  text-align:start;white-space:pre-wrap;overflow-wrap:anywhere;cursor:pointer}
.blank{white-space:pre;opacity:.45}
button:hover{background:color-mix(in srgb,var(--st-primary-color) 15%,transparent)}
button[aria-pressed=true]{background:color-mix(in srgb,var(--st-primary-color) 30%,transparent);
  box-shadow:0 2px 0 var(--st-primary-color);border-radius:0}
button:focus-visible{outline:2px solid var(--st-primary-color)}
"""
component = st.components.v2.component("icebear_words", html='<div class="words"></div>', css=STYLE, js=SHOW)


def draw(
    words: Sequence[Word],
    marked: tuple[int, int] | None,
    key: str,
    on_picked: Callable[[int, int, str], None],
) -> None:
    """The words, those of the tokens `marked` stand out; a click on one, or with shift (by touch a second tap) on a
    span, calls `on_picked` with its tokens and its text."""

    def picked() -> None:
        found = st.session_state[key].picked
        if found:
            on_picked(*found)

    component(
        data={"words": list(map(list, words)), "marked": marked and list(marked)},
        key=key,
        on_picked_change=picked,
    )


def words_of(pieces: Sequence[str]) -> list[Word]:
    """Tokens to click on; a character of several is one, which stands for all of them."""
    found: list[Word] = []
    start = 0
    for place, piece in enumerate(pieces):
        if piece:
            found.append((piece, start, place + 1))
            start = place + 1
    return found


def split(text: str) -> list[str]:
    """A text in words and signs, each with the space before it."""
    return re.findall(r"\s*(?:\w+(?:['\u2019-]\w+)*|[^\w\s]+)|\s+$", text)
