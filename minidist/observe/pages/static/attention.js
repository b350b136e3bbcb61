// Draws a cut hop by hop: hops, blocks, work and bytes are answers of minidist/observe/pages/attention.py.
import { $, ask, COLOURS, first, h, say, state, svg } from "./page.js";

const ON = ["#fff", "#111", "#111", "#111", "#111", "#111", "#fff", "#fff"]; // text on these colours
const NAMES = { plain: "plain", zigzag: "zig-zag", turns: "in turns" };
const SIZE = 480, EDGE = 44;

const usual = { cut: "plain", ranks: 4, pieces: 16, length: 16384, bytes: 8192, hop: 0, guess: "" };
for (const name of ["ranks", "pieces"]) { // a cut of one's own is for other ranks, or other pieces
  document.querySelector(`[data-state=${name}]`).addEventListener("input", () => {
    if (!(values.cut in NAMES)) values.cut = "plain";
    $("own").value = "";
  });
}
const { values, set } = state(usual, () => draw());
const answers = new Map(), given = first();
const question = () => ({ cut: values.cut, ranks: values.ranks, pieces: values.pieces, length: values.length, bytes: values.bytes });
const key = (each) => JSON.stringify(Object.entries(each).sort());
if (given) answers.set(key(given.question), given.answer);

async function draw() {
  const asked = question();
  let answer = answers.get(key(asked));
  if (answer === undefined) {
    $("shown").classList.add("old"); // the drawing before, until the answer is there
    named();
    answer = await ask(asked);
    if (!answer.error) answers.set(key(asked), answer);
    if (key(asked) !== key(question())) return; // there is a newer question
  }
  $("fault").replaceChildren(...(answer.error ? [h("p", { class: "panel fault" }, answer.error)] : []));
  for (const id of ["shown", "pieces", "revealed", "bytes"]) $(id).style.display = answer.error ? "none" : "";
  if (answer.error) return say("");
  show(answer);
}

function show(answer) {
  $("shown").classList.remove("old");
  const N = answer.work.length, hop = Math.min(Math.max(0, values.hop), N - 1);
  $("range").max = N - 1;
  $("range").value = hop;
  choose(answer);
  $("triangle").replaceChildren(triangle(answer, hop));
  $("ranks").replaceChildren(table(answer, hop));
  $("bars").replaceChildren(bars(answer, values.guess ? N - 1 : hop));
  $("bytes").replaceChildren(traffic(answer));
  $("text").textContent = answer.words;
  reveal(answer);
  const waits = answer.work[hop].filter((work) => work === 0).length;
  say(`Hop ${hop} of ${N - 1}: ${hop ? `rank r has the keys and values that began on rank r - ${hop} (before 0 comes ${N - 1})` : "each rank has its own keys and values"}. ` +
    (waits ? `${waits} rank${waits > 1 ? "s have" : " has"} nothing to compute.` : "All ranks compute."));
}

// ---- the cut: a button per piece

function named() {
  const preset = values.cut in NAMES;
  $("own").hidden = preset && !$("own").value;
  if (!preset) $("own").value = values.cut;
  document.querySelector('[data-state="cut"]').value = values.cut;
}

function choose(answer) {
  named();
  const box = $("pieces"), at = [...box.children].indexOf(document.activeElement);
  box.style.gap = "2px";
  box.replaceChildren(...answer.owner.map((rank, piece) => {
    const next = (rank + 1) % answer.work.length;
    const give = () => set({ cut: answer.owner.map((own, other) => (other === piece ? next : own)).join("") });
    const button = h("button", { type: "button", onclick: give, "aria-label": `piece ${piece} is on rank ${rank}; give it to rank ${next}` }, String(rank));
    Object.assign(button.style, { background: COLOURS[rank], color: ON[rank], padding: "0.2rem 0", width: "1.75rem", borderColor: "transparent" });
    return button;
  }));
  box.children[at]?.focus();
}

// ---- the triangle

