// Highlights what is pointed at in the picture of a circuit, and shows it in the panel. Text comes from the JSON beside
// it, as text only.
function watchCircuits(root) {
  for (const circuit of root.querySelectorAll(".circuit:not([data-watched])")) {
    circuit.dataset.watched = "yes";
    const { cards, actions } = JSON.parse(circuit.querySelector("script[type='application/json']").textContent);
    const nodes = [...circuit.querySelectorAll(".node")];
    const edges = [...circuit.querySelectorAll(".edge")];
    const boxes = [...nodes, ...circuit.querySelectorAll(".group")];
    const panel = circuit.querySelector(".panel");
    const range = circuit.querySelector("input[name=edges]");
    let pinned = null; // what was clicked stays highlighted

    function element(tag, name, text) {
      const made = document.createElement(tag);
      if (name) made.className = name;
      if (text !== undefined) made.textContent = text;
      return made;
    }

    function button(name, text, act) {
      const made = element("button", name, text);
      made.type = "button";
      made.onclick = act;
      return made;
    }

    // The ids that a box stands for: its own, or those of the members of a group.
    const idsOf = (id) => (id.startsWith("group ") ? Object.values(cards[id].lists)[0].map(([one]) => one) : [id]);

    function highlight(id) {
      const highlighted = new Set(id ? idsOf(id) : []);
      const near = new Set(highlighted);
      for (const edge of edges) {
        const own = highlighted.has(edge.dataset.source) || highlighted.has(edge.dataset.target);
        // Of one node also the edges that the picture does not show by itself; of a group these would be too many.
        const on = own && (highlighted.size === 1 || !edge.classList.contains("gone"));
        edge.classList.toggle("dim", id !== null && !on);
        edge.classList.toggle("highlight", id !== null && on);
        if (on) near.add(edge.dataset.source).add(edge.dataset.target);
      }
      for (const node of nodes) node.classList.toggle("dim", id !== null && !near.has(node.dataset.id));
    }

    function words(label, name, texts) {
      const line = element("div", "words", label + " ");
      for (const text of texts) line.append(element("span", name, text), " ");
      return line;
    }

    function list([title, rows]) {
      const made = element("ul");
      for (const [id, name, number] of rows) {
        const row = element("li");
        row.append(id ? button("name", name, () => pin(id)) : element("span", "name", name), element("span", "", number));
        made.append(row);
      }
      return [element("h4", "", title), made];
    }

    function show(id) {
      highlight(id);
      panel.classList.toggle("pinned", pinned !== null);
      const card = cards[id ?? "answer"];
      const parts = [element("h3", "", card.title), ...card.lines.map((line) => element("div", "", line))];
      if (card.raises.length) parts.push(words("raises", "raises", card.raises));
      if (card.lowers.length) parts.push(words("lowers", "lowers", card.lowers));
      if (card.acts) {
        const send = (name) => circuit.dispatchEvent(new CustomEvent("act", { detail: [name, id] }));
        const choices = element("div", "actions");
        for (const [name, label] of Object.entries(actions))
          if (!id.startsWith("group ") || name !== "card") choices.append(button("", label, () => send(name)));
        parts.push(choices);
      }
      if (id === null) parts.push(element("p", "hint", "Point at a box to see its inputs and outputs. Click it to select it."));
      panel.replaceChildren(...parts, ...Object.entries(card.lists).flatMap(list));
    }

    function pin(id) {
      pinned = id === pinned || !cards[id] ? null : id;
      show(pinned);
      for (const box of boxes) box.setAttribute("aria-pressed", String(pinned !== null && idOf(box) === pinned));
      circuit.dispatchEvent(new CustomEvent("pick", { detail: pinned }));
    }

    const idOf = (box) => box.dataset.id ?? "group " + box.dataset.group;

    function watch(box) {
      const id = idOf(box);
      const point = () => pinned === null && show(id);
      const leave = () => pinned === null && show(null);
      box.addEventListener("mouseenter", point);
      box.addEventListener("focus", point);
      box.addEventListener("mouseleave", leave);
      box.addEventListener("blur", leave);
      box.addEventListener("click", () => pin(id));
      box.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        pin(id);
      });
    }

    function limit() {
      for (const edge of edges) edge.classList.toggle("gone", Number(edge.dataset.rank) >= Number(range.value));
      circuit.querySelector(".count").textContent = `${range.value} strongest of ${edges.length}`;
    }

    boxes.forEach(watch);
    range.addEventListener("input", limit);
    limit();
    show(null);
    const picture = circuit.querySelector(".picture"), svg = picture.querySelector("svg");
    const natural = svg.getBoundingClientRect().width, fits = picture.clientWidth / natural;
    let scale = 1;
    function resize(factor) {
      scale = Math.min(4, Math.max(0.25, factor));
      svg.style.width = `${natural * scale}px`;
      svg.style.maxWidth = "none";
    }
    const press = (name, act) => { circuit.querySelector(`button[name=${name}]`).onclick = act; };
    press("smaller", () => resize(scale / 1.25));
    press("larger", () => resize(scale * 1.25));
    press("full", () => (document.fullscreenElement ? document.exitFullscreen() : circuit.requestFullscreen()));
    if (fits < 1 && fits > 0.6) resize(fits); // on a phone it would be illegible: it scrolls, to the answer at first
    const answer = circuit.querySelector(".node[data-id=answer]").getBoundingClientRect();
    picture.scrollLeft = answer.right - picture.getBoundingClientRect().right + 8;
    if (circuit.dataset.picked) pin(circuit.dataset.picked);
  }
}
