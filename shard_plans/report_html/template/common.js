// Helpers of all parts. Text only ever becomes text nodes: names in the data are a stranger's.
const report = JSON.parse(document.getElementById("data").textContent);

function make(tag, attributes = {}, ...inside) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...inside.map((part) => (part instanceof Node ? part : String(part))));
  return found;
}

function draw(tag, attributes = {}, ...inside) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...inside);
  return found;
}

function put(id, ...inside) {
  document.getElementById(id).replaceChildren(...inside);
}

const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

function bytes(count) {
  for (const [unit, scale] of UNITS) if (Math.abs(count) >= scale) return `${(count / scale).toPrecision(3)} ${unit}`;
  return `${count} B`;
}

function seconds(value) {
  return value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
}

function number(value) {
  return Math.round(value).toLocaleString("en");
}

function percent(value) {
  return `${Math.round(value * 100)} %`;
}

function change(theirs, ours) {
  const part = (theirs / ours - 1) * 100;
  return `${part < 0 ? "\u2212" : "+"}${Math.abs(part).toFixed(1)} %`;
}

// A table of rows of cells; columns: [heading, is a number].
function table(columns, rows) {
  const head = make("tr", {}, ...columns.map(([name, right]) => make("th", { scope: "col", class: right ? "number" : "" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, at) => make("td", { class: columns[at][1] ? "number" : "" }, cell))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

const tip = document.getElementById("tip");

function tips(element, words) {
  element.addEventListener("pointermove", (event) => {
    const text = words(event);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const top = event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  });
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
}

// Ticks at round numbers, at most `most` of them.
function ticks(largest, most) {
  const rough = largest / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const found = [];
  for (let at = 0; at <= largest; at += step) found.push(at);
  return found;
}

// What depends on the width or on the colours; called again when either changes.
const redraws = [];

function drawn(show) {
  redraws.push(show);
  show();
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  redraws.forEach((redraw) => redraw());
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redraws.forEach((redraw) => redraw());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
