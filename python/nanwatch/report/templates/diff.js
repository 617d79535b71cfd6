const { forPlotly, clip, color } = drawing;
const data = JSON.parse(document.getElementById("data").textContent);
// On a logarithmic scale zero has no place, and neither has what is not finite.
const drawn = (values) => values.map((value) => (typeof value === "number" && value > 0 ? value : null));
const told = (value) => (typeof value === "number" ? value.toExponential(2) : value);

const COLORS = ["output", "near", "fine", "input", "low", "gradient", "gone", "weight"];
const SIDES = [
  { key: "a", name: "A", dash: "solid" },
  { key: "b", name: "B", dash: "dot" },
];

function line(one, side, shade, rest) {
  return {
    x: rest.x || one.x,
    y: drawn(one[side.key]),
    hovertext: one[side.key].map((value, i) => `${forPlotly(rest.place(i))}<br>${side.name}: ${forPlotly(told(value))}`),
    hoverinfo: "text",
    mode: one.x.length > 200 ? "lines" : "lines+markers",
    line: { color: shade, width: 1.6, dash: side.dash },
    marker: { color: shade, size: 5, symbol: side.key === "a" ? "circle" : "circle-open" },
    name: forPlotly(rest.name),
    legendgroup: rest.group,
    showlegend: rest.inLegend,
  };
}

// Marks of the axis. Over less than two decades the powers of ten alone are too few, and plotly writes 2 and 5 without
// their power: there the numbers are written out.
function marks(lines) {
  const values = lines.flatMap((one) => one.y).filter((value) => value !== null);
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, 0]);
  if (!(high < 100 * low)) return high < 1e24 * low ? { dtick: 1 } : {};
  const power = Math.floor(Math.log10(low));
  const tickvals = [0, 1, 2].flatMap((i) => [1, 2, 5].map((digit) => Number(`${digit}e${power + i}`)));
  return { tickvals, ticktext: tickvals.map(String) };
}

function layout(place, lines, title) {
  const grid = color("line");
  return drawing.layout(place, lines, { l: 62, r: 12, b: 42 }, {
    xaxis: { title: { text: title }, zeroline: false, showgrid: false, linecolor: grid },
    yaxis: { title: { text: "largest magnitude" }, type: "log", exponentformat: "power", ...marks(lines), gridcolor: grid, griddash: "dot", zeroline: false },
  });
}

function draw(id, lines, title) {
  const place = document.getElementById(id);
  if (!place) return undefined;
  if (!place.dataset.drawn) place.replaceChildren();
  place.dataset.drawn = "yes";
  return Plotly.react(place, lines, layout(place, lines, title), drawing.config);
}

function drawAll() {
  const calls = data.calls;
  const x = calls.x.map((_, i) => i);
  const shades = [color("output"), color("near")];
  const both = SIDES.map((side, i) =>
    line(calls, side, shades[i], { x, name: side.name, inLegend: true, place: (n) => clip(calls.x[n], 90) }));
  const over = data.series.flatMap((one, i) =>
    SIDES.map((side) =>
      line(one, side, color(COLORS[i % COLORS.length]), {
        name: clip(one.name, 60), group: String(i), inLegend: side.key === "a",
        place: (n) => `${clip(one.name, 90)}, batch ${one.x[n]}`,
      })));
  return Promise.all([draw("calls", both, "call of a module, in order"), draw("series", over, "batch")]);
}

async function start() {
  try {
    await drawing.load();
    await drawAll();
  } catch (error) {
    for (const message of document.querySelectorAll("#calls .message, #series .message"))
      message.textContent = `${drawing.failure(error)} ${drawing.needs}`;
    return;
  }
  drawing.onChange(drawAll);
}

start();
