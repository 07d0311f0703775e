// The page: panels over one axis, pointer and keys, legend, theme, and what hovering tells.

const MEMORIES = ["micro-batches", "bytes", "off"];

function start(data) {
  window.addEventListener("error", (event) => fail(event.message));
  const views = data.views.map(readView);
  const app = {
    data, views, faces: data.faces, messages: { F: data.messages.SEND_F, B: data.messages.SEND_B },
    show: { messages: true, memory: "micro-batches", path: false, own: false }, theme: "auto",
    hovered: null, pinned: null, range: null, queued: false,
  };
  app.axis = makeAxis(Math.max(...views.map((view) => view.makespan)), () => redraw(app));
  app.most = {
    "micro-batches": Math.max(...views.flatMap((view) => view.held.flatMap((curve) => curve[1]))),
    bytes: Math.max(0, ...views.flatMap((view) => view.memory.map((curve) => curve[1].reduce((a, b) => Math.max(a, b), 0)))),
  };
  app.patterns = patternsOf(app);
  app.panels = views.map((view) => addPanel(app, view));
  app.overview = makeOverview(app, document.getElementById("overview"));
  readColours(app);
  addLegend(app);
  for (const button of document.querySelectorAll("button[data-key]")) button.addEventListener("click", () => key(app, button.dataset.key));
  for (const letter of "ln") document.querySelector(`[data-key="${letter}"]`).hidden = views.length < 2;
  window.addEventListener("keydown", (event) => onKey(app, event));
  window.addEventListener("resize", () => relayout(app));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => readColours(app));
  new ResizeObserver(() => relayout(app)).observe(document.getElementById("panels"));
  showState(app);
  relayout(app);
}

function fail(message) {
  const line = document.getElementById("failure");
  line.textContent = `The page failed: ${message}`;
  line.hidden = false;
  document.documentElement.dataset.failed = message;
}

function addPanel(app, view) {
  const panel = makePanel(app, view);
  const section = document.createElement("section"), header = document.createElement("header");
  section.className = "panel";
  header.append(element("h2", view.name), element("span", view.clock, `clock ${view.clock}`));
  const mean = view.bubbles.reduce((a, b) => a + b, 0) / view.ranks;
  header.append(element("span", `${view.size} · ${timeText(view.makespan)} · bubble ${percent(mean)}`));
  if (view.detail) header.append(element("span", view.detail));
  section.append(header, panel.canvas);
  document.getElementById("panels").append(section);
  new IntersectionObserver((seen) => {
    panel.visible = seen.at(-1).isIntersecting;
    redraw(app);
  }, { rootMargin: "200px" }).observe(panel.canvas);
  listen(app, panel);
  return panel;
}

