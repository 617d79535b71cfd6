const { forPlotly, clip, color, onLog, told, logLines, start } = drawing;
const data = JSON.parse(document.getElementById("data").textContent);

const COLORS = ["output", "near", "fine", "input", "low", "gradient", "gone", "weight"];
const SIDES = [
  { key: "a", name: "A", dash: "solid" },
  { key: "b", name: "B", dash: "dot" },
];

function line(one, side, shade, rest) {
  return {
    x: rest.x || one.x,
    y: onLog(one[side.key]),
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
  const magnitude = "largest magnitude";
  return Promise.all([logLines("calls", both, ["call of a module, in order", magnitude]), logLines("series", over, ["batch", magnitude])]);
}

start(drawAll);
