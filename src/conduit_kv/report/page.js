"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const NAMED = ["ink", "accent", "faint", "chance"];

function make(tag, text, into, name) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (name) element.className = name;
  if (into) into.append(element);
  return element;
}

// Colours that the figures leave to the theme have names.
function themed(value) {
  if (Array.isArray(value)) return value.map(themed);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [
      key,
      key === "color" && NAMED.includes(inner) ? css(inner)
        : key === "colorscale" && inner === "retention" ? scale() : themed(inner),
    ]));
  }
  return value;
}

function scale() {
  return root.dataset.theme === "dark"
    ? [[0, "#20262c"], [0.25, "#1f4a6b"], [0.6, "#3d8fc9"], [1, "#c9e8ff"]]
    : [[0, "#f1f3f7"], [0.25, "#bed6e8"], [0.6, "#3680ba"], [1, "#06265a"]];
}

const hidden = { curves: {}, pareto: {} };

function plot(id, figure, options) {
  const target = byId(id);
  const chips = byId(id + "-chips");
  byId(id + "-none").hidden = Boolean(figure);
  target.hidden = !figure;
  if (chips) chips.replaceChildren();
  if (!figure) return;
  const narrow = target.clientWidth < 560;
  const data = themed(figure.data);
  const known = hidden[id] || {};
  data.forEach((trace) => {
    if (trace.name in known) trace.visible = known[trace.name] ? "legendonly" : true;
    if (narrow && trace.colorbar) trace.showscale = false;
  });
  const axis = {
    gridcolor: css("grid"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true,
    tickfont: { size: narrow ? 11 : 12 },
  };
  const layout = themed(figure.layout);
  for (const name of ["xaxis", "yaxis"]) {
    layout[name] = { ...axis, ...layout[name] };
    layout[name].title = { standoff: 10, ...layout[name].title };
  }
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("ink") },
    margin: { l: narrow ? 46 : 60, r: 14, t: 14, b: 52 }, hovermode: "closest",
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } },
    dragmode: narrow ? false : "zoom",
  });
  if (options && options.names && narrow) {
    layout.yaxis.tickfont = { size: 9 };
  }
  if (figure.layout.height) target.style.minHeight = figure.layout.height + "px";
  Plotly.react(target, data, layout, { responsive: true, displayModeBar: false });
  if (!chips) return;
  data.forEach((trace, number) => {
    const button = make("button", null, chips);
    const mark = make("i", null, button, trace.mode === "markers" ? "dot" : "");
    mark.style.color = (trace.line || trace.marker).color;
    mark.style.borderTopColor = (trace.line || trace.marker).color;
    const dash = (trace.line || {}).dash;
    if (dash && dash !== "solid") mark.style.borderTopStyle = dash === "dot" ? "dotted" : "dashed";
    make("span", trace.name, button);
    const shown = trace.visible !== "legendonly";
    button.setAttribute("aria-pressed", String(shown));
    button.onclick = () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      known[trace.name] = !now;
      Plotly.restyle(target, { visible: now ? true : "legendonly" }, [number]);
    };
  });
}

function options(select, names, titles) {
  const before = select.value;
  select.replaceChildren();
  names.forEach((name, number) => {
    const option = make("option", titles ? titles[number] : name, select);
    option.value = name;
  });
  if (names.includes(before)) select.value = before;
}

const model = () => (byId("model") ? byId("model").value : DATA.models[0]);

function drawCurves() {
  const here = DATA.curves[model()];
  options(byId("curve-task"), Object.keys(here));
  plot("curves", here[byId("curve-task").value][byId("curve-value").value]);
}

function drawPareto() {
  const here = DATA.pareto[model()];
  options(byId("pareto-usage"), Object.keys(here), Object.values(here).map((each) => each.title));
  const chosen = here[byId("pareto-usage").value];
  plot("pareto", chosen ? chosen[byId("pareto-axis").value] : null);
}

function drawRetention() {
  const here = DATA.retention[model()] || {};
  options(byId("retention-task"), Object.keys(here));
  plot("retention", here[byId("retention-task").value], { names: true });
}

const pictures = {};
function picture(source) {
  pictures[source] ??= new Promise((resolve) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.src = source;
  });
  return pictures[source];
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// An image with its light taken where the chosen layers hold little of it.
async function shade(canvas, source, kept, layers, layer) {
  const image = await picture(source);
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const cells = (kept.data ??= bytes(kept.cells));
  const size = kept.rows * kept.columns;
  for (let cell = 0; cell < size; cell++) {
    let held = 0;
    if (layer < 0) {
      for (let each = 0; each < layers; each++) held += cells[each * size + cell] / layers;
    } else held = cells[layer * size + cell];
    const dark = 0.88 * (1 - Math.pow(held / 255, 0.6));
    if (dark < 0.004) continue;
    const row = Math.floor(cell / kept.columns), column = cell % kept.columns;
    const left = Math.round((column * canvas.width) / kept.columns);
    const top = Math.round((row * canvas.height) / kept.rows);
    const right = Math.round(((column + 1) * canvas.width) / kept.columns);
    const bottom = Math.round(((row + 1) * canvas.height) / kept.rows);
    context.fillStyle = `rgba(16,18,26,${dark})`;
    context.fillRect(left, top, right - left, bottom - top);
  }
}

