// One view on one canvas: a row per rank with its ops, its bubbles, its messages and what it holds.

const GUTTER = 116, MARGIN = 138, TOP = 26;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

function makePanel(app, view) {
  const panel = { view, canvas: document.createElement("canvas"), width: 0, height: 0, scale: 1, visible: true };
  panel.canvas.tabIndex = 0;
  panel.canvas.setAttribute("role", "application");
  panel.canvas.setAttribute("aria-label", `Timeline of ${view.name}: ${view.size}. Arrow keys go from op to op.`);
  // Times of the view, and times of the axis: the same, unless every view has its own scale.
  panel.stretch = () => (app.show.own && view.makespan ? app.axis.end / view.makespan : 1);
  panel.put = (time) => GUTTER + ((time - app.axis.from) / (app.axis.to - app.axis.from)) * plotWidth(panel);
  panel.at = (x) => app.axis.from + ((x - GUTTER) / plotWidth(panel)) * (app.axis.to - app.axis.from);
  panel.x = (time) => panel.put(time * panel.stretch());
  panel.time = (x) => panel.at(x) / panel.stretch();
  panel.layout = () => layout(app, panel);
  panel.draw = () => draw(app, panel);
  panel.hit = (x, y) => hit(app, panel, x, y);
  return panel;
}

const plotWidth = (panel) => Math.max(panel.width - GUTTER - MARGIN, 10);

/** Heights of the lanes of a row, and the canvas in device pixels. */
function layout(app, panel) {
  const lane = panel.view.ranks > 16 ? 18 : 24;
  const messages = app.show.messages && panel.view.transfers.count ? 8 : 0;
  const memory = app.show.memory === "off" ? 0 : panel.view.ranks > 16 ? 16 : 22;
  panel.lanes = { op: lane, message: messages, memory, row: lane + messages + memory + (memory || messages ? 9 : 4) };
  panel.width = panel.canvas.clientWidth || panel.canvas.parentNode.clientWidth;
  panel.height = TOP + panel.view.ranks * panel.lanes.row + 6;
  panel.scale = window.devicePixelRatio || 1;
  panel.canvas.style.height = `${panel.height}px`;
  panel.canvas.width = Math.round(panel.width * panel.scale);
  panel.canvas.height = Math.round(panel.height * panel.scale);
}

const rowTop = (panel, rank) => TOP + rank * panel.lanes.row;

function draw(app, panel) {
  const { view, canvas, width, height, scale } = panel;
  [panel.from, panel.to] = [app.axis.from, app.axis.to].map((time) => time / panel.stretch());
  const ink = canvas.getContext("2d");
  ink.setTransform(scale, 0, 0, scale, 0, 0);
  ink.clearRect(0, 0, width, height);
  drawNames(app, panel, ink);
  ink.save();
  ink.beginPath();
  ink.rect(GUTTER, 0, plotWidth(panel), height);
  ink.clip();
  drawTime(app, panel, ink);
  for (let rank = 0; rank < view.ranks; rank++) {
    drawTrack(app, panel, ink, rank);
    if (panel.lanes.memory) drawHeld(app, panel, ink, rank);
  }
  panel.drawn = drawOps(app, panel, ink);
  if (panel.lanes.message) drawMessages(app, panel, ink);
  if (app.show.path) drawPath(app, panel, ink);
  drawFocus(app, panel, ink);
  ink.restore();
}

