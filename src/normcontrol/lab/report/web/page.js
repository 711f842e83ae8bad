"use strict";
// The report's plots and tables. All data is in the page: curves are 32-bit floats in base64, step lists are shared.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const make = (tag, text, attributes = {}) => {
  const element = Object.assign(document.createElement(tag), attributes);
  if (text !== undefined) element.textContent = text;
  return element;
};
const floats = text => {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Float32Array(bytes.buffer);
};
const steps = data.steps.map(floats);
const runs = data.runs.map((run, index) => {
  const curves = {};
  for (const [key, [which, values]] of Object.entries(run.curves)) curves[key] = { x: steps[which], y: floats(values) };
  return { ...run, index, curves };
});
const arms = [...new Set(runs.map(run => run.arm))];
const colour = Object.fromEntries(arms.map((arm, i) => [arm, data.colours[i % data.colours.length]]));
const hidden = new Set();
let all = !runs.some(run => run.chosen);

// What the four panels show of a run.
const smoothed = curve => {
  const window = Math.max(Math.floor(curve.y.length / 20), 1), y = new Float32Array(curve.y.length);
  for (let i = 0, sum = 0; i < y.length; i++) {
    sum += curve.y[i] - (i >= window ? curve.y[i - window] : 0);
    y[i] = sum / Math.min(i + 1, window);
  }
  return { x: curve.x, y };
};
const lookup = curve => new Map(Array.from(curve.x, (x, i) => [x, curve.y[i]]));
const bases = new Map(runs.filter(run => run.baseline).map(run => [run.seed, lookup(run.curves.val_loss)]));
const lessBaseline = run => {
  const base = bases.get(run.seed), x = [], y = [];
  if (base) run.curves.val_loss.x.forEach((step, i) => base.has(step) && (x.push(step), y.push(run.curves.val_loss.y[i] - base.get(step))));
  return { x, y };
};
const panels = [
  { title: "training loss (running mean)", of: run => smoothed(run.curves.loss), steep: true },
  { title: "validation loss", of: run => run.curves.val_loss, steep: true, dots: true },
  { title: `validation loss minus that of ${data.baseline}, seed by seed`, of: lessBaseline, dots: true },
  { title: "norm / initial norm", of: run => run.curves.ratio },
].map(panel => ({ ...panel, lines: runs.map(panel.of), zoom: null }));

// The norm as a gain, for runs whose initial gain is known.
const [norms] = panels.slice(-1), ratios = norms.lines;
const gains = runs.map((run, i) => run.initial_gain ? { x: ratios[i].x, y: ratios[i].y.map(r => r * run.initial_gain) } : { x: [], y: [] });
function offerGains() {
  if (!runs.some(run => run.initial_gain)) return;
  const button = make("button", "as a gain", { type: "button", id: "gains" });
  button.addEventListener("click", () => {
    const on = norms.lines === ratios, title = on ? "gain: norm / root of the number of rows" : norms.title;
    norms.lines = on ? gains : ratios;
    norms.zoom = null;
    norms.caption.replaceChildren(title, button);
    norms.canvas.setAttribute("aria-label", title);
    button.textContent = on ? "as a ratio" : "as a gain";
    draw(norms);
    button.focus();
  });
  norms.caption.append(button);
}

// Where an arm has many runs, their mean over seeds is drawn, and they are faint: they would hide each other.
function means(panel) {
  if (all) return {};
  if (panel.averaged !== panel.lines) {
    panel.averaged = panel.lines;
    panel.means = {};
    for (const arm of arms) {
      const lines = runs.filter(run => run.arm === arm && run.chosen).map(run => panel.lines[run.index]), [{ x }] = lines.length ? lines : [{}];
      if (lines.length < data.many || lines.some(line => line.x.length !== x.length)) continue;
      panel.means[arm] = { x, y: Float32Array.from(x, (_, i) => lines.reduce((sum, line) => sum + line.y[i], 0) / lines.length) };
    }
  }
  return panel.means;
}

const shown = () => runs.filter(run => !hidden.has(run.arm) && (all || run.chosen));

