// Experts: tokens that travel to experts on other ranks and back. The answer of
// minidist/observe/pages/experts.py says who goes where; this file draws it, and asks.

import { $, ask, first, h, latest, say, state, svg } from "./page.js";

const COLOURS = ["var(--forward)", "var(--emphasis)", "var(--weight)", "var(--sent)"];
const INK = ["#fff", "#1b1b1b", "#1b1b1b", "#1b1b1b"];
const WIDTH = 1000, GAP = 14, HOME = 44, DOT = 7, PITCH = 16;
const STEPS = [
  "Route: the gate has chosen the experts of every token.",
  "Dispatch: an all_to_all brings every row to the rank of its expert.",
  "Compute: each expert runs its rows. The busiest experts have a frame; the others wait.",
  "Return: a second all_to_all brings the results home. A dropped choice adds nothing.",
];
const still = matchMedia("(prefers-reduced-motion: reduce)");
let answer = first()?.answer, drawn;

// ---- where everything is

function layout({ ranks, experts, k, home, takes }) {
  const box = (WIDTH - GAP * (ranks - 1)) / ranks, each = experts / ranks;
  const column = (box - 16) / each, high = (takes ?? 12) > 6 ? 12 : 6;
  const shelf = HOME + k * PITCH + 34, floor = shelf + Math.max(high, takes ?? 0) * PITCH + 4;
  const left = (expert) => home[expert] * (box + GAP) + 8 + (expert % each) * column;
  const lane = Math.min(PITCH + 6, (column - 8) / ranks);
  return {
    ranks, box, column, shelf, floor, lane, left, height: floor + 50,
    token: (r, t, j) => [r * (box + GAP) + 16 + (t + 0.5) * ((box - 32) / 12), HOME + j * PITCH],
    seat: (e, r, n) => [left(e) + column / 2 + (r - (ranks - 1) / 2) * lane, floor - 10 - n * PITCH],
  };
}

// Every choice as {rank, token, choice, expert, kept, from, to}.
function choices(at) {
  const filled = new Map(), found = [];
  answer.tokens.forEach((example, rank) => example.forEach((chosen, token) => chosen.forEach((expert, choice) => {
    const kept = answer.kept[rank][token][choice], lane = `${expert} ${rank}`, n = filled.get(lane) ?? 0;
    if (kept) filled.set(lane, n + 1);
    found.push({ rank, token, expert, kept, from: at.token(rank, token, choice), to: kept && at.seat(expert, rank, n) });
  })));
  return found;
}

// ---- drawing

function place(at) {
  const parts = [];
  for (let r = 0; r < at.ranks; r++) {
    const x = r * (at.box + GAP);
    parts.push(
      svg("rect", { x, y: 0, width: at.box, height: at.height, rx: 6, fill: "var(--surface)" }),
      svg("text", { x: x + 12, y: 20, "font-weight": 600 }, `rank ${r}`),
      svg("circle", { cx: x + at.box - 18, cy: 16, r: 6, fill: COLOURS[r] }),
    );
  }
  answer.home.forEach((_, e) => {
    const x = at.left(e) + 3, width = at.column - 6;
    parts.push(
      svg("rect", { x, y: at.shelf, width, height: at.floor - at.shelf, rx: 4, fill: "var(--background)", stroke: "var(--border)", "data-expert": e }),
      svg("text", { x: x + width / 2, y: at.floor + 18, "text-anchor": "middle" }, `expert ${e}`),
      svg("text", { x: x + width / 2, y: at.floor + 38, "text-anchor": "middle", "data-load": e }),
    );
    if (answer.takes !== null) {
      const y = at.floor - 10 - (answer.takes - 0.5) * PITCH;
      parts.push(svg("line", { x1: x, x2: x + width, y1: y, y2: y, stroke: "var(--fault)", "stroke-width": 1.5, "stroke-dasharray": "4 3" }));
    }
  });
  return parts;
}

function dot(one) {
  const cross = `M${-DOT + 1} ${-DOT + 1}L${DOT - 1} ${DOT - 1}M${DOT - 1} ${-DOT + 1}L${-DOT + 1} ${DOT - 1}`;
  const node = svg("g", {},
    svg("circle", { r: DOT, fill: COLOURS[one.rank], stroke: "var(--background)" }),
    svg("text", { y: 3.5, "text-anchor": "middle" }, String(one.expert)),
    svg("path", { d: cross, stroke: "var(--fault)", "stroke-width": 2.5, visibility: "hidden" }));
  node.children[1].style.cssText = `font-size: 10px; font-weight: 700; fill: ${INK[one.rank]}`;
  node.append(svg("title", {}, `token ${one.token} of rank ${one.rank}, to expert ${one.expert}`));
  return node;
}

