// Names reach the page as textContent only, and plotly through `forPlotly`.

const { forPlotly, clip, color } = drawing;
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const number = (value) => (typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value);

const records = data.records.map((row, index) => {
  const [frame, label, role, shape, dtype, absMin, absMax, isFinite, headroom, level, note] = row;
  const [batch, module, className, phase] = data.frames[frame];
  return {
    index, frame, batch, name: module, module: module || "(root)", className, phase, label, role, shape, dtype,
    absMin: number(absMin), absMax: number(absMax), isFinite, headroom: number(headroom), level,
    note: [note, phase].filter(Boolean).join(", "),
    text: `${module} ${className} ${label} ${role} ${dtype}`.toLowerCase(),
  };
});

function shown(value) {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  // As text and Python have it: at least two digits of exponent.
  return value.toExponential(2).replace(/([+-])(\d)$/, "$10$2");
}

function bits(value) {
  if (value === null) return "";
  if (value === Infinity) return "all zero";
  return value === -Infinity ? "none left" : value.toFixed(1);
}

// The table. Ten thousand rows at once take the browser a second, so it shows them by the hundred.

const STEP = 300;
const columns = [
  { name: "#", key: "index", number: true, show: (r) => String(r.index + 1) },
  { name: "batch", key: "batch", number: true, show: (r) => r.batch, order: (r) => Number(r.batch) },
  { name: "module", key: "module" },
  { name: "class", key: "className" },
  { name: "label", key: "label" },
  { name: "role", key: "role" },
  { name: "dtype", key: "dtype" },
  { name: "shape", key: "shape", nowrap: true, order: (r) => elements(r.shape) },
  { name: "abs min", key: "absMin", number: true, show: (r) => shown(r.absMin) },
  { name: "abs max", key: "absMax", number: true, show: (r) => shown(r.absMax), order: (r) => nanLast(r.absMax) },
  { name: "headroom", key: "headroom", number: true, level: true, show: (r) => bits(r.headroom) },
  { name: "note", key: "note" },
];
let sorted = { column: columns[0], descending: false };
let limit = STEP;

function elements(shape) {
  return shape ? JSON.parse(shape).reduce((product, size) => product * size, 1) : null;
}

function nanLast(value) {
  return Number.isNaN(value) ? Infinity : value;
}

function compare(column) {
  const of = column.order || ((r) => r[column.key]);
  const direction = sorted.descending ? -1 : 1;
  return (a, b) => {
    const [x, y] = [of(a), of(b)];
    // What has no value stands last in either direction.
    if (x === y || (x !== x && y !== y)) return a.index - b.index;
    if (x === null || x === "" || x !== x) return 1;
    if (y === null || y === "" || y !== y) return -1;
    return direction * (x < y ? -1 : 1) || a.index - b.index;
  };
}

function matching() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const below = $("low").checked ? Number($("low-bits").value) : null;
  return records.filter(
    (r) =>
      words.every((word) => r.text.includes(word)) &&
      (below === null || r.isFinite === false || (r.headroom !== null && r.headroom < below)),
  );
}

function cells(record) {
  const row = document.createElement("tr");
  if (record.isFinite === false && record.headroom !== null) row.classList.add("fault");
  if (record.index === data.culprit) row.classList.add("culprit");
  for (const column of columns) {
    const cell = row.insertCell();
    cell.textContent = column.show ? column.show(record) : record[column.key];
    if (column.number) cell.classList.add("number");
    if (column.nowrap) cell.classList.add("nowrap");
    if (column.level) cell.classList.add("level", record.level);
  }
  return row;
}

function showTable() {
  const found = matching().sort(compare(sorted.column));
  const body = $("table").tBodies[0];
  body.replaceChildren(...found.slice(0, limit).map(cells));
  const total = records.length.toLocaleString("en");
  const shownOf = found.length > limit ? `, the first ${limit.toLocaleString("en")} shown` : "";
  $("count").textContent = `${found.length.toLocaleString("en")} of ${total} records${shownOf}`;
  $("more").hidden = found.length <= limit;
}

function refilter() {
  limit = STEP;
  showTable();
}

function buildTable() {
  const head = $("table").tHead.rows[0];
  for (const column of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.name;
    button.addEventListener("click", () => {
      sorted = { column, descending: sorted.column === column && !sorted.descending };
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
      showTable();
    });
    cell.append(button);
    head.append(cell);
  }
  head.cells[0].setAttribute("aria-sort", "ascending");
  let waiting = 0;
  $("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refilter, 60);
  });
  for (const id of ["low", "low-bits"]) $(id).addEventListener("input", refilter);
  $("more").addEventListener("click", () => {
    limit += STEP;
    showTable();
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      $("filter").focus();
      $("filter").scrollIntoView({ block: "center" });
    } else if (event.key === "Escape" && event.target === $("filter")) {
      $("filter").value = "";
      refilter();
    }
  });
  showTable();
}

// The chart.

const ROLES = ["output", "input", "weight", "buffer", "gradient"];
// Points are SVG, as plotly's scattergl compiles code at run time, which the page's policy does not allow. Ten thousand
// records are drawn in a second.
const MANY = 1500; // records: above, no marks of their own for abs min, and lines in place of points for outputs
const VIEW = 24; // bits: a limit further from every value than this is told, not shown

