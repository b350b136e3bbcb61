// Write a schedule, see it judged: chosen by name, written as text or in Python, or dragged.
//
// Python validates, simulates and certifies (minidist/observe/pages/schedules.py); this script asks and
// draws. An action is addressed by [rank, index]: its rank, and its place in the rank's program.
import { $, ask, first, h, onServer, post, say, state, svg } from "./page.js";

const USUAL = {
  schedule: "1f1b", p: 4, m: 8, chunks: 1, forward: "1", backward_input: "1", backward_weight: "1",
  latency: "0", overhead: "0", limit: "", size: 1048576, beside: "", puzzle: "", path: "no",
  text: "", python: "",
};
const ASKED = ["p", "m", "chunks", "forward", "backward_input", "backward_weight", "latency", "overhead", "limit"];
const ONE_F_ONE_B = `def program(rank, p, m):
    ahead = min(p - 1 - rank, m)      # forwards before the first backward
    for i in range(ahead):
        yield Forward(i)
    for i in range(ahead, m):
        yield Forward(i)
        yield Backward(i - ahead)
    for i in range(m - ahead, m):
        yield Backward(i)
`;

// ---- the address: long texts are packed

const LONG = 300;
const WRITTEN = ["text", "python"];
const through = (bytes, stream) => new Response(new Blob([bytes]).stream().pipeThrough(stream));

