"use strict";
// Names come from a user's model and are hostile until shown otherwise: plotly, which reads a little HTML in its texts,
// gets them through `forPlotly` only.

const data = JSON.parse(document.getElementById("data").textContent);
const forPlotly = (text) =>
  String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\s+/g, " ");
const clip = (text, length) => (text.length <= length ? text : "…" + text.slice(1 - length));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
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

function layout(title) {
  const [ink, quiet, grid] = ["ink", "quiet", "line"].map(color);
  return {
    height: 440, margin: { l: 62, r: 12, t: 66, b: 42 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    hovermode: "closest",
    hoverlabel: { align: "left", bgcolor: color("card"), bordercolor: quiet, font: { color: ink }, namelength: 0 },
    legend: { orientation: "h", x: 0, xanchor: "left", yref: "container", y: 1, yanchor: "top", font: { color: quiet } },
    xaxis: { title: { text: title }, zeroline: false, showgrid: false, linecolor: grid },
    yaxis: { type: "log", exponentformat: "power", gridcolor: grid, griddash: "dot", zeroline: false },
  };
}

const config = {
  responsive: true, displaylogo: false,
  // Named one by one: plotly has others, of which some talk to a server.
  modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
};

function draw(id, lines, title) {
  const place = document.getElementById(id);
  if (!place) return undefined;
  if (!place.dataset.drawn) place.replaceChildren();
  place.dataset.drawn = "yes";
  return Plotly.react(place, lines, layout(title), config);
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
  return Promise.all([draw("calls", both, "call"), draw("series", over, "batch")]);
}

async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  try {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("packed-plotly").textContent);
    document.head.append(script);
    await drawAll();
  } catch (error) {
    for (const message of document.querySelectorAll("#calls .message, #series .message"))
      message.textContent = `The chart could not be drawn (${error}). A browser of 2023 or newer draws it.`;
    return;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

start();
