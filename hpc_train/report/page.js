"use strict";
// Draws the plots of the page from the JSON in #data. Texts reach the page only as textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 8;
const DASHES = ["", "7 4", "2 3"];
const MARGIN = { left: 58, right: 14, top: 10, bottom: 36 };
const AXES = { step: "step", time: "time since the first start", samples: "samples", tokens: "tokens" };
const shown = data.runs.map(() => true);
const find = (id) => document.getElementById(id);
const number = (value) => value !== null && value !== undefined && Number.isFinite(value);

function make(name, values, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in values) made.setAttribute(key, values[key]);
  if (parent) parent.append(made);
  return made;
}

function element(name, text, parent, cls) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (cls) made.className = cls;
  if (parent) parent.append(made);
  return made;
}

function label(value) {
  if (!number(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [prefix, unit] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (size >= unit) return trimmed(value / (prefix === "k" ? 1e3 : unit)) + prefix;
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : trimmed(value);
}

// A number with its unit; seconds as hpc_train/times.py writes short ones.
function quantity(value, unit) {
  if (unit !== "s" || !number(value)) return `${label(value)} ${unit}`.trim();
  const short = Number(value.toPrecision(3)), size = Math.abs(short);
  const [name, factor] = size >= 1 || !size ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
  return `${trimmed(short * factor)} ${name}`;
}

const trimmed = (value) => String(Number(value.toPrecision(5)));

// Ticks at 1, 2 or 5 times a power of ten; on a long logarithmic axis at powers of ten.
function ticks(low, high, count, log) {
  const found = [];
  if (log && high / low > 5) {
    const decades = Math.log10(high / low);
    const every = Math.max(1, Math.ceil(decades / count));
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every)
      for (const times of decades < 2 ? [1, 2, 5] : [1]) found.push(times * 10 ** power);
    return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  }
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= raw * 0.999);
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
  return found;
}

function timeUnit(seconds) {
  for (const [name, size] of [["days", 86400], ["hours", 3600], ["minutes", 60]])
    if (seconds > 2 * size) return [name, size];
  return ["seconds", 1];
}

// The exponentially weighted mean, without the pull of its first value.
function smoothed(values, share) {
  if (!share) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (!number(value)) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + 1 - share;
    return sum / weight;
  });
}

function path(places, values, x, y) {
  let text = "", pen = "M";
  for (let index = 0; index < values.length; index++) {
    if (!number(values[index]) || !number(places[index])) continue;
    const height = y(values[index]);
    if (!number(height)) continue;
    text += pen + x(places[index]).toFixed(1) + " " + height.toFixed(1);
    pen = "L";
  }
  return text;
}

// A line over the least and the greatest value of each bucket, in turn.
function extremes(places, low, high, x, y) {
  const twice = [], values = [];
  low.forEach((value, index) => {
    twice.push(places[index], places[index]);
    values.push(...(index % 2 ? [high[index], value] : [value, high[index]]));
  });
  return path(twice, values, x, y);
}

// An empty plot with its axes: returns the scales, and where to draw.
function frame(svg, xs, ys, options) {
  const width = Math.max(240, svg.clientWidth || svg.parentNode.clientWidth), height = 230;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  let [left, right] = xs, [low, high] = ys;
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  const log = options.log && high > 0 && low > 0;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  if (!log && options.zero && low > 0) low = 0;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (value) => MARGIN.left + ((value - left) / (right - left)) * inner.width;
  const part = log
    ? (value) => (value > 0 ? Math.log(value / low) / Math.log(high / low) : NaN)
    : (value) => (value - low) / (high - low);
  const y = (value) => MARGIN.top + (1 - part(value)) * inner.height;
  for (const tick of ticks(low, high, 6, log)) {
    make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }, svg);
    make("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, svg).textContent = options.unit === "s" ? quantity(tick, "s") : label(tick);
  }
  const [unit, size] = options.axis === "time" ? timeUnit(right - left) : ["", 1];
  for (const tick of ticks(left / size, right / size, Math.max(2, Math.floor(inner.width / 90)), false)) {
    const place = x(tick * size);
    make("line", { class: "axis", x1: place, x2: place, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }, svg);
    make("text", { x: place, y: height - MARGIN.bottom + 16, "text-anchor": "middle" }, svg).textContent = label(tick);
  }
  make("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom }, svg);
  make("text", { x: MARGIN.left + inner.width / 2, y: height - 4, "text-anchor": "middle" }, svg).textContent =
    AXES[options.axis] + (unit ? `, ${unit}` : "");
  return { x, y, width, height, left, right, unit, size };
}