const percent = (share) => (100 * share).toFixed(share < 0.095 ? 1 : 0) + " %";

function keptText(kept, layer) {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);
  const shares = kept.images.map((each) => (layer < 0 ? mean(each.share) : each.share[layer]));
  const text = layer < 0 ? mean(kept.text) : kept.text[layer];
  return `image ${percent(mean(shares))}, text ${percent(text)}`;
}

function answerLine(view, found) {
  if (!found) return;
  const line = make("p", null, view, "answer");
  const right = found[1] >= 1, wrong = found[1] <= 0;
  const mark = right ? "✓ " : wrong ? "✗ " : `${Math.round(100 * found[1])} % `;
  make("b", mark, line, right ? "up" : "down");
  line.append(found[0] || "(nothing)");
}

function drawSample() {
  const mine = DATA.samples.filter((sample) => sample.model === model());
  const select = byId("sample-item");
  options(select, mine.map((_, n) => String(n)), mine.map((s) => `${s.task}: ${s.item}`));
  byId("samples").hidden = !mine.length;
  const sample = mine[Number(select.value || 0)];
  if (!sample) return;
  const ask = byId("sample-ask");
  ask.replaceChildren();
  if (sample.first) make("p", `First: ${sample.first[0]}  ${sample.first[1]}`, ask, "soft");
  const line = make("p", null, ask);
  make("b", sample.question, line);
  make("p", `Right answer: ${sample.answer}`, ask);
  const plans = Object.keys(sample.kept);
  const layers = plans.length ? Object.values(sample.kept[plans[0]])[0].layers : 1;
  const slider = byId("sample-layer");
  slider.max = layers - 1;
  const layer = Number(slider.value);
  byId("sample-layer-name").textContent =
    layer < 0 ? `mean of all ${layers} layers` : `layer ${layer}`;
  const grid = byId("sample-views");
  grid.replaceChildren();
  const many = Math.min(sample.images.length, 4);
  const box = (title) => {
    const view = make("div", null, grid, "view");
    make("code", title, make("h3", null, view));
    const images = make("div", null, null, "images");
    images.style.gridTemplateColumns = `repeat(${many > 1 ? Math.ceil(Math.sqrt(sample.images.length)) : 1}, 1fr)`;
    return [view, images];
  };
  const [whole, shown] = box("full");
  make("div", "everything is kept", whole, "small soft");
  whole.append(shown);
  sample.images.forEach((source, n) => {
    const image = make("img", null, shown);
    image.src = source;
    image.alt = `image ${n + 1}`;
  });
  answerLine(whole, sample.answers.full);
  for (const plan of plans) {
    const stages = Object.entries(sample.kept[plan]);
    stages.forEach(([stage, kept], number) => {
      const last = number === stages.length - 1;
      const [view, images] = box(plan);
      const which = stages.length > 1 ? `after ${stage}: ` : "";
      make("div", which + keptText(kept, layer), view, "small soft");
      view.append(images);
      kept.images.forEach((each, n) => {
        const canvas = make("canvas", null, images);
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", `image ${n + 1}: ${percent(each.share.reduce((a, b) => a + b, 0) / each.share.length)} kept`);
        shade(canvas, sample.images[n], each, kept.layers, layer);
      });
      if (last) answerLine(view, sample.answers[plan]);
    });
  }
}

function drawAll() {
  document.querySelectorAll("[data-model]").forEach((part) => {
    part.hidden = part.dataset.model !== model();
  });
  drawCurves();
  drawPareto();
  drawRetention();
  drawSample();
}

function setTheme(theme) {
  root.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(system.matches ? "dark" : "light");
system.addEventListener("change", () => { setTheme(system.matches ? "dark" : "light"); drawAll(); });
byId("theme").onclick = () => {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  drawAll();
};
for (const [id, draw] of [
  ["model", drawAll], ["curve-task", drawCurves], ["curve-value", drawCurves],
  ["pareto-usage", drawPareto], ["pareto-axis", drawPareto], ["retention-task", drawRetention],
  ["sample-item", drawSample],
]) {
  if (byId(id)) byId(id).addEventListener("change", draw);
}
byId("sample-layer").addEventListener("input", drawSample);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) { width = innerWidth; drawCurves(); drawPareto(); drawRetention(); }
});
drawAll();
