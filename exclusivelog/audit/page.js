"use strict";
// Draws each chart once it comes near the window, in the colours of page.css. While one zooms, the
// tenures of the stretch of time in view are merged anew: those closer than a pixel are one bar.

const ROW = 26, LOAD = 150, SILENCE = 120, SPACE = 44;
const TICKS = [1, 10, 100, 1e3, 1e4, 6e4, 6e5, 3.6e6, 3.6e7, 3.6e8];
const TEXTS = ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min", "1 h", "10 h", "100 h"];
const COARSE = matchMedia("(pointer: coarse)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lane = (chart, index) =>
  colour(chart.lanes[index].endsWith(" others") ? "--others" : `--c${index % 8}`);
const short = (name, most) => (name.length > most ? name.slice(0, most - 1) + "\u2026" : name);
// Plotly takes some markup in texts; names are shown as they are.
const plain = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function lasting(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${+s.toPrecision(3)} s`;
  return s < 7200 ? `${+(s / 60).toPrecision(3)} min` : `${+(s / 3600).toPrecision(3)} h`;
}

function inView(chart, view, width) {
  const [from, to] = view, apart = (1.5 * (to - from)) / width, last = [], found = [];
  for (const [place, start, end, count, text] of chart.bars) {
    if (end < from || start > to) continue;
    const before = last[place];
    if (before && start - before.end < apart) {
      before.end = Math.max(before.end, end);
      before.count += count;
      before.text = "";
    } else {
      found.push((last[place] = { place, start, end, count, text }));
    }
  }
  const least = apart / 1.5;  // a pixel: what is shorter would not be seen
  for (const bar of found) bar.end = Math.max(bar.end, bar.start + least);
  return found;
}

function spans(chart, rows, name, found, fill, view, width) {
  const least = (2 * (view[1] - view[0])) / width;
  const lengths = found.map(([from, to]) => to - from);
  return {
    type: "bar", orientation: "h", yaxis: "y", showlegend: false, width: 0.62,
    y: found.map(() => rows.indexOf(name)), base: found.map(([from]) => chart.start + from),
    x: lengths.map((ms) => Math.max(ms, least)), marker: { color: fill },
    customdata: lengths.map((ms) => `${name} for ${lasting(ms)}`),
    hovertemplate: "%{customdata}<extra></extra>",
  };
}

function traces(chart, rows, view, width) {
  const bars = inView(chart, view, width), first = rows.length - chart.lanes.length;
  const found = [{
    type: "bar", orientation: "h", yaxis: "y", showlegend: false, width: 0.62,
    y: bars.map((bar) => first + bar.place), base: bars.map((bar) => chart.start + bar.start),
    x: bars.map((bar) => bar.end - bar.start),
    marker: { color: bars.map((bar) => lane(chart, bar.place)) },
    customdata: bars.map((bar) => `${plain(chart.lanes[bar.place])}<br>` +
      (plain(bar.text) || `${bar.count.toLocaleString("en")} leaderships`)),
    hovertemplate: "%{customdata}<extra></extra>",
  }];
  if (chart.gaps.length) {
    found.push(spans(chart, rows, "no leader", chart.gaps, colour("--bad"), view, width));
  }
  if (chart.pauses.length) {
    found.push(spans(chart, rows, "no message", chart.pauses, colour("--pause"), view, width));
  }
  for (const crashed of [0, 1]) {
    const marks = chart.marks.filter((mark) => mark[2] === crashed);
    if (!marks.length) continue;
    found.push({
      type: "scatter", mode: "markers", yaxis: "y", showlegend: false,
      x: marks.map((mark) => chart.start + mark[1]), y: marks.map((mark) => first + mark[0]),
      marker: crashed
        ? { symbol: "x-thin", size: 9, line: { width: 2.5, color: colour("--bad") } }
        : { symbol: "diamond-open", size: 9, color: colour("--text"), line: { width: 1.5 } },
      hovertemplate: `${crashed ? "crashed or unresponsive" : "fenced or moved"}<extra></extra>`,
    });
  }
  if (chart.load) found.push(...load(chart));
  if (chart.silences.length) found.push(silences(chart));
  return found;
}

function load(chart) {
  const { first, step, counts } = chart.load;
  return counts.flatMap((numbers, index) => (numbers.some(Boolean) ? [{
    type: "scatter", mode: "lines", yaxis: "y2", stackgroup: "load", name: plain(chart.lanes[index]),
    showlegend: false, line: { width: 0, shape: "hv" }, fillcolor: lane(chart, index),
    x: [...numbers, 0].map((_, place) => chart.start + first + place * step),
    y: [...numbers, 0].map((count) => (count * 1000) / step),
    hovertemplate: "%{y:.3s}/s<extra>%{fullData.name}</extra>",
  }] : []));
}

function silences(chart) {
  const found = chart.silences;
  return {
    type: "scatter", mode: "markers", yaxis: "y3", showlegend: false,
    x: found.map((one) => chart.start + one[0]), y: found.map((one) => Math.max(1, one[1])),
    marker: { size: 7, color: found.map((one) => colour(one[2] ? "--bad" : "--soft")) },
    customdata: found.map((one) => `${plain(one[3])}<br>${lasting(one[1])} without a message`),
    hovertemplate: "%{customdata}<extra></extra>",
  };
}

function layout(chart, rows, view, figure) {
  const narrow = figure.clientWidth < 560, heights = [rows.length * ROW];
  const titles = ["Who led"];
  if (chart.load) {
    heights.push(LOAD);
    const { step } = figure.closest("figure").dataset;
    titles.push("Messages per second" + (narrow ? "" : `, in steps of ${step}`));
  }
  if (chart.silences.length) {
    heights.push(SILENCE);
    titles.push("Silence at each take-over");
  }
  const total = heights.reduce((sum, one) => sum + one + SPACE, 0) - SPACE;
  const axis = {
    fixedrange: true, gridcolor: colour("--line"), zeroline: false, automargin: false,
    linecolor: colour("--axis"),
  };
  const found = {
    height: total + 76, margin: { l: narrow ? 92 : 140, r: narrow ? 8 : 16, t: 26, b: 50 },
    paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"), barmode: "overlay",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--soft") },
    dragmode: COARSE.matches ? false : "zoom", hovermode: "closest", annotations: [],
    hoverlabel: { bgcolor: colour("--back"), bordercolor: colour("--axis"),
                  font: { color: colour("--text"), size: 13 }, align: "left" },
    xaxis: { ...axis, fixedrange: COARSE.matches, type: "date", showgrid: true, tickangle: 0,
             range: view.map((ms) => chart.start + ms), nticks: narrow ? 4 : 9 },
  };
  let top = 1;
  heights.forEach((height, index) => {
    const domain = [Math.max(0, top - height / total), top];
    found[index ? `yaxis${axisOf(chart, index)}` : "yaxis"] = { ...axis, domain };
    found.annotations.push({
      text: `<b>${titles[index]}</b>`, xref: "paper", yref: "paper", x: 0, xanchor: "left", y: top,
      yanchor: "bottom", yshift: 4, showarrow: false,
      font: { size: narrow ? 12 : 13, color: colour("--text") },
    });
    top = domain[0] - SPACE / total;
  });
  const last = heights.length === 1 ? "" : axisOf(chart, heights.length - 1);
  found.xaxis.anchor = `y${last}`;
  Object.assign(found.yaxis, {
    range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, index) => index),
    ticktext: rows.map((name) => plain(short(name, narrow ? 12 : 19))), showgrid: false,
    tickfont: { color: colour("--text"), size: 12 },
  });
  if (found.yaxis2) Object.assign(found.yaxis2, { rangemode: "tozero", tickformat: "~s", nticks: 5 });
  if (found.yaxis3) {
    const longest = Math.max(...chart.silences.map((one) => one[1]), 10);
    Object.assign(found.yaxis3, { type: "log", tickvals: TICKS, ticktext: TEXTS,
                                  range: [-0.1, Math.log10(longest) + 0.15] });
  }
  return found;
}

const axisOf = (chart, index) => (index === 1 && chart.load ? "2" : "3");

class Picture {
  constructor(figure) {
    this.figure = figure;
    this.place = figure.querySelector(".chart");
    this.chart = JSON.parse(figure.querySelector("script").textContent);
    const { chart } = this;
    this.rows = [
      ...(chart.gaps.length ? ["no leader"] : []), ...(chart.pauses.length ? ["no message"] : []),
      ...chart.lanes,
    ];
    const edge = 0.01 * chart.end;
    this.whole = this.view = [-edge, chart.end + edge];
    this.drawn = false;
    const rows = this.rows.length * ROW + (chart.load ? LOAD + SPACE : 0) +
      (chart.silences.length ? SILENCE + SPACE : 0);
    this.place.style.minHeight = `${rows + 76}px`;
    for (const button of figure.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => this.zoom(button.dataset.zoom));
    }
  }

  draw() {
    const { chart, place, rows, view } = this;
    this.width = place.clientWidth;
    Plotly.react(place, traces(chart, rows, view, Math.max(200, place.clientWidth - 150)),
      { ...layout(chart, rows, view, place), width: this.width }, { displayModeBar: false, responsive: false });
    if (!this.drawn) {
      this.drawn = true;
      place.on("plotly_relayout", (change) => this.relaid(change));
    }
  }

  relaid(change) {
    const ends = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (ends[0] !== undefined && ends[1] !== undefined) {
      this.look(ends.map((time) => new Date(`${time}`.replace(" ", "T") + "Z") - this.chart.start));
    } else if (change["xaxis.autorange"]) {
      this.look(this.whole);
    }
  }

  zoom(how) {
    const [from, to] = this.view, length = to - from, { view } = this;
    this.look({
      in: [from + length / 4, to - length / 4], out: [from - length / 2, to + length / 2],
      earlier: [from - length / 2, to - length / 2], later: [from + length / 2, to + length / 2],
      all: this.whole,
    }[how] || view);
  }

  look([from, to]) {
    const [first, last] = this.whole, most = last - first;
    const length = Math.min(Math.max(to - from, 2), most);
    const start = Math.min(Math.max(from, first), last - length);
    this.view = [start, start + length];
    this.draw();
  }
}

const pictures = [...document.querySelectorAll("figure")].map((figure) => new Picture(figure));
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    pictures.find((picture) => picture.figure === entry.target).draw();
  }
}, { rootMargin: "400px" });
pictures.forEach((picture) => near.observe(picture.figure));

const again = () => pictures.filter((picture) => picture.drawn).forEach((picture) => picture.draw());
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const picture = pictures.find((one) => one.place === target);
    if (picture.drawn && picture.width !== target.clientWidth) picture.draw();
  }
});
pictures.forEach((picture) => resized.observe(picture.place));
DARK.addEventListener("change", again);
COARSE.addEventListener("change", again);

const all = () => pictures.forEach((picture) => picture.draw());
matchMedia("print").addEventListener("change", all);
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  all();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  all();
});