function range(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (number(value)) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

const colour = (run) => `--c: var(--c${run % COLOURS})`;
const dash = (run) => DASHES[Math.floor(run / COLOURS) % DASHES.length];

// Restarts have a step and a time; on other axes they stand where the curve has that step.
function placeOf(run, step, time, axis) {
  if (axis === "time") return time;
  if (axis === "step") return step;
  const steps = run.x.step, places = run.x[axis];
  const index = steps.findIndex((value) => number(value) && value >= step);
  return index < 0 ? null : places[index];
}

function drawMarks(svg, scales, runs, axis) {
  const bottom = scales.height - MARGIN.bottom;
  const inside = (place) => number(place) && place >= scales.left && place <= scales.right;
  const found = [];
  for (const index of runs) for (const mark of data.runs[index].marks) {
    const place = placeOf(data.runs[index], mark.step, mark.time, axis);
    if (!inside(place)) continue;
    if (axis !== "time" && mark.lost) {
      const end = placeOf(data.runs[index], mark.step + mark.lost, null, axis);
      const width = Math.max(1, scales.x(inside(end) ? end : scales.right) - scales.x(place));
      make("rect", { class: "lost", x: scales.x(place), width, y: MARGIN.top, height: bottom - MARGIN.top }, svg);
    }
    const line = make("line", { class: "mark", x1: scales.x(place), x2: scales.x(place), y1: MARGIN.top, y2: bottom }, svg);
    make("title", {}, line).textContent = mark.text;
    found.push({ at: scales.x(place), text: mark.text });
  }
  return found;
}

// Shows the values at the pointer, and with the arrow keys at the next bucket. `rows(index of nearest)` makes the lines.
function hover(svg, scales, nearest, rows, marks, axis) {
  const line = make("line", { class: "cursor", y1: MARGIN.top, y2: scales.height - MARGIN.bottom, visibility: "hidden" }, svg);
  let last = MARGIN.left;
  const hide = () => { line.setAttribute("visibility", "hidden"); find("tooltip").hidden = true; };
  const show = (at, height) => {
    last = Math.min(scales.width - MARGIN.right, Math.max(MARGIN.left, at));
    const value = scales.left + ((last - MARGIN.left) / (scales.width - MARGIN.left - MARGIN.right)) * (scales.right - scales.left);
    const place = nearest(value);
    if (!number(place)) return hide();
    const tip = find("tooltip");
    tip.replaceChildren();
    element("strong", `${axis === "time" ? "" : AXES[axis] + " "}${label2(place / scales.size)}${scales.unit ? " " + scales.unit : ""}`, tip);
    for (const [style, text] of rows(place, height)) {
      const row = element("div", "", tip);
      if (style) element("span", "", row, "swatch").setAttribute("style", style);
      element("span", text, row);
    }
    for (const mark of marks) if (Math.abs(mark.at - last) < 8) element("div", mark.text, tip, "warn");
    const box = svg.getBoundingClientRect(), ratio = box.width / scales.width;
    line.setAttribute("x1", scales.x(place)); line.setAttribute("x2", scales.x(place));
    line.setAttribute("visibility", "visible");
    tip.hidden = false;
    const wide = document.documentElement.clientWidth;
    const from = box.left + scales.x(place) * ratio + 12;
    const fits = from + tip.offsetWidth < wide - 4;
    tip.style.left = `${window.scrollX + Math.max(4, fits ? from : from - tip.offsetWidth - 24)}px`;
    tip.style.top = `${window.scrollY + box.top + 8}px`;
  };
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect();
    show(((event.clientX - box.left) / box.width) * scales.width, ((event.clientY - box.top) / box.height) * scales.height);
  };
  svg.onpointerleave = svg.onblur = hide;
  svg.onkeydown = (event) => {
    const move = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (move) { event.preventDefault(); show(last + move, 0); }
    if (event.key === "Escape") hide();
  };
}