function triangle(answer, hop) {
  const { owner, blocks } = answer, P = owner.length, N = answer.work.length, c = SIZE / P;
  const lit = owner.map((r, q) => blocks[q].filter((count, k) => count && answer.hop[q][k] === hop).length);
  const words = Array.from({ length: N }, (_, r) => `rank ${r} computes ${lit.filter((_, q) => owner[q] === r).reduce((a, b) => a + b, 0)} blocks`);
  const root = svg("svg", { viewBox: `0 0 ${EDGE + SIZE + 2} ${EDGE + SIZE + 2}`, role: "img", "aria-label": `Hop ${hop}: ${words.join(", ")}` });
  const edge = (x, y, rank, title) => {
    root.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(x < EDGE ? 16 : c - 1, 2), height: y < EDGE ? 16 : c - 1, fill: COLOURS[rank] }, svg("title", {}, title)));
    if (c >= 14) root.append(svg("text", { x: x + (x < EDGE ? 8 : c / 2), y: y + (y < EDGE ? 8 : c / 2) + 4, "text-anchor": "middle", fill: ON[rank] }, String(rank)));
  };
  root.append(svg("text", { x: EDGE, y: 14, fill: "var(--muted)" }, "keys, and where they are now"), svg("text", { x: 14, y: EDGE, fill: "var(--muted)", transform: `rotate(-90 14 ${EDGE})`, "text-anchor": "end" }, "queries"));
  owner.forEach((rank, piece) => {
    edge(EDGE + piece * c, EDGE - 20, (rank + hop) % N, `keys of piece ${piece}, of rank ${rank}, are on rank ${(rank + hop) % N}`);
    edge(EDGE - 20, EDGE + piece * c, rank, `queries of piece ${piece} are on rank ${rank}`);
  });
  blocks.forEach((row, q) => row.forEach((count, k) => root.append(block(answer, q, k, count, hop, c))));
  return root;
}

function block(answer, q, k, count, hop, c) {
  const own = answer.hop[q][k], rank = answer.owner[q], x = EDGE + k * c, y = EDGE + q * c, s = c - 1;
  const when = own === hop ? "now" : own < hop ? "before" : "later";
  const title = svg("title", {}, `queries ${q}, keys ${k}: rank ${rank}, hop ${own}, ${count ? `${count.toLocaleString("en")} scores` : "skipped"}`);
  if (!count) return svg("rect", { x, y, width: s, height: s, fill: when === "now" ? "var(--idle)" : "none", stroke: when === "now" ? COLOURS[rank] : "none", "stroke-width": 1 }, title);
  const points = q === k ? `${x},${y} ${x},${y + s} ${x + s},${y + s}` : `${x},${y} ${x + s},${y} ${x + s},${y + s} ${x},${y + s}`;
  return svg("polygon", { points, fill: when === "later" ? "var(--surface)" : COLOURS[rank], "fill-opacity": when === "before" ? 0.3 : 1,
    stroke: when === "now" ? "var(--text)" : "var(--border)", "stroke-width": when === "now" ? 1.5 : 0.5 }, title);
}

// ---- what each rank does; who waits

const number = (value) => value.toLocaleString("en");
const bytes = (value) => value >= 1e9 ? `${(value / 1e9).toPrecision(4)}\u00a0GB` : value >= 1e6 ? `${(value / 1e6).toPrecision(4)}\u00a0MB` : `${(value / 1e3).toPrecision(4)}\u00a0KB`;

function grid(caption, heads, rows) {
  return h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...heads.map((text, i) => h("th", { scope: "col", class: i ? "number" : null }, text)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((text, i) => i ? h("td", { class: "number" }, text) : h("th", { scope: "row" }, text))))));
}

function table(answer, hop) {
  const { owner, blocks, work, sent } = answer, N = work.length;
  const count = (rank, wanted) => owner.reduce((sum, r, q) => sum + (r === rank ? blocks[q].filter((n, k) => answer.hop[q][k] === hop && (n > 0) === wanted).length : 0), 0);
  const mark = (rank) => svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, fill: COLOURS[rank] }));
  return grid(`Hop ${hop}`, ["rank", "has keys of", "blocks", "skipped", "scores per head", "sends on"],
    work[hop].map((scores, r) => [h("span", {}, mark(r), ` ${r}`), `rank\u00a0${(r - hop + N) % N}`, count(r, true), count(r, false), number(scores), sent[hop][r] ? bytes(sent[hop][r]) : "nothing"]));
}