/** Left: rank and its stages. Right: its bubble, as a number and a bar, and its peak. */
function drawNames(app, panel, ink) {
  const { view, width, lanes } = panel;
  const { text, soft, line } = app.colours;
  const right = width - MARGIN;
  ink.textBaseline = "middle";
  ink.font = `11px ${FONT}`;
  ink.fillStyle = soft;
  ink.textAlign = "right";
  ink.fillText("bubble", right + 56, 12);
  ink.fillText(app.show.memory === "bytes" ? "peak" : "in flight", right + 126, 12);
  for (let rank = 0; rank < view.ranks; rank++) {
    const middle = rowTop(panel, rank) + lanes.op / 2;
    ink.font = `12px ${FONT}`;
    ink.fillStyle = text;
    ink.textAlign = "right";
    ink.fillText(`rank ${rank}`, GUTTER - 10, middle);
    ink.fillText(percent(view.bubbles[rank]), right + 56, middle);
    ink.fillText(peakText(app, view, rank), right + 126, middle);
    if (lanes.row - lanes.op < 12) continue;
    ink.fillStyle = line;
    ink.fillRect(right + 12, middle + lanes.op / 2, 44, 3);
    ink.fillStyle = app.colours.gradient;
    ink.fillRect(right + 12, middle + lanes.op / 2, 44 * view.bubbles[rank], 3);
    ink.font = `10.5px ${FONT}`;
    ink.fillStyle = soft;
    const stages = view.stagesOf[rank];
    const list = stages.length > 3 ? `${stages[0]}, ${stages[1]} .. ${stages.at(-1)}` : stages.join(", ");
    ink.fillText(`stage${stages.length > 1 ? "s" : ""} ${list}`, GUTTER - 10, middle + lanes.op / 2 + 6);
  }
}

function peakText(app, view, rank) {
  if (app.show.memory === "bytes" && view.memory.length) return bytesText(Math.max(...view.memory[rank][1]));
  return app.show.memory === "bytes" ? "-" : String(Math.max(...view.held[rank][1]));
}

function drawTime(app, panel, ink) {
  const { colours } = app;
  ink.font = `11px ${FONT}`;
  ink.textAlign = "center";
  ink.textBaseline = "middle";
  for (const { time, text } of ticks(panel.from, panel.to, plotWidth(panel))) {
    const x = Math.round(panel.x(time)) + 0.5;
    ink.fillStyle = colours.grid;
    ink.fillRect(x - 0.5, TOP - 4, 1, panel.height - TOP);
    ink.fillStyle = colours.soft;
    const half = ink.measureText(text).width / 2;
    ink.fillText(text, Math.min(Math.max(x, GUTTER + half), GUTTER + plotWidth(panel) - half), 12);
  }
}

/** The lane of a rank up to the end of the step, with its idle times hatched. */
function drawTrack(app, panel, ink, rank) {
  const { view, lanes } = panel;
  const top = rowTop(panel, rank), gaps = view.gaps[rank];
  const begin = Math.max(panel.x(0), GUTTER), end = Math.min(panel.x(view.makespan), GUTTER + plotWidth(panel));
  ink.fillStyle = app.colours.track;
  ink.fillRect(begin, top, Math.max(end - begin, 0), lanes.op);
  ink.font = `10.5px ${FONT}`;
  ink.textAlign = "center";
  for (let i = 0; i < gaps.start.length; i++) {
    if (gaps.end[i] < panel.from) continue;
    if (gaps.start[i] > panel.to) break;
    const from = Math.max(panel.x(gaps.start[i]), GUTTER), to = Math.min(panel.x(gaps.end[i]), GUTTER + plotWidth(panel));
    ink.fillStyle = app.colours.bubble;
    ink.fillRect(from, top, to - from, lanes.op);
    if (to - from > 3) {
      ink.fillStyle = app.patterns(ink, panel.scale).bubble;
      ink.fillRect(from, top, to - from, lanes.op);
    }
    const text = timeText(gaps.end[i] - gaps.start[i], 3);
    const room = ink.measureText(text).width + 8;
    if (to - from > room + 16) {
      ink.fillStyle = app.colours.card;
      ink.globalAlpha = 0.85;
      ink.fillRect((from + to - room) / 2, top + lanes.op / 2 - 7, room, 14);
      ink.globalAlpha = 1;
      ink.fillStyle = app.colours.soft;
      ink.fillText(text, (from + to) / 2, top + lanes.op / 2 + 0.5);
    }
  }
}