async function pack(text) {
  const bytes = new Uint8Array(await through(text, new CompressionStream("deflate-raw")).arrayBuffer());
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unpack(packed) {
  const letters = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return through(bytes, new DecompressionStream("deflate-raw")).text();
}

async function packed() { // what is after # in a link to this page
  const hash = new URLSearchParams(location.hash.slice(1));
  for (const name of WRITTEN) {
    const text = hash.get(name);
    if (text === null || text.length <= LONG) continue;
    hash.delete(name);
    hash.set(`${name}.z`, await pack(text));
  }
  return hash.toString();
}

async function unpackAddress() {
  const hash = new URLSearchParams(location.hash.slice(1));
  for (const name of WRITTEN) {
    if (!hash.has(`${name}.z`)) continue;
    try {
      hash.set(name, await unpack(hash.get(`${name}.z`)));
    } catch {
      say("This link is not complete; copy all of it.");
    }
    hash.delete(`${name}.z`);
  }
  history.replaceState(null, "", `#${hash}`);
}

let packing; // a timer: the address is packed when the reader pauses
async function packAddress() {
  const before = location.hash, hash = await packed();
  if (location.hash === before && hash.includes(".z=")) history.replaceState(null, "", `#${hash}`);
}

const isPacked = () => location.hash.includes(".z=");
addEventListener("hashchange", async (event) => { // before the listener of state()
  if (!isPacked()) return;
  event.stopImmediatePropagation();
  await unpackAddress();
  dispatchEvent(new HashChangeEvent("hashchange"));
});
if (isPacked()) await unpackAddress();

// ---- questions: one at a time; what changed meanwhile is asked next

const known = new Map(); // answers, by question
let busy = false, again = false, timer;

function question(values) {
  const asked = Object.fromEntries(ASKED.map((name) => [name, values[name]]));
  const source = values.python ? { python: values.python } : { text: values.text };
  return { schedule: values.schedule, size: String(values.size), text: "", python: "", ...asked, ...source };
}

async function answerTo(asked) {
  const key = JSON.stringify(asked);
  if (!known.has(key)) {
    const answer = await ask(asked);
    if (answer.error) return answer;
    known.set(key, answer);
    if (known.size > 40) known.delete(known.keys().next().value);
  }
  return known.get(key);
}

function changed(values) {
  show(values);
  clearTimeout(timer);
  timer = setTimeout(request, values.python ? 300 : 0, values); // Python is written letter by letter
}

async function request(values) {
  if (busy) return void (again = true);
  busy = true;
  const answer = await answerTo(question(values));
  let beside = null;
  if (values.beside && !answer.error) {
    const chunks = takesChunks(values.beside) ? Math.max(2, values.chunks) : 1;
    const own = { schedule: values.beside, text: "", python: "", p: answer.p, m: answer.m, chunks };
    beside = await answerTo(question({ ...values, ...own }));
  }
  busy = false;
  if (!again) return draw(answer, beside);
  again = false;
  request(values);
}

const takesChunks = (name) => $("schedule").querySelector(`[data-chunks]:is(${optionOf(name)})`) !== null;
const optionOf = (name) => `[value="${CSS.escape(name)}"]`;

// ---- numbers and words

const number = (value) => String(Number(Number(value).toPrecision(5)));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (count, word) => `${number(count)} ${word}${Number(count) === 1 ? "" : "s"}`;
const passes = (count) => `${number(count)} forward pass${Number(count) === 1 ? "" : "es"}`; // of a stage each
const MEANINGS = {
  F: "forward", B: "backward", I: "input half of backward", W: "weight half of backward",
  U: "update", R: "sum over ranks",
};

function bytes(count) { // as bytes_text of the package: a kB has 1000
  const power = count < 999.5 ? 0 : Math.min(4, Math.floor(Math.log10(count * 1.0005) / 3));
  return `${Number((count / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

// ---- a timeline

const LEFT = 68, TOP = 20, BAR = 26, STRIP = 20, GAP = 10, RIGHT = 12;
const views = new WeakMap(); // an svg -> {rows, cells, scale, ...}
const style = getComputedStyle(document.documentElement);
const COLORS = Object.fromEntries(Object.keys(MEANINGS).map((kind) => [kind, style.getPropertyValue(`--of-${kind}`).trim()]));

function shade(kind, chunk, chunks) { // a later chunk is lighter, as in the package's figures
  const color = COLORS[kind] ?? "#56b4e9", white = chunks > 1 ? (0.6 / (chunks - 1)) * chunk : 0;
  const parts = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  const dark = (kind === "F" || kind === "U") && white < 0.3;
  return [`rgb(${parts.map((part) => Math.round(part + (255 - part) * white)).join(" ")})`, dark ? "#fff" : "#222"];
}

const widths = new Map(); // of the drawings' places, until the window has another one
function scaleFor(place, end, rows) { // pixels per unit of time: all of it is seen, if cells stay visible
  if (!widths.get(place)) widths.set(place, place.clientWidth - 6);
  const room = Math.max(260, widths.get(place) - LEFT - RIGHT);
  const lengths = rows.flat().map((cell) => cell.end - cell.start).filter((length) => length > 0);
  const shortest = lengths.length ? lengths.reduce((a, b) => Math.min(a, b)) : 1;
  return end > 0 ? Math.max(room / end, Math.min(8 / shortest, 6000 / end)) : 1;
}

function ticks(end, scale) { // times at least 46 pixels apart
  const ten = 10 ** Math.floor(Math.log10(46 / scale));
  const step = ten * [1, 2, 5, 10].find((digit) => digit * ten * scale >= 46 || digit === 10);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

// view: {rows, end, scale, label, words(cell, r), stash, peaks, limit, over, mark: [rank, index], timed}
function timeline(view) {
  const { rows, scale, end } = view, x = (time) => LEFT + time * scale;
  const step = BAR + (view.stash ? STRIP : 0) + GAP;
  const width = Math.ceil(x(end) + RIGHT), height = TOP + rows.length * step + 2;
  const chunks = 1 + rows.flat().reduce((most, cell) => Math.max(most, cell.chunk ?? 0), 0);
  const behind = svg("g", { "aria-hidden": "true" });
  const grid = svg("g", { role: "grid", "aria-label": view.label });
  if (view.timed !== false) {
    for (const time of ticks(end, scale)) {
      behind.append(svg("line", { class: "tick", x1: x(time), x2: x(time), y1: TOP - 4, y2: height - GAP }));
      behind.append(svg("text", { class: "time", x: x(time), y: TOP - 8 }, number(time)));
    }
  }
  view.cells = rows.map((row, r) => {
    const y = TOP + r * step;
    behind.append(svg("rect", { class: "idle", x: LEFT, y, width: Math.max(1, end * scale), height: BAR }));
    behind.append(svg("text", { class: "rank", x: 0, y: y + BAR / 2 + 4 }, `rank ${r}`));
    if (view.stash) behind.append(...stashOf(view, r, x, y + BAR + 2));
    const cells = row.map((cell, i) => cellOf(view, cell, r, i, x, y, chunks));
    grid.append(svg("g", { role: "row", "aria-label": `rank ${r}` }, cells));
    return cells;
  });
  view.tops = rows.map((_, r) => TOP + r * step);
  view.lines = svg("g", { class: "lines", "aria-hidden": "true" });
  if (view.mark) view.lines.append(markOf(view, x));
  const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": view.label }, behind, grid, view.lines);
  if (view.path) drawn.classList.add("path");
  view.cells.find((cells) => cells.length)?.[0].setAttribute("tabindex", "0");
  view.svg = drawn;
  views.set(drawn, view);
  return drawn;
}

function cellOf(view, cell, r, i, x, y, chunks) {
  const room = Math.max(2, (cell.end - cell.start) * view.scale - 1), left = x(cell.start);
  const [fill, ink] = shade(cell.kind, cell.chunk, chunks);
  const parts = [svg("rect", { x: left, y, width: room, height: BAR, rx: Math.min(3, room / 4), fill })];
  const short = cell.micro_batch < 0 ? cell.kind : String(cell.micro_batch ?? "");
  const words = room >= 7 * cell.name.length + 8 ? cell.name : short;
  const size = Math.min(12, (room - 1) / (0.58 * words.length));
  const written = words && size >= 7;
  if (written) parts.push(svg("text", { x: left + room / 2, y: y + BAR / 2 }, words));
  const name = view.timed === false ? `${cell.name}, place ${i}` : `${cell.name}, ${number(cell.start)} to ${number(cell.end)}`;
  return svg("g", { class: cell.critical ? "cell critical" : "cell", role: "gridcell", tabindex: "-1", "aria-label": name, "data-at": `${r} ${i}`,
    fill: ink, "font-size": written ? size.toFixed(1) : null }, parts);
}

function stashOf(view, r, x, y) { // how many activations the rank keeps, as steps
  const most = Math.max(1, view.limit ?? 0, ...view.peaks), base = y + STRIP - 3;
  const up = (count) => base - (count / most) * (STRIP - 6);
  const steps = view.stash[r].map(([time, count]) => `H${x(time).toFixed(1)}V${up(count).toFixed(1)}`);
  const over = view.over.includes(r), path = `M${x(0)} ${base}${steps.join("")}H${x(view.end).toFixed(1)}V${base}Z`;
  const parts = [svg("path", { class: over ? "stash over" : "stash", d: path })];
  if (view.limit) parts.push(svg("line", { class: "limit", x1: x(0), x2: x(view.end), y1: up(view.limit), y2: up(view.limit) }));
  parts.push(svg("text", { class: over ? "peak over" : "peak", x: 0, y: base }, `keeps ${number(view.peaks[r])}`));
  return parts;
}

function markOf(view, x) { // at the fault, or after the last action of its rank
  const [r, i] = view.mark, row = view.rows[r] ?? [];
  const [from, to] = row[i] ? [row[i].start, row[i].end] : [row.length, row.length + 1];
  const y = TOP + r * (BAR + GAP), middle = (x(from) + x(to)) / 2;
  return svg("path", { class: "mark", d: `M${x(from)} ${y - 1}H${x(to) - 1}V${y + BAR + 1}H${x(from)}ZM${middle - 5} ${y + BAR + 9}h10l-5 -7Z` });
}

function gridRows(grid) { // names without times: each as long as every other
  return grid.map((names) => names.map((name, i) => {
    const [, kind, micro, chunk] = name.match(/^([A-Z])(\d*)(?:\.(\d+))?$/) ?? [null, name[0], "", 0];
    return { name, kind, micro_batch: micro === "" ? -1 : Number(micro), chunk: Number(chunk ?? 0), start: i, end: i + 1, needs: [], waited: null };
  }));
}

// ---- what an answer shows

let shown = { answer: null, beside: null }, main = null; // main: the view that can be edited

function draw(answer, beside = null) {
  shown = { answer, beside };
  const { values } = page, fault = answer.error ?? answer.fault?.message ?? null;
  $("fault").hidden = fault === null;
  if ($("fault").textContent !== (fault ?? "")) $("fault").textContent = fault ?? "";
  if (!answer.error || main === null) drawTimelines(answer, beside);
  $("timeline").classList.toggle("old", fault !== null && !answer.grid?.length);
  drawEditor(answer);
  $("text").textContent = answer.words ?? fault;
  drawNumbers(answer, beside);
  drawCertificate(answer.certificate);
  drawLinks(answer.drawing);
  drawGoal(answer);
  $("echo").textContent = fault ?? ($("goal").hidden ? "" : `${$("verdict").textContent} `) + inShort(answer.drawing); // beside the text
  $("echo").className = fault === null ? "note" : "note panel fault";
  $("save-text").disabled = $("split").disabled = !ownText();
  clearTimeout(packing);
  packing = setTimeout(packAddress, 500);
  $("save-csv").disabled = !answer.csv;
  $("start").disabled = !answer.drawing || running !== null;
  if (values.text || values.python) [$("p").value, $("m").value] = values.python ? [values.p, values.m] : [answer.p ?? "", answer.m ?? ""];
}

function drawTimelines(answer, beside) {
  const { drawing, grid } = answer, place = $("timeline");
  if (!drawing && !grid?.length) return;
  const found = place.contains(document.activeElement) ? document.activeElement.dataset.at : null;
  const rows = drawing ? drawing.rows : gridRows(grid);
  const other = drawing ? beside?.drawing : null;
  const end = Math.max(drawing ? drawing.makespan : 1 + Math.max(...rows.map((row) => row.length)), other ? other.makespan : 0);
  const fitted = scaleFor(place, end, [...rows, ...(other ? other.rows : [])]);
  const scale = drawing ? fitted : Math.min(fitted, 40);
  const name = nameOf(answer), parts = [];
  if (drawing) {
    main = viewOf(drawing, end, scale, `Timeline of ${name}`);
  } else {
    const { rank, at } = answer.fault ?? {};
    const mark = rank === null || rank === undefined ? null : [rank, at ?? rows[rank].length];
    main = { rows, end, scale, label: `The order of ${name}, which is not valid yet`, timed: false, mark };
  }
  if (other) parts.push(h("p", { class: "above" }, h("b", {}, name)));
  parts.push(timeline(main));
  main.svg.classList.add("main");
  if (other) {
    parts.push(h("p", { class: "above" }, h("b", {}, page.values.beside), ", at the same scale"));
    parts.push(timeline(viewOf(other, end, scale, `Timeline of ${page.values.beside}`)));
  }
  place.replaceChildren(...parts);
  drawLegend(rows);
  const again = chosenNext ?? (found ? found.split(" ").map(Number) : null);
  picked = chosenNext = null;
  if (!again || !main.cells[again[0]]?.[again[1]]) return quiet();
  if (document.activeElement === document.body) choose(main, ...again);
  else pick(...again);
}

function viewOf(drawing, end, scale, label) {
  const { rows, stash, over, peak_stash: peaks } = drawing;
  const limit = Number(page.values.limit) || null; // of a list or a fraction, Python says who is over it
  return { rows, end, scale, label, stash, over: over ?? [], peaks, limit, path: page.values.path === "yes" };
}

const nameOf = (answer) => (page.values.python ? "your Python" : page.values.text ? "your text" : page.values.schedule);

function drawLegend(rows) {
  const kinds = Object.keys(MEANINGS).filter((kind) => rows.some((row) => row.some((cell) => cell.kind === kind)));
  const chunks = rows.some((row) => row.some((cell) => cell.chunk > 0));
  const swatch = (color) => svg("svg", { width: 14, height: 12, "aria-hidden": "true" }, svg("rect", { width: 14, height: 12, rx: 2, fill: color, class: color ? null : "idle" }));
  $("legend").replaceChildren(
    ...kinds.map((kind) => h("span", { class: "key" }, swatch(shade(kind, 0, 1)[0]), ` ${kind} ${MEANINGS[kind]}`)),
    h("span", { class: "key" }, swatch(null), " idle"),
    chunks ? h("span", { class: "key" }, "lighter: a later chunk") : "",
  );
}

function drawNumbers(answer, beside) {
  const { drawing } = answer, other = beside?.drawing;
  const boxes = (of) => {
    const most = Math.max(...of.peak_stash), sent = of.links.reduce((sum, link) => sum + link.bytes, 0);
    return [
      ["Makespan", plural(of.makespan, "unit")],
      ["Idle, of all ranks' time", percent(of.bubble)],
      ["Idle, from each rank's own start", percent(of.span_bubble)],
      [`Most kept on a rank${of.over?.length ? ": over the limit" : ""}`, passes(most)],
      ["Sent between ranks, in a step", bytes(sent)],
    ];
  };
  $("difference").textContent = drawing && other ? difference(drawing.makespan, other.makespan) : beside?.error ?? "";
  if (!drawing) {
    for (const value of $("numbers").querySelectorAll("dd")) value.textContent = value.className ? "" : "?";
    return;
  }
  const theirs = other ? boxes(other) : [];
  $("numbers").replaceChildren(...boxes(drawing).map(([name, value], i) =>
    h("div", { class: i === 3 && drawing.over?.length ? "fault" : null }, h("dt", {}, name), h("dd", {}, value), other ? h("dd", { class: "beside" }, `${page.values.beside}: ${theirs[i][1]}`) : null)));
}

const inShort = ({ makespan, bubble, peak_stash: peaks, over }) => `${plural(makespan, "unit")}, ${percent(bubble)} idle, ` +
  `at most ${passes(Math.max(...peaks))} kept on a rank${over?.length ? ": over the limit" : ""}.`;

function difference(own, other) {
  const name = page.values.beside, units = plural(Math.abs(other - own), "unit");
  if (Math.abs(other - own) < 1e-9 * Math.max(1, own)) return `${name} takes as long.`;
  return `${name} takes ${units} ${other > own ? "more" : "fewer"}: ${percent(Math.abs(other - own) / own)} of ${number(own)}.`;
}

function table(caption, heads, rows) { // numbers, also with a unit, to the right
  const kind = (value) => (/^[\d.]+(e-?\d+)?( [kMGT]?B)?$/.test(value) ? "number" : null);
  return h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: kind(rows[0]?.[i]) }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", { class: kind(value) }, String(value)))))));
}

function drawCertificate(certificate) {
  const place = $("certificate");
  $("sets").hidden = !certificate;
  place.className = "muted";
  place.textContent = "The schedule is not valid yet.";
  if (!certificate) return;
  place.className = `panel ${certificate.ok ? "good" : "fault"}`;
  place.textContent = certificate.words;
  const rows = certificate.rows.map((row) => [row.stage, row.rank, ` ${row.micro_batches.join(" ")}`]);
  $("sets").querySelector("div").replaceChildren(table("The micro-batches in every stage's gradients", ["stage", "rank", "micro-batches"], rows));
}

function drawLinks(drawing) {
  if (!drawing) return $("links").replaceChildren(h("p", { class: "muted" }, "The schedule is not valid yet."));
  const rows = drawing.links.map((link) => [`rank ${link.source} to rank ${link.to}`, link.activations, link.gradients, bytes(link.bytes)]);
  $("links").replaceChildren(rows.length ? table("Sent per link, in one step", ["link", "activations", "gradients", "bytes"], rows) : h("p", {}, "Nothing: there is one rank."));
}

// ---- hover, focus, the critical path

let picked = null, chosenNext = null;
const HINT = $("chosen").textContent;

function quiet() {
  $("chosen").textContent = HINT;
  for (const id of ["earlier", "later"]) $(id).disabled = true;
  for (const drawn of $("timeline").querySelectorAll("svg.lit")) unlight(views.get(drawn));
}

function unlight(view) {
  view.svg.classList.remove("lit");
  for (const lit of view.svg.querySelectorAll(".on, .needed, .this")) lit.classList.remove("on", "needed", "this");
  for (const line of view.lines.querySelectorAll(".need")) line.remove();
}

function pathTo(rows, r, i) { // back from an action, to what each waited for, until time 0
  const found = [];
  for (let cell = rows[r][i]; ; cell = rows[r][i]) {
    if (cell.waited) [r, i] = cell.waited;
    else if (i > 0 && cell.start > 0) i -= 1;
    else return found;
    found.push([r, i]);
  }
}

function light(view, r, i) {
  const { rows, cells, scale } = view, cell = rows[r][i];
  if (view.plain) return; // measured: what waits for what was not
  unlight(view);
  view.svg.classList.add("lit");
  for (const [q, j] of pathTo(rows, r, i)) cells[q][j].classList.add("on");
  for (const [q, j] of cell.needs) {
    cells[q][j].classList.add("needed");
    const x1 = LEFT + rows[q][j].end * scale, x2 = LEFT + cell.start * scale + 2;
    const [y1, y2] = [q, r].map((rank) => view.tops[rank] + BAR / 2), bend = Math.max(10, (x2 - x1) / 2);
    const waited = cell.waited && cell.waited[0] === q && cell.waited[1] === j;
    view.lines.append(svg("path", { class: waited ? "need waited" : "need", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }));
  }
  cells[r][i].classList.add("this");
  $("chosen").textContent = wordsOf(view, r, i);
}

function wordsOf(view, r, i) {
  const { rows, timed } = view, cell = rows[r][i];
  const what = `${cell.name}, ${MEANINGS[cell.kind] ?? cell.kind}, rank ${r}`;
  if (timed === false) return `${what}, action ${i} of its program.`;
  const name = ([q, j]) => `${rows[q][j].name} of rank ${q} (ends at ${number(rows[q][j].end)})`;
  const needs = cell.needs.length ? `needs ${cell.needs.map(name).join(" and ")}` : "needs nothing";
  const before = i > 0 ? `its rank was busy until then with ${rows[r][i - 1].name}` : "it is the first of its rank";
  const waited = cell.waited ? `it waited for ${name(cell.waited)}` : before;
  return `${what}: from ${number(cell.start)} to ${number(cell.end)}. It ${needs}; ${waited}.${cell.critical ? " It is on the critical path." : ""}`;
}

function choose(view, r, i) { // focus a cell: one of a drawing is in the order of the Tab key
  view.svg.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
  view.cells[r][i].setAttribute("tabindex", "0");
  view.cells[r][i].focus();
}

function pick(r, i) { // the action that the buttons move
  picked = [r, i];
  light(main, r, i);
  $("earlier").disabled = i === 0;
  $("later").disabled = i === main.rows[r].length - 1;
}

const placeOf = (target) => {
  const cell = target.closest?.(".cell");
  return cell ? [views.get(cell.ownerSVGElement), ...cell.dataset.at.split(" ").map(Number)] : null;
};

for (const place of [$("timeline"), $("measured")]) {
  place.addEventListener("pointerover", ({ target }) => {
    const found = placeOf(target);
    if (found && !dragged) light(...found);
  });
  place.addEventListener("pointerleave", () => {
    for (const drawn of place.querySelectorAll("svg.lit")) unlight(views.get(drawn));
    if (picked && place.id === "timeline") light(main, ...picked);
    else $("chosen").textContent = HINT;
  });
  place.addEventListener("focusin", ({ target }) => {
    const found = placeOf(target);
    if (!found) return;
    if (found[0] === main) pick(...found.slice(1));
    else light(...found);
  });
  place.addEventListener("keydown", (event) => {
    const found = placeOf(event.target);
    if (!found) return;
    const [view, r, i] = found, row = view.rows[r];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.altKey && step && view === main) move(r, i, i + step);
    else if (event.altKey || event.metaKey) return;
    else if (event.ctrlKey && event.key === "z") undo();
    else if (event.ctrlKey) return;
    else if (step && row[i + step]) choose(view, r, i + step);
    else if (event.key === "Home") choose(view, r, 0);
    else if (event.key === "End") choose(view, r, row.length - 1);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const q = r + (event.key === "ArrowUp" ? -1 : 1);
      const near = (cell) => Math.abs(cell.start - row[i].start);
      const next = view.rows[q]?.reduce((best, cell, j, all) => (best < 0 || near(cell) < near(all[best]) ? j : best), -1) ?? -1;
      if (next >= 0) choose(view, q, next);
    } else if (!step) return;
    event.preventDefault();
  });
}

// ---- moving an action: by a drag, by keys, by buttons; all of them edit the text

const TOKEN = /[^\s()]+/g;
const HEAD = /^(\s*rank\s+\d+\s*:?\s*)([^#]*)(#.*)?$/;
const edits = []; // what the texts were before

function lineOf(lines, rank) {
  return lines.findIndex((line) => HEAD.test(line) && Number(line.match(/\d+/)[0]) === rank);
}

function moved(text, rank, from, to) { // the text with one action at another place of its rank
  const lines = text.split("\n"), at = lineOf(lines, rank);
  const [, head, body, comment] = lines[at].match(HEAD);
  const cells = body.match(/\([^()]*\)|[^\s()]+/g) ?? [];
  const actions = cells.flatMap((cell, pair) => cell.match(TOKEN).map((name) => ({ name, pair })));
  const [one] = actions.splice(from, 1);
  actions.splice(to, 0, one);
  let row = "";
  actions.forEach(({ name, pair }, i) => { // two of a pair stay in brackets while they are neighbours
    const opens = actions[i + 1]?.pair === pair, closes = actions[i - 1]?.pair === pair;
    row += `${i ? " " : ""}${opens ? "(" : ""}${name}${closes ? ")" : ""}`;
  });
  lines[at] = `${head}${row}${comment ? ` ${comment}` : ""}`;
  return lines.join("\n");
}

function move(rank, from, to) {
  const count = main.rows[rank].length;
  if (to < 0 || to >= count || to === from || !shown.answer.text && !page.values.text) return;
  const own = page.values.text;
  const text = lineOf(own.split("\n"), rank) >= 0 ? own : shown.answer.text;
  chosenNext = [rank, to];
  write(moved(text, rank, from, to));
  say(`${main.rows[rank][from].name} is action ${to} of rank ${rank} now.`);
}

function write(text) { // the reader's text from now on
  const { schedule, text: own, python } = page.values;
  edits.push({ schedule, text: own, python });
  $("undo").disabled = false;
  page.set({ text, python: "" });
}

function undo() {
  const before = edits.pop();
  $("undo").disabled = edits.length === 0;
  if (before) page.set(before);
  say("Undone.");
}

function split(text) { // every B as its halves; brackets keep the I
  const halves = (row) => row.replace(/\bB(\d+(?:\.\d+)?)(\)?)/g, "I$1$2 W$1");
  return text.split("\n").map((line) => line.replace(HEAD, (_, head, body, comment = "") => head + halves(body) + comment)).join("\n");
}
$("split").addEventListener("click", () => write(split(ownText())));

let dragged = null; // {r, i, to, x, pointer, line, ghost}
const canvas = $("timeline");
canvas.addEventListener("pointerdown", (event) => {
  const found = placeOf(event.target);
  if (!found || found[0] !== main || event.button !== 0) return;
  const [, r, i] = found;
  dragged = { r, i, to: i, x: event.clientX, pointer: event.pointerId, line: null };
  choose(main, r, i);
  event.preventDefault();
});
canvas.addEventListener("pointermove", (event) => {
  if (!dragged || event.pointerId !== dragged.pointer) return;
  const { r, i, x } = dragged, by = event.clientX - x;
  if (!dragged.line) {
    if (Math.abs(by) < 5) return;
    canvas.setPointerCapture(event.pointerId);
    unlight(main);
    main.cells[r][i].classList.add("held");
    dragged.ghost = main.lines.appendChild(main.cells[r][i].firstChild.cloneNode());
    dragged.line = main.lines.appendChild(svg("line", { class: "drop", y1: main.tops[r] - 5, y2: main.tops[r] + BAR + 5 }));
  }
  dragged.ghost.setAttribute("transform", `translate(${by} -4)`);
  const time = (event.clientX - main.svg.getBoundingClientRect().left - LEFT) / main.scale;
  const rest = main.rows[r].filter((_, j) => j !== i);
  dragged.to = rest.filter((cell) => (cell.start + cell.end) / 2 < time).length;
  const before = rest[dragged.to - 1], after = rest[dragged.to];
  const at = LEFT + (before ? before.end : after ? after.start : 0) * main.scale - 0.5;
  for (const end of ["x1", "x2"]) dragged.line.setAttribute(end, at);
});
const drop = (event) => {
  if (!dragged || event.pointerId !== dragged.pointer) return;
  const { r, i, to, line, ghost } = dragged;
  dragged = null;
  if (!line) return;
  for (const part of [line, ghost]) part.remove();
  main.cells[r][i].classList.remove("held");
  if (event.type === "pointerup") move(r, i, to);
};
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, drop);
const shift = (by) => picked && move(picked[0], picked[1], picked[1] + by);
for (const [id, by] of [["earlier", -1], ["later", 1]]) $(id).addEventListener("click", () => shift(by));
$("undo").addEventListener("click", undo);

// ---- the editors

const editors = ["program", "python"].map((id) => ({ area: $(id), place: $(id).closest(".editor"), top: 0, left: 0 }));

function numbered(editor, line = null, column = null, length = 1) { // line numbers, and a mark
  const { area, place } = editor, count = area.value.split("\n").length;
  const numbers = Array.from({ length: count }, (_, i) => h("span", { class: i + 1 === line ? "at" : null }, `${i + 1}\n`));
  place.querySelector(".gutter").replaceChildren(...numbers);
  const marks = place.querySelector(".marks");
  marks.replaceChildren();
  if (line !== null && line <= count) {
    const own = area.value.split("\n")[line - 1];
    const [start, size] = column === null ? [0, Math.max(1, own.length)] : [column - 1, length];
    marks.append("\n".repeat(line - 1), own.slice(0, start).replace(/[^\t]/g, " "), h("mark", {}, " ".repeat(Math.max(1, size))));
  }
  follow(editor);
}

function follow({ place, top, left }, moved = top > 0 || left > 0) { // scroll numbers and mark, too
  for (const part of moved ? place.querySelectorAll("pre") : []) part.scrollTo(left, top);
}

function drawEditor(answer) {
  const { values } = page, [text, python] = editors;
  if (!values.text && answer.text) fill(text.area, answer.text);
  const { line, column, rank, at } = answer.fault ?? {};
  const told = line ?? (answer.error ?? answer.fault?.message)?.match(/\bline (\d+)/)?.[1] ?? null;
  numbered(python, values.python && told ? Number(told) : null);
  if (values.python) return numbered(text);
  const lines = text.area.value.split("\n");
  let where = line ? [line, column] : [null, null];
  if (!line && rank !== null && rank !== undefined && lineOf(lines, rank) >= 0) where = wordAt(lines, rank, at);
  const word = where[0] ? lines[where[0] - 1]?.slice((where[1] ?? 1) - 1).match(/^[^\s()]*/)?.[0] ?? "" : "";
  numbered(text, where[0], where[1], word.length);
}

function wordAt(lines, rank, at) { // line and column of an action, or the end of its line
  const line = lineOf(lines, rank), [, head, body] = lines[line].match(HEAD);
  const found = [...body.matchAll(TOKEN)][at];
  return [line + 1, head.length + (found ? found.index : body.trimEnd().length + 1) + 1];
}

function fill(area, text) {
  if (area.value === text) return;
  area.value = text;
  area.rows = Math.min(16, Math.max(4, text.split("\n").length + (area.id === "program" ? 0 : 1)));
}

for (const editor of editors) {
  editor.area.addEventListener("scroll", ({ target }) => { // read here alone: it needs a layout
    [editor.top, editor.left] = [target.scrollTop, target.scrollLeft];
    follow(editor, true);
  });
  editor.area.addEventListener("input", () => {
    numbered(editor);
    const value = editor.area.value || "\n"; // nothing is the reader's text, too
    page.set(editor.area.id === "program" ? { text: value, python: "" } : { python: value, text: "" });
  });
}
fill($("python"), ONE_F_ONE_B);

function side(python) {
  $("python-side").hidden = $("use-python").hidden = !python;
  $("text-side").hidden = python;
  $("as-python").setAttribute("aria-pressed", String(python));
  $("as-text").setAttribute("aria-pressed", String(!python));
  numbered(editors[python ? 1 : 0]);
}
$("as-text").addEventListener("click", () => side(false));
$("as-python").addEventListener("click", () => side(true));
$("use-python").addEventListener("click", () => page.set({ python: $("python").value, text: "" }));
$("put").addEventListener("click", async () => {
  const { text, error } = await answerTo(question({ ...page.values, text: "", python: "" }));
  if (error) return say(error);
  side(false);
  write(text);
  $("program").focus();
});

// ---- the controls

let kept = null; // the reader's own, while a named one is shown

function show(values) {
  const own = values.text || values.python;
  if (own) kept = { text: values.text, python: values.python };
  const select = $("schedule");
  select.value = own ? "own" : values.schedule;
  select.querySelector(optionOf("own")).disabled = !own && !kept;
  const locked = select.disabled = values.puzzle !== "";
  for (const input of document.querySelectorAll("[data-state]")) {
    const name = input.dataset.state;
    const byText = values.text && (name === "p" || name === "m");
    const noChunks = name === "chunks" && (own || !takesChunks(values.schedule));
    const given = locked && ASKED.includes(name) && name !== "chunks";
    input.disabled = Boolean(byText || noChunks || given);
  }
  $("put").textContent = `Begin with the text of ${values.schedule}`;
  if (values.text) fill($("program"), values.text);
  if (values.python) {
    $("brought").hidden = true;
    fill($("python"), values.python);
    if ($("python-side").hidden) side(true);
  }
  for (const drawn of $("timeline").querySelectorAll("svg")) drawn.classList.toggle("path", values.path === "yes");
}

$("schedule").addEventListener("change", ({ target: { value } }) => {
  if (value === "own") return page.set(kept);
  const chunks = takesChunks(value) ? Math.max(2, page.values.chunks) : 1;
  page.set({ schedule: value, chunks, text: "", python: "" });
});
for (const option of [...$("schedule").options].slice(1)) $("beside").append(h("option", {}, option.value));
for (const option of $("schedule").options) option.setAttribute("value", option.value);

// ---- puzzles

const SOLVED = "minidist.puzzles";
let puzzles = [], entered = false; // entered: the next drawing shows where the puzzle is
const solved = () => JSON.parse(localStorage.getItem(SOLVED) ?? "{}");
const parOf = (puzzle) => Math.min(...Object.values(puzzle.par));

function drawPuzzles() {
  const done = solved();
  if (!puzzles.length) return;
  $("puzzles").replaceChildren(...puzzles.map((puzzle) => h("li", {},
    h("button", { type: "button", "aria-pressed": String(puzzle.name === page.values.puzzle), onclick: () => enter(puzzle) }, puzzle.name),
    h("span", {}, ` ${puzzle.words}`, done[puzzle.name] ? h("b", { class: "done" }, ` Solved: ${number(done[puzzle.name])}.`) : ""))));
}

async function enter(puzzle) {
  const { name, start: schedule, p, m } = puzzle, { path, size } = page.values;
  const given = ["forward", "backward_input", "backward_weight", "latency", "limit"].map((key) => [key, String(puzzle[key] ?? "")]);
  const values = { ...USUAL, path, size, schedule, p, m, ...Object.fromEntries(given) };
  values.chunks = takesChunks(schedule) ? puzzle.chunks : 1;
  const { text, error } = await answerTo(question(values));
  if (error) return say(error);
  edits.length = 0;
  $("undo").disabled = true;
  page.set({ ...values, text, puzzle: name });
  entered = true;
  say(`Puzzle: ${name}. It begins with ${schedule}: drag actions, or edit the text.`);
}

function verdict(puzzle, { drawing, p, m, chunks, certificate }) { // [solved, words]
  if (!drawing || !certificate?.ok) return [false, "Not valid yet."];
  if (p !== puzzle.p || m !== puzzle.m) return [false, `The puzzle has ${puzzle.p} ranks and ${puzzle.m} micro-batches, and this has ${p} and ${m}.`];
  if (chunks > puzzle.chunks) return [false, `A rank may hold ${plural(puzzle.chunks, "stage")} here, and one holds ${chunks}.`];
  const { makespan } = drawing, par = parOf(puzzle);
  if (drawing.over.length) return [false, `${drawing.over.map((r) => `Rank ${r} keeps ${number(drawing.peak_stash[r])}`).join(", ")}: more than the limit, ${puzzle.limit}.`];
  if (makespan > par + 1e-9) return [false, `${plural(makespan, "unit")}: ${number(makespan - par)} above par.`];
  return [true, makespan < par - 1e-9 ? `Solved: ${number(makespan)}, shorter than par!` : `Solved: ${number(makespan)}, which is par.`];
}

function drawGoal(answer) {
  const puzzle = puzzles.find(({ name }) => name === page.values.puzzle), place = $("goal");
  place.hidden = !puzzle;
  drawPuzzles();
  if (!puzzle) return;
  const [done, words] = verdict(puzzle, answer), before = solved();
  if (done && !(before[puzzle.name] <= answer.drawing.makespan)) {
    localStorage.setItem(SOLVED, JSON.stringify({ ...before, [puzzle.name]: answer.drawing.makespan }));
    drawPuzzles();
    say(words);
  } else if (!done && $("status").textContent.startsWith("Solved")) say("");
  const next = puzzles[puzzles.indexOf(puzzle) + 1];
  const pars = Object.entries(puzzle.par).sort(([, a], [, b]) => a - b).map(([name, value]) => h("span", { class: "key" }, `${name} ${number(value)}`));
  place.className = done ? "panel good" : "panel";
  place.replaceChildren(
    h("p", {}, h("b", {}, puzzle.name), `. ${puzzle.words}`),
    h("p", { id: "verdict" }, h("b", {}, words)),
    h("p", { class: "pars" }, `Par is ${number(parOf(puzzle))} units. Schedules that keep to the limit: `, pars),
    h("div", { class: "controls" },
      done && next ? h("button", { type: "button", class: "main", onclick: () => enter(next) }, `Next: ${next.name}`) : null,
      h("button", { type: "button", onclick: () => page.set({ puzzle: "" }) }, "Leave the puzzle")),
  );
  if (entered) place.scrollIntoView({ block: "nearest" });
  entered = false;
}

// ---- links and files

$("copy").addEventListener("click", async () => {
  const { origin, pathname, search } = location; // a server's token is in search
  const link = `${origin}${pathname}${search}#${await packed()}`;
  try {
    await navigator.clipboard.writeText(link);
    say(onServer ? "The link is copied. It opens on this machine, while minidist explore runs." : "The link is copied.");
  } catch {
    say("This browser does not let a page copy; the link is the address of this page.");
  }
});

