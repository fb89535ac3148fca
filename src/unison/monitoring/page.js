"use strict";
const EVERY = 1000;
const byId = (id) => document.getElementById(id);

// Returns an element with a text; texts of the job never become markup.
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function scaled(value, unit, factor, units) {
  if (value === null || value === undefined) return "";
  let index = 0;
  while (Math.abs(value) >= factor && index < units.length - 1) { value /= factor; index += 1; }
  const digits = Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits) + " " + units[index] + unit;
}
const number = (value) => scaled(value, "", 1000, ["", "k", "M", "G", "T"]).replace(" ", "");
const bytes = (value) => scaled(value, "B", 1024, ["", "Ki", "Mi", "Gi", "Ti"]);
const percent = (value) => Math.round(100 * value) + "%";
function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1e-3) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toPrecision(3) + " ms";
  if (value < 100) return value.toPrecision(3) + " s";
  const whole = Math.round(value), parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return (parts[0] ? parts[0] + " h " : "") + parts[1] + " min";
}
const loss = (value) => value === null ? "" : value.toPrecision(4);

function showFacts(state) {
  const times = state.step_seconds;
  const facts = [
    ["step", String(state.step)],
    ["steps/s", number(state.steps_per_second)],
    ["examples/s", number(state.examples_per_second)],
    ["step time, median", times && seconds(times.p50)],
    ["99% of them", times && seconds(times.p99)],
    ["loss", loss(state.loss)],
    ["last recovery", seconds(state.last_recovery_seconds)],
  ];
  byId("facts").replaceChildren(...facts.filter((fact) => fact[1]).map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", value));
    return box;
  }));
}

function phases(told) {
  const cell = element("td", undefined, "phases");
  if (!told) return cell;
  const bar = element("div", undefined, "bar"), words = [];
  for (const [name, called] of [["input", "input"], ["others", "others"], ["computing", "computing"]]) {
    if (told[name] === null) continue;
    const part = element("i", undefined, name);
    part.style.width = 100 * told[name] + "%";
    bar.append(part);
    words.push(called + " " + percent(told[name]));
  }
  bar.title = words.join(", ");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", bar.title);
  cell.append(bar);
  return cell;
}

function showWorkers(state) {
  const columns = [
    ["worker", (worker) => worker.name],
    ["", (worker) => worker.state],
    ["step", (worker) => String(worker.step)],
    ["time a step", (worker) => worker.step_seconds && seconds(worker.step_seconds.p50)],
    ["90%", (worker) => worker.step_seconds && seconds(worker.step_seconds.p90)],
    ["99%", (worker) => worker.step_seconds && seconds(worker.step_seconds.p99)],
    ["sent", (worker) => bytes(worker.sent_bytes)],
    ["memory", (worker) => bytes(worker.memory_bytes)],
    ["on devices", (worker) => bytes(worker.device_bytes)],
  ].filter(([name, value]) => name === "" || state.workers.some(value));
  const head = columns.map(([name]) => element("th", name));
  document.querySelector("#workers thead tr").replaceChildren(...head, element("th", "where its time goes"));
  document.querySelector("#workers tbody").replaceChildren(...state.workers.map((worker) => {
    const row = element("tr");
    row.classList.toggle("is-straggler", Boolean(worker.straggles));
    row.classList.toggle("is-away", worker.state !== "running");
    for (const [name, value] of columns) {
      const cell = element("td", value(worker));
      if (name && name !== "worker") cell.dataset.label = name;
      row.append(cell);
    }
    row.append(phases(worker.phases));
    return row;
  }));
}

// Draws points as a line, with round numbers at the axes.
function showCurve(id, points) {
  const figure = byId(id);
  figure.hidden = points.length < 2;
  if (figure.hidden) return;
  const width = 480, height = 220, left = 48, right = 12, top = 10, bottom = 24;
  const svg = (tag, about, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(about)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const lowX = xs[0], highX = Math.max(xs[xs.length - 1], lowX + 1e-9);
  const low = Math.min(0, ...ys), high = Math.max(...ys, low + 1e-9);
  const step = (() => {
    const power = 10 ** Math.floor(Math.log10((high - low) / 4));
    return [1, 2, 2.5, 5, 10].map((size) => size * power).find((size) => size * 5 >= high - low);
  })();
  const end = Math.ceil(high / step) * step, begin = Math.floor(low / step) * step;
  const across = (x) => left + (width - left - right) * (x - lowX) / (highX - lowX);
  const up = (y) => height - bottom - (height - top - bottom) * (y - begin) / (end - begin);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  drawing.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
  for (let tick = begin; tick <= end + step / 2; tick += step) {
    drawing.append(svg("path", { d: `M${left} ${up(tick)}H${width - right}`, stroke: "var(--line)" }));
    const shown = number(Math.round(tick / step) * step);
    drawing.append(svg("text", { x: left - 6, y: up(tick) + 4, "text-anchor": "end" }, shown));
  }
  for (const [x, anchor] of [[lowX, "start"], [highX, "end"]]) {
    drawing.append(svg("text", { x: across(x), y: height - 6, "text-anchor": anchor }, number(Math.round(x))));
  }
  const path = "M" + points.map(([x, y]) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("L");
  drawing.append(svg("path", { d: path, fill: "none", stroke: "var(--series-0)", "stroke-width": 2, "stroke-linejoin": "round" }));
  figure.querySelectorAll("svg").forEach((old) => old.remove());
  figure.append(drawing);
}

function showEvents(state) {
  byId("history").hidden = state.events.length === 0;
  byId("events").replaceChildren(...state.events.slice().reverse().map((event) => {
    const line = element("li");
    line.append(element("time", new Date(1000 * event.time).toLocaleTimeString()), event.text);
    return line;
  }));
}

function show(state) {
  document.title = (state.ended ? "ended: " : "") + state.program;
  byId("program").textContent = state.program;
  const running = state.workers.filter((worker) => worker.state === "running").length;
  const many = state.workers.length === 1 ? " worker runs" : " workers run";
  byId("about").textContent = state.ended
    ? "The job has ended: " + state.ended
    : running + " of " + state.workers.length + many + ", for " + seconds(state.seconds);
  byId("about").className = state.ended ? "is-over" : "";
  showFacts(state);
  byId("warnings").replaceChildren(...state.stragglers.map((text) => element("p", text)));
  showWorkers(state);
  showCurve("loss", state.losses);
  showCurve("rate", state.rates);
  showEvents(state);
}

async function look() {
  let why = "";
  try {
    const answer = await fetch("/state.json" + location.search);
    if (answer.ok) {
      const state = await answer.json();
      show(state);
      if (state.ended) return;
    } else {
      why = await answer.text();
    }
  } catch (error) {
    why = "The job does not answer any more: it has ended, or the connection is lost.";
  }
  if (why) {
    byId("about").textContent = why;
    byId("about").className = "is-over";
  }
  setTimeout(look, EVERY);
}
look();
