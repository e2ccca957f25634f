// What a browser adds to pages that work without it: keys, theme, peeks in place, an interval dragged on a chart.
// Keys press what is visible: whatever has data-key="t" is listed by `?` and clicked by t. j and k go through [data-row].

const root = document.documentElement;
root.classList.add("js");

const shown = (element) => element.getClientRects().length > 0;
const keyed = () => [...document.querySelectorAll("[data-key]")].filter((element) => shown(element) && !element.closest("dialog"));
const rows = () => [...document.querySelectorAll("[data-row]")].filter(shown);
const current = () => document.querySelector("[data-row].at");

// ---------------------------------------------------------------- theme

function toggleTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `lightningrl-theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
}

// ---------------------------------------------------------------- rows

function select(row, { scroll = true } = {}) {
  for (const other of document.querySelectorAll("[data-row].at")) other.classList.remove("at");
  if (!row) return;
  row.classList.add("at");
  if (scroll) row.scrollIntoView({ block: "nearest" });
  const link = row.querySelector("[data-open]") ?? row.querySelector("[data-peek]") ?? row; // Enter presses what has the focus
  link.focus({ preventScroll: true });
}

function move(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(current());
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1)];
  select(next);
  const peek = next.querySelector("[data-peek]");
  if (peek && document.querySelector("#peek [data-close]")) open(peek.href);
}

function within(selector) {
  const found = current()?.querySelector(selector);
  if (found) found.click();
  return Boolean(found);
}

// ---------------------------------------------------------------- peeks: the same address, one part of its page

let latest = 0;

async function open(address) {
  const mine = ++latest;
  const place = document.querySelector("#peek");
  const response = await fetch(address, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.querySelector("#peek");
  if (mine !== latest) return;
  if (!fresh || !place) return location.assign(address);
  place.replaceWith(document.adoptNode(fresh));
  document.body.classList.toggle("peeking", Boolean(fresh.querySelector("[data-close]")));
  history.replaceState(null, "", address);
}

document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const row = event.target.closest("[data-row]");
  if (row) select(row, { scroll: false });
  const link = event.target.closest("a[data-peek], a[data-close]");
  if (link && document.querySelector("#peek")) {
    event.preventDefault();
    open(link.href).then(() => {
      if (link.matches("[data-close]")) select(current());
    });
  } else if (row && !event.target.closest("a, button, input, select, summary, label") && !getSelection().toString()) {
    (row.querySelector("[data-peek]") ?? row.querySelector("[data-open]"))?.click();
  }
});

// ---------------------------------------------------------------- keys

let prefix = "";

function press(key) {
  const found = keyed().find((element) => element.dataset.key === key);
  if (!found) return false;
  found.matches("input, select") ? (found.focus(), found.select?.()) : found.click();
  return true;
}

function showKeys() {
  const dialog = document.querySelector("#keys");
  const list = dialog.querySelector("dl");
  list.replaceChildren();
  const say = (key, what) => {
    const name = document.createElement("dt");
    for (const part of key.split(" ")) {
      const shownKey = document.createElement("kbd");
      shownKey.textContent = part;
      name.append(shownKey, " ");
    }
    const text = document.createElement("dd");
    text.textContent = what;
    list.append(name, text);
  };
  if (rows().length) {
    say("j k", "next, previous");
    say("Enter", "open");
    if (document.querySelector("[data-peek]")) say("Space", "peek");
  }
  say("Esc", "close, back");
  const seen = new Set();
  for (const element of keyed()) {
    if (seen.has(element.dataset.key)) continue;
    seen.add(element.dataset.key);
    say(element.dataset.key, (element.getAttribute("aria-label") || element.textContent).trim());
  }
  dialog.showModal();
}

function escape() {
  const close = document.querySelector("a[data-close]");
  if (document.activeElement?.matches("input, select")) return document.activeElement.blur();
  if (close) return close.click();
  document.querySelector("[data-back]")?.click();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape") return escape();
  if (typing) return;
  const interactive = event.target.matches("a, button, summary, input");
  const key = prefix ? `${prefix} ${event.key}` : event.key;
  prefix = "";
  let done = true;
  if (key === "j" || key === "ArrowDown" && current()) move(1);
  else if (key === "k" || key === "ArrowUp" && current()) move(-1);
  else if (key === "Enter") done = !interactive && within("[data-open]");
  else if (key === " ") done = !event.target.matches("button, summary, input") && within("[data-peek]");
  else if (key === "g" && !keyed().some((element) => element.dataset.key === "g")) prefix = "g";
  else done = press(key);
  if (done) event.preventDefault();
});

document.querySelector("#theme")?.addEventListener("click", toggleTheme);
document.querySelector("#help")?.addEventListener("click", showKeys);

// ---------------------------------------------------------------- a chart's interval: drag, and see its rollouts

function drag(chart) {
  const shade = chart.querySelector(".interval");
  const [left, right, first, last] = ["left", "right", "first", "last"].map((name) => Number(chart.dataset[name]));
  let from = null;
  const place = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    return Math.min(Math.max(point.x, left), right);
  };
  const step = (x) => Math.round(first + ((x - left) / (right - left || 1)) * (last - first));
  const draw = (x) => {
    shade.setAttribute("x", Math.min(from, x));
    shade.setAttribute("width", Math.abs(from - x));
  };
  chart.addEventListener("pointerdown", (event) => {
    if (event.button || event.target.closest("a")) return;
    from = place(event);
    chart.setPointerCapture(event.pointerId);
    draw(from);
  });
  chart.addEventListener("pointermove", (event) => from !== null && draw(place(event)));
  chart.addEventListener("pointercancel", () => (from = null));
  chart.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [low, high] = [step(from), step(place(event))].sort((a, b) => a - b);
    const moved = Math.abs(place(event) - from);
    from = null;
    if (moved < 4) return shade.setAttribute("width", 0);
    const address = new URL(chart.dataset.interval, location.href);
    address.searchParams.set("from", Math.max(low, 1));
    address.searchParams.set("to", Math.max(high, 1));
    location.assign(address);
  });
}

// ---------------------------------------------------------------- a small curve says the value below the pointer

function read(chart) {
  const [first, last, low, high] = chart.dataset.read.split(" ").map(Number);
  const lines = [...chart.querySelectorAll("path.line:not(.raw)")].map((path) => (path.getAttribute("d").match(/[\d.]+ [\d.]+/g) ?? []).map((pair) => pair.split(" ").map(Number)));
  const grid = [...chart.querySelectorAll(".gridline")];
  const ys = grid.map((line) => Number(line.getAttribute("y1")));
  const [left, right] = ["x1", "x2"].map((name) => Number(grid[0].getAttribute(name)));
  const [top, bottom] = [Math.min(...ys), Math.max(...ys)];
  const output = chart.closest(".mini-card").querySelector("output");
  const before = output.textContent;
  chart.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const near = lines.filter((line) => line.length).map((line) => line.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)));
    if (!near.length) return;
    const step = Math.round(first + ((near[0][0] - left) / (right - left || 1)) * (last - first));
    const values = near.map(([, y]) => Number((low + ((bottom - y) / (bottom - top || 1)) * (high - low)).toPrecision(3)));
    output.textContent = `step ${step}: ${values.join(" · ")}`;
    output.classList.add("at");
  });
  chart.addEventListener("pointerleave", () => {
    output.textContent = before;
    output.classList.remove("at");
  });
}

if (innerWidth <= 800) {
  for (const group of document.querySelectorAll(".facet-group")) group.open = false;
  [...document.querySelectorAll(".curve-group")].slice(2).forEach((group) => (group.open = false));
}
document.querySelectorAll("svg[data-read]").forEach(read);

document.querySelectorAll("svg[data-interval]").forEach(drag);
document.body.classList.toggle("peeking", Boolean(document.querySelector("#peek [data-close]")));
const beginning = document.querySelector("[data-row].at");
if (beginning) beginning.scrollIntoView({ block: "nearest" });

// ---------------------------------------------------------------- live: news carries ids, and the page's part #live is fetched anew

const REST_MS = 1000; // between two fetches, and longer where the server says that it makes the page again only later
let place = document.body.dataset.place;
let source = null;
let fetching = false;
let waiting = false; // something is new that the page does not show
let stepped = false; // a step has finished meanwhile: the server makes the page again for it at once
let timer = null; // of the rest after a fetch
let asked = 0;

const live = () => document.querySelector("#live[data-live]");

function listen() {
  if (source || document.hidden || !live()) return;
  source = new EventSource(`${document.body.dataset.events}?after=${encodeURIComponent(place)}`);
  source.onmessage = (event) => {
    place = root.dataset.place = event.lastEventId;
    const news = JSON.parse(event.data);
    document.dispatchEvent(new CustomEvent("news", { detail: news }));
    hear(news.steps.length > 0);
  };
  source.onerror = () => {
    if (source?.readyState !== EventSource.CLOSED) return; // the browser comes back by itself
    hush();
    setTimeout(listen, 2 * REST_MS);
  };
}

function hush() {
  source?.close();
  source = null;
}

function hear(hasStep) {
  waiting = true;
  stepped ||= hasStep;
  if (fetching) return;
  if (timer === null) refresh();
  else if (stepped) rest(REST_MS - (performance.now() - asked));
}

function rest(duration) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    timer = null;
    if (waiting) refresh();
  }, duration);
}

async function refresh() {
  fetching = true;
  waiting = stepped = false;
  asked = performance.now();
  let duration = REST_MS;
  try {
    const response = await fetch(location.href, { headers: { accept: "text/html" } });
    const freshIn = response.headers.get("x-fresh-in");
    if (freshIn !== null) [waiting, duration] = [true, Math.max(duration, 1000 * Number(freshIn))];
    const fresh = response.ok && new DOMParser().parseFromString(await response.text(), "text/html").querySelector("#live");
    const part = live();
    if (fresh && part && !(getSelection().toString() && part.contains(getSelection().anchorNode))) replace(part, fresh);
  } catch {
    // the server is away: the next news brings what is new
  }
  fetching = false;
  rest(stepped ? REST_MS : duration);
}

function replace(part, fresh) {
  const open = [...part.querySelectorAll("details")].map((details) => details.open);
  const row = rows().indexOf(current());
  const focus = part.contains(document.activeElement) && document.activeElement.getAttribute("href");
  part.replaceWith(document.adoptNode(fresh));
  [...fresh.querySelectorAll("details")].forEach((details, index) => (details.open = open[index] ?? details.open));
  fresh.querySelectorAll("svg[data-interval]").forEach(drag);
  fresh.querySelectorAll("svg[data-read]").forEach(read);
  if (row >= 0 && !current()) rows()[row]?.classList.add("at");
  if (focus) [...fresh.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === focus)?.focus({ preventScroll: true });
  if (!live()) hush(); // it has ended
}

document.addEventListener("visibilitychange", () => (document.hidden ? hush() : listen()));
listen();
