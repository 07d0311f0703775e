// A view, indexed: events per rank in time order, what each waited for, what its rank holds. Knows nothing of a browser.

const LETTERS = "FBRW";
const SHADES = 4; // of each kind of op, for the stages of a rank
const PRODUCERS = { F: [-1, "F"], B: [1, "B"], R: [0, "F"], W: [0, "B"] };

/** From the JSON of a view: typed columns and the indices that drawing and hovering need. Times in seconds. */
function readView(data) {
  const view = { ...data, ranks: data.busy.length, stages: data.placement.length };
  view.events = readColumns(data.events);
  view.transfers = readColumns(data.transfers);
  view.stagesOf = Array.from({ length: view.ranks }, () => []);
  data.placement.forEach((rank, stage) => view.stagesOf[rank].push(stage));
  view.shade = data.placement.map((rank, stage) => view.stagesOf[rank].indexOf(stage) % SHADES);
  view.rows = rowsBy(view.events, (i) => data.placement[view.events.stage[i]], view.ranks);
  view.messages = rowsBy(view.transfers, (i) => data.placement[view.transfers.stage[i]], view.ranks);
  view.place = new Int32Array(view.events.count); // of an event in the row of its rank
  view.rows.forEach((row) => row.forEach((i, at) => (view.place[i] = at)));
  view.byOp = new Map();
  for (let i = 0; i < view.events.count; i++) view.byOp.set(opName(view.events, i), i);
  view.arriving = new Map(); // by the op that reads the message
  for (let i = 0; i < view.transfers.count; i++) view.arriving.set(readerName(view.transfers, i), i);
  view.gaps = view.rows.map((row) => gapsOf(view, row));
  view.held = view.rows.map((row) => heldOf(view, row));
  view.digits = String(view.events.microbatch.reduce((a, b) => Math.max(a, b), 0)).length;
  view.bubbles = data.busy.map((busy) => (view.makespan ? 1 - busy / view.makespan : 0));
  return view;
}

function readColumns(columns) {
  return {
    count: columns.start.length,
    kind: columns.kind,
    stage: Uint32Array.from(columns.stage),
    microbatch: Uint32Array.from(columns.microbatch),
    start: Float64Array.from(columns.start),
    end: Float64Array.from(columns.end),
    part: Uint8Array.from(columns.part || []),
    parts: Uint8Array.from(columns.parts || []),
  };
}

function rowsBy(items, rankOf, ranks) {
  const rows = Array.from({ length: ranks }, () => []);
  for (let i = 0; i < items.count; i++) rows[rankOf(i)].push(i);
  for (const row of rows) row.sort((a, b) => items.start[a] - items.start[b] || a - b);
  return rows;
}

const opName = (items, i) => items.stage[i] + items.kind[i] + items.microbatch[i];

const readerName = (messages, i) =>
  messages.stage[i] + (messages.kind[i] === "F" ? 1 : -1) + messages.kind[i] + messages.microbatch[i];

/** The idle times of a rank, each with the event that ends it (-1: the end of the step). */
function gapsOf(view, row) {
  const gaps = { start: [], end: [], next: [] };
  const least = view.makespan * 1e-9;
  let time = 0;
  const close = (end, next) => {
    if (end - time > least) {
      gaps.start.push(time);
      gaps.end.push(end);
      gaps.next.push(next);
    }
  };
  for (const i of row) {
    close(view.events.start[i], i);
    time = Math.max(time, view.events.end[i]);
  }
  close(view.makespan, -1);
  return gaps;
}

/** Micro-batches in flight on a rank over time: from the start of F to the end of W where there is one, else of B. */
function heldOf(view, row) {
  const { kind, start, end, stage, microbatch } = view.events;
  const curve = [[0], [0]];
  let value = 0;
  const change = (time, by) => {
    value += by;
    if (time <= curve[0].at(-1)) curve[1][curve[1].length - 1] = value;
    else {
      curve[0].push(time);
      curve[1].push(value);
    }
  };
  const frees = (i) => kind[i] === "W" || (kind[i] === "B" && !view.byOp.has(stage[i] + "W" + microbatch[i]));
  for (let at = 0; at < row.length; at += view.events.parts[row[at]]) {
    const group = row.slice(at, at + view.events.parts[row[at]]);
    const grown = group.filter((i) => kind[i] === "F").length, freed = group.filter(frees).length;
    if (grown) change(start[group[0]], grown);
    if (freed) change(end[group[0]], -freed);
  }
  return curve;
}