function save(name, kind, text) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  say(`${name} is saved.`);
}
const ownText = () => page.values.text || shown.answer.text;
$("save-text").addEventListener("click", () => save("schedule.txt", "text/plain", ownText()));
$("save-csv").addEventListener("click", () => save("schedule.csv", "text/csv", shown.answer.csv));
const ownDrawing = () => new XMLSerializer().serializeToString(alone(main.svg));
$("save-svg").addEventListener("click", () => save("schedule.svg", "image/svg+xml", ownDrawing()));

function alone(drawn) { // a copy that needs no style sheet
  const copy = drawn.cloneNode(true), own = [...drawn.querySelectorAll("*")];
  const wanted = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];
  [...copy.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(own[i]);
    for (const name of wanted) element.setAttribute(name, style.getPropertyValue(name));
    for (const name of ["tabindex", "data-at", "class"]) element.removeAttribute(name);
  });
  const color = getComputedStyle(document.body).backgroundColor, back = getComputedStyle(document.documentElement).backgroundColor;
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: color === "rgba(0, 0, 0, 0)" ? back : color }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return copy;
}

// ---- real processes, with `minidist explore`

let running = null;
if (onServer) {
  $("runner").hidden = false;
  $("run-words").textContent = "A process per rank trains a small model with this schedule. Then you see what was measured, and every gradient is compared with one device.";
}
$("start").addEventListener("click", async () => {
  $("start").disabled = true;
  for (const id of ["measured", "run-result"]) $(id).replaceChildren();
  const { run, error } = await post("run", { text: ownText() });
  if (error || !run) return finish({ state: "failed", error: error ?? "there is no run" });
  running = run;
  $("cancel").disabled = false;
  poll(run);
});
$("cancel").addEventListener("click", () => post("cancel", { run: running }));

