"use strict";
// What the charts of all pages have in common. Names come from a user's model and are hostile until shown otherwise:
// plotly, which reads a little HTML in its texts, gets them through `forPlotly` only.

const drawing = (() => {
  const forPlotly = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\s+/g, " ");
  const clip = (text, length) => (text.length <= length ? text : "…" + text.slice(1 - length));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // Pixels: a line of the legend, the width of the buttons, the height of the plot, a width with room for few names.
  const [ROW, BUTTONS, PLOT, NARROW] = [20, 190, 364, 460];

  // How many lines the legend of these traces takes in a chart of this width, and whether the buttons fit beside it.
  function legendOf(traces, width) {
    const widths = traces.filter((one) => one.name && one.showlegend !== false).map((one) => one.name.length * 7 + 45);
    const sum = widths.reduce((a, b) => a + b, 0);
    if (sum <= width) return { rows: 1, isBeside: sum + BUTTONS < width };
    if (width < NARROW) return { rows: widths.length, isBeside: false }; // there plotly puts one under the other
    let [rows, filled] = [1, 0];
    for (const one of widths) {
      if (filled && filled + one > width) [rows, filled] = [rows + 1, 0];
      filled += one;
    }
    return { rows, isBeside: false };
  }

  // Colours and letters of the page, as they are now, and above the plot room for buttons and legend. `margin` is that
  // beside and below, `rest` are the parts of a layout that a chart has of its own.
  function layout(place, traces, margin, rest) {
    const [ink, quiet] = ["ink", "quiet"].map(color);
    const { rows, isBeside } = legendOf(traces, place.clientWidth - margin.l - margin.r);
    const top = (isBeside ? 0 : 30) + ROW * rows + 46;
    const height = top + PLOT + margin.b;
    return {
      height, margin: { ...margin, t: top },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
      hovermode: "closest",
      hoverlabel: { align: "left", bgcolor: color("card"), bordercolor: quiet, font: { color: ink }, namelength: 0 },
      legend: { orientation: "h", x: 0, xanchor: "left", yref: "container", y: isBeside ? 1 : 1 - 30 / height, yanchor: "top",
        font: { color: quiet } },
      ...rest,
    };
  }

  const config = {
    responsive: true, displaylogo: false,
    // Named one by one: plotly has others, of which some talk to a server.
    modeBarButtons: [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
  };

  async function unpack(base64) {
    const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  async function run() {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("packed-plotly").textContent);
    document.head.append(script);
  }

  // Runs plotly, which lies in the page as base64 of gzip; once, whoever asks.
  let loading = null;
  function load() {
    loading = loading || run();
    return loading;
  }

  // Calls `draw` when colours or width are not what they were.
  function onChange(draw) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let [width, waiting] = [innerWidth, 0];
    addEventListener("resize", () => {
      clearTimeout(waiting);
      if (innerWidth !== width) waiting = setTimeout(() => { width = innerWidth; draw(); }, 150);
    });
  }

  // On a logarithmic scale zero has no place, and neither has what is not finite.
  const onLog = (values) => values.map((value) => (typeof value === "number" && value > 0 ? value : null));
  const told = (value) => (typeof value === "number" ? value.toExponential(2) : value);

  // Marks of a logarithmic axis. Over less than two decades the powers of ten alone are too few, and plotly writes 2
  // and 5 without their power: there the numbers are written out.
  function marks(lines) {
    const values = lines.flatMap((one) => one.y).filter((value) => value !== null);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, 0]);
    if (!(high < 100 * low)) return high < 1e24 * low ? { dtick: 1 } : {};
    const power = Math.floor(Math.log10(low));
    const tickvals = [0, 1, 2].flatMap((i) => [1, 2, 5].map((digit) => Number(`${digit}e${power + i}`)));
    return { tickvals, ticktext: tickvals.map((value) => (value < 1e-3 ? value.toExponential() : String(value))) };
  }

  // Lines on a logarithmic scale over the places `x`.
  function logLines(id, lines, [across, up]) {
    return plot(id, lines, {
      xaxis: { title: { text: across }, zeroline: false, showgrid: false, linecolor: color("line") },
      yaxis: { title: { text: up }, type: "log", exponentformat: "power", ...marks(lines), gridcolor: color("line"), griddash: "dot", zeroline: false },
    });
  }

  function plot(id, traces, rest, left = 62) {
    const place = document.getElementById(id);
    if (!place) return undefined;
    if (!place.dataset.drawn) place.replaceChildren();
    place.dataset.drawn = "yes";
    return Plotly.react(place, traces, layout(place, traces, { l: left, r: 12, b: 42 }, rest), config);
  }

  // Draws now and whenever colours or width change, or says in place of the charts why not.
  async function start(drawAll) {
    try {
      await load();
      await drawAll();
    } catch (error) {
      for (const message of document.querySelectorAll("[role=figure] .message")) message.textContent = `${failure(error)} ${needs}`;
      return;
    }
    onChange(drawAll);
  }

  const failure = (error) => `The chart could not be drawn (${error}).`;
  const needs = "A browser of 2023 or newer draws it.";
  return { forPlotly, clip, color, NARROW, layout, config, load, onChange, failure, needs, onLog, told, logLines, plot, start };
})();