/** The first place in a row whose item ends after `time`. */
function firstAfter(items, row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items.end[row[middle]] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The value of a curve at a time. */
function valueAt([times, values], time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low ? values[low - 1] : 0;
}

/** What an event (with all that runs together with it) waited for, latest first: {event, message or -1, end}. */
function causes(view, index) {
  const { events, transfers } = view;
  const row = view.rows[view.placement[events.stage[index]]];
  const first = view.place[index] - events.part[index];
  const found = [];
  for (const i of row.slice(first, first + events.parts[index])) {
    const [step, kind] = PRODUCERS[events.kind[i]];
    const last = events.kind[i] === "B" && events.stage[i] === view.stages - 1;
    const stage = last ? events.stage[i] : events.stage[i] + step;
    const producer = view.byOp.get(stage + (last ? "F" : kind) + events.microbatch[i]);
    if (producer === undefined) continue;
    const message = view.arriving.get(opName(events, i)) ?? -1;
    const arrived = message >= 0 && view.timed ? transfers.end[message] : events.end[producer];
    found.push({ event: producer, message, end: arrived });
  }
  if (first) found.push({ event: row[first - 1], message: -1, end: events.end[row[first - 1]], rank: true });
  return found.sort((a, b) => b.end - a.end);
}

/** The chain of events and messages that ends last, each of which waited for the one before it. */
function criticalPath(view) {
  const path = { events: [], messages: [], links: [] };
  let at = -1;
  for (let i = 0; i < view.events.count; i++) if (at < 0 || view.events.end[i] > view.events.end[at]) at = i;
  const seen = new Set();
  while (at >= 0 && !seen.has(at)) {
    seen.add(at);
    path.events.push(at);
    const [cause] = causes(view, at);
    if (!cause) break;
    if (cause.message >= 0) path.messages.push(cause.message);
    path.links.push([cause.event, at]);
    at = cause.event;
  }
  return path;
}

function timeText(seconds, digits = 4) {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${Number((seconds / scale).toPrecision(digits))} ${unit}`;
}

function bytesText(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return `${count} B`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function waitText(view, cause, start) {
  const { events } = view;
  const op = `${events.kind[cause.event]}${events.microbatch[cause.event]}`;
  const from = cause.rank ? `${op} on this rank` : `${op} of stage ${events.stage[cause.event]}`;
  const slack = start - cause.end;
  const early = slack > view.makespan * 1e-9 ? ` (${timeText(slack)} earlier)` : "";
  return from + (cause.message >= 0 ? ", sent over a link" : "") + early;
}

/** What hovering tells of {kind, index, rank, time}: a heading and pairs of words. */
function describe(view, names, hit) {
  if (hit.kind === "gap") return describeGap(view, hit);
  if (hit.kind === "memory") return describeMemory(view, hit);
  const items = hit.kind === "message" ? view.transfers : view.events;
  const i = hit.index, kind = items.kind[i];
  const rows = [
    ["start", timeText(items.start[i], 6)],
    ["end", timeText(items.end[i], 6)],
    ["duration", timeText(items.end[i] - items.start[i])],
  ];
  if (hit.kind === "message") {
    const to = items.stage[i] + (kind === "F" ? 1 : -1);
    if (!view.timed) rows.push(["note", "from when it was made to when it was read"]);
    const ends = `rank ${view.placement[items.stage[i]]} to ${view.placement[to]}`;
    return { head: `${names["SEND_" + kind]} · micro-batch ${items.microbatch[i]} · stage ${items.stage[i]} to ${to} · ${ends}`, rows };
  }
  const rank = view.placement[items.stage[i]];
  causes(view, i).forEach((cause, at) => rows.push([at ? "and for" : "waits for", waitText(view, cause, items.start[i])]));
  if (items.parts[i] > 1) rows.push(["together", `one of ${items.parts[i]} ops that share this time`]);
  rows.push(["in flight", String(valueAt(view.held[rank], items.start[i]))]);
  if (view.memory.length) rows.push(["held", bytesText(valueAt(view.memory[rank], items.start[i]))]);
  return { head: `${names[kind]} ${kind}${items.microbatch[i]} · stage ${items.stage[i]} · rank ${rank}`, rows };
}

function describeGap(view, { rank, index }) {
  const gaps = view.gaps[rank], start = gaps.start[index], end = gaps.end[index], next = gaps.next[index];
  const rows = [
    ["start", timeText(start, 6)],
    ["end", timeText(end, 6)],
    ["idle", `${timeText(end - start)}, ${percent((end - start) / view.makespan)} of the step`],
  ];
  const cause = next < 0 ? null : causes(view, next).find((one) => !one.rank);
  if (next < 0) rows.push(["until", "the other ranks are done"]);
  else rows.push(["until", `${view.events.kind[next]}${view.events.microbatch[next]} of stage ${view.events.stage[next]} can start`]);
  if (cause) rows.push(["waits for", waitText(view, cause, end)]);
  return { head: `bubble · rank ${rank}`, rows };
}

function describeMemory(view, { rank, time }) {
  const rows = [
    ["time", timeText(time, 6)],
    ["in flight", `${valueAt(view.held[rank], time)}, at most ${Math.max(...view.held[rank][1])}`],
  ];
  if (view.memory.length) {
    rows.push(["held", `${bytesText(valueAt(view.memory[rank], time))}, at most ${bytesText(Math.max(...view.memory[rank][1]))}`]);
    if (view.capacity) rows.push(["usable of the device", bytesText(view.capacity)]);
  }
  return { head: `what rank ${rank} holds`, rows };
}
