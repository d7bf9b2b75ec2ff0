"use strict";

// Names come from checkpoints: into the page they go as text, by textContent or by escaped().

const FIELDS = ["part", "name", "dtype", "shape", "nbytes", "otherNames", "where", "min", "max", "mean", "norm", "nan", "inf", "zeros", "histogram", "update"];
const BOXES_MAX = 300; // More cannot be told apart, and Plotly takes seconds to draw thousands.
const EXPONENT_BIAS = 1024; // as in reporting/values.py
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function escaped(text) {
  return String(text).replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);
}

function size(nbytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; nbytes >= 1024 && unit < units.length - 1; unit++) nbytes /= 1024;
  return unit ? `${nbytes.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ${units[unit]}` : `${nbytes} bytes`;
}

const count = (number) => number.toLocaleString("en");
const share = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)} %`;

function number(value) {
  if (value === null || value === undefined) return "–";
  const plain = value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6);
  return plain ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

async function unpacked(id) {
  const packed = atob(byId(`packed-${id}`).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function asScript(text) {
  return URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
}

function loaded(url) {
  return new Promise((resolve, reject) => {
    const script = element("script");
    script.onload = resolve;
    script.onerror = () => reject(new Error("the charts could not be loaded"));
    script.src = url;
    document.head.append(script);
  });
}

// Colors and charts

function color(name) {
  document.body.append((color.probe ??= element("span")));
  color.probe.style.color = `var(--${name})`;
  const found = getComputedStyle(color.probe).color;
  color.probe.remove();
  return found;
}

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" || (getComputedStyle(document.documentElement).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

function palette() {
  return isDark()
    ? ["#2f6cb0", "#9a5a1e", "#2f7d4c", "#81509a", "#9a4343", "#5e6875", "#6f6a24", "#257c82"]
    : ["#8db8e8", "#f2b880", "#94d3a8", "#d3aee6", "#eda3a3", "#c0c8d2", "#d6d07f", "#8ed3d8"];
}

const charts = new Map(); // from the id of an element to the function that draws it

function draw(id, drawing) {
  charts.set(id, drawing);
  drawing();
}

function plot(target, traces, layout) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true };
  const { xaxis, yaxis, ...others } = layout;
  const common = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("text"), family: "system-ui, sans-serif", size: 13 },
    margin: { t: 10, r: 10, b: 40, l: 60 },
    hoverlabel: { bgcolor: color("raised"), bordercolor: color("line"), font: { color: color("text") } },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
  return Plotly.react(target, traces, { ...common, ...others }, { displayModeBar: false, responsive: true });
}

// Plotly takes tags and entities in its texts for markup.
const asLabel = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function fill(table, headings, rows) {
  const head = element("tr", {}, ...headings.map((one, i) => element("th", { scope: "col", ...(i && { class: "number" }) }, one)));
  const body = rows.map(([first, ...others]) => element("tr", {}, element("th", { scope: "row" }, element("code", {}, first)), ...others.map((one) => element("td", { class: "number" }, one))));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

// The treemap

class Treemap {
  constructor({ labels, parents, nbytes, tensors }) {
    Object.assign(this, { labels, parents, nbytes, tensors, at: 0 });
    this.children = labels.map(() => []);
    parents.forEach((parent, i) => parent >= 0 && this.children[parent].push(i));
    this.part = parents.map(() => -1); // which of the root's children a node belongs to
    parents.forEach((parent, i) => (this.part[i] = parent < 0 ? -1 : parent === 0 ? this.children[0].indexOf(i) : this.part[parent]));
  }

  /* The nodes that are drawn: those around the one that is shown, itself, what is directly in it, and what is in that,
     as deep as there are few enough boxes. */
  drawn() {
    const found = this.way();
    let level = this.children[this.at];
    for (let levels = 1; level.length && (levels === 1 || found.length + level.length <= BOXES_MAX); levels++) {
      found.push(...level);
      level = level.flatMap((one) => this.children[one]);
    }
    return found;
  }

  /* From the root to the node that is shown. */
  way() {
    const found = [];
    for (let one = this.at; one >= 0; one = this.parents[one]) found.unshift(one);
    return found;
  }

  draw() {
    const colors = palette();
    const drawn = this.drawn();
    plot(
      "treemap",
      [
        {
          type: "treemap",
          ids: drawn.map(String),
          labels: drawn.map((i) => asLabel(this.labels[i])),
          parents: drawn.map((i) => (this.parents[i] < 0 ? "" : String(this.parents[i]))),
          values: drawn.map((i) => this.nbytes[i]),
          branchvalues: "total",
          level: String(this.at),
          customdata: drawn.map((i) => size(this.nbytes[i])),
          texttemplate: "%{label}<br>%{customdata}",
          hovertemplate: "%{label}<br>%{customdata}, %{percentRoot} of all<extra></extra>",
          marker: { colors: drawn.map((i) => (i ? colors[this.part[i] % colors.length] : color("raised"))), line: { color: color("ground"), width: 1 }, pad: { t: 22, l: 3, r: 3, b: 3 } },
          textfont: { color: isDark() ? "#ffffff" : "#1b2027" },
          pathbar: { visible: true, textfont: { color: color("text") } },
          tiling: { pad: 1 },
        },
      ],
      { margin: { t: 26, r: 0, b: 0, l: 0 } },
    );
  }

  begin() {
    draw("treemap", () => this.draw());
    byId("treemap").on("plotly_treemapclick", ({ nextLevel, points }) => {
      const node = Number(nextLevel ?? points[0].id);
      if (this.children[node].length) this.show(node);
      return false; // Plotly itself would show no more than what was drawn already.
    });
  }

  show(node) {
    this.list(node);
    this.draw();
  }

  /* Shows in the table what is in a node. */
  list(node) {
    this.at = node;
    const steps = this.way().map((one) => {
      const button = element("button", { type: "button", ...(one === node && { "aria-current": "true" }) }, this.labels[one]);
      button.onclick = () => this.show(one);
      return button;
    });
    byId("way").replaceChildren(...steps.flatMap((step, i) => (i ? [" › ", step] : [step])));
    const inside = [...this.children[node]].sort((a, b) => this.nbytes[b] - this.nbytes[a]);
    const rows = inside.map((one) => {
      const name = this.children[one].length ? element("button", { type: "button" }, this.labels[one]) : element("code", {}, this.labels[one]);
      if (this.children[one].length) name.onclick = () => { this.show(one); byId("way").querySelector("[aria-current]").focus(); };
      const cells = [size(this.nbytes[one]), share(this.nbytes[one], this.nbytes[0]), count(this.tensors[one])];
      return element("tr", {}, element("td", {}, name), ...cells.map((cell, i) => element("td", { class: i === 2 ? "number wide" : "number" }, cell)));
    });
    byId("modules").tBodies[0].replaceChildren(...rows);
    byId("said").textContent = `${this.labels[node]}: ${size(this.nbytes[node])}, ${count(this.tensors[node])} tensors`;
  }
}

// Bytes by rank

function showRanks(rankBytes) {
  const parts = Object.keys(rankBytes);
  const ranks = (rankBytes[parts[0]] ?? []).map((_, rank) => rank);
  draw("rank-chart", () => {
    const colors = palette();
    const traces = parts.map((part, i) => ({
      type: "bar",
      name: asLabel(part),
      x: ranks,
      y: rankBytes[part],
      customdata: rankBytes[part].map(size),
      hovertemplate: "rank %{x}: %{customdata}",
      marker: { color: colors[i % colors.length] },
    }));
    const most = Math.max(0, ...ranks.map((rank) => parts.reduce((sum, part) => sum + rankBytes[part][rank], 0)));
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((one) => one * most);
    plot("rank-chart", traces, { barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.15, traceorder: "normal" }, xaxis: { title: { text: "rank" }, ...(ranks.length < 20 && { dtick: 1 }) }, yaxis: { tickvals: ticks, ticktext: ticks.map((one) => size(Math.round(one))) } });
  });
  fill(byId("rank-table"), ["rank", ...parts, "all"], ranks.map((rank) => [String(rank), ...parts.map((part) => size(rankBytes[part][rank])), size(parts.reduce((sum, part) => sum + rankBytes[part][rank], 0))]));
}

// The table of tensors

/* The bins of a histogram without gaps, from the least number to the greatest one; a bin of zeros between the signs. */
function bins({ histogram, zeros }) {
  const found = new Map(histogram);
  const keys = [...found.keys()];
  const spans = [-1, 1].map((sign) => keys.filter((key) => key * sign > 0));
  const filled = spans.map((own) => own.length && Array.from({ length: Math.max(...own) - Math.min(...own) + 1 }, (_, i) => Math.min(...own) + i));
  const bounds = (key) => {
    const low = 2 ** (Math.abs(key) - EXPONENT_BIAS);
    return key > 0 ? `from ${number(low)} to ${number(2 * low)}` : `from ${number(-2 * low)} to ${number(-low)}`;
  };
  const as = (own) => (own || []).map((key) => ({ text: bounds(key), key, count: found.get(key) ?? 0 }));
  return [...as(filled[0]), ...(zeros ? [{ text: "zero", key: 0, count: zeros }] : []), ...as(filled[1])];
}

function miniature(tensor) {
  const all = bins(tensor);
  if (!all.length) return "";
  const most = Math.max(...all.map((one) => one.count));
  const width = 110 / all.length;
  const path = all.map((one, i) => `M${(i * width).toFixed(1)} 24v${(-23 * one.count / most).toFixed(1)}h${width.toFixed(1)}V24z`).join("");
  return `<svg class="mini" width="110" height="25" viewBox="0 0 110 25" aria-hidden="true"><path d="${path}"/></svg>`;
}

function ranksOf(where) {
  if (!where) return "";
  const [ranks, first, last] = where;
  return ranks === 1 ? String(first) : ranks === last - first + 1 ? `${first}-${last}` : `${ranks} of ${first}-${last}`;
}

function details(tensor, id) {
  const { where, update } = tensor;
  const numel = tensor.shape.reduce((product, one) => product * one, 1);
  const facts = [
    ["key", `${tensor.part}/${tensor.name}`],
    ...(tensor.otherNames.length ? [["also named", tensor.otherNames.join(", ")]] : []),
    ["dtype", tensor.dtype],
    ["shape", `[${tensor.shape.join(", ")}]`],
    ["elements", count(numel)],
    ["size", `${count(tensor.nbytes)} bytes`],
    ...(where ? [["ranks", ranksOf(where)], ["pieces", count(where[3])], ["tiers", where[4]]] : []),
  ];
  if (tensor.histogram) {
    facts.push(...["min", "max", "mean", "norm"].map((name) => [name, number(tensor[name])]));
    facts.push(["NaN", count(tensor.nan)], ["infinite", count(tensor.inf)], ["zeros", `${count(tensor.zeros)} (${share(tensor.zeros, numel)})`]);
    if (update) facts.push(["norm of the update", number(update[0])], ["elements changed", `${count(update[1])} (${share(update[1], numel)})`]);
  }
  const list = element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, element("code", {}, value))]));
  const made = element("div", { class: "details", id }, list);
  if (tensor.histogram?.length || tensor.zeros) {
    const all = bins(tensor);
    const chart = element("div", { class: "chart lower", role: "img", "aria-label": "Histogram of the values. The table below shows the same.", id: `${id}-chart` });
    const table = element("table");
    fill(table, ["values", "elements"], all.map((one) => [one.text, count(one.count)]));
    made.append(element("div", {}, chart, element("p", {}, "Each bar counts the elements between a power of two and the next one. Those below zero are on the left."), element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll low", tabindex: "0", role: "region", "aria-label": "Histogram" }, table))));
    made.draw = () => {
      const labelled = Math.max(1, Math.ceil(all.length / 10));
      const ticks = all.map((one, i) => i).filter((i) => i % labelled === 0);
      const bound = (key) => (key ? `${key < 0 ? "−" : ""}2<sup>${Math.abs(key) - EXPONENT_BIAS}</sup>` : "0");
      plot(chart, [{ type: "bar", x: all.map((_, i) => i), y: all.map((one) => one.count), customdata: all.map((one) => one.text), hovertemplate: "%{customdata}<br>%{y:,} elements<extra></extra>", marker: { color: color("bar") } }], { bargap: 0.05, xaxis: { tickvals: ticks, ticktext: ticks.map((i) => bound(all[i].key)) }, yaxis: { title: { text: "elements" } } });
    };
  }
  return made;
}

function showTensors(rows, withValues, DataTable) {
  const tensors = rows.map((row) => Object.fromEntries(FIELDS.map((name, i) => [name, row[i]])));
  const numeric = (title, read, show = number, wide = false) => ({
    title,
    className: wide ? "number wide" : "number",
    searchable: false,
    type: "num",
    data: (tensor, type) => (type === "display" ? escaped(show(read(tensor))) : read(tensor) ?? -Infinity),
  });
  const text = (title, read, className = "") => ({
    title,
    className,
    type: "string",
    data(tensor, type) {
      if (type === "display") return `<code>${escaped(read(tensor)).replace(/[./_]/g, "$&<wbr>")}</code>`;
      return type === "filter" ? escaped(read(tensor)) : read(tensor); // What it searches, DataTables takes for markup.
    },
  });
  const statistic = (title, name, show, wide) => numeric(title, (tensor) => tensor[name], (value) => (value === undefined ? "" : show ? show(value) : number(value)), wide);
  const hasUpdates = tensors.some((tensor) => tensor.update);
  const columns = [
    { title: '<span class="hidden">Details</span>', orderable: false, searchable: false, data: (tensor) => `<button type="button" class="more" aria-expanded="false" aria-label="details of ${escaped(tensor.part)}/${escaped(tensor.name)}">+</button>` },
    text("key", (tensor) => `${tensor.part}/${tensor.name}`, "key"),
    { ...text("dtype", (tensor) => tensor.dtype, "wide"), searchable: false },
    { ...text("shape", (tensor) => `[${tensor.shape.join(", ")}]`, "wide whole"), searchable: false, orderable: false },
    numeric("size", (tensor) => tensor.nbytes, size),
    ...(withValues
      ? [
          statistic("min", "min", null, true),
          statistic("max", "max", null, true),
          statistic("mean", "mean", null, true),
          statistic("norm", "norm"),
          statistic("zeros", "zeros", count, true),
          numeric("not finite", (tensor) => tensor.nan + tensor.inf, (value) => (Number.isNaN(value) ? "" : count(value)), true),
          ...(hasUpdates ? [numeric("update", (tensor) => tensor.update?.[0], (value) => (value === undefined ? "" : number(value)), true)] : []),
          { title: "histogram", orderable: false, searchable: false, className: "wide", data: (tensor, type) => (type === "display" && tensor.histogram ? miniature(tensor) : "") },
        ]
      : []),
  ];
  const table = new DataTable("#tensor-table", {
    data: tensors,
    columns,
    order: [],
    pageLength: 25,
    autoWidth: false,
    layout: { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" },
    language: { search: "Search keys ", searchPlaceholder: "such as layers.3 mlp", lengthMenu: "_MENU_ rows" },
  });
  byId("part").onchange = ({ target }) => {
    const chosen = target.value;
    table.search.fixed("part", chosen ? (_, tensor) => tensor.part === chosen : null).draw();
  };
  byId("tensor-table").addEventListener("click", ({ target }) => {
    const button = target.closest("button.more");
    if (!button) return;
    const row = table.row(button.closest("tr"));
    const id = `details-${row.index()}`;
    const open = !row.child.isShown();
    if (open) {
      const made = details(row.data(), id);
      row.child(made).show();
      if (made.draw) draw(id, made.draw);
    } else {
      row.child.hide();
      charts.delete(id);
    }
    row.node().classList.toggle("shown", open);
    button.textContent = open ? "−" : "+";
    button.setAttribute("aria-expanded", String(open));
  });
}

// Layers over training steps

function showLayers({ names, parts, norms, updates }, steps) {
  const chosen = () => {
    const part = byId("layer-part").selectedIndex;
    const measure = byId("measure").value;
    const wanted = byId("layer-filter").value.trim().toLowerCase();
    const of = names.map((name, layer) => {
      const norm = norms[part][layer];
      const update = updates[part][layer];
      const relative = update.map((value, i) => (value !== null && norm[i - 1] ? value / norm[i - 1] : null));
      return { name, layer, values: { norm, update, relative }[measure] };
    });
    return of.filter(({ name, values }) => name.toLowerCase().includes(wanted) && values.some((value) => value !== null));
  };
  const show = () => {
    const found = chosen();
    const of = (i) => `hsl(${Math.round(250 - (250 * i) / Math.max(1, names.length - 1))} 70% ${isDark() ? 65 : 42}%)`;
    const traces = found.map(({ name, layer, values }) => ({
      type: "scatter",
      mode: "lines+markers",
      name: asLabel(name),
      x: steps,
      y: values,
      line: { color: of(layer), width: 1.5 },
      marker: { size: 6 },
      hovertemplate: "step %{x}: %{y:.4g}",
    }));
    const measure = byId("measure").selectedOptions[0].textContent;
    plot("layer-chart", traces, { showlegend: innerWidth > 700 && found.length <= 40, hovermode: "closest", xaxis: { title: { text: "step" }, tickvals: steps.length <= 12 ? steps : undefined }, yaxis: { title: { text: measure }, type: byId("log").checked ? "log" : "linear", exponentformat: "power" } });
    fill(byId("layer-table"), ["layer", ...steps.map((step) => `step ${count(step)}`)], found.map(({ name, values }) => [name, ...values.map(number)]));
  };
  for (const id of ["layer-part", "measure", "log"]) byId(id).onchange = show;
  byId("layer-filter").oninput = show;
  draw("layer-chart", show);
}

async function main() {
  for (const one of document.querySelectorAll("data")) one.textContent = size(Number(one.value));
  const redraw = () => charts.forEach((drawing) => drawing());
  byId("theme").onchange = ({ target }) => {
    document.documentElement.dataset.theme = target.value;
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const [text, table, plotly] = await Promise.all(["data", "datatables", "plotly"].map(unpacked));
  const data = JSON.parse(text);
  const treemap = new Treemap(data.treemap);
  treemap.list(0);
  const { default: DataTable } = await import(asScript(table));
  showTensors(data.tensors, data.withValues, DataTable);
  await loaded(asScript(plotly));
  treemap.begin();
  showRanks(data.rankBytes);
  if (data.layers) showLayers(data.layers, data.steps);
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
}

main();
