// A heat map on a canvas: a name is written with fillText and textContent alone, which read no markup. A cell is a whole
// number, the worst of them the least, and `stops` say which colours the numbers between them have.

const { clip, color, onChange } = drawing;
const field = data.map;
const $ = (id) => document.getElementById(id);
const bytes = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)).buffer;

const [rows, columns] = [field.rows.length, field.first.length];
const cells = new Int16Array(bytes(field.cells)); // by row and column
const log2 = new Float32Array(bytes(field.log2)); // of the magnitude, where there is one
const longest = field.rows.reduce((most, name) => Math.max(most, name.length), 0);
const map = $("map");
const context = map.getContext("2d");

// Pixels: marks above the plot, batches below it, room for half a mark at its right, a row with its name beside it.
const LINE = 14; // of marks: failures and skipped steps, below them spikes and forecasts
const [MARKS, AXIS, RIGHT, NAMED] = [field.marks.length ? 2 * LINE : LINE, 22, 6, 11];
const [LEAST_HEIGHT, MOST_HEIGHT, ROW_HEIGHT] = [120, 640, 16];

// What is seen, in rows and columns; `to` is exclusive.
const all = () => ({ row: 0, toRow: rows, column: 0, toColumn: columns });
let view = all();
let dragged = null; // the start and the end of a drag, in pixels of the plot
let plot = { left: 0, width: 1, height: 1 };

// 0xAABBGGRR of each value of a cell, for an ImageData.
let shades = new Map();

function rgb(name) {
  context.fillStyle = color(name); // which spells any colour as #rrggbb
  return [1, 3, 5].map((at) => parseInt(context.fillStyle.slice(at, at + 2), 16));
}

// A share of one colour over another.
function mixed([name, share = 1, behind = "card"]) {
  const ground = rgb(behind);
  return rgb(name).map((part, i) => ground[i] + (part - ground[i]) * share);
}

function shade(value) {
  if (shades.has(value)) return shades.get(value);
  const { stops } = field;
  const next = stops.findIndex(([at]) => at > value);
  const before = next < 0 ? stops.length - 1 : Math.max(next - 1, 0);
  const [[from, ...own], [to, ...other]] = [stops[before], stops[next < 0 ? before : next]];
  const share = to > from ? Math.max(0, (value - from) / (to - from)) : 0;
  const special = { [field.gone]: ["gone"], [field.zero]: ["none", 0.4] }[value];
  const [start, end] = special ? [mixed(special), mixed(special)] : [mixed(own), mixed(other)];
  const [r, g, b] = start.map((part, i) => Math.round(part + (end[i] - part) * share));
  const made = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  shades.set(value, made);
  return made;
}

// The first and the last of the cells from `from` to `to` that lie under each of so many pixels.
function cover(from, to, pixels) {
  const scale = (to - from) / pixels;
  return Array.from({ length: pixels }, (_, i) => {
    const start = Math.min(Math.floor(from + i * scale), to - 1);
    return [start, Math.max(start, Math.min(Math.ceil(from + (i + 1) * scale) - 1, to - 1))];
  });
}

// A pixel shows the least headroom of all cells under it, so that no zoom hides a failure.
function image(width, height) {
  const made = context.createImageData(width, height);
  const pixels = new Uint32Array(made.data.buffer);
  const across = cover(view.column, view.toColumn, width);
  const line = new Int16Array(width);
  let before = null;
  cover(view.row, view.toRow, height).forEach((rowsUnder, y) => {
    const key = rowsUnder.join();
    if (key !== before) {
      line.fill(32767);
      let isSeen = new Uint8Array(width);
      for (let row = rowsUnder[0]; row <= rowsUnder[1]; row += 1) {
        for (let x = 0; x < width; x += 1) {
          for (let column = across[x][0]; column <= across[x][1]; column += 1) {
            const value = cells[row * columns + column];
            if (value === field.absent) continue;
            isSeen[x] = 1;
            if (value < line[x]) line[x] = value;
          }
        }
      }
      before = key;
      for (let x = 0; x < width; x += 1) pixels[y * width + x] = isSeen[x] ? shade(line[x]) : 0;
    } else {
      pixels.copyWithin(y * width, (y - 1) * width, y * width);
    }
  });
  return made;
}