function range(panel) {
  if (panel.zoom) return panel.zoom;
  let x0 = Infinity, x1 = -Infinity, ys = [];
  for (const run of shown()) {
    const { x, y } = panel.lines[run.index];
    if (!x.length) continue;
    x0 = Math.min(x0, x[0]); x1 = Math.max(x1, x[x.length - 1]);
    const stride = Math.max(Math.floor(y.length / 400), 1);
    for (let i = 0; i < y.length; i += stride) if (isFinite(y[i])) ys.push(y[i]);
  }
  if (!ys.length) return { x0: 0, x1: 1, y0: 0, y1: 1 };
  ys.sort((a, b) => a - b);
  // The steep start of a loss would flatten all the rest.
  const low = ys[0], high = panel.steep && ys.length > 10 ? ys[Math.floor(ys.length * 0.85)] : ys[ys.length - 1];
  const margin = 0.05 * (high - low || Math.abs(high) || 1);
  return { x0, x1: x1 > x0 ? x1 : x0 + 1, y0: low - margin, y1: high + margin };
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw), found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return found;
}
// As many digits as tell one tick from the next.
function labels(values) {
  const gap = values.length > 1 ? values[1] - values[0] : 1, unit = Math.max(...values.map(Math.abs)) >= 1e4 ? 1000 : 1;
  const digits = Math.min(Math.max(Math.ceil(-Math.log10(gap / unit) - 1e-9), 0), 100);
  return values.map(value => value && unit > 1 ? `${+(value / unit).toFixed(digits)}k` : `${+value.toFixed(digits)}`);
}

function draw(panel) {
  const { canvas } = panel, scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  canvas.width = width * scale; canvas.height = height * scale;
  const c = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), r = range(panel);
  c.font = "12px system-ui, sans-serif";
  const heights = ticks(r.y0, r.y1, 6), words = labels(heights), across = ticks(r.x0, r.x1, Math.min(8, width / 80)), names = labels(across);
  const widest = Math.max(0, ...words.map(word => c.measureText(word).width));
  const box = { left: Math.max(52, widest + 12), right: width - 20, top: 8, bottom: height - 40 };
  const px = x => box.left + (x - r.x0) / (r.x1 - r.x0) * (box.right - box.left);
  const py = y => box.bottom - (y - r.y0) / (r.y1 - r.y0) * (box.bottom - box.top);
  Object.assign(panel, { box, px, py, r });
  c.scale(scale, scale);
  c.fillStyle = style.getPropertyValue("--quiet"); c.strokeStyle = style.getPropertyValue("--faint"); c.lineWidth = 1;
  c.beginPath();
  c.textAlign = "right"; c.textBaseline = "middle";
  heights.forEach((t, i) => { c.moveTo(box.left, py(t)); c.lineTo(box.right, py(t)); c.fillText(words[i], box.left - 6, py(t)); });
  c.textAlign = "center"; c.textBaseline = "top";
  across.forEach((t, i) => { c.moveTo(px(t), box.top); c.lineTo(px(t), box.bottom); c.fillText(names[i], px(t), box.bottom + 6); });
  c.fillText("step", (box.left + box.right) / 2, box.bottom + 22);
  c.stroke();
  c.save();
  c.beginPath(); c.rect(box.left, box.top, box.right - box.left, box.bottom - box.top); c.clip();
  c.lineJoin = "round";
  const mean = means(panel);
  for (const run of shown()) {
    const { x, y } = panel.lines[run.index];
    c.strokeStyle = c.fillStyle = colour[run.arm];
    c.globalAlpha = run === panel.near ? 1 : mean[run.arm] ? 0.15 : 0.8;
    c.lineWidth = run === panel.near ? 2.6 : 1.4;
    c.beginPath();
    trace(c, x, y, px, py, box);
    c.stroke();
    if (panel.dots && x.length < 60 && !mean[run.arm]) for (let i = 0; i < x.length; i++) { c.beginPath(); c.arc(px(x[i]), py(y[i]), 2, 0, 7); c.fill(); }
  }
  c.globalAlpha = 1; c.lineWidth = 2.6;
  for (const [arm, { x, y }] of Object.entries(mean)) {
    if (hidden.has(arm)) continue;
    c.strokeStyle = colour[arm];
    c.beginPath();
    trace(c, x, y, px, py, box);
    c.stroke();
  }
  if (panel.drag) { c.fillStyle = "#8884"; c.fillRect(...panel.drag); }
  c.restore();
}

// Where there are more points than pixels, each column gets its lowest and highest one: it looks the same, and is quick.
function trace(c, x, y, px, py, box) {
  if (x.length < 2 * (box.right - box.left)) {
    for (let i = 0, up = true; i < x.length; i++) { const bad = !isFinite(y[i]); if (!bad) c[up ? "moveTo" : "lineTo"](px(x[i]), py(y[i])); up = bad; }
    return;
  }
  let column = -1, low = 0, high = 0;
  for (let i = 0; i < x.length; i++) {
    const at = Math.round(px(x[i]));
    if (at !== column) {
      if (column >= 0) { c.lineTo(column, py(low)); c.lineTo(column, py(high)); }
      column = at; low = high = y[i];
    } else { low = Math.min(low, y[i]); high = Math.max(high, y[i]); }
  }
  c.lineTo(column, py(low)); c.lineTo(column, py(high));
}