/** Ops in view, one colour after the other: changing the colour is what costs time. Returns how many. */
function drawOps(app, panel, ink) {
  const { view, scale } = panel;
  const { events, rows } = view;
  const pinned = app.pinned === null ? -1 : app.pinned.microbatch;
  const ranges = rows.map((row) => rangeOf(panel, events, row));
  const patterns = app.patterns(ink, scale);
  let count = 0;
  for (const kind of LETTERS) {
    for (const [shade, [face, label]] of app.faces[kind].entries()) {
      for (let rank = 0; rank < view.ranks; rank++) {
        const [first, last] = ranges[rank];
        for (let at = first; at < last; at++) {
          const i = rows[rank][at];
          if (events.kind[i] !== kind || view.shade[events.stage[i]] !== shade) continue;
          count++;
          ink.globalAlpha = pinned < 0 || events.microbatch[i] === pinned ? 1 : 0.22;
          drawOp(panel, ink, i, rank, face, label, patterns[kind]);
        }
      }
    }
  }
  ink.globalAlpha = 1;
  return count;
}

function rangeOf(panel, items, row) {
  const first = firstAfter(items, row, panel.from);
  let last = first, high = row.length;
  while (last < high) {
    const middle = (last + high) >> 1;
    if (items.start[row[middle]] < panel.to) last = middle + 1;
    else high = middle;
  }
  return [first, last];
}

/** The rectangle of an op: on whole device pixels where it is wide enough to be told from its neighbour. */
function boxOf(panel, i, rank) {
  const { events } = panel.view;
  const height = panel.lanes.op / events.parts[i];
  const top = rowTop(panel, rank) + height * events.part[i];
  let from = panel.x(events.start[i]), to = panel.x(events.end[i]);
  if (to - from > 4) {
    from = Math.round(from * panel.scale) / panel.scale;
    to = Math.round(to * panel.scale) / panel.scale - 1;
  }
  return [from, top, Math.max(to - from, 0.4), height - (events.parts[i] > 1 ? 1 : 0)];
}

function drawOp(panel, ink, i, rank, face, label, pattern) {
  const { view } = panel;
  const [left, top, width, height] = boxOf(panel, i, rank);
  ink.fillStyle = face;
  ink.fillRect(left, top, width, height);
  if (pattern && width > 5) {
    ink.fillStyle = pattern;
    ink.fillRect(left, top, width, height);
  }
  if (width < 10 || height < 9) return;
  const number = String(view.events.microbatch[i]);
  const long = view.events.kind[i] + number;
  const letter = 6.6;
  const { digits } = view, room = panel.x(view.events.end[i]) - panel.x(view.events.start[i]);
  const text = room > (digits + 1) * letter + 6 ? long : room > digits * letter + 2 ? number : "";
  if (!text) return;
  const from = Math.max(left, GUTTER), to = Math.min(left + width, GUTTER + plotWidth(panel));
  if (to - from < text.length * letter) return;
  ink.fillStyle = label;
  ink.font = `${height < 14 ? 9 : 11}px ${FONT}`;
  ink.textAlign = "center";
  ink.textBaseline = "middle";
  ink.fillText(text, (from + to) / 2, top + height / 2 + 0.5);
  const stage = `stage ${view.events.stage[i]}`;
  if (view.stages > view.ranks && to - from > 130) {
    ink.textAlign = "left";
    ink.globalAlpha *= 0.8;
    ink.fillText(stage, from + 6, top + height / 2 + 0.5);
  }
}

/** Thin lanes of what a rank sends, activations above gradients; arrows to the readers while they can be told apart. */
function drawMessages(app, panel, ink) {
  const { view, lanes } = panel;
  const { transfers, messages } = view;
  const pinned = app.pinned === null ? -1 : app.pinned.microbatch;
  const arrows = [];
  for (const kind of "FB") {
    ink.fillStyle = app.messages[kind];
    for (let rank = 0; rank < view.ranks; rank++) {
      const top = rowTop(panel, rank) + lanes.op + (kind === "F" ? 1 : 5);
      const [, last] = rangeOf(panel, transfers, messages[rank]);
      for (let at = 0; at < last; at++) {
        const i = messages[rank][at];
        if (transfers.kind[i] !== kind || transfers.end[i] < panel.from) continue;
        ink.globalAlpha = pinned < 0 || transfers.microbatch[i] === pinned ? 1 : 0.2;
        const from = panel.x(transfers.start[i]);
        ink.fillRect(from, top, Math.max(panel.x(transfers.end[i]) - from, 1), 3);
        if (pinned < 0 || transfers.microbatch[i] === pinned) arrows.push(i);
      }
    }
  }
  ink.globalAlpha = 1;
  if (arrows.length * 9 < plotWidth(panel) * 2) for (const i of arrows) drawArrow(app, panel, ink, i, app.messages[transfers.kind[i]], 1);
}