async function poll(run) {
  const now = await post("status", { run });
  $("progress").hidden = false;
  $("progress").value = now.fraction ?? 0;
  $("progress-words").textContent = now.progress ?? "";
  if (now.state === "running") setTimeout(poll, 250, run);
  else finish(now);
}

function finish(now) {
  running = null;
  $("cancel").disabled = true;
  $("start").disabled = !shown.answer?.drawing;
  $("progress").hidden = true;
  const ends = { done: now.progress || "Done.", cancelled: "Cancelled." };
  $("progress-words").textContent = ends[now.state] ?? "It failed.";
  const parts = [], rows = now.certificate?.rows ?? [];
  if (now.error) parts.push(h("p", { class: "panel fault", role: "alert" }, now.error));
  if (now.certificate) parts.push(h("p", { class: `panel ${now.certificate.ok ? "good" : "fault"}` }, now.certificate.words));
  if (now.defences) parts.push(h("p", { class: "muted" }, now.defences));
  const short = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toExponential(1) : String(value));
  if (rows.length) {
    const heads = Object.keys(rows[0]);
    parts.push(h("details", {}, h("summary", {}, "Model by model"), h("div", { class: "wide" }, table("Compared with one device", heads, rows.map((row) => heads.map((head) => short(row[head])))))));
  }
  $("run-result").replaceChildren(...parts);
  if (now.measured) drawMeasured(now.measured, now.simulated);
}

