"use strict";
// Charts of all pages, as SVG. Names come from a user's model and are hostile: they reach the page as textContent only.
// Colours are the page's own variables, so a chart follows the colour scheme without being drawn again.

const drawing = (() => {
  const clip = (text, length) => (text.length <= length ? text : "…" + text.slice(1 - length));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const told = (value) => (typeof value === "number" ? value.toExponential(2) : value);

  // Calls `draw` when colours or width are not what they were.
  function onChange(draw) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let [width, waiting] = [innerWidth, 0];
    addEventListener("resize", () => {
      clearTimeout(waiting);
      if (innerWidth !== width) waiting = setTimeout(() => { width = innerWidth; draw(); }, 150);
    });
  }

  // Pixels: beside, above and below the plot, its height, and how near the pointer must be to a point.
  const [LEFT, RIGHT, TOP, BELOW, PLOT, NEAR] = [62, 12, 22, 42, 364, 30];
  const DASHES = { dotted: "1.5 4", dashed: "7 4" };
  const SIGNS = { circle: "●", open: "○", diamond: "◆", cross: "✕", down: "▽", dash: "–", dotted: "┈", dashed: "╍" };
  // The path of each point, beside a circle's, which is a line without length and with round ends.
  const SHAPES = {
    open: (x, y, s) => `M${x - s} ${y}a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0`,
    diamond: (x, y, s) => `M${x} ${y - s}l${s} ${s} ${-s} ${s} ${-s} ${-s}z`,
    cross: (x, y, s) => `M${x - s} ${y - s}l${2 * s} ${2 * s}m0 ${-2 * s}l${-2 * s} ${2 * s}`,
    down: (x, y, s) => `M${x - s} ${y - s}h${2 * s}l${-s} ${1.7 * s}z`,
    dash: (x, y, s) => `M${x - s} ${y}h${2 * s}`,
  };

  function add(parent, tag, attributes, text) {
    const made = document.createElementNS(parent.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // Round numbers from `low` to `high`, at most so many.
  function ticks(low, high, most) {
    const power = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = power * [1, 2, 5, 10].find((round) => round * power * most >= 0.999 * (high - low));
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
  }

  // Of a logarithmic axis, whose ends are powers of ten: powers, or numbers where these would be too few.
  function logTicks(low, high) {
    if (high - low >= 2) return ticks(low, high, 8).filter(Number.isInteger);
    const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
    const round = powers.flatMap((power) => [1, 2, 5].map((digit) => Math.log10(digit) + power)).filter((at) => at >= low && at <= high);
    return round.length > 1 ? round : ticks(10 ** low, 10 ** high, 5).filter((value) => value > 0).map(Math.log10);
  }

  function spell(value) {
    const short = Number(value.toPrecision(6));
    return short && (Math.abs(short) < 1e-3 || Math.abs(short) >= 1e5) ? short.toExponential() : String(short);
  }

  function ends(values, pad) {
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    if (low > high) return [0, 1];
    const more = (high - low) * pad || 0.5;
    return [low - more, high + more];
  }

  // The place of a value on the logarithmic axis; null where it has none.
  const up = (value) => (typeof value === "number" && value > 0 && value < Infinity ? Math.log10(value) : null);

  const charts = {};

  // Draws what `make` returns for the width of the element, and again when that changes:
  //   traces  {name, group, color, x, y, words(i), symbol, size, line, dash, edge, inLegend}; y null: a gap; edge: at an end
  //   across, high  the names of the axes;  range  {x, y} of the whole, y as powers of ten;  labels  [[x, text]]
  //   levels  [{y, color, dash, text, isBelow}];  marks  [{x, color, dash, text, isTop}]
  function chart(id, make, onClick) {
    const place = document.getElementById(id);
    if (!place) return;
    const [svg, legend, tip] = ["svg", ".legend", ".tip"].map((one) => place.querySelector(one));
    const state = (charts[id] = { hidden: new Set(), view: null, points: [] });
    let [drag, box, plot] = [null, null, null];

    function draw() {
      const made = make(place.clientWidth);
      const { traces, range = {}, labels, levels = [], marks = [] } = made;
      const [width, tall] = [Math.max(50, place.clientWidth - LEFT - RIGHT), BELOW + (labels ? 50 : 0)];
      const whole = {
        x: range.x || ends(traces.flatMap((one) => one.x), 0.02),
        y: range.y || ends(traces.flatMap((one) => one.y.map(up)).filter((value) => value !== null), 0.06),
      };
      const view = state.view || whole;
      Object.assign(state, { made, seen: view });
      const scale = ([low, high], size) => (value) => ((value - low) / (high - low)) * size;
      const [right, upward] = [scale(view.x, width), scale(view.y, PLOT)];
      const down = (value) => PLOT - upward(value);
      svg.replaceChildren();
      for (const [name, value] of [["width", place.clientWidth], ["height", TOP + PLOT + tall]]) svg.setAttribute(name, value);
      for (const at of logTicks(...view.y)) {
        add(svg, "path", { d: `M${LEFT} ${TOP + down(at)}h${width}`, stroke: "var(--line)", "stroke-dasharray": "1 3" });
        add(svg, "text", { x: LEFT - 8, y: TOP + down(at) + 4, "text-anchor": "end" }, spell(10 ** at));
      }
      for (const at of labels ? [] : ticks(...view.x, Math.max(2, width / 90)).filter(Number.isInteger)) {
        add(svg, "path", { d: `M${LEFT + right(at)} ${TOP + PLOT}v4`, stroke: "var(--quiet)" });
        add(svg, "text", { x: LEFT + right(at), y: TOP + PLOT + 17, "text-anchor": "middle" }, String(at));
      }
      for (const [at, text] of labels || []) {
        if (at < view.x[0] || at > view.x[1]) continue;
        const where = `translate(${LEFT + right(at) + 4} ${TOP + PLOT + 14}) rotate(-45)`;
        add(svg, "text", { transform: where, "text-anchor": "end", class: "small" }, text);
      }
      add(svg, "text", { x: LEFT + width / 2, y: TOP + PLOT + tall - 6, "text-anchor": "middle" }, made.across || "");
      add(svg, "text", { transform: `translate(13 ${TOP + PLOT / 2}) rotate(-90)`, "text-anchor": "middle" }, made.high || "");
      add(svg, "path", { d: `M${LEFT} ${TOP}v${PLOT}h${width}`, stroke: "var(--line)", fill: "none" });
      plot = add(svg, "svg", { x: LEFT, y: TOP, width, height: PLOT, class: "plot" }); // which clips
      state.points = [];
      for (const one of traces) if (!state.hidden.has(one.group ?? one.name)) trace(one, right, down, width);
      for (const { y, color: shade, dash, text, isBelow } of levels) {
        const at = down(up(y));
        add(plot, "path", { d: `M0 ${at}h${width}`, stroke: `var(--${shade})`, "stroke-dasharray": DASHES[dash] || "none" });
        add(plot, "text", { x: 3, y: at + (isBelow ? 13 : -4), fill: `var(--${shade})`, class: "note" }, text);
      }
      for (const { x, color: shade, dash, text, isTop } of marks) {
        if (x < view.x[0] || x > view.x[1]) continue;
        const at = LEFT + right(x);
        add(svg, "path", { d: `M${at} ${TOP}v${PLOT}`, stroke: `var(--${shade})`, "stroke-dasharray": DASHES[dash] || "none" });
        const isLeft = right(x) > width / 2;
        const where = { x: at + (isLeft ? -3 : 3), y: isTop ? TOP - 7 : TOP + PLOT - 5, "text-anchor": isLeft ? "end" : "start" };
        add(svg, "text", { ...where, fill: `var(--${shade})`, class: isTop ? "note first" : "note" }, text);
      }
      box = add(plot, "rect", { class: "zoom", width: 0, height: 0 });
      state.ring = add(svg, "circle", { r: 7, class: "ring", hidden: "" });
      showLegend(traces);
      place.dataset.drawn = "yes";
    }

    function trace(one, right, down, width) {
      const { line, symbol, size = 5 } = one;
      let [path, dots, isOpen] = ["", "", false];
      const shape = SHAPES[symbol];
      one.x.forEach((x, i) => {
        const value = one.edge ? null : up(one.y[i]);
        if (value === null && !one.edge) { isOpen = false; return; }
        const [h, v] = [Number(right(x).toFixed(1)), one.edge ? (one.edge === "top" ? 6 : PLOT - 5) : Number(down(value).toFixed(1))];
        if (line) path += `${isOpen ? "L" : "M"}${h} ${v}`;
        if (symbol) dots += shape ? shape(h, v, size / 2) : `M${h} ${v}h0`;
        isOpen = true;
        if (one.words && h >= 0 && h <= width && v >= 0 && v <= PLOT) state.points.push([h, v, one, i]);
      });
      const shade = `var(--${one.color})`;
      if (line) add(plot, "path", { d: path, stroke: shade, fill: "none", "stroke-width": line, "stroke-dasharray": DASHES[one.dash] || "none" });
      const thick = shape ? 1.5 : size;
      if (symbol) add(plot, "path", { d: dots, stroke: shade, fill: symbol === "diamond" ? shade : "none", "stroke-width": thick, "stroke-linecap": "round", class: "points" });
    }

    function showLegend(traces) {
      const [named, buttons] = [new Set(), []];
      for (const one of traces) {
        const group = one.group ?? one.name;
        if (!one.name || one.inLegend === false || named.has(group)) continue;
        named.add(group);
        const button = document.createElement("button");
        const sign = document.createElement("span");
        sign.textContent = one.dash && one.line ? SIGNS[one.dash] : SIGNS[one.symbol] || "━";
        sign.style.color = `var(--${one.color})`;
        Object.assign(button, { type: "button", ariaPressed: String(!state.hidden.has(group)) });
        button.append(sign, ` ${clip(one.name, 60)}`);
        button.addEventListener("click", () => {
          if (!state.hidden.delete(group)) state.hidden.add(group);
          draw();
        });
        buttons.push(button);
      }
      legend.replaceChildren(...buttons);
    }

    const inPlot = (event) => {
      const frame = plot.getBoundingClientRect();
      const within = (value, most) => Math.min(Math.max(value, 0), most);
      return [within(event.clientX - frame.left, plot.width.baseVal.value), within(event.clientY - frame.top, PLOT)];
    };
    const nearest = ([x, y]) => state.points.reduce((best, one) => {
      const far = Math.hypot(one[0] - x, one[1] - y);
      return far < best[0] ? [far, one] : best;
    }, [NEAR, null])[1];

    function tell(at) {
      const found = nearest(at);
      tip.hidden = !found;
      state.ring.toggleAttribute("hidden", !found);
      if (!found) return;
      const [h, v, one, i] = found;
      tip.textContent = one.words(i);
      state.ring.setAttribute("cx", LEFT + h);
      state.ring.setAttribute("cy", TOP + v);
      tip.style.left = `${Math.max(0, Math.min(LEFT + h + 10, place.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${svg.offsetTop + TOP + v + 12}px`;
    }

    svg.addEventListener("pointerdown", (event) => {
      if (event.button || !event.target.closest(".plot, svg")) return;
      drag = inPlot(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const at = inPlot(event);
      if (!drag) return tell(at);
      const parts = { x: Math.min(at[0], drag[0]), y: Math.min(at[1], drag[1]), width: Math.abs(at[0] - drag[0]), height: Math.abs(at[1] - drag[1]) };
      for (const [name, value] of Object.entries(parts)) box.setAttribute(name, value);
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const [from, to] = [drag, inPlot(event)];
      drag = null;
      const sizes = [plot.width.baseVal.value, PLOT];
      const isLong = [0, 1].map((i) => Math.abs(to[i] - from[i]) >= 4);
      if (!isLong.includes(true)) { // a click, or a hand that shook
        const hit = nearest(to);
        if (hit && onClick) onClick(hit[2], hit[3]);
        return;
      }
      // A drag along one direction zooms that direction alone.
      const part = (name, i) => {
        const [low, high] = state.seen[name];
        if (!isLong[i]) return [low, high];
        const shares = [from[i], to[i]].map((at) => (i ? 1 - at / sizes[i] : at / sizes[i])).sort((a, b) => a - b);
        return shares.map((share) => low + share * (high - low));
      };
      state.view = { x: part("x", 0), y: part("y", 1) };
      draw();
    });
    svg.addEventListener("dblclick", () => { state.view = null; draw(); });
    Object.assign(state, { draw, tell });
    draw();
    onChange(draw);
  }

  // Lines as a page's data has them: {across, high, lines: [{name, color, dash, x, y, at, group, inLegend, isMark}]},
  // where `at` names each place, and without it the line's own name and x.
  function lines(id, { across, high, lines: given }) {
    const words = (one) => (i) => {
      const at = one.at ? one.at[i] : `${one.name}, ${across} ${one.x[i]}`;
      return `${clip(at, 90)}\n${one.side || one.name}: ${told(one.y[i])}`;
    };
    const isDotted = (one) => one.x.length <= 200 && one.dash !== "dashed";
    const traces = given.map((one) => ({
      ...one, words: words(one), line: one.isMark ? 0 : 1.6, size: one.isMark ? 11 : 5,
      symbol: one.isMark ? "open" : isDotted(one) ? (one.dash ? "open" : "circle") : "",
    }));
    chart(id, () => ({ across, high, traces }));
  }

  return { clip, color, told, onChange, charts, chart, lines };
})();

const data = JSON.parse(document.getElementById("data").textContent);
for (const [id, one] of Object.entries(data.charts || {})) drawing.lines(id, one);
