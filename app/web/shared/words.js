export default function ({ data, parentElement, setTriggerValue }) {
  const place = parentElement.querySelector(".words");
  const drawnWords = JSON.stringify(data.words);
  if (place.dataset.drawnWords !== drawnWords) {
    place.dataset.drawnWords = drawnWords;
    const texts = data.words.map(([text]) => text);
    place.dir = /^\P{L}*[\u0590-\u08ff]/u.test(texts.join("")) ? "rtl" : "ltr";
    place.replaceChildren(...drawn(texts));
  }
  const buttons = [...place.querySelectorAll("button")];
  const [from, to] = data.marked ?? [0, 0];
  const wholes = data.words.map((_, at) => whole(data.words, at));
  const alone = wholes.some(([start, stop]) => start === from && stop === to);
  const first = Math.max(0, data.words.findIndex(([, start]) => data.marked && start >= from));
  buttons.forEach((button, at) => {
    const [, begun, ended] = data.words[at];
    const marked = begun < to && ended > from;
    button.setAttribute("aria-pressed", String(marked));
    [button.style.cssText, button.title] = data.colors?.[at] ?? ["", ""];
    button.tabIndex = at === first ? 0 : -1;
    button.onclick = (event) => {
      const [start, stop] = event.altKey ? [begun, ended] : wholes[at];
      const second = place.dataset.pointer === "touch" && alone && !marked;
      const phrase = data.marked && (event.shiftKey || second);
      const [low, high] = phrase ? [Math.min(from, start), Math.max(to, stop)] : [start, stop];
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
    if (!rest.trim()) button.ariaLabel = "space";
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

// The tokens of the word that a piece belongs to.
function whole(words, at) {
  const inside = (left, right) => joined(left[0], right[0]) && /[\p{L}\p{N}]$/u.test(left[0]) && /^[\p{L}\p{N}]/u.test(right[0]);
  let low = at, high = at;
  while (words[low - 1] && inside(words[low - 1], words[low])) low -= 1;
  while (words[high + 1] && inside(words[high], words[high + 1])) high += 1;
  return [words[low][1], words[high][2]];
}

function joined(before, text) {
  const parted = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u;
  return /\S$/.test(before) && /^\S/.test(text) && !parted.test(before.slice(-1) + text[0]);
}