const isShown = (value) => Number.isFinite(value) && value > 0;

function hover(r) {
  const room = r.headroom === null ? "" : `<br>headroom ${bits(r.headroom)}${Number.isFinite(r.headroom) ? " bits" : ""}`;
  return (
    `<b>${forPlotly(clip(r.module, 80))}</b> ${forPlotly(clip(r.className, 40))}<br>` +
    `${forPlotly(clip(r.label, 60))} · ${forPlotly(r.dtype)} ${forPlotly(clip(r.shape, 60))}<br>` +
    `abs max ${shown(r.absMax)} · abs min ${shown(r.absMin)}${room}` +
    (r.note ? `<br>${forPlotly(clip(r.note, 80))}` : "")
  );
}

function traces() {
  const read = records.filter((r) => r.absMax !== null && r.absMin !== null);
  const many = read.length > MANY;
  const spans = { x: [], y: [] };
  for (const r of read) {
    const ends = [r.absMin, r.absMax].filter(isShown);
    if (ends.length === 2) {
      spans.x.push(r.index, r.index, null);
      spans.y.push(...ends, null);
    }
  }
  const points = (chosen, y, rest) => ({
    x: chosen.map((r) => r.index),
    y: chosen.map(y),
    hovertext: chosen.map(hover),
    hoverinfo: "text",
    mode: "markers",
    ...rest,
  });
  const made = [
    { ...spans, mode: "lines", line: { color: color("line"), width: many ? 1 : 3 }, hoverinfo: "skip", showlegend: false },
  ];
  if (!many) {
    const low = read.filter((r) => isShown(r.absMin));
    const marker = { color: color("quiet"), size: 5, symbol: "line-ew", line: { width: 1.5, color: color("quiet") } };
    made.push(points(low, (r) => r.absMin, { name: "abs min", marker }));
  }
  for (const role of ROLES) {
    const chosen = read.filter((r) => r.role === role && isShown(r.absMax));
    if (!chosen.length) continue;
    const lines = role === "output" ? (many ? "lines" : "lines+markers") : "markers";
    made.push(
      points(chosen, (r) => r.absMax, {
        name: `${role} abs max`,
        mode: lines,
        line: { color: color(role), width: 1.2 },
        marker: { color: color(role), size: role === "output" ? 7 : 5, symbol: role === "weight" ? "diamond" : "circle" },
      }),
    );
  }
  const zeros = read.filter((r) => r.absMin <= 0);
  const edge = { yaxis: "y2", cliponaxis: false };
  if (zeros.length) {
    const marker = { color: color("none"), symbol: "triangle-down-open", size: many ? 4 : 7 };
    made.push(points(zeros, () => 0.012, { ...edge, name: "holds a zero", marker }));
  }
  const bad = read.filter((r) => !Number.isFinite(r.absMax));
  if (bad.length) {
    const meant = (r) => r.headroom === null;
    const marker = { color: bad.map((r) => color(meant(r) ? "none" : "gone")), symbol: "x", size: 9 };
    made.push(points(bad, () => 0.985, { ...edge, name: "nan or inf", marker }));
  }
  return made;
}

function limitsAndRange(whole) {
  const values = [];
  for (const r of records) for (const v of [r.absMin, r.absMax]) if (isShown(v)) values.push(Math.log2(v));
  let low = values.reduce((a, b) => Math.min(a, b), values.length ? Infinity : -14);
  let high = values.reduce((a, b) => Math.max(a, b), values.length ? -Infinity : 16);
  const [bottom, top] = [low - VIEW, high + VIEW];
  const lines = [];
  const beyond = [];
  for (const [dtype, [largest, normal]] of Object.entries(data.limits)) {
    for (const [value, isEnd] of [[largest, true], [normal, false]]) {
      const at = Math.log2(value);
      if (whole || (isEnd ? at < top : at > bottom)) {
        lines.push({ value, isEnd, dtype });
        [low, high] = [Math.min(low, at), Math.max(high, at)];
      } else {
        beyond.push(`${dtype} ${isEnd ? "ends at" : "turns subnormal below"} ${shown(value)}`);
      }
    }
  }
  const pad = Math.max(1, (high - low) * 0.06);
  const tens = (log2) => log2 * Math.log10(2);
  return { lines, beyond, range: [tens(low - pad), tens(high + pad)] };
}