function drawMeasured(measured, simulated) {
  const both = [["Measured", measured], ["Simulated", simulated]].filter(([, one]) => one);
  const end = Math.max(...both.map(([, one]) => one.makespan));
  const scale = scaleFor($("measured"), end, []);
  $("measured").replaceChildren(...both.flatMap(([name, one]) => {
    const rows = one.rows.map((row) => row.map((cell) => ({ chunk: 0, needs: [], waited: null, ...gridRows([[cell.name]])[0][0], ...cell })));
    return [h("p", { class: "above" }, h("b", {}, name), `: ${number(one.makespan)} s`), timeline({ rows, end, scale, label: `${name} timeline`, plain: true })];
  }));
}

// ---- begin: the drawing made beforehand, then Python

function readFirst(values) { // Python that comes with a link runs when the reader has pressed a button
  if (!values.python) return;
  fill($("python"), values.python);
  side(true);
  $("brought").hidden = false;
  values.python = "";
}

const page = state(USUAL, changed, readFirst);
show(page.values);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width || !shown.answer) return;
  width = innerWidth;
  widths.clear();
  drawTimelines(shown.answer, shown.beside);
});

const made = first(), wanted = question(page.values);
const same = made && Object.entries(made.question).every(([name, value]) => String(wanted[name]) === String(value));
if (made) draw(made.answer);
if (!same || page.values.beside) {
  if (made) canvas.classList.add("old");
  request(page.values);
}
ask({ puzzles: "yes" }).then((answer) => {
  puzzles = answer.puzzles ?? [];
  drawPuzzles();
  if (shown.answer && page.values.puzzle) drawGoal(shown.answer);
});