const label2 = (value) => (Number.isInteger(value) ? String(value) : trimmed(value));

function closest(places, value, values) {
  let best = -1, distance = Infinity;
  for (let index = 0; index < places.length; index++) {
    if (!number(places[index]) || (values && !number(values[index]))) continue;
    const away = Math.abs(places[index] - value);
    if (away < distance) [best, distance] = [index, away];
  }
  return best;
}

function drawPlot(figure, plot) {
  const svg = figure.querySelector("svg"), axis = find("axis").value;
  const share = plot.smooth ? Number(find("smoothing").value) : 0;
  const runs = data.runs.map((run, index) => index)
    .filter((index) => shown[index] && data.runs[index].series[plot.key] && data.runs[index].x[axis]);
  const lines = runs.map((index) => {
    const run = data.runs[index], series = run.series[plot.key];
    return { index, run, places: run.x[axis], ...series, smooth: smoothed(series.mean, share) };
  });
  const xs = range(lines.map((line) => line.places));
  const log = plot.log && find("logarithmic").checked;
  let ys = range(lines.flatMap((line) => [line.low || line.mean, line.high || line.mean]));
  if (log && ys[0] <= 0) ys = range(lines.flatMap((line) => [line.low || line.mean, line.high || line.mean].map((list) => list.filter((value) => value > 0))));
  if (!Number.isFinite(xs[0]) || !Number.isFinite(ys[0])) {
    svg.replaceChildren();
    svg.setAttribute("viewBox", "0 0 300 40"); svg.setAttribute("height", 40);
    make("text", { x: 4, y: 24 }, svg).textContent = "no values on this axis";
    svg.onpointermove = svg.onpointerdown = svg.onkeydown = null;
    return;
  }
  const scales = frame(svg, xs, ys, { log, zero: plot.zero, axis, unit: plot.unit });
  const marks = drawMarks(svg, scales, runs, axis);
  for (const line of lines) {
    const style = colour(line.index), count = line.mean.filter(number).length;
    const group = make("g", { style, "data-run": line.run.name }, svg);
    const raw = line.low ? extremes(line.places, line.low, line.high, scales.x, scales.y)
      : share ? path(line.places, line.mean, scales.x, scales.y) : "";
    if (raw) make("path", { class: "raw", d: raw }, group);
    const bold = make("path", { class: "line", d: path(line.places, line.smooth, scales.x, scales.y) }, group);
    if (dash(line.index)) bold.setAttribute("stroke-dasharray", dash(line.index));
    if (count <= 60) line.smooth.forEach((value, at) => {
      if (number(value) && number(line.places[at]) && number(scales.y(value)))
        make("circle", { class: "point", cx: scales.x(line.places[at]), cy: scales.y(value), r: 2.5 }, group);
    });
  }
  const nearest = (value) => {
    const found = lines.map((line) => line.places[closest(line.places, value, line.mean)]).filter(number);
    return found.sort((one, other) => Math.abs(one - value) - Math.abs(other - value))[0];
  };
  const rows = (place, height) => lines.map((line) => {
    const at = closest(line.places, place, line.mean);
    return { line, at, away: at < 0 ? Infinity : Math.abs(scales.y(line.mean[at]) - height) };
  }).filter((row) => row.at >= 0).sort((one, other) => one.away - other.away).slice(0, 10).map(({ line, at }) => {
    const name = data.runs.length > 1 ? `${line.run.name}: ` : "";
    const spread = line.low && line.low[at] !== line.high[at] ? ` (${quantity(line.low[at], plot.unit)} to ${quantity(line.high[at], plot.unit)})` : "";
    return [colour(line.index), `${name}${quantity(line.mean[at], plot.unit)}${spread}`];
  });
  hover(svg, scales, nearest, rows, marks, axis);
}

