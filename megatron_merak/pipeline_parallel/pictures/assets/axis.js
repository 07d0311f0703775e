// The time that all timelines show: one window [from, to] of [0, end], in seconds.

function makeAxis(end, changed) {
  const least = end * 1e-6 || 1e-12;
  const axis = { end, from: 0, to: end, cursor: null };
  axis.show = (from, to) => {
    const span = Math.min(Math.max(to - from, least), end || least);
    axis.from = Math.min(Math.max(from, 0), Math.max(end - span, 0));
    axis.to = axis.from + span;
    changed();
  };
  axis.zoom = (factor, at) => axis.show(at - (at - axis.from) * factor, at + (axis.to - at) * factor);
  axis.pan = (time) => axis.show(axis.from + time, axis.to + time);
  axis.reset = () => axis.show(0, end);
  axis.reveal = (from, to) => {
    const span = axis.to - axis.from;
    if (from >= axis.from && to <= axis.to) return changed();
    const width = Math.max(span, 3 * (to - from));
    axis.show((from + to - width) / 2, (from + to + width) / 2);
  };
  return axis;
}

/** Round times in [from, to] some `gap` pixels apart: [{time, text}]. */
function ticks(from, to, pixels, gap = 90) {
  const raw = ((to - from) * gap) / Math.max(pixels, 1);
  if (!(raw > 0)) return [];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) || 10);
  const [scale, unit] = to >= 1 ? [1, "s"] : to >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const places = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to * (1 + 1e-12); n++)
    found.push({ time: n * step, text: `${((n * step) / scale).toFixed(places)} ${unit}` });
  return found;
}