function bars(answer, until) {
  const { work } = answer, N = work.length, longest = work.map((hop) => Math.max(...hop)), all = longest.reduce((a, b) => a + b, 0);
  const x = (time) => 52 + (time / all) * 520, row = 24, total = (r) => number(work.slice(0, until + 1).reduce((sum, hop) => sum + hop[r], 0));
  const root = svg("svg", { viewBox: `0 0 580 ${26 + N * row}`, role: "img", "aria-label": `Scores up to hop ${until}: ${work[0].map((_, r) => `rank ${r} ${total(r)}`).join(", ")}` });
  work[0].forEach((_, r) => root.append(svg("text", { x: 0, y: 38 + r * row }, `rank ${r}`)));
  let start = 0;
  work.slice(0, until + 1).forEach((hop, i) => {
    if (longest[i]) root.append(svg("text", { x: x(start + longest[i] / 2), y: 14, "text-anchor": "middle", fill: "var(--muted)" }, N > 5 ? String(i) : `hop ${i}`));
    hop.forEach((scores, r) => root.append(
      svg("rect", { x: x(start), y: 24 + r * row, width: Math.max(0, x(longest[i]) - x(0) - 1), height: row - 5, fill: "var(--idle)" }, svg("title", {}, `rank ${r}, hop ${i}: ${number(scores)} of ${number(longest[i])} scores`)),
      svg("rect", { x: x(start), y: 24 + r * row, width: Math.max(0, x(scores) - x(0) - 1), height: row - 5, fill: COLOURS[r], "pointer-events": "none" })));
    start += longest[i];
  });
  root.style.minWidth = "26rem";
  return root;
}

function traffic(answer) {
  const of = (name, pairs) => [name, ...[0, 1].flatMap((way) => [bytes(Math.max(...pairs.map((pair) => pair[way]))), bytes(pairs.reduce((sum, pair) => sum + pair[way], 0))])];
  return grid("Bytes sent in one layer, from formulas", ["", "forward, busiest rank", "forward, all ranks", "backward, busiest rank", "backward, all ranks"],
    [of("ring", answer.ring), of("Ulysses", answer.ulysses)]);
}

// ---- predict, then reveal

function reveal(answer) {
  $("again").hidden = values.guess === "";
  $("reveal").hidden = values.guess !== "";
  $("best").parentElement.style.display = values.guess === "" ? "" : "none";
  if (values.guess === "") return $("revealed").replaceChildren();
  const share = (value) => `${(100 * value).toFixed(1)} %`, name = (cut) => NAMES[cut] ?? "yours";
  const most = Math.max(...answer.cuts.map((each) => each.balance)), best = answer.cuts.filter((each) => each.balance > most - 1e-9);
  const right = best.some((each) => each.cut === values.guess || (values.guess === "own" && !(each.cut in NAMES)));
  $("revealed").replaceChildren(
    h("p", { class: right ? "panel good" : "panel" }, `${right ? "Right" : "No"}: best balanced is ${best.map((each) => name(each.cut)).join(", and ")}.`),
    h("p", {}, "Balance: the scores of the mean rank, divided by those of the busiest rank, over all hops. Idle: the share of the time in which ranks wait, if each hop lasts as long as its busiest rank."),
    h("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Balance of the cuts" }, grid("Every cut, with these ranks and pieces",
      ["cut", "balance", "idle"], answer.cuts.map((each) => [name(each.cut) + (each.cut === values.cut ? " (shown)" : ""), share(each.balance), share(each.idle)]))));
}

const go = (by) => set({ hop: Math.min(Math.max(0, Number($("range").value) + by), values.ranks - 1) });
$("next").addEventListener("click", () => go(1));
$("back").addEventListener("click", () => go(-1));
addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], box = event.target.closest(".drawing");
  if (!by || (box && box.scrollWidth > box.clientWidth) || event.target.closest("input, select, textarea, .wide, #pieces") || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  go(by);
});
$("pieces").addEventListener("keydown", (event) => { // from piece to piece
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...$("pieces").children];
  if (by) all[(all.indexOf(document.activeElement) + by + all.length) % all.length].focus();
});
$("guess").addEventListener("submit", (event) => { event.preventDefault(); set({ guess: $("best").value }); });
$("again").addEventListener("click", () => { $("guess").reset(); set({ guess: "" }); $("best").focus(); });
draw();
