// The explorer: eigenvalues, kernels and impulse response of a layer, by training step.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 480;
const HEIGHT = 300;
const EDGE = { left: 52, right: 14, top: 30, bottom: 38 };
const SHAPES = ["m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", "m-3 -3h6v6h-6z", "m0 -4l4 4l-4 4l-4 -4z", "m0 -4l4 7h-8z", "m0 4l4 -7h-8z"];

function element(name, attributes = {}, text = "", space = SVG) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const short = (value) =>
  (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replace("-", "−");

function marks(first, last) {
  const size = (last - first) / 5;
  const power = 10 ** Math.floor(Math.log10(size));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= size * 0.999);
  const found = [];
  for (let k = Math.ceil(first / step - 1e-9); k * step <= last + 1e-9 * step; k += 1) found.push(k * step);
  return found;
}

// A panel: {title, description, x: {label, limits, ticks}, y: {label, limits, log}, circle, series: [{name, style, kind, points: [[x, y, text]]}]}
function panel(what) {
  const { x, y } = what;
  const level = (value) => (y.log ? Math.log10(value) : value);
  const across = (value) =>
    EDGE.left + ((value - x.limits[0]) / (x.limits[1] - x.limits[0])) * (WIDTH - EDGE.left - EDGE.right);
  const up = (value) =>
    HEIGHT - EDGE.bottom - ((level(value) - level(y.limits[0])) / (level(y.limits[1]) - level(y.limits[0]))) * (HEIGHT - EDGE.top - EDGE.bottom);

  const drawing = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${what.title}. ${what.description}` });
  const powers = [];
  if (y.log) for (let k = Math.ceil(level(y.limits[0])); k <= level(y.limits[1]); k += 1) powers.push(10 ** k);
  const every = Math.ceil(powers.length / 6);
  const levels = y.log ? powers.filter((_, k) => k % every === 0) : marks(...y.limits);
  for (const [value, text] of y.ticks || levels.map((each) => [each, short(each)])) {
    drawing.append(element("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: up(value), y2: up(value) }));
    drawing.append(element("text", { class: "tick-y", x: EDGE.left - 6, y: up(value) + 4 }, text));
  }
  for (const [value, text] of x.ticks || marks(...x.limits).map((each) => [each, short(each)])) {
    drawing.append(element("text", { class: "tick-x", x: across(value), y: HEIGHT - EDGE.bottom + 16 }, text));
  }
  drawing.append(element("text", { class: "label-x", x: WIDTH - EDGE.right, y: HEIGHT - 5 }, x.label));
  drawing.append(element("text", { class: "label-y", x: 2, y: 14 }, y.label));
  if (what.circle) {
    const size = { rx: across(1) - across(0), ry: up(0) - up(1) };
    drawing.append(element("ellipse", { class: "guide", fill: "none", cx: across(0), cy: up(0), ...size }));
  }
  for (const one of what.series) {
    const group = element("g", { class: `${one.kind} s${one.style}`, "data-n": one.name });
    if (one.kind.startsWith("line")) {
      group.append(element("path", { d: one.points.map(([a, b], k) => `${k ? "L" : "M"}${across(a).toFixed(1)} ${up(b).toFixed(1)}`).join("") }));
    }
    for (const [a, b, text] of one.points) {
      const [left, top] = [across(a).toFixed(1), up(b).toFixed(1)];
      group.append(element("path", { class: "point", d: `M${left} ${top}${SHAPES[one.style % SHAPES.length]}`, "data-t": text, "data-x": left, "data-y": top }));
    }
    drawing.append(group);
  }

  const plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${what.title}: left and right arrow keys read the values` }, "", null);
  const tip = element("output", { class: "tip", hidden: "" }, "", null);
  plot.append(drawing, tip);
  const caption = element("figcaption", {}, what.title, null);
  if (what.note) caption.append(element("div", {}, what.note, null));
  if (what.series.length > 1) {
    const legend = element("ul", { class: "legend" }, "", null);
    for (const one of what.series) {
      const sample = element("svg", { viewBox: "0 0 28 12", width: 28, height: 12, "aria-hidden": "true" });
      const group = element("g", { class: `line s${one.style}` });
      group.append(element("path", { d: "M1 6H27" }));
      sample.append(group);
      const item = element("li", {}, "", null);
      item.append(sample, one.name);
      legend.append(item);
    }
    caption.append(legend);
  }
  const figure = element("figure", {}, "", null);
  figure.append(plot, caption);
  readable(plot);
  return figure;
}

// As paper/snapshots.py packs them: 16-bit integers in base64.
const words = (text) => [...new Int16Array(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer)];
const power = (word) => (word === -32768 ? 0 : 10 ** (word / 2000));

function unpacked(layer) {
  const pairs = words(layer.eigenvalues);
  return {
    ...layer,
    eigenvalues: Array.from({ length: pairs.length / 2 }, (_, k) => [-power(pairs[2 * k]), (pairs[2 * k + 1] / 32767) * Math.PI]),
    kernels: layer.kernels.map((each) => ({ channel: each.channel, values: words(each.values).map((word) => (word / 32767) * each.high) })),
    response: words(layer.response).map(power),
  };
}