function draw() {
  const at = layout(answer), all = choices(at);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${at.height}`, role: "img", "aria-label": "" });
  picture.style.minWidth = "52rem";
  picture.append(...place(at));
  const lines = svg("g", { "stroke-width": 1, opacity: 0.45 });
  picture.append(lines);
  for (const one of all) picture.append((one.node = dot(one)));
  $("drawing").replaceChildren(picture);
  drawn = { at, all, picture, lines };
}

// Move the dots to where they are in a step; crosses and loads only where they are revealed.
function show(step, revealed) {
  const { all, picture, lines } = drawn, away = step === 1 || step === 2;
  lines.replaceChildren();
  for (const one of all) {
    const gone = revealed && !one.kept && step > 0, [x, y] = away && one.kept ? one.to : one.from;
    one.node.style.transition = still.matches ? "none" : "transform 0.7s ease-in-out";
    one.node.style.transform = `translate(${x}px, ${y}px)`;
    one.node.children[0].style.fill = gone ? "var(--fault-surface)" : "";
    one.node.children[1].style.visibility = gone ? "hidden" : "";
    one.node.children[2].style.visibility = gone ? "visible" : "hidden";
    if (step === 1 && one.kept && answer.home[one.expert] !== one.rank) {
      const [x1, y1] = one.from, [x2, y2] = one.to;
      lines.append(svg("line", { x1, y1, x2, y2, stroke: COLOURS[one.rank] }));
    }
  }
  const most = Math.max(...answer.load);
  answer.load.forEach((load, e) => {
    const busiest = step === 2 && load === most;
    const shelf = picture.querySelector(`[data-expert="${e}"]`), words = picture.querySelector(`[data-load="${e}"]`);
    shelf.style.stroke = busiest ? "var(--emphasis)" : "";
    shelf.style.strokeWidth = busiest ? "3px" : "";
    words.textContent = revealed && step > 0 ? `${load} rows` : "";
    words.style.fontWeight = busiest ? "700" : "";
  });
  picture.setAttribute("aria-label", step && revealed ? answer.words : `${STEPS[0]} ${all.length} choices.`);
}

// ---- numbers

const bytes = (n) => `${n.toLocaleString("en")} bytes`;

function numbers(revealed) {
  const dropped = answer.dropped.reduce((a, b) => a + b, 0), mean = answer.load.reduce((a, b) => a + b, 0) / answer.experts;
  const rows = [
    ["An expert takes, from each rank", answer.takes === null ? "all" : `${answer.takes} at most`],
    ["Choices dropped", String(dropped)],
    ["Tokens that reach no expert", String(answer.passed_by)],
    ["Rows of the busiest expert / mean", mean ? `${(Math.max(...answer.load) / mean).toFixed(2)} times` : "none"],
    ["Rows that leave their rank", String(answer.away)],
    ["Sent in forward: there and back", `2 × ${bytes(answer.bytes)}`],
    ["Sent in backward: there and back", `2 × ${bytes(answer.bytes)}`],
    ["Balancing loss (even routing: 1)", answer.balance.toFixed(2)],
  ];
  $("numbers").replaceChildren(...rows.map(([what, value], i) =>
    h("div", {}, h("dt", {}, what), h("dd", {}, revealed || i === 0 ? value : "?"))));
  const most = Math.max(1, ...answer.matrix.flat());
  const cell = (n, r, to) => {
    const td = h("td", { class: "number" }, String(n));
    td.style.background = `color-mix(in srgb, ${COLOURS[r]} ${Math.round((45 * n) / most)}%, transparent)`;
    if (r === to) td.style.fontStyle = "italic";
    return td;
  };
  const head = answer.matrix.map((_, r) => h("th", { class: "number", scope: "col" }, `to rank ${r}`));
  $("matrix").replaceChildren(...(revealed ? [h("div", { class: "wide" }, h("table", {},
    h("caption", {}, "The all_to_all: rows from each rank to each rank. Those in italics stay at home."),
    h("thead", {}, h("tr", {}, h("td"), ...head)),
    h("tbody", {}, ...answer.matrix.map((row, r) =>
      h("tr", {}, h("th", { scope: "row" }, `rank ${r}`), ...row.map((n, to) => cell(n, r, to))))))) ] : []));
}

// ---- the page

const asked = latest(ask);
const usual = { ranks: "4", experts: "8", k: "1", capacity: "1", skew: "2", step: 0, guess: "" };
const page = state(usual, update);
let shown = "", predicted = null; // the case of the guess

async function update(values) {
  const { ranks, experts, k, capacity, skew } = values;
  const key = [ranks, experts, k, capacity, skew].join(" ");
  if (key !== shown) {
    const given = { ranks: Number(ranks), experts: Number(experts), k: Number(k), capacity, skew: Number(skew) };
    const found = await asked(given);
    if (found === null) return;
    if (found.error) return say(found.error);
    answer = found;
    shown = key;
    draw();
  }
  const revealed = values.guess !== "", step = revealed ? Math.min(3, Math.max(0, values.step)) : 0;
  const total = answer.tokens.flat(2).length, dropped = answer.dropped.reduce((a, b) => a + b, 0);
  $("question").firstChild.textContent = `How many of the ${total} choices are dropped? `;
  $("guess").max = total;
  $("guess").value = values.guess;
  $("again").hidden = !revealed;
  for (const button of document.querySelectorAll("[data-step]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.step) === step));
    button.disabled = !revealed && button.dataset.step !== "0";
  }
  const verdict = revealed ? ` ${dropped} of ${total} choices are dropped${predicted && predicted !== key ? ". Your guess was for another case; press Hide to predict this one" : `; your guess was ${values.guess}`}.` : " Predict, and the other steps open.";
  say(STEPS[step] + verdict);
  show(step, revealed);
  numbers(revealed);
  $("text").textContent = revealed ? answer.words : "Predict first; then this is the drawing in words.";
}

for (const button of document.querySelectorAll("[data-step]")) {
  button.addEventListener("click", () => page.set({ step: Number(button.dataset.step) }));
}
$("drawing").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by === undefined || page.values.guess === "") return;
  event.preventDefault();
  page.set({ step: Math.min(3, Math.max(0, page.values.step + by)) });
});
$("predict").addEventListener("submit", (event) => {
  event.preventDefault();
  predicted = shown;
  page.set({ guess: $("guess").value, step: 1 });
});
$("again").addEventListener("click", () => page.set({ guess: "", step: 0 }));
if (answer && !answer.error) {
  const q = first().question;
  shown = [q.ranks, q.experts, q.k, q.capacity, q.skew].join(" ");
  draw();
}
update(page.values);