function drawPhases(figure) {
  const svg = figure.querySelector("svg"), index = Number(figure.dataset.run), run = data.runs[index];
  const axis = find("axis") && run.x[find("axis").value] ? find("axis").value : "step";
  const places = run.x[axis], phases = data.phases.filter((phase) => run.phases[phase]);
  if (!places || !phases.length) return;
  const sums = [places.map(() => 0)];
  for (const phase of phases) sums.push(run.phases[phase].map((value, at) => sums[sums.length - 1][at] + (value || 0)));
  const scales = frame(svg, range([places]), [0, range([sums[sums.length - 1]])[1] || 1], { zero: true, axis, unit: "s" });
  phases.forEach((phase, number_) => {
    const style = `--c: var(--p${data.phases.indexOf(phase)})`;
    const there = (list) => list.filter((value, at) => number(places[at]) && number(run.phases.other[at]));
    const xs = there(places), low = there(sums[number_]), high = there(sums[number_ + 1]);
    if (xs.length === 1) { xs.unshift(scales.left); xs.push(scales.right); low.push(low[0], low[0]); high.push(high[0], high[0]); }
    const back = path([...xs].reverse(), [...low].reverse(), scales.x, scales.y).replace("M", "L");
    const area = make("path", { class: "area", style, d: path(xs, high, scales.x, scales.y) + back + "Z" }, svg);
    make("title", {}, area).textContent = phase;
  });
  const marks = drawMarks(svg, scales, [index], axis);
  const whole = (at) => sums[sums.length - 1][at];
  hover(svg, scales, (value) => places[closest(places, value)], (place) => {
    const at = closest(places, place);
    return [...phases].reverse().map((phase) => [`--c: var(--p${data.phases.indexOf(phase)})`,
      `${phase}: ${quantity(run.phases[phase][at], "s")}, ${((100 * run.phases[phase][at]) / (whole(at) || 1)).toFixed(1)} %`]);
  }, marks, axis);
}

// From blue to orange over grey: its ends differ in lightness, too, so colour-blind readers tell them apart.
function ramp(part) {
  const ends = [[0, 114, 178], [150, 150, 150], [230, 130, 0]];
  const [from, to, share] = part < 0.5 ? [ends[0], ends[1], part * 2] : [ends[1], ends[2], part * 2 - 1];
  return `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * share)).join(",")})`;
}