function element(name, text, kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

/** Draw once per frame, however much has changed. */
function redraw(app) {
  if (app.queued || !app.overview) return;
  app.queued = true;
  requestAnimationFrame(() => {
    app.queued = false;
    drawAll(app);
  });
}

function drawAll(app) {
  app.overview.draw();
  for (const panel of app.panels) if (panel.visible) panel.draw();
  document.documentElement.dataset.drawn = app.panels.map((panel) => panel.drawn).join(",");
}

function relayout(app) {
  app.overview.layout();
  for (const panel of app.panels) panel.layout();
  drawAll(app);
}

function readColours(app) {
  const dark = app.theme === "dark" || (app.theme === "auto" && window.matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  app.colours = {
    text: of("--text"), soft: of("--soft"), line: of("--line"), track: of("--track"), bubble: of("--bubble"), hatch: of("--hatch"),
    grid: of("--grid"), hold: of("--hold"), holdLine: of("--hold-line"), accent: of("--accent"), path: of("--path"),
    shade: of("--shade"), card: of("--card"), gradient: app.messages.B, veil: dark ? "rgba(18,22,27,0.66)" : "rgba(246,247,249,0.72)",
  };
  app.patterns = patternsOf(app);
  if (app.overview) {
    app.overview.still = null;
    addLegend(app);
  }
  redraw(app);
}

/** Textures, so that no meaning hangs on colour alone; made once per pixel density. */
function patternsOf(app) {
  const made = new Map();
  return (ink, scale) => {
    if (!made.has(scale)) {
      const lines = (colour, size, points) => {
        const tile = document.createElement("canvas");
        tile.width = tile.height = Math.round(size * scale);
        const brush = tile.getContext("2d"), side = tile.width;
        brush.strokeStyle = colour;
        brush.lineWidth = scale;
        for (const [x0, y0, x1, y1] of points) {
          brush.beginPath();
          brush.moveTo(x0 * side, y0 * side);
          brush.lineTo(x1 * side, y1 * side);
          brush.stroke();
        }
        const pattern = ink.createPattern(tile, "repeat");
        pattern.setTransform(new DOMMatrix([1 / scale, 0, 0, 1 / scale, 0, 0]));
        return pattern;
      };
      const rising = [[-0.25, 0.25, 0.25, -0.25], [0, 1, 1, 0], [0.75, 1.25, 1.25, 0.75]];
      made.set(scale, {
        bubble: lines(app.colours.hatch, 7, rising),
        R: lines("rgba(255,255,255,0.38)", 5, rising.map(([a, b, c, d]) => [a, 1 - b, c, 1 - d])),
        W: lines("rgba(255,255,255,0.30)", 5, [[0, 0.5, 1, 0.5]]),
      });
    }
    return made.get(scale);
  };
}

function addLegend(app) {
  const legend = document.getElementById("legend");
  const most = Math.max(...app.views.map((view) => Math.max(...view.stagesOf.map((stages) => stages.length))));
  const shades = [...Array(Math.min(most, SHADES)).keys()];
  const present = new Set(app.views.flatMap((view) => [...new Set(view.events.kind)]));
  const entries = [...LETTERS].filter((kind) => present.has(kind)).map((kind) => {
    const colours = shades.map((shade) => app.faces[kind][shade][0]);
    return [app.data.names[kind], colours, kind];
  });
  if (app.views.some((view) => view.transfers.count))
    for (const kind of "FB") entries.push([app.data.names[`SEND_${kind}`], [app.messages[kind]], "message"]);
  entries.push(["bubble", [app.colours.track], "bubble"]);
  if (shades.length > 1) entries.push(["shades: the stages of a rank", [], ""]);
  legend.replaceChildren(...entries.map(([name, colours, kind]) => {
    const entry = element("span", name);
    if (colours.length) entry.prepend(swatch(app, colours, kind));
    return entry;
  }));
}

function swatch(app, colours, kind) {
  const canvas = document.createElement("canvas"), scale = window.devicePixelRatio || 1;
  canvas.width = 26 * scale;
  canvas.height = 14 * scale;
  const ink = canvas.getContext("2d");
  ink.scale(scale, scale);
  const tall = kind === "message" ? 4 : 14;
  colours.forEach((colour, i) => {
    ink.fillStyle = colour;
    ink.fillRect((26 * i) / colours.length, (14 - tall) / 2, 26 / colours.length, tall);
  });
  const pattern = app.patterns(ink, scale)[kind];
  if (pattern) {
    ink.fillStyle = pattern;
    ink.fillRect(0, 0, 26, 14);
  }
  return canvas;
}

function listen(app, panel) {
  const { canvas } = panel, pointers = new Map();
  let moved = 0;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) app.axis.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), panel.at(at(event)[0]));
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) app.axis.pan(panel.at(sideways) - panel.at(0));
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event)[0]);
    moved = 0;
    if (event.shiftKey) app.range = { from: panel.at(at(event)[0]), to: panel.at(at(event)[0]) };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (!pointers.has(event.pointerId)) return hover(app, panel, x, y, event);
    drag(app, panel, pointers, event.pointerId, x);
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    canvas.classList.toggle("dragging", moved > 4);
  });
  const release = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    canvas.classList.remove("dragging");
    const range = app.range;
    app.range = null;
    if (range && Math.abs(panel.put(range.to) - panel.put(range.from)) > 4) app.axis.show(Math.min(range.from, range.to), Math.max(range.from, range.to));
    else if (moved <= 4) pin(app, panel.hit(...at(event)));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => leave(app));
  canvas.addEventListener("dblclick", (event) => app.axis.zoom(0.5, panel.at(at(event)[0])));
}