function columnWords(column) {
  const [first, last] = [field.first[column], field.last[column]];
  return first === last ? `${field.column} ${first}` : `${field.plural} ${first} to ${last}`;
}

function draw() {
  shades = new Map();
  const ratio = window.devicePixelRatio || 1;
  const width = map.clientWidth;
  const seen = { rows: view.toRow - view.row, columns: view.toColumn - view.column };
  const height = Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, rows * ROW_HEIGHT));
  const font = `11px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  context.font = font;
  const letter = context.measureText("0").width;
  const left = Math.round(Math.min(longest * letter + 12, 280, width * 0.3));
  plot = { left, width: Math.max(1, width - left - RIGHT), height };
  map.style.height = `${MARKS + height + AXIS}px`;
  map.width = Math.round(width * ratio);
  map.height = Math.round((MARKS + height + AXIS) * ratio);
  const wide = Math.max(1, Math.round(plot.width * ratio));
  const high = Math.max(1, Math.round(height * ratio));
  context.putImageData(image(wide, high), Math.round(left * ratio), Math.round(MARKS * ratio));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);

  const quiet = color("quiet");
  context.font = font; // a canvas whose size is set forgets it
  context.fillStyle = quiet;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const size = height / seen.rows;
  const step = Math.max(1, Math.ceil(NAMED / size));
  const letters = Math.floor((left - 10) / letter);
  for (let row = view.row; row < view.toRow; row += step) {
    context.fillText(clip(field.rows[row], letters), left - 6, MARKS + (row - view.row + 0.5) * size);
  }
  axis(seen, quiet);
  marks(field.failed, "▼", color("gone"), LINE / 2);
  marks(field.skipped, "△", color("ink"), LINE / 2);
  const told = (kind) => field.marks.filter(([own]) => own === kind).map(([, column]) => column);
  marks(told("forecast"), "◇", color("ink"), 1.5 * LINE);
  marks(told("spike"), "◆", color("ink"), 1.5 * LINE);
  places(seen, size);
  if (dragged) {
    const [x, y, toX, toY] = dragged;
    context.strokeStyle = color("focus");
    context.strokeRect(left + Math.min(x, toX), MARKS + Math.min(y, toY), Math.abs(toX - x), Math.abs(toY - y));
  }
  map.dataset.drawn = "1";
}

function axis(seen, quiet) {
  context.fillStyle = quiet;
  context.textAlign = "left";
  const room = Math.max(1, Math.floor(plot.width / 90));
  const least = Math.max(1, Math.ceil(seen.columns / room));
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((round) => round * power >= least);
  for (let column = Math.ceil(view.column / step) * step; column < view.toColumn; column += step) {
    const x = plot.left + ((column - view.column) / seen.columns) * plot.width;
    context.fillRect(x, MARKS + plot.height, 1, 4);
    context.fillText(String(field.first[column]), x + 3, MARKS + plot.height + 12);
  }
}

// A frame round each cell that a spike or a forecast names, which stays visible where cells are narrow.
function places(seen, size) {
  context.strokeStyle = color("ink");
  const wide = plot.width / seen.columns;
  const [across, down] = [Math.max(5, wide), Math.max(5, size)];
  for (const [, column, row] of field.marks) {
    if (column < view.column || column >= view.toColumn || row < view.row || row >= view.toRow) continue;
    const [x, y] = [plot.left + (column - view.column + 0.5) * wide, MARKS + (row - view.row + 0.5) * size];
    context.strokeRect(x - across / 2, y - down / 2, across, down);
  }
}

function marks(which, sign, shown, y) {
  context.fillStyle = shown;
  context.textAlign = "center";
  let before = -Infinity;
  for (const column of which) {
    if (column < view.column || column >= view.toColumn) continue;
    const x = plot.left + ((column - view.column + 0.5) / (view.toColumn - view.column)) * plot.width;
    if (x - before < 5) continue; // one over the other they would be a bar
    context.fillText(sign, x, y);
    before = x;
  }
}

// The cell under the mouse, and what it holds.

function inPlot(event) {
  const box = map.getBoundingClientRect();
  const within = (value, most) => Math.min(Math.max(value, 0), most);
  return [within(event.clientX - box.left - plot.left, plot.width), within(event.clientY - box.top - MARKS, plot.height)];
}

function cellAt([x, y]) {
  const row = view.row + Math.floor((y / plot.height) * (view.toRow - view.row));
  const column = view.column + Math.floor((x / plot.width) * (view.toColumn - view.column));
  return [Math.min(row, view.toRow - 1), Math.min(column, view.toColumn - 1)];
}

function largest(exponent) {
  const value = 2 ** exponent; // beyond float64 only for an inf
  return Number.isFinite(value) ? value.toExponential(2) : String(exponent === Infinity ? "inf" : "nan");
}

function words(row, column) {
  const at = row * columns + column;
  const value = cells[at];
  const told = { [field.absent]: field.none, [field.gone]: "not finite", [field.zero]: "all zero" }[value];
  const room = told ?? (field.unit && `${(value / 10).toFixed(1)} ${field.unit}`);
  const rest = value === field.absent || !log2.length || Number.isNaN(log2[at]) ? "" : `${field.measure} ${largest(log2[at])}`;
  const skipped = field.skipped.includes(column) ? "step skipped" : "";
  const marked = field.marks.filter(([, at]) => at === column)
    .map(([kind, , at, text]) => (at === row ? text : `${kind} at ${field.rows[at]}`));
  return [field.rows[row], columnWords(column), room, rest, skipped, ...marked].filter(Boolean).join(" · ");
}

function tell(event) {
  $("told").textContent = words(...cellAt(inPlot(event)));
}

// Zoom.

function show(next) {
  const part = (from, to, most) => {
    const size = Math.max(1, Math.min(most, Math.round(to - from)));
    const start = Math.max(0, Math.min(most - size, Math.round(from)));
    return [start, start + size];
  };
  const [row, toRow] = part(next.row, next.toRow, rows);
  const [column, toColumn] = part(next.column, next.toColumn, columns);
  view = { row, toRow, column, toColumn };
  draw();
}

function zoom(factor) {
  const part = (from, to) => {
    const [middle, half] = [(from + to) / 2, Math.max(0.5, ((to - from) / 2) * factor)];
    return [middle - half, middle + half];
  };
  const [row, toRow] = part(view.row, view.toRow);
  const [column, toColumn] = part(view.column, view.toColumn);
  show({ row, toRow, column, toColumn });
}

function move(down, right) {
  const step = (share, size) => Math.sign(share) * Math.max(1, Math.round(Math.abs(share) * size)) || 0;
  const by = [step(down, view.toRow - view.row), step(right, view.toColumn - view.column)];
  show({ row: view.row + by[0], toRow: view.toRow + by[0], column: view.column + by[1], toColumn: view.toColumn + by[1] });
}

map.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const at = inPlot(event);
  dragged = [...at, ...at];
  map.setPointerCapture(event.pointerId);
});
map.addEventListener("pointermove", (event) => {
  tell(event);
  if (!dragged) return;
  dragged.splice(2, 2, ...inPlot(event));
  draw();
});
map.addEventListener("pointerup", () => {
  if (!dragged) return;
  const [x, y, toX, toY] = dragged;
  dragged = null;
  // A click, or a hand that shook, is no drag.
  if (Math.abs(toX - x) < 4 && Math.abs(toY - y) < 4) return draw();
  const [from, to] = [cellAt([Math.min(x, toX), Math.min(y, toY)]), cellAt([Math.max(x, toX), Math.max(y, toY)])];
  // A drag along one direction zooms that direction alone.
  const [isWide, isHigh] = [Math.abs(toX - x) >= 4, Math.abs(toY - y) >= 4];
  show({
    row: isHigh ? from[0] : view.row, toRow: isHigh ? to[0] + 1 : view.toRow,
    column: isWide ? from[1] : view.column, toColumn: isWide ? to[1] + 1 : view.toColumn,
  });
});
map.addEventListener("pointercancel", () => { dragged = null; draw(); });
map.addEventListener("dblclick", () => show(all()));
map.addEventListener("keydown", (event) => {
  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(all()), Escape: () => show(all()),
    ArrowUp: () => move(-0.2, 0), ArrowDown: () => move(0.2, 0), ArrowLeft: () => move(0, -0.2), ArrowRight: () => move(0, 0.2),
  };
  if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  keys[event.key]();
});
$("closer").addEventListener("click", () => zoom(0.5));
$("farther").addEventListener("click", () => zoom(2));
$("whole").addEventListener("click", () => show(all()));
document.querySelector(".zoom").hidden = false;
onChange(draw);
draw();