function panels(packed, step) {
  const layer = unpacked(packed);
  const eigenvalues = layer.eigenvalues.map(([size, phase]) => ({
    re: Math.exp(size) * Math.cos(phase),
    im: Math.exp(size) * Math.sin(phase),
    phase,
    memory: Math.min(1e9, Math.max(0.01, 1 / Math.max(-size, 1e-9))),
    text: `|λ| ${Math.exp(size).toPrecision(7)}, phase ${short(phase)}, memory ${size < 0 ? short(-1 / size) : "without end"}`,
  }));
  const part = layer.eigenvalues.length < layer.eigenvalues_of ? `${layer.eigenvalues.length} of ${layer.eigenvalues_of}, evenly chosen` : `all ${layer.eigenvalues_of}`;
  const reduced = layer.stride > 1 ? `Each point stands for ${layer.stride} positions: the value of largest magnitude.` : "";
  const memories = eigenvalues.map((each) => each.memory);
  const longest = layer.kernel_length - 1 || 1;
  const values = layer.kernels.flatMap((each) => each.values);
  const high = Math.max(1e-12, ...values.map(Math.abs)) * 1.05;
  const strips = layer.kernels.length;
  const least = Math.max(1e-12, ...layer.response) * 1e-6;
  const response = layer.response.map((each) => Math.max(each, least));
  const position = { label: "position", limits: [0, longest] };
  return [
    panel({
      title: `Eigenvalues at step ${step}`,
      note: `In the complex plane, with the unit circle: ${part}.`,
      description: `${part} eigenvalues in the complex plane.`,
      circle: true,
      x: { label: "Re λ", limits: [-1.927, 1.927], ticks: [-1, 0, 1].map((k) => [k, short(k)]) },
      y: { label: "Im λ", limits: [-1.08, 1.08] },
      series: [{ name: "λ", style: 0, kind: "dots", points: eigenvalues.map((each) => [each.re, each.im, each.text]) }],
    }),
    panel({
      title: "Memory of each eigenvalue",
      note: "1 / −log |λ|, in positions, against the phase of λ.",
      description: "Memory in positions against the phase.",
      x: { label: "phase of λ", limits: [-Math.PI, Math.PI], ticks: [[-Math.PI, "−π"], [0, "0"], [Math.PI, "π"]] },
      y: { label: "positions", log: true, limits: [Math.min(...memories) / 2, Math.max(...memories) * 2] },
      series: [{ name: "memory", style: 0, kind: "dots", points: eigenvalues.map((each) => [each.phase, each.memory, each.text]) }],
    }),
    panel({
      title: `Kernels of ${layer.kernels.length} of ${layer.channels} channels`,
      note: reduced,
      description: `Kernel values over ${layer.kernel_length} positions.`,
      x: position,
      y: { label: `channel; a strip is ±${short(high)}`, limits: [0, strips], ticks: layer.kernels.map((each, k) => [strips - k - 0.5, String(each.channel)]) },
      series: layer.kernels.map((each, k) => ({
        name: `channel ${each.channel}`,
        style: k,
        kind: "line dense fine",
        points: each.values.map((value, at) => [Math.min(at * layer.stride, longest), strips - k - 0.5 + (0.5 * value) / high, `position ${at * layer.stride}, ${short(value)}`]),
      })),
    }),
    panel({
      title: "Impulse response of the layer",
      note: `Root mean square over all ${layer.channels} channels of the kernel with its skip, ${layer.bidirectional ? "both directions, " : ""}log scale. ${reduced}`,
      description: "What a unit impulse leaves behind, by position.",
      x: position,
      y: { label: "response", log: true, limits: [Math.min(...response) / 1.5, Math.max(...response) * 1.5] },
      series: [{ name: "response", style: 0, kind: "line dense fine", points: response.map((value, at) => [Math.min(at * layer.stride, longest), value, `position ${at * layer.stride}, ${short(value)}`]) }],
    }),
  ];
}

function explore() {
  const [run, layer, step] = ["run", "layer", "step"].map((name) => document.getElementById(name));
  const [facts, shown, steps, room] = ["layer-facts", "step-shown", "steps", "explorer"].map((name) => document.getElementById(name));
  const known = new Map();

  function draw() {
    const snapshots = known.get(run.value);
    const snapshot = snapshots[step.value];
    const chosen = snapshot.layers[layer.value];
    const which = snapshots.length > 1 ? `snapshot ${Number(step.value) + 1} of ${snapshots.length}` : "the only snapshot";
    shown.textContent = `${snapshot.step} (${which})`;
    step.setAttribute("aria-valuetext", `step ${snapshot.step}, ${which}`);
    facts.textContent = `${chosen.kind}, ${chosen.channels} channels, ${chosen.states} states, kernel of ${chosen.kernel_length} positions.`;
    room.replaceChildren(...panels(chosen, snapshot.step));
    room.ariaBusy = "false";
  }

  function choose() {
    if (!known.has(run.value)) {
      const script = document.createElement("script");
      script.src = `layers/${run.value}.js`;
      script.onerror = () => {
        facts.textContent = "The layers of this run are missing.";
        room.ariaBusy = "false";
      };
      room.ariaBusy = "true"; // the previous run is still drawn
      document.head.append(script);
      return;
    }
    const snapshots = known.get(run.value);
    layer.replaceChildren(...snapshots[0].layers.map((each, k) => element("option", { value: k }, `${each.name} (${each.kind})`, null)));
    step.max = snapshots.length - 1;
    step.value = snapshots.length - 1;
    steps.hidden = snapshots.length < 2; // a slider needs two steps
    const [from, to] = steps.querySelectorAll(".ends span");
    from.textContent = snapshots[0].step;
    to.textContent = snapshots[snapshots.length - 1].step;
    draw();
  }

  window.dlrnnLayers = (name, snapshots) => {
    known.set(name, snapshots);
    if (name === run.value) choose();
  };
  run.addEventListener("change", choose);
  layer.addEventListener("change", draw);
  step.addEventListener("input", draw);
  choose();
}

if (document.getElementById("run")) explore();
