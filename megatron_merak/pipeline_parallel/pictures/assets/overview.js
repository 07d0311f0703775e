// The whole step of every view in one strip: how many of its ranks do what, and the window that the timelines show.

const BINS = 720;

/** Of each bin of [0, end]: the share of the ranks' time that each kind of op takes. */
function utilisation(view, end) {
  const share = Object.fromEntries([...LETTERS].map((kind) => [kind, new Float64Array(BINS)]));
  const { kind, start, end: stop, parts, count } = view.events;
  const width = end / BINS || 1;
  for (let i = 0; i < count; i++) {
    for (let bin = Math.floor(start[i] / width); bin < BINS && bin * width < stop[i]; bin++) {
      const inside = Math.min(stop[i], (bin + 1) * width) - Math.max(start[i], bin * width);
      share[kind[i]][bin] += inside / width / view.ranks / parts[i];
    }
  }
  return share;
}

function makeOverview(app, canvas) {
  const overview = { canvas, shares: [], own: null };
  overview.layout = () => {
    overview.scale = window.devicePixelRatio || 1;
    overview.strip = Math.max(6, Math.min(22, Math.floor(90 / app.views.length)));
    overview.height = app.views.length * (overview.strip + 3) + 4;
    canvas.style.height = `${overview.height}px`;
    overview.width = canvas.clientWidth;
    canvas.width = Math.round(overview.width * overview.scale);
    canvas.height = Math.round(overview.height * overview.scale);
    overview.still = null;
    if (overview.own === app.show.own) return;
    overview.own = app.show.own;
    overview.shares = app.panels.map((panel) => utilisation(panel.view, app.axis.end / panel.stretch()));
  };
  overview.draw = () => drawOverview(app, overview);
  const timeAt = (event) => ((event.clientX - canvas.getBoundingClientRect().left) / overview.width) * app.axis.end;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const span = app.axis.to - app.axis.from, time = timeAt(event);
    const inside = time >= app.axis.from && time <= app.axis.to && span < app.axis.end * 0.999;
    overview.grip = inside ? time - app.axis.from : span / 2;
    if (!inside && span < app.axis.end * 0.999) app.axis.show(time - span / 2, time + span / 2);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!canvas.hasPointerCapture(event.pointerId)) return;
    const from = timeAt(event) - overview.grip;
    app.axis.show(from, from + app.axis.to - app.axis.from);
  });
  return overview;
}

/** The strips stay as they are while the window moves. */
function drawStrips(app, { canvas, shares, width, scale, strip }) {
  const still = document.createElement("canvas");
  still.width = canvas.width;
  still.height = canvas.height;
  const ink = still.getContext("2d");
  ink.setTransform(scale, 0, 0, scale, 0, 0);
  const step = width / BINS;
  shares.forEach((share, place) => {
    const bottom = 2 + place * (strip + 3) + strip;
    ink.fillStyle = app.colours.track;
    ink.fillRect(0, bottom - strip, (width * app.views[place].makespan * app.panels[place].stretch()) / (app.axis.end || 1), strip);
    const level = new Float64Array(BINS);
    for (const kind of LETTERS) {
      ink.fillStyle = app.faces[kind][0][0];
      for (let bin = 0; bin < BINS; bin++) {
        const tall = share[kind][bin] * strip;
        if (tall) ink.fillRect(bin * step, bottom - level[bin] - tall, step + 0.3, tall);
        level[bin] += tall;
      }
    }
  });
  return still;
}

function drawOverview(app, overview) {
  const { canvas, width, height, scale } = overview, ink = canvas.getContext("2d");
  overview.still = overview.still || drawStrips(app, overview);
  ink.setTransform(1, 0, 0, 1, 0, 0);
  ink.clearRect(0, 0, canvas.width, canvas.height);
  if (canvas.width && canvas.height) ink.drawImage(overview.still, 0, 0);
  ink.setTransform(scale, 0, 0, scale, 0, 0);
  const [from, to] = [app.axis.from, app.axis.to].map((time) => (time / (app.axis.end || 1)) * width);
  ink.fillStyle = app.colours.veil;
  ink.fillRect(0, 0, from, height);
  ink.fillRect(to, 0, width - to, height);
  ink.strokeStyle = app.colours.accent;
  ink.lineWidth = 1.5;
  ink.strokeRect(from + 0.75, 0.75, Math.max(to - from - 1.5, 2), height - 1.5);
}
