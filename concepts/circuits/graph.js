// Highlights what is pointed at in the picture of a circuit. Text comes from the JSON beside it, as text only.
function watchCircuits(root) {
  for (const circuit of root.querySelectorAll(".circuit:not([data-watched])")) {
    circuit.dataset.watched = "yes";
    const cards = JSON.parse(circuit.querySelector("script[type='application/json']").textContent);
    const nodes = [...circuit.querySelectorAll(".node")];
    const edges = [...circuit.querySelectorAll(".edge")];
    const card = circuit.querySelector(".card");
    const status = circuit.querySelector(".count");
    const ranges = Object.fromEntries([...circuit.querySelectorAll("input")].map((x) => [x.name, x]));
    let pinned = null; // what was clicked stays highlighted

    function show(chosen) {
      const highlighted = new Set(chosen ? chosen.ids : []);
      const near = new Set(highlighted);
      for (const edge of edges) {
        const on = highlighted.has(edge.dataset.source) || highlighted.has(edge.dataset.target);
        edge.classList.toggle("dim", chosen !== null && !on);
        edge.classList.toggle("highlight", chosen !== null && on);
        if (on && !edge.classList.contains("gone")) near.add(edge.dataset.source).add(edge.dataset.target);
      }
      for (const node of nodes) node.classList.toggle("dim", chosen !== null && !near.has(node.dataset.id));
      card.replaceChildren(
        ...(chosen ? cards[chosen.card] : []).map((line) => {
          const row = document.createElement("div");
          row.textContent = line;
          return row;
        }),
      );
    }

    function members(group) {
      return cards["group " + group.dataset.group][1].split(", ");
    }

    function watch(element, chosen) {
      const point = () => show(pinned ?? chosen);
      element.addEventListener("mouseenter", point);
      element.addEventListener("focus", point);
      element.addEventListener("mouseleave", () => show(pinned));
      element.addEventListener("blur", () => show(pinned));
      const click = () => {
        pinned = pinned && pinned.card === chosen.card ? null : chosen;
        show(pinned ?? chosen);
        for (const one of circuit.querySelectorAll("[role=button]"))
          one.setAttribute("aria-pressed", String(one === element && pinned !== null));
        circuit.dispatchEvent(new CustomEvent("pick", { detail: pinned && pinned.card, bubbles: true }));
      };
      element.addEventListener("click", click);
      element.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          click();
        }
      });
    }

    function limit() {
      const gone = new Set();
      for (const node of nodes) {
        const hidden = Number(node.dataset.rank) >= Number(ranges.nodes.value);
        node.classList.toggle("gone", hidden);
        if (hidden) gone.add(node.dataset.id);
      }
      let shown = 0;
      for (const edge of edges) {
        const hidden =
          Number(edge.dataset.rank) >= Number(ranges.edges.value) ||
          gone.has(edge.dataset.source) ||
          gone.has(edge.dataset.target);
        edge.classList.toggle("gone", hidden);
        shown += hidden ? 0 : 1;
      }
      status.textContent = `${ranges.nodes.value} nodes, ${shown} edges`;
    }

    for (const node of nodes) watch(node, { ids: [node.dataset.id], card: node.dataset.id });
    for (const group of circuit.querySelectorAll(".group"))
      watch(group, { ids: members(group), card: "group " + group.dataset.group });
    for (const range of Object.values(ranges)) range.addEventListener("input", limit);
    limit();
  }
}
