"use strict";
// All that the viewer's pages do by themselves; what a page shows comes from the server.

const root = document.documentElement;
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

// Dark or light: as the system says, until a reader says otherwise.
const chosen = localStorage.getItem("theme");
if (chosen) root.dataset.theme = chosen;
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
one("#theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  drawAll();
});

// The twin of a page: what it shows, as JSON.
for (const twin of all("[data-twin]")) {
  twin.href = location.pathname + ".json" + location.search;
}

// What scrolls sideways is scrolled by keys too, once it has the focus.
new ResizeObserver(() => {
  for (const box of all("section, .wide")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}).observe(document.body);

// Keys: rows by j and k, what they lead to by Enter, up by u.
let at = -1;
function go(by) {
  const rows = all(".rows tbody tr").filter((row) => one("a", row));
  if (!rows.length) return;
  rows[at]?.classList.remove("at");
  at = Math.min(Math.max(at + by, 0), rows.length - 1);
  rows[at].classList.add("at");
  one("a", rows[at]).focus();
  rows[at].scrollIntoView({ block: "nearest" });
}
const keys = {
  j: () => go(1),
  k: () => go(-1),
  u: () => all("[data-up]").at(-1)?.click(),
  "/": () => one("input[type=search]")?.focus(),
  "?": () => one("#keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const act = keys[event.key];
  if (act) { event.preventDefault(); act(); }
});
one("#help").addEventListener("click", keys["?"]);

// Forms that write to the log: their fields as JSON, and the part of the page they stand in is asked for anew.
const parsed = (text) => { try { return JSON.parse(text); } catch { return text; } };
document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-write]");
  if (!form) return;
  event.preventDefault();
  const fields = {};
  for (const [name, text] of new FormData(form, event.submitter)) {
    if (text !== "") fields[name] = "json" in (form.elements[name].dataset ?? {}) ? parsed(text) : text;
  }
  const headers = { "content-type": "application/json" };
  const reply = await fetch(form.dataset.write, { method: "POST", headers, body: JSON.stringify(fields) });
  const { error } = await reply.json();
  one("output", form).textContent = error ? error.message : "written";
  if (!error) form.closest("[hx-get]")?.dispatchEvent(new Event("written"));
});

// Curves of a run: a panel a metric, drawn again in the colours of the theme.
const panels = [];
function drawPanel({ place, steps, sides, name, to }) {
  const ink = getComputedStyle(root);
  const [dim, line, link] = ["--dim", "--line", "--link"].map((colour) => ink.getPropertyValue(colour));
  const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, font: "11px system-ui" };
  place.replaceChildren();
  const title = document.createElement("h3");
  title.textContent = name.replaceAll("_", " ") + " ";
  const shown = document.createElement("span");
  title.append(shown);
  place.append(title);
  const lasts = sides.map((values) => values.findLast((value) => value != null));
  const say = (index) => {
    const values = index == null ? lasts : sides.map((values) => values[index]);
    const words = values.map((value) => value == null ? "–" : value.toPrecision(4)).join(" and ");
    shown.textContent = (index == null ? "" : `step ${steps[index]}: `) + words;
  };
  say(null);
  const plot = new uPlot({
    width: place.clientWidth - 20, height: 150, legend: { show: false }, cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: false } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 52 }],
    series: [{}, ...sides.map((_, side) => ({
      stroke: side ? ink.getPropertyValue("--hot") : link, width: 1.4, spanGaps: true, points: { show: steps.length < 60, size: 4 },
    }))],
    hooks: { setCursor: [(plot) => say(plot.cursor.idx)] },
  }, [steps, ...sides], place);
  plot.over.addEventListener("click", () => { if (plot.cursor.idx != null) location.href = to + steps[plot.cursor.idx]; });
}
function drawAll() { for (const panel of panels) drawPanel(panel); }
for (const box of all("[data-curves]")) {
  const asked = [box.dataset.curves, box.dataset.other].filter(Boolean);
  Promise.all(asked.map(async (address) => (await fetch(address)).json())).then((runs) => {
    for (const name of new Set(runs.flatMap(({ metrics }) => Object.keys(metrics)))) {
      const place = document.createElement("div");
      place.className = "curve";
      box.append(place);
      const [steps, ...sides] = uPlot.join(runs.map(({ step, metrics }) => [step, metrics[name] ?? step.map(() => null)]));
      panels.push({ place, steps, sides, name, to: box.dataset.step });
    }
    drawAll();
    if (!panels.length) box.textContent = "No step has a metric yet.";
  });
}
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawAll, 150); });

