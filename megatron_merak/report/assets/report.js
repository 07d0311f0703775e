(() => {
"use strict";
window.addEventListener("error", (event) => fail(event.message));

function fail(message) {
  const place = document.getElementById("failure");
  place.hidden = false;
  place.textContent = `The page could not be completed: ${message}`;
  document.documentElement.dataset.failed = message;
}

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const plots = new Map(Array.from(document.querySelectorAll("[data-chart]"), (figure) =>
  [figure.dataset.chart, figure.querySelector(".plot")]));

/* The place of the value of a line at an iteration, or the nearest before or behind it; -1 without values. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

const across = (x) => data.last > data.first ? (x - data.first) / (data.last - data.first) : 0.5;

function up(chart, y) {
  if (!chart.log) return (y - chart.low) / (chart.high - chart.low || 1);
  return Math.log(Math.max(y, chart.low) / chart.low) / Math.log(chart.high / chart.low);
}

function text(value, digits) {
  if (value === null) return "not finite";
  if (!digits) return Math.round(value).toLocaleString("en");
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : Number(value.toPrecision(digits + 1)).toLocaleString("en", {maximumFractionDigits: 6});
}

/* All iterations of training lines, in order: where a pointer can rest. */
const stops = Array.from(new Set(data.charts.flatMap((chart) => chart.lines.flatMap((line) => line.x)))).sort((a, b) => a - b);
let shown = -1;

function marks(plot) {
  plot.querySelectorAll(".cursor, .point").forEach((mark) => mark.remove());
}

function add(plot, name, left, top) {
  const mark = document.createElement("i");
  mark.className = name;
  mark.style.left = `${100 * left}%`;
  if (top !== undefined) mark.style.top = `${100 * (1 - top)}%`;
  plot.append(mark);
}

/* Mark an iteration in all charts, and return [line, value, chart] of what is known of it. */
function mark(iteration) {
  const known = [];
  for (const chart of data.charts) {
    const plot = plots.get(chart.key);
    marks(plot);
    add(plot, "cursor", across(iteration));
    for (const line of chart.lines) {
      const at = line.x.length ? nearest(line.x, iteration) : -1;
      if (at < 0 || line.x[at] !== iteration) continue;
      known.push([line, line.y[at], chart]);
      if (line.y[at] !== null) add(plot, `point c${line.colour}`, across(iteration), up(chart, line.y[at]));
    }
  }
  return known;
}

function show(iteration, key, x, y) {
  const known = mark(iteration);
  const list = document.createElement("dl");
  for (const [line, value, chart] of known) {
    const name = document.createElement("dt"), shownValue = document.createElement("dd");
    name.className = `c${line.colour}${chart.key === key ? " here" : ""}`;
    shownValue.className = chart.key === key ? "here" : "";
    name.textContent = chart.key === "loss" ? `${line.name} loss` : line.name;
    shownValue.textContent = text(value, chart.digits);
    list.append(name, shownValue);
  }
  const head = document.createElement("b");
  head.textContent = `iteration ${iteration.toLocaleString("en")}`;
  tip.replaceChildren(head, list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 18 + box.width > innerWidth ? x - 18 - box.width : x + 18;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, Math.min(y - box.height / 2, innerHeight - box.height - 4))}px)`;
  shown = stops.indexOf(iteration);
}

function hide() {
  tip.hidden = true;
  shown = -1;
  plots.forEach(marks);
}

for (const [key, plot] of plots) {
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const place = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    if (stops.length) show(stops[nearest(stops, data.first + place * (data.last - data.first))], key, event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity}[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined || !stops.length) return;
    event.preventDefault();
    const at = Math.min(stops.length - 1, Math.max(0, (shown < 0 ? stops.length : shown) + step));
    const box = plot.getBoundingClientRect();
    show(stops[at], key, box.left + box.width * across(stops[at]), box.top + box.height / 2);
  });
}
document.documentElement.dataset.ready = data.charts.map((chart) => chart.key).join(",");
})();