function nearest(panel, mx, my) {
  let best = null, distance = 40 ** 2;
  for (const run of shown()) {
    const { x, y } = panel.lines[run.index];
    if (!x.length) continue;
    const want = panel.r.x0 + (mx - panel.box.left) / (panel.box.right - panel.box.left) * (panel.r.x1 - panel.r.x0);
    let low = 0, high = x.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (x[middle] < want) low = middle + 1; else high = middle; }
    for (const i of [low - 1, low]) {
      if (i < 0) continue;
      const d = (panel.px(x[i]) - mx) ** 2 + (panel.py(y[i]) - my) ** 2;
      if (d < distance) { distance = d; best = { run, x: x[i], y: y[i] }; }
    }
  }
  return best;
}

function listen(panel) {
  const { canvas, tip } = panel;
  let from = null;
  const at = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", event => { from = at(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = at(event);
    if (from) { panel.drag = [Math.min(from[0], x), Math.min(from[1], y), Math.abs(x - from[0]), Math.abs(y - from[1])]; draw(panel); return; }
    const found = nearest(panel, x, y);
    tip.style.display = found ? "block" : "none";
    if (found) {
      tip.textContent = `${found.run.label}: ${+found.y.toPrecision(5)} at step ${found.x}`;
      tip.style.left = `${Math.max(0, Math.min(x + 12, canvas.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${y + 30}px`;
    }
    if ((found && found.run) !== panel.near) { panel.near = found ? found.run : undefined; draw(panel); }
  });
  const end = () => {
    const drag = panel.drag;
    from = panel.drag = null;
    if (drag && drag[2] > 8 && drag[3] > 8) {
      const { box, r } = panel, X = p => r.x0 + (p - box.left) / (box.right - box.left) * (r.x1 - r.x0);
      const Y = p => r.y0 + (box.bottom - p) / (box.bottom - box.top) * (r.y1 - r.y0);
      panel.zoom = { x0: X(drag[0]), x1: X(drag[0] + drag[2]), y0: Y(drag[1] + drag[3]), y1: Y(drag[1]) };
    }
    draw(panel);
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", () => { from = panel.drag = null; draw(panel); });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; panel.near = undefined; draw(panel); });
  canvas.addEventListener("dblclick", () => { panel.zoom = null; draw(panel); });
}

function legend() {
  const place = $("#legend"), idles = [];
  for (const arm of arms) {
    const button = make("button", undefined, { type: "button" });
    button.append(make("span", "", { className: "dot", style: `background:${colour[arm]}` }), arm);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      hidden[hidden.has(arm) ? "delete" : "add"](arm);
      button.setAttribute("aria-pressed", String(!hidden.has(arm)));
      redraw();
    });
    const idle = () => { button.hidden = !all && !runs.some(run => run.arm === arm && run.chosen); };
    idles.push(idle);
    idle();
    place.append(button);
  }
  if (runs.some(run => !run.chosen) && runs.some(run => run.chosen)) {
    const more = make("button", "show every trial", { type: "button", id: "every" });
    more.addEventListener("click", () => { all = !all; more.textContent = all ? "show the chosen trials" : "show every trial"; idles.forEach(idle => idle()); redraw(); });
    place.append(more);
  }
}

function sortable(table) {
  table.querySelectorAll("th").forEach((th, column) => {
    th.tabIndex = 0;
    const sort = () => {
      const up = th.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      const value = row => { const text = row.cells[column].textContent.trim(), n = parseFloat(text.replace(/[,+]/g, "")); return isNaN(n) ? text : n; };
      const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
      body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b))));
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
    };
    th.addEventListener("click", sort);
    th.addEventListener("keydown", event => event.key === "Enter" && sort());
  });
}

function configs() {
  const dialog = $("#config");
  document.querySelectorAll("button[data-run]").forEach(button => button.addEventListener("click", () => {
    const run = runs[button.dataset.run];
    $("h2", dialog).textContent = run.label;
    $("pre", dialog).textContent = JSON.stringify({ ...data.config, ...run.config }, null, 1) + (run.error ? `\n\n${run.error}` : "");
    dialog.showModal();
  }));
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const set = on => { root.classList.toggle("dark", on); redraw(); };
  $("#theme").addEventListener("click", () => set(!root.classList.contains("dark")));
  dark.addEventListener("change", event => set(event.matches));
  root.classList.toggle("dark", dark.matches);
}

const redraw = () => panels.forEach(draw);
theme();
legend();
for (const panel of panels) {
  const figure = make("figure");
  panel.canvas = make("canvas");
  panel.canvas.setAttribute("role", "img");
  panel.canvas.setAttribute("aria-label", panel.title);
  panel.tip = make("div", "", { className: "tip" });
  panel.caption = make("figcaption", panel.title);
  figure.append(panel.caption, panel.canvas, panel.tip);
  $("#panels").append(figure);
  listen(panel);
}
offerGains();
document.querySelectorAll("table.sorts").forEach(sortable);
configs();
redraw();
addEventListener("resize", redraw);
document.body.dataset.drawn = Math.round(performance.now());