// Tokens: another colouring is a character a token; it is put on a chunk when the chunk comes near.
const view = one("#coloured");
if (view) {
  const bar = one(".colours", view), legend = one("#legend"), card = one("#card"), tokens = one(".tokens", view);
  const chunks = [];
  for (const part of all("section", tokens)) {
    let start = Number(part.dataset.start);
    for (const chunk of all("p", part)) {
      chunks.push(Object.assign(chunk, { start }));
      start += chunk.children.length;
    }
  }
  let classes = null;
  const paint = (chunk) => {
    if (chunk.painted === classes) return;
    chunk.painted = classes;
    for (let i = 0; i < chunk.children.length; i++) {
      const colour = classes[chunk.start + i];
      chunk.children[i].className = colour && colour !== "." ? "c" + colour : "";
    }
  };
  const near = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) { near.delete(target); continue; }
      near.add(target);
      if (classes !== null) paint(target);
    }
  }, { rootMargin: "1500px" });
  chunks.forEach((chunk) => watcher.observe(chunk));
  bar.addEventListener("click", async ({ target }) => {
    const { by } = target.dataset;
    if (!by) return;
    const scale = await (await fetch(`${bar.dataset.colours}?by=${by}${bar.dataset.rest}`)).json();
    view.dataset.kind = scale.kind;
    classes = scale.classes;
    near.forEach(paint);
    legend.replaceChildren(...scale.legend.map(([colour, words]) => {
      const key = document.createElement("span"), patch = document.createElement("i");
      key.className = "key";
      patch.className = "c" + colour;
      key.append(patch, words);
      return key;
    }), scale.why);
    for (const button of all("[data-by]", bar)) button.setAttribute("aria-pressed", button === target);
  });
  // A token's card: where it stands among those of its chunk says which it is.
  let chosenToken = null, wanted = 0;
  const show = async (token) => {
    const place = token.parentElement.start + [...token.parentElement.children].indexOf(token);
    const mine = ++wanted;
    const reply = await fetch(`${tokens.dataset.card}${place}?${bar.dataset.rest.slice(1)}`);
    const text = await reply.text();
    if (mine === wanted) card.innerHTML = reply.ok ? text : `<p class="error">${reply.status}: ask again</p>`;
  };
  // One token is reached by Tab; from there the arrow keys lead to those beside it, and to other parts.
  const choose = (token) => {
    chosenToken?.classList.remove("at");
    chosenToken?.removeAttribute("tabindex");
    chosenToken?.removeAttribute("role");
    chosenToken = token;
    token.tabIndex = 0;
    token.setAttribute("role", "button");
  };
  const chunkOf = (token, by) => chunks[chunks.indexOf(token.parentElement) + by];
  const partOf = (token, by) => by > 0 ? token.closest("section").nextElementSibling : token.closest("section").previousElementSibling;
  const beside = {
    ArrowRight: (token) => token.nextElementSibling ?? chunkOf(token, 1)?.firstElementChild,
    ArrowLeft: (token) => token.previousElementSibling ?? chunkOf(token, -1)?.lastElementChild,
    ArrowDown: (token) => partOf(token, 1)?.querySelector("i"),
    ArrowUp: (token) => partOf(token, -1)?.querySelector("i"),
  };
  const open = (token) => {
    choose(token);
    token.classList.add("at");
    show(token);
  };
  if (chunks.length) choose(chunks[0].firstElementChild);
  tokens.addEventListener("click", ({ target }) => { if (target.tagName === "I") open(target); });
  tokens.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (target !== chosenToken) return;
    const next = beside[key]?.(target);
    if (key === "Enter" || key === " ") open(target);
    else if (next) { choose(next); next.focus(); }
    if (key === "Enter" || key === " " || beside[key]) event.preventDefault();
  });
}

// A trajectory's turns and branches, folded or not, all at once.
for (const button of all("[data-fold]")) {
  button.addEventListener("click", () => {
    for (const part of all("main details")) part.open = !button.dataset.fold;
    for (const turn of all("article.turn")) turn.classList.toggle("folded", Boolean(button.dataset.fold));
  });
}

// Live lines: what the server sends, the newest last; the oldest go beyond so many.
const log = one("#lines");
if (log) {
  const MOST = 2000, state = one("#live-state"), pause = one("#pause");
  const source = new EventSource(log.dataset.lines);
  source.onopen = () => { state.textContent = "live"; };
  source.onerror = () => { state.textContent = "the server is away; asking again"; };
  source.onmessage = ({ data }) => {
    const { lines, missed } = JSON.parse(data);
    const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (missed) lines.unshift(`<span class="dim">… ${missed} lines more …</span>`);
    log.insertAdjacentHTML("beforeend", lines.join(""));
    while (log.childElementCount > MOST) log.firstElementChild.remove();
    if (low && pause.getAttribute("aria-pressed") !== "true") log.scrollTop = log.scrollHeight;
  };
  pause.addEventListener("click", () => pause.setAttribute("aria-pressed", pause.getAttribute("aria-pressed") !== "true"));
}