/** One pointer moves or measures, two pinch. */
function drag(app, panel, pointers, id, x) {
  const before = pointers.get(id), others = [...pointers.keys()].filter((other) => other !== id);
  leave(app);
  if (app.range) app.range.to = panel.at(x);
  else if (others.length) {
    const fixed = pointers.get(others[0]);
    app.axis.zoom(Math.abs(before - fixed) / Math.max(Math.abs(x - fixed), 1), panel.at(fixed));
  } else app.axis.pan(panel.at(before) - panel.at(x));
  pointers.set(id, x);
  redraw(app);
}

function hover(app, panel, x, y, event) {
  const time = panel.at(x);
  app.axis.cursor = x >= GUTTER && x <= panel.width - MARGIN ? time : null;
  app.hovered = panel.hit(x, y);
  if (app.hovered) tell(app, app.hovered, event.clientX, event.clientY);
  else document.getElementById("tip").hidden = true;
  redraw(app);
}

function leave(app) {
  app.axis.cursor = app.hovered = null;
  document.getElementById("tip").hidden = true;
  redraw(app);
}

function tell(app, focus, left, top) {
  const tip = document.getElementById("tip"), list = document.createElement("dl");
  const { head, rows } = describe(focus.panel.view, app.data.names, focus);
  for (const [name, value] of [...rows, ["times are", focus.panel.view.clock]]) list.append(element("dt", name), element("dd", value));
  tip.replaceChildren(element("b", head), list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${left + box.width + 24 > innerWidth ? Math.max(left - box.width - 14, 4) : left + 16}px`;
  tip.style.top = `${Math.max(4, Math.min(top + 16, innerHeight - box.height - 8))}px`;
}

function pin(app, focus) {
  app.pinned = focus && focus.kind === "op" ? focus : null;
  redraw(app);
}

/** Pin an op by its index, bring it into view and tell of it. */
function goTo(app, panel, index) {
  const { view } = panel, { events } = view;
  const rank = view.placement[events.stage[index]];
  pin(app, { panel, kind: "op", index, rank, microbatch: events.microbatch[index], time: events.start[index] });
  app.axis.reveal(events.start[index] * panel.stretch(), events.end[index] * panel.stretch());
  const box = panel.canvas.getBoundingClientRect(), [left, top] = boxOf(panel, index, rank);
  tell(app, app.pinned, box.left + Math.max(left, GUTTER), box.top + top + panel.lanes.op);
}

/** Arrow keys: along the rank, back to what an op waited for, on to what waited for it. */
function step(app, name) {
  const panel = app.pinned ? app.pinned.panel : app.panels.find((one) => one.canvas === document.activeElement) || app.panels[0];
  const { view } = panel;
  if (!app.pinned) return view.rows[0].length && goTo(app, panel, view.rows[0][0]);
  const { index, rank } = app.pinned, row = view.rows[rank], place = view.place[index];
  let next;
  if (name === "ArrowLeft") next = row[place - 1];
  else if (name === "ArrowRight") next = row[place + 1];
  else if (name === "ArrowUp") next = causes(view, index).map((cause) => cause.event)[0];
  else next = readers(view, index)[0];
  if (next !== undefined) goTo(app, panel, next);
}

/** The ops that read what an op makes, on other ranks or later on its own. */
function readers(view, index) {
  const { kind, stage, microbatch } = view.events, k = microbatch[index], s = stage[index];
  const names = { F: [`${s + 1}F${k}`, `${s}R${k}`, `${s}B${k}`], R: [`${s}B${k}`], B: [`${s - 1}B${k}`, `${s}W${k}`], W: [] };
  return names[kind[index]].map((name) => view.byOp.get(name)).filter((found) => found !== undefined);
}

function onKey(app, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (event.target.closest("summary, button, dialog") && ["Enter", " "].includes(event.key)) return;
  if (event.key.startsWith("Arrow") && !event.target.closest("canvas") && !app.pinned) return;
  if (key(app, event.key)) event.preventDefault();
}

/** What a key or a button does; whether it does anything. */
function key(app, name) {
  const { axis, show } = app, span = axis.to - axis.from;
  const middle = axis.cursor ?? (axis.from + axis.to) / 2;
  const actions = {
    "0": axis.reset, "+": () => axis.zoom(1 / 1.5, middle), "=": () => axis.zoom(1 / 1.5, middle), "-": () => axis.zoom(1.5, middle),
    w: () => axis.zoom(1 / 1.5, middle), s: () => axis.zoom(1.5, middle), a: () => axis.pan(-span / 6), d: () => axis.pan(span / 6),
    c: () => (show.messages = !show.messages), p: () => (show.path = !show.path), m: () => (show.memory = nextMemory(app)),
    n: () => (show.own = !show.own),
    l: () => document.getElementById("panels").classList.toggle("beside"),
    t: () => (app.theme = { auto: "light", light: "dark", dark: "auto" }[app.theme]),
    g: () => savePicture(app),
    "?": () => document.getElementById("help").showModal(), Escape: () => (pin(app, null), leave(app)),
  };
  const action = actions[name] || actions[name.toLowerCase()] || (name.startsWith("Arrow") && (() => step(app, name)));
  if (!action) return false;
  action();
  if (name.toLowerCase() === "t") readColours(app);
  showState(app);
  if ("cmltn".includes(name.toLowerCase())) relayout(app);
  else redraw(app);
  return true;
}

/** Let the buttons say what is shown. */
function showState({ show, theme }) {
  const pressed = { c: show.messages, m: show.memory !== "off", p: show.path, n: show.own, l: document.getElementById("panels").classList.contains("beside") };
  for (const [letter, on] of Object.entries(pressed)) document.querySelector(`[data-key="${letter}"]`).setAttribute("aria-pressed", on);
  document.querySelector('[data-key="m"]').textContent = `Memory: ${show.memory}`;
  document.querySelector('[data-key="t"]').textContent = `Theme: ${theme}`;
}

/** Download what the panels show as one picture, the panels one below the other under their names. */
function savePicture(app) {
  const scale = window.devicePixelRatio || 1, title = 30 * scale, canvas = document.createElement("canvas");
  canvas.width = Math.max(...app.panels.map((panel) => panel.canvas.width));
  canvas.height = app.panels.reduce((sum, panel) => sum + title + panel.canvas.height, 0);
  const ink = canvas.getContext("2d");
  ink.fillStyle = app.colours.card;
  ink.fillRect(0, 0, canvas.width, canvas.height);
  let top = 0;
  for (const panel of app.panels) {
    panel.draw();
    ink.fillStyle = app.colours.text;
    ink.font = `600 ${15 * scale}px ${FONT}`;
    ink.fillText(panel.view.name, 14 * scale, top + 20 * scale);
    ink.drawImage(panel.canvas, 0, top + title);
    top += title + panel.canvas.height;
  }
  const link = document.createElement("a");
  link.download = "timeline.png";
  link.href = canvas.toDataURL("image/png");
  link.click();
  return canvas;
}

function nextMemory(app) {
  const known = MEMORIES.filter((name) => name !== "bytes" || app.most.bytes);
  return known[(known.indexOf(app.show.memory) + 1) % known.length];
}
