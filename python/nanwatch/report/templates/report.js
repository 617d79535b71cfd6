// Names reach the page as textContent only.

const { clip } = drawing;
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
const MANY = 1500; // records: above, no marks of their own for abs min, and lines in place of points for outputs
const VIEW = 24; // bits: a limit further from every value than this is told, not shown

const isShown = (value) => Number.isFinite(value) && value > 0;

function hover(r) {
  const room = r.headroom === null ? "" : `headroom ${bits(r.headroom)}${Number.isFinite(r.headroom) ? " bits" : ""}`;
  return [
    `${clip(r.module, 80)} ${clip(r.className, 40)}`,
    `${clip(r.label, 60)} · ${r.dtype} ${clip(r.shape, 60)}`,
    `abs max ${shown(r.absMax)} · abs min ${shown(r.absMin)}`, room, clip(r.note, 80),
  ].filter(Boolean).join("\n");
}

function traces() {
  const read = records.filter((r) => r.absMax !== null && r.absMin !== null);
  const many = read.length > MANY;
  const of = (chosen, key, rest) => ({
    records: chosen, x: chosen.map((r) => r.index), y: chosen.map((r) => r[key]), words: (i) => hover(chosen[i]), ...rest,
  });
  const spans = read.filter((r) => isShown(r.absMin) && isShown(r.absMax));
  const made = [{
    x: spans.flatMap((r) => [r.index, r.index, r.index]), y: spans.flatMap((r) => [r.absMin, r.absMax, null]),
    color: "line", line: many ? 1 : 3,
  }];
  const low = read.filter((r) => isShown(r.absMin));
  if (!many) made.push(of(low, "absMin", { name: "abs min", color: "quiet", symbol: "dash", size: 6 }));
  for (const role of ROLES) {
    const chosen = read.filter((r) => r.role === role && isShown(r.absMax));
    const [isOutput, symbol] = [role === "output", role === "weight" ? "diamond" : "circle"];
    const style = { line: isOutput ? 1.2 : 0, symbol: isOutput && many ? "" : symbol, size: isOutput ? 7 : 5 };
    if (chosen.length) made.push(of(chosen, "absMax", { name: `${role} abs max`, color: role, ...style }));
  }
  const zeros = read.filter((r) => r.absMin <= 0);
  if (zeros.length) made.push(of(zeros, "absMin", { name: "holds a zero", color: "none", symbol: "down", size: many ? 4 : 7, edge: "bottom" }));
  for (const [isMeant, shade] of [[false, "gone"], [true, "none"]]) {
    const bad = read.filter((r) => !Number.isFinite(r.absMax) && (r.headroom === null) === isMeant);
    if (bad.length) made.push(of(bad, "absMax", { name: "nan or inf", color: shade, symbol: "cross", size: 9, edge: "top" }));
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

function spec() {
  const { lines, beyond, range } = limitsAndRange(whole);
  $("beyond").textContent = beyond.length ? `Out of view: ${beyond.join("; ")}.` : "";
  const levels = lines.map(({ value, isEnd, dtype }) => ({
    y: value, color: isEnd ? "near" : "none", dash: isEnd ? "" : "dotted", isBelow: !isEnd,
    text: `${dtype} ${isEnd ? "largest finite" : "smallest normal"} ${shown(value)}`,
  }));
  const marks = [];
  data.frames.forEach(([batch], i) => {
    if (!i || batch === data.frames[i - 1][0] || marks.length > 50) return;
    const first = records.find((r) => r.frame >= i);
    if (first) marks.push({ x: first.index - 0.5, color: "quiet", dash: "dotted", text: `batch ${batch}` });
  });
  const culprit = records[data.culprit];
  if (culprit) {
    const text = `${data.value}, first: ${clip(culprit.module, 60)} ${clip(culprit.label, 40)}`;
    marks.push({ x: culprit.index, color: "gone", isTop: true, text });
  }
  return { traces: traces(), range: { x: [-1, records.length], y: range }, levels, marks, ...ticks() };
}

// The last two parts of a frame's name under its records, where there is room for them.
function ticks() {
  if (data.frames.length > Math.min(48, $("chart").clientWidth / 20)) return { across: "record" };
  const at = new Map();
  for (const r of records) at.set(r.frame, [...(at.get(r.frame) || []), r.index]);
  const name = (i) => clip(data.frames[i][1].split(".").slice(-2).join(".") || "(root)", 14);
  return { labels: [...at].map(([i, all]) => [(all[0] + all[all.length - 1]) / 2, name(i)]) };
}

let whole = false;

function buildChart() {
  if (!records.some((r) => r.absMax !== null)) {
    $("chart").textContent = "No record has a range: nothing could be read.";
    return;
  }
  drawing.chart("chart", spec, (trace, i) => {
    $("filter").value = trace.records[i].name;
    refilter();
  });
  for (const id of ["fit", "whole"]) {
    $(id).addEventListener("click", () => {
      whole = id === "whole";
      $("fit").setAttribute("aria-pressed", String(!whole));
      $("whole").setAttribute("aria-pressed", String(whole));
      Object.assign(drawing.charts.chart, { view: null }).draw();
    });
  }
}

if (records.length) {
  buildTable();
  buildChart();
}
