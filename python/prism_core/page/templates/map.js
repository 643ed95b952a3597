"use strict";
// The map of all ranks over time: rows of cells (shares of computing, transfer and waiting), drawn for the part in view.
(() => {
  const data = JSON.parse(document.getElementById("map-data").textContent);
  const canvas = document.getElementById("map");
  if (!canvas || !data.now) return;
  const context = canvas.getContext("2d");
  const tip = document.getElementById("map-tip");
  const LEFT = 52, BOTTOM = 22, LEVELS = 15, LEAST_COLUMNS = 2, LEAST_ROWS = 4;
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const value = new Map([...DIGITS].map((digit, at) => [digit, at]));

  // One state of the job: cells of the different rows, the row of each place, and how rare each row is.
  function decoded(state) {
    const map = state.map;
    const cells = map.rows.map((row) => {
      const shares = new Uint8Array(map.columns * 3);
      for (let at = 0; at < map.columns; at++) {
        const bits = (value.get(row[2 * at]) << 6) | value.get(row[2 * at + 1]);
        shares.set([bits >> 8, (bits >> 4) & 15, bits & 15], 3 * at);
      }
      return shares;
    });
    const count = map.runs.reduce((sum, run) => sum + run[1], 0);
    const places = new Uint32Array(count), frequency = new Uint32Array(cells.length);
    let place = 0;
    for (const [row, times] of map.runs) {
      places.fill(row, place, place + times);
      frequency[row] += times;
      place += times;
    }
    return { state, columns: map.columns, perRow: map.ranks_per_row, cells, places, frequency };
  }
  const shown = Object.fromEntries(Object.entries(data).map(([name, state]) => [name, decoded(state)]));
  let now = shown.now;
  let view = null;
  const all = () => ({ from: 0, to: now.columns, top: 0, bottom: now.places.length });

  let colours = null;
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (name) => {
      probe.fillStyle = style.getPropertyValue("--" + name).trim();
      probe.fillRect(0, 0, 1, 1);
      return probe.getImageData(0, 0, 1, 1).data.slice(0, 3);
    };
    colours = { states: ["compute", "transfer", "waiting", "idle"].map(rgb) };
    for (const name of ["path", "paper", "soft", "line"]) colours[name] = style.getPropertyValue("--" + name).trim();
  }

  // Colours of all columns of a row, as words of an image.
  const painted = new Map();
  function words(row) {
    const key = (now === shown.now ? 0 : 1e7) + row;
    let found = painted.get(key);
    if (found) return found;
    const shares = now.cells[row];
    found = new Uint32Array(now.columns);
    for (let at = 0; at < now.columns; at++) {
      const own = [shares[3 * at], shares[3 * at + 1], shares[3 * at + 2]];
      own.push(Math.max(0, LEVELS - own[0] - own[1] - own[2]));
      const whole = own.reduce((sum, one) => sum + one, 0) || 1;
      const mixed = [0, 1, 2].map((channel) => own.reduce((sum, one, state) => sum + one * colours.states[state][channel], 0) / whole);
      found[at] = (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
    }
    painted.set(key, found);
    return found;
  }

  // Of the places in one line of pixels, the rarest row: a single slow rank stays visible among thousands.
  function rarest(from, to) {
    let best = now.places[from];
    for (let place = from + 1; place < to; place++) {
      const row = now.places[place];
      if (row !== best && now.frequency[row] < now.frequency[best]) best = row;
    }
    return best;
  }

  function size() {
    const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
    return { width: box.width, height: box.height, scale, plotWidth: Math.max(1, box.width - LEFT), plotHeight: Math.max(1, box.height - BOTTOM) };
  }

  function draw() {
    const { width, height, scale, plotWidth, plotHeight } = size();
    if (width < 1) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const w = Math.max(1, Math.round(plotWidth * scale)), h = Math.max(1, Math.round(plotHeight * scale));
    const image = context.createImageData(w, h), pixels = new Uint32Array(image.data.buffer);
    const rows = view.bottom - view.top, columns = view.to - view.from;
    const columnOf = new Uint32Array(w);
    for (let x = 0; x < w; x++) columnOf[x] = Math.min(now.columns - 1, Math.floor(view.from + ((x + 0.5) * columns) / w));
    let last = -1;
    for (let y = 0; y < h; y++) {
      const from = Math.min(now.places.length - 1, Math.floor(view.top + (y * rows) / h));
      const to = Math.min(now.places.length, Math.max(from + 1, Math.floor(view.top + ((y + 1) * rows) / h)));
      const row = rarest(from, to);
      if (row === last) {
        pixels.copyWithin(y * w, (y - 1) * w, y * w);
        continue;
      }
      last = row;
      const own = words(row);
      for (let x = 0; x < w; x++) pixels[y * w + x] = own[columnOf[x]];
    }
    context.putImageData(image, Math.round(LEFT * scale), 0);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    if (document.getElementById("map-path").checked) drawPath(plotWidth, plotHeight);
    drawAxes(plotWidth, plotHeight);
    canvas.style.touchAction = columns < now.columns || rows < now.places.length ? "none" : "pan-y";
  }

  function drawPath(plotWidth, plotHeight) {
    const length = now.state.length_ns || 1;
    const x = (time) => LEFT + ((((time / length) * now.columns - view.from) / (view.to - view.from)) * plotWidth);
    const y = (rank) => (((rank + 0.5) / now.perRow - view.top) / (view.bottom - view.top)) * plotHeight;
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plotWidth, plotHeight);
    context.clip();
    context.lineJoin = "round";
    const jumps = new Path2D(), stays = new Path2D();
    let before = null;
    for (const piece of now.state.path) {
      const [from, to, at] = [x(piece.start_ns), x(piece.end_ns), y(piece.rank)];
      if (before !== null) {
        jumps.moveTo(from, before);
        jumps.lineTo(from, at);
      }
      stays.moveTo(from, at);
      stays.lineTo(Math.max(to, from + 1), at);
      before = at;
    }
    context.strokeStyle = colours.path;
    context.globalAlpha = 0.28;
    context.lineWidth = 1;
    context.stroke(jumps);
    context.globalAlpha = 1;
    context.strokeStyle = colours.paper;
    context.lineWidth = 4;
    context.stroke(stays);
    context.strokeStyle = colours.path;
    context.lineWidth = 2;
    context.stroke(stays);
    context.restore();
  }

  function timeText(time) {
    for (const [limit, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) {
      if (Math.abs(time) >= limit) return (time / limit).toFixed(time >= 100 * limit ? 0 : time >= 10 * limit ? 1 : 2) + " " + unit;
    }
    return Math.round(time) + " ns";
  }

  function drawAxes(plotWidth, plotHeight) {
    context.fillStyle = colours.soft;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const rows = view.bottom - view.top, ranks = rows * now.perRow;
    let step = 1;
    while (ranks / step > Math.max(2, plotHeight / 44)) step *= 2;
    for (let rank = Math.ceil((view.top * now.perRow) / step) * step; rank < view.bottom * now.perRow; rank += step) {
      const at = ((rank / now.perRow - view.top + 0.5 / Math.max(1, now.perRow)) / rows) * plotHeight;
      context.fillText(rank.toLocaleString("en"), LEFT - 7, Math.min(plotHeight - 6, Math.max(6, at)));
    }
    context.textBaseline = "top";
    const columns = view.to - view.from, ticks = Math.max(2, Math.floor(plotWidth / 110));
    for (let tick = 0; tick <= ticks; tick++) {
      const time = ((view.from + (tick * columns) / ticks) / now.columns) * now.state.length_ns;
      context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
      context.fillText(timeText(time), LEFT + (tick * plotWidth) / ticks, plotHeight + 6);
    }
  }

  let asked = false;
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  }

  const between = (number, low, high) => Math.min(Math.max(number, low), high);
  function move(from, top, columns, rows) {
    columns = between(columns, Math.min(LEAST_COLUMNS, now.columns), now.columns);
    rows = between(rows, Math.min(LEAST_ROWS, now.places.length), now.places.length);
    from = between(from, 0, now.columns - columns);
    top = between(top, 0, now.places.length - rows);
    view = { from, to: from + columns, top, bottom: top + rows };
    redraw();
  }
  function zoom(factor, x, y, timeOnly) {
    const columns = view.to - view.from, rows = view.bottom - view.top;
    const wide = between(columns * factor, Math.min(LEAST_COLUMNS, now.columns), now.columns);
    const high = timeOnly ? rows : between(rows * factor, Math.min(LEAST_ROWS, now.places.length), now.places.length);
    move(view.from + x * (columns - wide), view.top + y * (rows - high), wide, high);
  }
  function share(event) {
    const box = canvas.getBoundingClientRect(), { plotWidth, plotHeight } = size();
    return [(event.clientX - box.left - LEFT) / plotWidth, (event.clientY - box.top) / plotHeight];
  }

  function tell(event) {
    const [x, y] = share(event);
    if (x < 0 || x >= 1 || y < 0 || y >= 1) {
      tip.hidden = true;
      return;
    }
    const column = between(Math.floor(view.from + x * (view.to - view.from)), 0, now.columns - 1);
    const { plotHeight, scale } = size(), rows = view.bottom - view.top;
    const line = Math.floor(y * plotHeight * scale), h = Math.round(plotHeight * scale);
    const from = between(Math.floor(view.top + (line * rows) / h), 0, now.places.length - 1);
    const to = between(Math.floor(view.top + ((line + 1) * rows) / h), from + 1, now.places.length);
    const row = rarest(from, to);
    const place = now.places.indexOf(row, from);
    const first = place * now.perRow, last = Math.min(first + now.perRow, now.state.ranks_examined) - 1;
    const shares = now.cells[row].slice(3 * column, 3 * column + 3);
    const part = (share) => Math.round((100 * share) / LEVELS) + " %";
    const time = (column / now.columns) * now.state.length_ns;
    tip.textContent = `rank ${first === last ? first : first + "–" + last} at ${timeText(time)}\ncomputing ${part(shares[0])}\ntransfer ${part(shares[1])}\nwaiting ${part(shares[2])}`;
    tip.hidden = false;
    const box = canvas.getBoundingClientRect();
    const left = event.clientX - box.left, above = event.clientY - box.top;
    tip.style.left = Math.min(left + 14, box.width - tip.offsetWidth - 4) + "px";
    tip.style.top = Math.min(above + 14, box.height - tip.offsetHeight - 4) + "px";
  }

  const pointers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "mouse") tell(event);
      return;
    }
    const columns = view.to - view.from, rows = view.bottom - view.top;
    const [x, y] = share(event), [fromX, fromY] = share(before);
    const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
    if (other) {
      const [otherX, otherY] = share(other);
      const factor = Math.hypot(fromX - otherX, fromY - otherY) / Math.max(0.01, Math.hypot(x - otherX, y - otherY));
      zoom(factor, (x + otherX) / 2, (y + otherY) / 2, false);
    } else {
      tip.hidden = true;
      move(view.from - (x - fromX) * columns, view.top - (y - fromY) * rows, columns, rows);
    }
    pointers.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (name === "pointerup") tell(event);
    });
  }
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    // Without the focus the wheel scrolls the page.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.0015), ...share(event), event.shiftKey);
  }, { passive: false });
  const reset = () => { view = all(); redraw(); };
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("keydown", (event) => {
    const columns = view.to - view.from, rows = view.bottom - view.top;
    const actions = {
      ArrowLeft: () => move(view.from - columns / 8, view.top, columns, rows), ArrowRight: () => move(view.from + columns / 8, view.top, columns, rows),
      ArrowUp: () => move(view.from, view.top - rows / 8, columns, rows), ArrowDown: () => move(view.from, view.top + rows / 8, columns, rows),
      "+": () => zoom(0.7, 0.5, 0.5, event.altKey), "-": () => zoom(1 / 0.7, 0.5, 0.5, event.altKey), "0": reset,
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  document.getElementById("map-in").addEventListener("click", () => zoom(0.6, 0.5, 0.5, false));
  document.getElementById("map-out").addEventListener("click", () => zoom(1 / 0.6, 0.5, 0.5, false));
  document.getElementById("map-all").addEventListener("click", reset);
  document.getElementById("map-path").addEventListener("change", redraw);
  const before = document.getElementById("map-before");
  if (before) before.addEventListener("change", () => {
    now = before.checked ? shown.before : shown.now;
    reset();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    painted.clear();
    redraw();
  });
  new ResizeObserver(redraw).observe(canvas);
  readColours();
  view = all();
  draw();
})();