function drawParallel() {
  const svg = find("parallel"), { names, axes } = data.parallel;
  const width = Math.max(svg.parentNode.clientWidth, axes.length * 110), height = 300, top = 40, bottom = 16, side = 60;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.width = `${width}px`;
  const x = (index) => axes.length < 2 ? width / 2 : side + (index * (width - 2 * side)) / (axes.length - 1);
  const parts = axes.map(({ values }) => {
    const there = values.filter((value) => value !== null);
    if (there.some((value) => typeof value === "string")) {
      const words = [...new Set(there)].sort();
      return { words, of: (value) => (words.length < 2 ? 0.5 : words.indexOf(value) / (words.length - 1)) };
    }
    const [low, high] = range([there]);
    const log = low > 0 && high / low > 30;
    const of = (value) => (low === high ? 0.5 : log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    return { low, high, log, of };
  });
  const y = (part) => height - bottom - part * (height - top - bottom);
  const last = axes.length - 1;
  names.forEach((name, run) => {
    const points = axes.map((axis, index) => axis.values[run] === null ? null : [x(index), y(parts[index].of(axis.values[run]))]).filter(Boolean);
    if (!points.length) return;
    const result = last < 0 || axes[last].values[run] === null ? 0.5 : parts[last].of(axes[last].values[run]);
    const line = make("path", { class: "task", "data-run": name, d: "M" + points.map((point) => point.map((value) => value.toFixed(1)).join(" ")).join("L"), stroke: ramp(result) }, svg);
    const told = axes.map((axis) => `${axis.label} ${typeof axis.values[run] === "string" ? axis.values[run] : label(axis.values[run])}`);
    make("title", {}, line).textContent = [name, ...told].join("\n");
    line.onpointerenter = () => { line.classList.add("chosen"); svg.append(line); };
    line.onpointerleave = () => line.classList.remove("chosen");
  });
  axes.forEach((axis, index) => {
    const part = parts[index];
    make("line", { class: "axis", x1: x(index), x2: x(index), y1: y(0), y2: y(1) }, svg);
    const short = (text) => (text.length > 18 ? text.slice(0, 17) + "…" : text);
    make("text", { x: x(index), y: 14, "text-anchor": "middle" }, svg).textContent = short(axis.label.split(".").slice(-1)[0]) + (part.log ? " (log)" : "");
    const ends = part.words ? (part.words.length > 12 ? [] : part.words.map((word) => [part.of(word), word]))
      : Number.isFinite(part.low) ? [[part.of(part.low), label(part.low)], ...(part.high > part.low ? [[1, label(part.high)]] : [])] : [];
    for (const [at, text] of ends)
      make("text", { x: x(index) + 5, y: y(at) + (at === 1 && !part.words ? -4 : 4), "text-anchor": "start" }, svg).textContent = short(text);
  });
}

function draw() {
  find("tooltip").hidden = true;
  document.querySelectorAll("figure.plot").forEach((figure) => drawPlot(figure, data.plots[figure.dataset.plot]));
  document.querySelectorAll("figure.phases").forEach(drawPhases);
  if (data.parallel && find("parallel")) drawParallel();
}

// A page may be kept from storing anything, for instance one opened from a file.
function stored(key, value) {
  try {
    if (value === undefined) return window.sessionStorage.getItem(`hpc_train.${key}`);
    window.sessionStorage.setItem(`hpc_train.${key}`, value);
  } catch { /* then nothing is remembered */ }
  return null;
}

function start() {
  const root = document.documentElement, theme = stored("theme");
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  find("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored("theme", root.dataset.theme);
  };
  if (find("axis")) {
    for (const option of [...find("axis").options]) if (!data.runs.some((run) => run.x[option.value])) option.remove();
    for (const id of ["axis", "smoothing"]) {
      const value = stored(id);
      if (value !== null && (id !== "axis" || [...find(id).options].some((option) => option.value === value))) find(id).value = value;
      find(id).oninput = () => { stored(id, find(id).value); draw(); };
    }
    find("logarithmic").checked = stored("logarithmic") === "true";
    find("logarithmic").onchange = () => { stored("logarithmic", find("logarithmic").checked); draw(); };
    if (data.runs.length > 1) data.runs.forEach((run, index) => {
      const row = element("label", "", element("li", "", find("legend")));
      const box = element("input", "", row);
      box.type = "checkbox"; box.checked = true;
      box.onchange = () => { shown[index] = box.checked; draw(); };
      const styles = ["solid", "dashed", "dotted"], style = styles[Math.floor(index / COLOURS) % styles.length];
      element("span", "", row, "sign").setAttribute("style", `${colour(index)}; border-top-style: ${style}`);
      element("span", run.name, row);
    });
  }
  draw();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; draw(); } });
  window.addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((one) => { one.open = true; }); draw(); });
  window.addEventListener("afterprint", draw);
}

start();