function layout(whole, drawn) {
  const { lines, beyond, range } = limitsAndRange(whole);
  $("beyond").textContent = beyond.length ? `Out of view: ${beyond.join("; ")}.` : "";
  const [quiet, grid] = ["quiet", "line"].map(color);
  const shapes = [];
  const annotations = [];
  for (const line of lines) {
    const shade = color(line.isEnd ? "near" : "none");
    shapes.push({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: line.value, y1: line.value,
      line: { color: shade, width: 1, dash: line.isEnd ? "solid" : "dot" },
    });
    annotations.push({
      xref: "paper", x: 0, xanchor: "left", y: Math.log10(line.value), yanchor: line.isEnd ? "bottom" : "top",
      text: `${line.dtype} ${line.isEnd ? "largest finite" : "smallest normal"} ${shown(line.value)}`,
      showarrow: false, font: { size: 11, color: shade },
    });
  }
  data.frames.forEach((frame, i) => {
    if (i && frame[0] !== data.frames[i - 1][0] && shapes.length < 60) {
      const first = records.find((r) => r.frame >= i);
      if (!first) return;
      const x = first.index - 0.5;
      shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: quiet, width: 1, dash: "dot" } });
      annotations.push({ x, yref: "paper", y: 0, yanchor: "bottom", xanchor: "left", text: `batch ${forPlotly(frame[0])}`,
        showarrow: false, font: { size: 11, color: quiet } });
    }
  });
  const culprit = records[data.culprit];
  if (culprit) {
    shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: culprit.index, x1: culprit.index,
      line: { color: color("gone"), width: 1.5 } });
    const left = culprit.index < records.length / 2;
    annotations.push({ x: culprit.index, yref: "paper", y: 1, yanchor: "bottom", xanchor: left ? "left" : "right",
      text: `<b>${forPlotly(data.value)}, first:</b> ${forPlotly(clip(culprit.module, 60))} ${forPlotly(clip(culprit.label, 40))}`,
      showarrow: false, font: { size: 13, color: color("gone") } });
  }
  return drawing.layout($("chart"), drawn, { l: 62, r: 12, b: 10 }, {
    xaxis: { range: [-1, records.length], automargin: true, zeroline: false, showgrid: false, linecolor: grid, ...ticks() },
    yaxis: { type: "log", range, exponentformat: "power", dtick: range[1] - range[0] > 24 ? undefined : 1,
      gridcolor: grid, griddash: "dot", zeroline: false },
    yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
    shapes, annotations,
  });
}

// The last two parts of a frame's name under its records, where there is room for them.
function ticks() {
  if (data.frames.length > Math.min(48, $("chart").clientWidth / 20)) return { title: { text: "record" } };
  const at = new Map();
  for (const r of records) at.set(r.frame, [...(at.get(r.frame) || []), r.index]);
  return {
    tickvals: [...at.values()].map((all) => (all[0] + all[all.length - 1]) / 2),
    ticktext: [...at.keys()].map((i) => forPlotly(clip(data.frames[i][1].split(".").slice(-2).join(".") || "(root)", 20))),
    tickangle: -45, tickfont: { size: 10, color: color("quiet") },
  };
}

let whole = false;
function drawChart() {
  const drawn = traces();
  return Plotly.react($("chart"), drawn, layout(whole, drawn), drawing.config);
}

async function buildChart() {
  const chart = $("chart");
  const say = (words) => {
    const line = document.createElement("p");
    line.className = "message";
    line.textContent = words;
    chart.replaceChildren(line);
  };
  if (!records.some((r) => r.absMax !== null)) return say("No record has a range: nothing could be read.");
  try {
    await drawing.load();
    chart.replaceChildren();
    await drawChart();
    chart.on("plotly_click", ({ points: [point] }) => {
      $("filter").value = records[point.x].name;
      refilter();
    });
    chart.dataset.drawn = "yes";
  } catch (error) {
    say(`${drawing.failure(error)} The table below has every number. ${drawing.needs}`);
    return;
  }
  for (const id of ["fit", "whole"]) {
    $(id).addEventListener("click", () => {
      whole = id === "whole";
      $("fit").setAttribute("aria-pressed", String(!whole));
      $("whole").setAttribute("aria-pressed", String(whole));
      drawChart();
    });
  }
  drawing.onChange(drawChart);
}

// The spreads of what the guilty operation was given and made: figures of Python's, in the page's colours.

function drawSpread(place, { data: bars, layout: own }) {
  const [quiet, grid] = ["quiet", "line"].map(color);
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont: { color: quiet } };
  const narrow = place.clientWidth < drawing.NARROW;
  const axes = Object.fromEntries(["xaxis", "yaxis", "yaxis2"].map((name) => [name, { ...own[name], ...axis }]));
  axes.yaxis.title = { text: narrow ? "" : own.yaxis.title.text, standoff: 8 };
  const inPage = drawing.layout(place, [], { l: 52, r: 12, b: 40 }, { ...own, ...axes });
  const size = { height: 300, margin: { ...inPage.margin, t: 8 } };
  return Plotly.react(place, bars, { ...inPage, ...size }, { ...drawing.config, displayModeBar: false });
}

async function buildSpreads() {
  const places = [...document.querySelectorAll(".spread")];
  const drawAll = () => Promise.all(places.map((place, i) => drawSpread(place, data.spreads[i])));
  try {
    await drawing.load();
    for (const place of places) place.replaceChildren();
    await drawAll();
    for (const place of places) place.dataset.drawn = "yes";
  } catch (error) {
    for (const place of places) place.textContent = `${drawing.failure(error)} ${drawing.needs}`;
    return;
  }
  drawing.onChange(drawAll);
}

if (records.length) {
  buildTable();
  buildChart();
}
if (data.spreads.length) buildSpreads();