function drawArrow(app, panel, ink, i, colour, thick) {
  const { transfers, placement } = panel.view;
  const { op } = panel.lanes;
  const source = placement[transfers.stage[i]], down = transfers.kind[i] === "F";
  const destination = placement[transfers.stage[i] + (down ? 1 : -1)];
  const below = destination > source;
  const [x0, x1] = [panel.x(transfers.start[i]), panel.x(transfers.end[i])];
  const y0 = rowTop(panel, source) + (below ? op + (down ? 2 : 6) : 0), y1 = rowTop(panel, destination) + (below ? 0 : op);
  const bend = (y1 - y0) / 2;
  ink.strokeStyle = ink.fillStyle = colour;
  ink.lineWidth = thick;
  ink.beginPath();
  ink.moveTo(x0, y0);
  ink.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
  ink.stroke();
  const head = below ? -5 : 5;
  ink.beginPath();
  ink.moveTo(x1, y1);
  ink.lineTo(x1 - 2.6, y1 + head);
  ink.lineTo(x1 + 2.6, y1 + head);
  ink.fill();
}

/** What a rank holds, as steps; the same height means the same in every row of every timeline. */
function drawHeld(app, panel, ink, rank) {
  const { view, lanes } = panel;
  const bytes = app.show.memory === "bytes";
  const curve = bytes ? view.memory[rank] : view.held[rank];
  if (!curve) return;
  const bottom = rowTop(panel, rank) + lanes.op + lanes.message + lanes.memory + 3;
  const high = app.most[app.show.memory] || 1;
  const y = (value) => bottom - (value / high) * lanes.memory;
  const [times, values] = curve, points = [];
  for (let i = 0; i < times.length; i++) {
    const next = i + 1 < times.length ? times[i + 1] : view.makespan;
    if (next < panel.from || times[i] > panel.to) continue;
    points.push([panel.x(times[i]), y(values[i])], [panel.x(next), y(values[i])]);
  }
  if (!points.length) return;
  const line = new Path2D(), area = new Path2D();
  points.forEach(([left, top]) => line.lineTo(left, top));
  [[points[0][0], bottom], ...points, [points.at(-1)[0], bottom]].forEach(([left, top]) => area.lineTo(left, top));
  ink.fillStyle = app.colours.hold;
  ink.fill(area);
  ink.strokeStyle = app.colours.holdLine;
  ink.lineWidth = 1;
  ink.stroke(line);
  if (bytes && view.capacity && view.capacity <= high) {
    ink.fillStyle = app.colours.path;
    ink.fillRect(Math.max(panel.x(0), GUTTER), y(view.capacity), panel.x(view.makespan) - Math.max(panel.x(0), GUTTER), 1);
  }
}

function drawPath(app, panel, ink) {
  const { view } = panel;
  panel.path = panel.path || criticalPath(view);
  ink.strokeStyle = app.colours.path;
  ink.lineWidth = 2;
  for (const i of panel.path.events) {
    if (view.events.end[i] < panel.from || view.events.start[i] > panel.to) continue;
    const [left, top, width, height] = boxOf(panel, i, view.placement[view.events.stage[i]]);
    ink.strokeRect(left, top + 1, Math.max(width, 1), height - 2);
  }
  ink.lineWidth = 1.5;
  for (const [from, to] of panel.path.links) {
    const ranks = [from, to].map((i) => view.placement[view.events.stage[i]]);
    if (ranks[0] === ranks[1]) continue;
    const x = [panel.x(view.events.end[from]), panel.x(view.events.start[to])];
    const y = ranks.map((rank) => rowTop(panel, rank) + panel.lanes.op / 2);
    ink.beginPath();
    ink.moveTo(x[0], y[0]);
    ink.lineTo(x[1], y[1]);
    ink.stroke();
  }
}

