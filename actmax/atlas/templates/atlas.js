// One scatter of packed points (atlas_page.py). All text is data: it is written as text only.
function atlas(root, data) {
  const kinds = {u2: Uint16Array, u4: Uint32Array, i2: Int16Array};
  const column = ([kind, text]) => new kinds[kind](Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const sides = Object.fromEntries(Object.entries(data.arrays).map(([name, packed]) => [name, column(packed)]));
  const count = sides.x.length, FINEST = 65535, HITS = 50, NEAR = 12, LABELS = 24, INK = [127, 127, 127];
  const canvas = root.querySelector("canvas"), pen = canvas.getContext("2d"), hint = root.querySelector(".hint");
  const form = root.querySelector("form"), panel = root.querySelector(".panel"), list = root.querySelector(".hits");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const most = {layer: sides.layer.reduce((a, b) => Math.max(a, b), 1), clarity: FINEST / 5};
  const middles = data.clusters.map(() => [0, 0, 0]);
  for (let i = 0; i < count; i++) if (sides.cluster[i] >= 0) {
    const sums = middles[sides.cluster[i]];
    sums[0] += sides.x[i]; sums[1] += sides.y[i]; sums[2]++;
  }
  const view = {x: FINEST / 2, y: FINEST / 2, zoom: 1};  // the point in the middle; zoom 1 shows all
  let colors = new Uint32Array(count), hits = null, chosen = -1, pointed = -1, waiting = false;

  const name = (i) => `L${sides.layer[i]}.${data.sites[sides.site[i]]}.${sides.index[i]}`;
  const sign = (i) => (sides.minus[i] ? "-" : "+");
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
    const stops = dark.matches ? [[90, 120, 220], [60, 180, 150], [250, 220, 80]] : [[50, 60, 160], [20, 140, 120], [215, 150, 0]];
    const at = Math.min(0.9999, Math.max(0, share)) * 2, [from, to] = [stops[Math.floor(at)], stops[Math.floor(at) + 1]];
    return from.map((value, part) => Math.round(value + (to[part] - value) * (at % 1)));
  }

  function hue(number) {
    const made = (part) => {
      const at = (part + number * 137.508 / 30) % 12, light = dark.matches ? 0.62 : 0.45;
      return Math.round(255 * (light - 0.3 * Math.max(-1, Math.min(at - 3, 9 - at, 1))));
    };
    return [made(0), made(8), made(4)];
  }

  const pixel = ([red, green, blue]) => (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  const gray = () => (dark.matches ? [75, 78, 84] : [205, 205, 205]);

  function paint() {
    const by = form.elements.color.value;
    for (let i = 0; i < count; i++) {
      const color = by === "cluster" ? (sides.cluster[i] < 0 ? (hits ? INK : gray()) : hue(sides.cluster[i])) : rgb(sides[by][i] / most[by]);
      colors[i] = pixel(hits && !hits.has(i) ? gray() : color);
    }
    const legend = root.querySelector(".legend");
    legend.replaceChildren();
    if (by === "cluster") legend.append(`${data.clusters.filter(Boolean).length} of ${data.clusters.length} clusters have a name.`);
    else {
      const bar = element("span", "", "bar");
      bar.style.background = `linear-gradient(90deg, ${[0, 0.5, 1].map((share) => `rgb(${rgb(share)})`).join(",")})`;
      legend.append(`${by} 0`, bar, by === "layer" ? String(most.layer) : "0.2 and more");
    }
    draw();
  }

  function draw() {
    if (!waiting) requestAnimationFrame(() => { waiting = false; now(); });
    waiting = true;
  }

  function now() {
    const {width, height} = canvas, image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const size = Math.max(1, Math.round(devicePixelRatio * Math.min(8, 1.3 * view.zoom ** 0.4)));
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
    if (hits) dots(true, size + Math.ceil(devicePixelRatio));
    pen.putImageData(image, 0, 0);
    labels();
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

  function labels() {  // the largest clusters in view whose names do not overlap
    const boxes = [], style = getComputedStyle(canvas);
    pen.font = `600 ${13 * devicePixelRatio}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.lineWidth = 4 * devicePixelRatio;
    pen.lineJoin = "round";
    for (let number = 0; number < data.clusters.length && boxes.length < LABELS; number++) {
      const [x, y, size] = middles[number], text = data.clusters[number];
      if (!text || hits) continue;
      const at = [(x / size - view.x) * scale() + canvas.width / 2, (y / size - view.y) * scale() + canvas.height / 2];
      const wide = pen.measureText(text).width / 2 + 4, high = 11 * devicePixelRatio;
      if (at[0] < wide || at[0] > canvas.width - wide || at[1] < high || at[1] > canvas.height - high) continue;
      if (boxes.some((box) => Math.abs(box[0] - at[0]) < box[2] + wide && Math.abs(box[1] - at[1]) < 2 * high)) continue;
      boxes.push([...at, wide]);
      pen.strokeStyle = style.getPropertyValue("--back");
      pen.strokeText(text, ...at);
      pen.fillStyle = style.color;
      pen.fillText(text, ...at);
    }
  }

  function nearest(x, y, far = NEAR * devicePixelRatio) {
    const unit = scale(), atX = (x - canvas.width / 2) / unit + view.x, atY = (y - canvas.height / 2) / unit + view.y;
    let best = -1, least = (far / unit) ** 2;
    for (let i = 0; i < count; i++) {
      const across = sides.x[i] - atX, down = sides.y[i] - atY, square = across * across + down * down;
      if (square < least && (!hits || hits.has(i))) [best, least] = [i, square];
    }
    return best;
  }

  function sentence(i) {
    const letters = Array.from(data.sentences[sides.sentence[i]]), line = element("p", "");
    const part = (from, to) => letters.slice(from, to).join("");
    line.append(part(0, sides.start[i]), element("mark", part(sides.start[i], sides.end[i])), part(sides.end[i]));
    return line;
  }

  function about(i) {
    return [element("div", `${name(i)} ${sign(i)}`, "name"), element("div", cluster(i), "about"), sentence(i)];
  }

  function point(i, x, y) {
    if (i === pointed && i < 0) return;
    pointed = i;
    hint.hidden = i < 0;
    if (i >= 0) {
      hint.replaceChildren(...about(i));
      hint.style.left = `${Math.max(0, Math.min(x + 14, canvas.clientWidth - hint.offsetWidth))}px`;
      hint.style.top = `${y + 14 + hint.offsetHeight > canvas.clientHeight ? Math.max(0, y - 14 - hint.offsetHeight) : y + 14}px`;
    }
    draw();
  }

  function choose(i) {
    if (i < 0) return;
    chosen = i;
    const clarity = `clarity ${(sides.clarity[i] / FINEST).toFixed(3)}, layer ${sides.layer[i]}`;
    panel.replaceChildren(...about(i), element("p", clarity, "about"), element("code", `icebear neuron ${name(i)}`));
    draw();
  }

  function move(x, y) {
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

  function search() {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const has = (text) => words.every((word) => text.toLowerCase().includes(word));
    const inSentences = data.sentences.map(has), inClusters = data.clusters.map(has);
    hits = words.length ? new Set() : null;
    if (hits) for (let i = 0; i < count; i++) if (inSentences[sides.sentence[i]] || inClusters[sides.cluster[i]]) hits.add(i);
    form.elements.count.textContent = hits ? `${hits.size} of ${count} points` : "";
    const clearest = hits ? [...hits].sort((a, b) => sides.clarity[b] - sides.clarity[a]).slice(0, HITS) : [];
    list.replaceChildren(...clearest.map((i) => {
      const row = document.createElement("li"), button = element("button", `${name(i)} ${sign(i)}: ${cluster(i)}`);
      button.type = "button";
      button.addEventListener("click", () => { Object.assign(view, {x: sides.x[i], y: sides.y[i]}); choose(i); });
      row.append(button);
      return row;
    }));
    paint();
  }

  const held = new Map();  // the pointers that are down -> where they were last
  let moved = 0;
  const spot = (event) => [event.offsetX * devicePixelRatio, event.offsetY * devicePixelRatio];
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, spot(event));
    if (held.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = spot(event), last = held.get(event.pointerId);
    if (!last) return point(nearest(x, y), event.offsetX, event.offsetY);
    const others = [...held].filter(([id]) => id !== event.pointerId);
    if (others.length) {
      const [otherX, otherY] = others[0][1], gap = (at) => Math.hypot(at[0] - otherX, at[1] - otherY);
      zoom(gap([x, y]) / Math.max(1, gap(last)), (x + otherX) / 2, (y + otherY) / 2);
    } else move((last[0] - x) / scale(), (last[1] - y) / scale());
    moved += Math.hypot(x - last[0], y - last[1]);
    held.set(event.pointerId, [x, y]);
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (event) => {
    if (kind === "pointerup" && moved < 6 * devicePixelRatio) choose(nearest(...spot(event), 2 * NEAR * devicePixelRatio));
    held.delete(event.pointerId);
  });
  canvas.addEventListener("pointerleave", () => point(-1));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), ...spot(event));
  }, {passive: false});
  const step = () => 60 * devicePixelRatio / scale();
  const keys = {
    ArrowLeft: () => move(-step(), 0), ArrowRight: () => move(step(), 0), ArrowUp: () => move(0, -step()), ArrowDown: () => move(0, step()),
    "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: all,
    Enter: () => choose(nearest(canvas.width / 2, canvas.height / 2, Infinity)),
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
  form.elements.words.addEventListener("input", search);
  form.elements.color.addEventListener("change", paint);
  dark.addEventListener("change", paint);
  new ResizeObserver(() => {
    [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.max(1, Math.round(length * devicePixelRatio)));
    draw();
  }).observe(canvas);
  paint();
}
