const { forPlotly, clip, color, onLog, told, logLines, plot, start } = drawing;
const data = JSON.parse(document.getElementById("data").textContent);

function line(key, name, shade, dash) {
  return {
    x: data.names.map((_, i) => i), y: onLog(data[key]),
    hovertext: data.names.map((one, i) => `${forPlotly(clip(one, 90))}<br>${name}: ${forPlotly(told(data[key][i]))}`),
    hoverinfo: "text", name,
    mode: dash || data.names.length > 200 ? "lines" : "lines+markers",
    line: { color: shade, width: 1.6, dash }, marker: { color: shade, size: 5 },
  };
}

function drawDepth() {
  const lines = [line("error", "error", color("output")), line("input", "error of the input", color("input"), "dot"),
    line("limit", "limit", color("near"), "dash"), line("floor", "noise floor", color("quiet"), "dash")];
  if (data.first !== null) {
    const all = line("error", "first", color("gone"));
    const one = Object.fromEntries(["x", "y", "hovertext"].map((part) => [part, [all[part][data.first]]]));
    lines.push({ ...all, ...one, mode: "markers", marker: { color: color("gone"), size: 11, symbol: "diamond-open", line: { width: 2 } } });
  }
  return logLines("depth", lines, ["call of a module, in order", "relative error"]);
}

function drawTokens() {
  const { names, labels, from, errors } = data.tokens;
  // An inf has the colour of the largest error.
  const shown = errors.map(onLog);
  const [low, high] = shown.flat().reduce(([a, b], value) => (value === null ? [a, b] : [Math.min(a, value), Math.max(b, value)]), [Infinity, 0]);
  const [least, most] = high ? [Math.floor(Math.log10(low)), Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)] : [-1, 0];
  const z = shown.map((row, i) => row.map((value, k) => (value === null ? (errors[i][k] === 0 ? null : most) : Math.log10(value))));
  const decades = Array.from({ length: most - least + 1 }, (_, i) => least + i).filter((one, _, all) => (one - least) % Math.ceil(all.length / 8) === 0);
  const step = Math.ceil(names.length / 20);
  const rows = names.map((_, i) => i).filter((i) => i % step === 0);
  const letters = document.getElementById("tokens").clientWidth < drawing.NARROW ? 10 : 28;
  const trace = {
    type: "heatmap", z, x: from, y: names.map((_, i) => i), zmin: least, zmax: most, hoverinfo: "text",
    hovertext: errors.map((row, i) => row.map((value, k) => `${forPlotly(clip(names[i], 90))}, token ${from[k]}<br>error: ${forPlotly(told(value))}`)),
    colorscale: [[0, color("line")], [0.5, color("low")], [1, color("gone")]],
    colorbar: { thickness: 12, outlinewidth: 0, tickvals: decades, ticktext: decades.map((one) => `1e${one}`), title: { text: "error", side: "right" } },
  };
  return plot("tokens", [trace], {
    xaxis: { title: { text: "token" }, zeroline: false, showgrid: false, linecolor: color("line") },
    yaxis: { autorange: "reversed", tickvals: rows, ticktext: rows.map((i) => forPlotly(clip(labels[i], letters))), zeroline: false, showgrid: false },
  }, 22 + letters * 7);
}

start(() => Promise.all([drawDepth(), data.tokens && drawTokens()]));