/** The end of the step, the pointer's time in every timeline, the op under it and the op that is pinned. */
function drawFocus(app, panel, ink) {
  const { view, height } = panel;
  ink.fillStyle = app.colours.soft;
  ink.fillRect(panel.x(view.makespan), TOP - 4, 1, height - TOP);
  if (app.range && app.range.to !== app.range.from) {
    const [from, to] = [app.range.from, app.range.to].sort((a, b) => a - b).map(panel.put);
    ink.fillStyle = app.colours.shade;
    ink.fillRect(from, 0, to - from, height);
    badge(app, ink, timeText(Math.abs(app.range.to - app.range.from) / panel.stretch()), (from + to) / 2, panel);
  } else if (app.axis.cursor !== null) {
    const x = panel.put(app.axis.cursor);
    ink.fillStyle = app.colours.accent;
    ink.fillRect(Math.round(x), TOP - 4, 1, height - TOP);
    badge(app, ink, timeText(app.axis.cursor / panel.stretch(), 5), x, panel);
  }
  for (const [focus, thick] of [[app.hovered, 1.5], [app.pinned, 2.5]]) {
    if (!focus || focus.panel !== panel || focus.kind !== "op") continue;
    const [left, top, width, tall] = boxOf(panel, focus.index, view.placement[view.events.stage[focus.index]]);
    ink.strokeStyle = app.colours.text;
    ink.lineWidth = thick;
    ink.strokeRect(left, top, Math.max(width, 2), tall);
    const [cause] = causes(view, focus.index);
    if (cause && cause.message >= 0) drawArrow(app, panel, ink, cause.message, app.colours.text, 1.5);
  }
}

function badge(app, ink, text, x, panel) {
  ink.font = `11px ${FONT}`;
  const width = ink.measureText(text).width + 10;
  const left = Math.min(Math.max(x - width / 2, GUTTER), GUTTER + plotWidth(panel) - width);
  ink.fillStyle = app.colours.accent;
  ink.fillRect(left, 4, width, 16);
  ink.fillStyle = app.colours.card;
  ink.textAlign = "center";
  ink.textBaseline = "middle";
  ink.fillText(text, left + width / 2, 12.5);
}

/** What is at a point of the canvas: {panel, kind, index, rank, time}, or null. */
function hit(app, panel, x, y) {
  const { view, lanes } = panel;
  const rank = Math.floor((y - TOP) / lanes.row), time = panel.time(x);
  if (rank < 0 || rank >= view.ranks || x < GUTTER || x > GUTTER + plotWidth(panel)) return null;
  if (time < 0 || time > view.makespan) return null;
  const inside = y - rowTop(panel, rank), found = (kind, index) => ({ panel, kind, index, rank, time });
  if (inside < lanes.op) return hitOp(panel, view, rank, time, inside, found);
  if (inside < lanes.op + lanes.message + 1) {
    const kind = inside < lanes.op + 4 ? "F" : "B", slack = panel.time(3) - panel.time(0);
    const row = view.messages[rank].filter((i) => view.transfers.kind[i] === kind);
    const near = row.find((i) => view.transfers.start[i] - slack <= time && time <= view.transfers.end[i] + slack);
    return near === undefined ? null : found("message", near);
  }
  return lanes.memory ? found("memory", 0) : null;
}

function hitOp(panel, view, rank, time, inside, found) {
  const row = view.rows[rank], { events } = view;
  for (let at = firstAfter(events, row, time); at < row.length && events.start[row[at]] <= time; at++) {
    const i = row[at];
    if (Math.floor((inside / panel.lanes.op) * events.parts[i]) === events.part[i])
      return { ...found("op", i), microbatch: events.microbatch[i] };
  }
  const gap = view.gaps[rank].end.findIndex((end, i) => time <= end && time >= view.gaps[rank].start[i]);
  return gap < 0 ? null : found("gap", gap);
}
