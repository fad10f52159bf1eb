// One scatter of packed points (atlas_page.py). All text is data: it is written as text only.
// app: what the view of the app does on a click (card) and with a list of points (take), and its memory of the camera.
function atlas(root, data, app) {
  const types = {u2: Uint16Array, u4: Uint32Array, i2: Int16Array};
  const column = ([kind, text]) => new types[kind](Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const sides = Object.fromEntries(Object.entries(data.arrays).map(([name, packed]) => [name, column(packed)]));
  const count = sides.x.length, FINEST = 65535, HITS = 50, NEAR = 12, LABELS = 24, TAKEN = 100, CLOSE = 12, SLIP = 6, AROUND = 30, FEW = 1000, NAMED = 3, CHANGED = 200, SAME = 2, LISTED = 8, INK = [127, 127, 127];
  const canvas = root.querySelector("canvas"), pen = canvas.getContext("2d"), hint = root.querySelector(".hint");
  const form = root.querySelector("form"), panel = root.querySelector(".panel"), list = root.querySelector(".hits");
  const most = {layer: sides.layer.reduce((a, b) => Math.max(a, b), 1), clarity: FINEST / 5, exchanged: FINEST};
  const intro = [...panel.childNodes], middles = data.clusters.map(() => [0, 0, 0]);
  for (let i = 0; i < count; i++) if (sides.cluster[i] >= 0) {
    const sums = middles[sides.cluster[i]];
    sums[0] += sides.x[i]; sums[1] += sides.y[i]; sums[2]++;
  }
  const view = app?.memory.view ?? {x: FINEST / 2, y: FINEST / 2, zoom: 1};  // the point in the middle; zoom 1 shows all
  if (app) app.memory.view = view;
  let colors = new Uint32Array(count), hits = null, chosen = -1, pointed = -1, waiting = false, lasso = null, dark = false, litIn = [];

  const name = (i) => `L${sides.layer[i]}.${data.sites[sides.site[i]]}.${sides.index[i]}`;
  const sign = (i) => (sides.minus[i] ? "-" : "+");
  const labels = Object.keys(data.labels).length ? Array.from(sides.x, (_, i) => data.labels[`${name(i)} ${sign(i)}`] ?? "") : null;
  const kinds = labels && [...new Set(labels)].filter(Boolean), number = labels && new Map(kinds.map((text, at) => [text, at]));
  if (labels) form.elements.color.append(new Option("label"));
  if (sides.exchanged) form.elements.color.append(new Option("exchanged", "exchanged", true, true));
  const cluster = (i) => (sides.cluster[i] < 0 ? "no cluster" : data.clusters[sides.cluster[i]] || "a cluster without a name");
  const scale = () => Math.min(canvas.width, canvas.height) * 0.96 * view.zoom / FINEST;
  const left = (i) => (sides.x[i] - view.x) * scale() + canvas.width / 2;
  const top = (i) => (sides.y[i] - view.y) * scale() + canvas.height / 2;

  function element(tag, text, kind) {
    const made = document.createElement(tag);
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function rgb(share) {  // of 0 to 1: blue, green, yellow; all stand out from white and from black
    const stops = dark ? [[90, 120, 220], [60, 180, 150], [250, 220, 80]] : [[50, 60, 160], [20, 140, 120], [215, 150, 0]];
    const at = Math.min(0.9999, Math.max(0, share)) * 2, [from, to] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
    return from.map((value, part) => Math.round(value + (to[part] - value) * (at % 1)));
  }

  function hue(number) {
    const made = (part) => {
      const at = (part + number * 137.508 / 30) % 12, light = dark ? 0.62 : 0.45;
      return Math.round(255 * (light - 0.3 * Math.max(-1, Math.min(at - 3, 9 - at, 1))));
    };
    return [made(0), made(8), made(4)];
  }

  const pixel = ([red, green, blue]) => (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  const gray = () => (dark ? [75, 78, 84] : [205, 205, 205]);

  function paint() {
    const by = form.elements.color.value, part = by === "label" ? (i) => (labels[i] ? number.get(labels[i]) : -1) : (i) => sides.cluster[i];
    dark = getComputedStyle(canvas).color.match(/[\d.]+/g).slice(0, 3).reduce((sum, value) => sum + Number(value), 0) > 382;
    for (let i = 0; i < count; i++) {
      const color = by in most ? rgb(sides[by][i] / most[by]) : part(i) < 0 ? (hits ? INK : gray()) : hue(part(i));
      colors[i] = pixel(hits && !hits.has(i) ? gray() : color);
    }
    const legend = root.querySelector(".legend");
    legend.replaceChildren();
    if (by === "label") legend.append(`${labels.filter(Boolean).length} of ${count} points have a label.`);
    else if (by === "cluster") legend.append(`${data.clusters.filter(Boolean).length} of ${data.clusters.length} clusters have a name.`);
    else {
      const bar = element("span", "", "bar");
      bar.style.background = `linear-gradient(90deg, ${[0, 0.5, 1].map((share) => `rgb(${rgb(share)})`).join(",")})`;
      legend.append(`${by} 0`, bar, {layer: String(most.layer), clarity: "0.2 and more", exchanged: "1"}[by]);
    }
    draw();
  }

  function draw() {
    if (!waiting) requestAnimationFrame(() => { waiting = false; now(); });
    waiting = true;
  }

  function now() {
    const {width, height} = canvas, image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const size = Math.max(1, Math.round(devicePixelRatio * Math.min(8, 1.3 * view.zoom ** 0.4 * Math.max(1, 20000 / count) ** 0.3)));
    const unit = scale(), {x: middleX, y: middleY} = view;
    const dots = (wanted, size) => {
      for (let i = 0; i < count; i++) {
        if (hits && hits.has(i) !== wanted) continue;
        const x = Math.round((sides.x[i] - middleX) * unit + width / 2), y = Math.round((sides.y[i] - middleY) * unit + height / 2);
        if (x < 0 || y < 0 || x + size > width || y + size > height) continue;
        for (let at = y * width + x, row = 0; row < size; row++, at += width)
          for (let step = 0; step < size; step++) pixels[at + step] = colors[i];
      }
    };
    dots(false, size);
    if (hits) dots(true, size + Math.ceil((hits.size < FEW ? 3 : 1) * devicePixelRatio));
    pen.putImageData(image, 0, 0);
    names();
    if (lasso) outline();
    for (const i of [pointed, chosen]) if (i >= 0) ring(left(i), top(i), 7);
    if (canvas.matches(":focus-visible")) ring(width / 2, height / 2, 4);
  }

  function ring(x, y, radius) {
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.lineWidth = 2 * devicePixelRatio;
    pen.beginPath();
    pen.arc(x, y, radius * devicePixelRatio, 0, 7);
    pen.stroke();
  }

  function outline() {
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.lineWidth = 1.5 * devicePixelRatio;
    pen.setLineDash([6, 4]);
    pen.beginPath();
    for (const at of lasso) pen.lineTo(...at);
    pen.closePath();
    pen.stroke();
    pen.setLineDash([]);
  }

  function names() {  // the largest clusters in view whose names do not overlap
    const boxes = [], style = getComputedStyle(canvas);
    pen.font = `600 ${13 * devicePixelRatio}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.lineWidth = 4 * devicePixelRatio;
    pen.lineJoin = "round";
    for (let number = 0; number < data.clusters.length && boxes.length < LABELS; number++) {
      const [x, y, size] = middles[number], text = data.clusters[number];
      if (!text || (hits && litIn[number] < NAMED)) continue;
      const at = [(x / size - view.x) * scale() + canvas.width / 2, (y / size - view.y) * scale() + canvas.height / 2];
      const wide = pen.measureText(text).width / 2 + 4, high = 11 * devicePixelRatio;
      if (at[0] < wide || at[0] > canvas.width - wide || at[1] < high || at[1] > canvas.height - high) continue;
      if (boxes.some((box) => Math.abs(box[0] - at[0]) < box[2] + wide && Math.abs(box[1] - at[1]) < 2 * high)) continue;
      boxes.push([...at, wide]);
      pen.strokeStyle = style.backgroundColor;  // of a variable the browser gives only its text
      pen.strokeText(text, ...at);
      pen.fillStyle = style.color;
      pen.fillText(text, ...at);
    }
  }

  function nearest(x, y, far = NEAR * devicePixelRatio) {
    const unit = scale(), atX = (x - canvas.width / 2) / unit + view.x, atY = (y - canvas.height / 2) / unit + view.y;
    const best = [-1, -1], least = [(far / unit) ** 2, (far / unit) ** 2];  // of points that are lit, and of the others
    for (let i = 0; i < count; i++) {
      const across = sides.x[i] - atX, down = sides.y[i] - atY, square = across * across + down * down;
      if (square >= least[0] && square >= least[1]) continue;
      const kind = hits && !hits.has(i) ? 1 : 0;
      if (square < least[kind]) [best[kind], least[kind]] = [i, square];
    }
    return best[0] < 0 ? best[1] : best[0];
  }

  function sentence(i) {
    const letters = Array.from(data.sentences[sides.sentence[i]]), line = element("p", "");
    const part = (from, to) => letters.slice(from, to).join("");
    line.append(part(0, sides.start[i]), element("mark", part(sides.start[i], sides.end[i])), part(sides.end[i]));
    return line;
  }

  function excerpt(i) {  // the marked word, with some letters around it
    const letters = Array.from(data.sentences[sides.sentence[i]]), from = Math.max(0, sides.start[i] - AROUND), to = sides.end[i] + AROUND;
    return `${from ? "…" : ""}${letters.slice(from, to).join("")}${to < letters.length ? "…" : ""}`.trim();
  }

  function under(i) {  // the other points in the same place, as the eye sees it; those with a label first
    const near = (SAME * devicePixelRatio / scale()) ** 2, others = [];
    for (let j = 0; j < count; j++) if (j !== i && (sides.x[j] - sides.x[i]) ** 2 + (sides.y[j] - sides.y[i]) ** 2 <= near) others.push(j);
    if (labels) others.sort((a, b) => !labels[a] - !labels[b]);
    const rows = others.slice(0, LISTED).flatMap((j) => [element("div", `${name(j)} ${sign(j)}`), ...label(j)]);
    const more = others.length - LISTED;
    return [...(rows.length ? [element("p", "In the same place", "about")] : []), ...rows, ...(more > 0 ? [element("div", `and ${more} more; zoom in`, "about")] : [])];
  }

  const label = (i) => (labels?.[i] ? [element("div", labels[i])] : []);

  function about(i) {
    return [element("div", `${name(i)} ${sign(i)}`, "name"), ...label(i), element("div", cluster(i), "about"), sentence(i)];
  }

  function point(i, x, y) {
    if (i === pointed && i < 0) return;
    pointed = i;
    hint.hidden = i < 0;
    if (i >= 0) {
      hint.replaceChildren(...about(i), ...under(i));
      hint.style.left = `${Math.max(0, Math.min(x + 14, canvas.clientWidth - hint.offsetWidth))}px`;
      hint.style.top = `${y + 14 + hint.offsetHeight > canvas.clientHeight ? Math.max(0, y - 14 - hint.offsetHeight) : y + 14}px`;
    }
    draw();
  }

  function choose(i) {
    if (i < 0) return;
    chosen = i;
    const clarity = `clarity ${(sides.clarity[i] / FINEST).toFixed(3)}, layer ${sides.layer[i]}`;
    const more = app ? button("Open its card", () => app.card(name(i), sign(i))) : element("code", `icebear neuron ${name(i)}`);
    panel.replaceChildren(...about(i), element("p", clarity, "about"), more);
    point(i, left(i) / devicePixelRatio, top(i) / devicePixelRatio);
  }

  function press(i) {  // a point that is shown already, by the mouse above it or a press before, opens its card
    if (app && i >= 0 && i === pointed) app.card(name(i), sign(i));
    else choose(i);
  }

  function button(text, act) {
    const made = element("button", text);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  }

  function take(inside) {  // of the lit points, if any are lit; the clearest of many
    const taken = Array.from(sides.x.keys()).filter((i) => (!hits || hits.has(i)) && inside(left(i), top(i)));
    taken.sort((a, b) => sides.clarity[b] - sides.clarity[a]);
    const row = (i) => [name(i), sign(i), cluster(i), sides.clarity[i] / FINEST];
    app.take(taken.slice(0, TAKEN).map(row), taken.length);
  }

  function within(x, y) {  // whether a point is inside the lasso: a line to the right crosses it an odd number of times
    let odd = false;
    lasso.forEach(([fromX, fromY], at) => {
      const [toX, toY] = lasso[(at + 1) % lasso.length];
      if ((fromY > y) !== (toY > y) && x < fromX + (toX - fromX) * (y - fromY) / (toY - fromY)) odd = !odd;
    });
    return odd;
  }

  function move(x, y) {
    lasso = null;
    point(-1);
    view.x = Math.max(0, Math.min(FINEST, view.x + x));
    view.y = Math.max(0, Math.min(FINEST, view.y + y));
    draw();
  }

  function zoom(factor, x = canvas.width / 2, y = canvas.height / 2) {
    const before = scale();
    view.zoom = Math.max(0.5, Math.min(200, view.zoom * factor));
    const shift = 1 / before - 1 / scale();
    move((x - canvas.width / 2) * shift, (y - canvas.height / 2) * shift);
  }

  function all() {
    Object.assign(view, {x: FINEST / 2, y: FINEST / 2, zoom: 1});
    draw();
  }

  function light(numbers) {  // null: all
    hits = numbers && new Set(numbers);
    litIn = data.clusters.map(() => 0);
    for (const i of hits ?? []) if (sides.cluster[i] >= 0) litIn[sides.cluster[i]]++;
    chosen = -1;
    lasso = null;
    point(-1);
    panel.replaceChildren(...intro);
    form.elements.count.textContent = hits ? `${hits.size.toLocaleString("en")} of ${count.toLocaleString("en")} points are lit` : "";
    list.replaceChildren(...[...(hits ?? [])].slice(0, HITS).map((i) => {
      const row = document.createElement("li");
      row.append(button(`${name(i)} ${sign(i)}: ${excerpt(i)}`, () => {
        Object.assign(view, {x: sides.x[i], y: sides.y[i], zoom: Math.max(view.zoom, CLOSE)});
        choose(i);
      }));
      return row;
    }));
    paint();
  }

  function search() {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (text) => words.every((word) => text.toLowerCase().includes(word));
    const inSentences = data.sentences.map(has), inClusters = data.clusters.map(has);
    const is = (i) => inSentences[sides.sentence[i]] || inClusters[sides.cluster[i]] || (labels && has(labels[i]));
    light(words.length ? Array.from(sides.x.keys()).filter(is).sort((a, b) => sides.clarity[b] - sides.clarity[a]) : null);
  }

  const circling = () => form.elements.circle?.getAttribute("aria-pressed") === "true";
  const circle = (on) => form.elements.circle?.setAttribute("aria-pressed", on);
  const held = new Map();  // the pointers that are down -> where they were last
  let moved = 0;
  const spot = (event) => [event.offsetX * devicePixelRatio, event.offsetY * devicePixelRatio];
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, spot(event));
    if (held.size === 1) moved = 0;
    lasso = app && (event.shiftKey || circling()) && held.size === 1 ? [spot(event)] : null;
    if (lasso) point(-1);  // what is said of a point would hide others
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = spot(event), last = held.get(event.pointerId);
    if (!last) return point(nearest(x, y), event.offsetX, event.offsetY);
    moved += Math.hypot(x - last[0], y - last[1]);
    const others = [...held].filter(([id]) => id !== event.pointerId);
    if (others.length) {
      const [otherX, otherY] = others[0][1], gap = (at) => Math.hypot(at[0] - otherX, at[1] - otherY);
      zoom(gap([x, y]) / Math.max(1, gap(last)), (x + otherX) / 2, (y + otherY) / 2);
    } else if (lasso) {
      lasso.push([x, y]);
      draw();
    } else if (moved > SLIP * devicePixelRatio) move((last[0] - x) / scale(), (last[1] - y) / scale());
    held.set(event.pointerId, [x, y]);
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (event) => {
    const shown = pointed >= 0 && event.pointerType === "mouse" ? pointed : nearest(...spot(event), 2 * NEAR * devicePixelRatio);
    if (kind === "pointerup" && moved <= SLIP * devicePixelRatio) press(shown);
    else if (kind === "pointerup" && lasso) {
      circle(false);
      take(within);
    }
    held.delete(event.pointerId);
  });
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(-1); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), ...spot(event));
  }, {passive: false});
  const step = () => 60 * devicePixelRatio / scale();
  const keys = {
    ArrowLeft: () => move(-step(), 0), ArrowRight: () => move(step(), 0), ArrowUp: () => move(0, -step()), ArrowDown: () => move(0, step()),
    "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: all,
    Enter: () => press(nearest(canvas.width / 2, canvas.height / 2, Infinity)),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const kind of ["focus", "blur"]) canvas.addEventListener(kind, draw);
  form.elements.in.addEventListener("click", () => zoom(1.6));
  form.elements.out.addEventListener("click", () => zoom(1 / 1.6));
  form.elements.all.addEventListener("click", all);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.words?.addEventListener("input", search);
  form.elements.circle?.addEventListener("click", () => circle(!circling()));
  form.elements.take?.addEventListener("click", () => take((x, y) => x >= 0 && y >= 0 && x < canvas.width && y < canvas.height));
  form.elements.color.addEventListener("change", paint);
  canvas.addEventListener("transitionend", paint);  // of the color of text, when day becomes night
  new ResizeObserver(() => {
    [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.max(1, Math.round(length * devicePixelRatio)));
    draw();
  }).observe(canvas);
  paint();
  if (sides.exchanged) {
    const changed = Array.from(sides.x.keys()).filter((i) => sides.exchanged[i]);
    light(changed.sort((a, b) => sides.exchanged[b] - sides.exchanged[a]).slice(0, CHANGED));
  }
  return {all, light: (texts) => {
    const known = texts && new Map(Array.from(sides.x.keys(), (i) => [`${name(i)} ${sign(i)}`, i]));
    light(texts && texts.map((text) => known.get(text)).filter((i) => i !== undefined));
  }};
}
