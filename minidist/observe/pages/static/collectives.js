// Draws the recorded steps of a collective; times are the latency and the bytes of these steps.
import { $, ask, COLOURS, first, h, say, state, svg } from "./page.js";

const NAMES = { ring: "ring", tree: "tree", halving_doubling: "halving and doubling", hierarchical: "two levels" };
const PHASES = { tree: ["reduce", "broadcast"] };
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const LEFT = 76, WIDTH = 576, CELL = 32, ROW = 56, UNIT = 44; // UNIT: pixels of S in the bar of sent bytes

for (const select of document.querySelectorAll("select[data-state]")) {
  select.addEventListener("input", () => { values.step = 0; });
}
const usual = { algorithm: "ring", ranks: 4, step: 0, size: 1048576, latency: 20, rate: 10, guess: "" };
const { values, set } = state(usual, () => draw());
const answers = new Map(), given = first();
if (given) answers.set(given.question.ranks, given.answer);

async function draw() {
  const ranks = values.ranks;
  if (!answers.has(ranks)) {
    const answer = await ask({ ranks });
    if (!answer.error) answers.set(ranks, answer);
    if (ranks !== values.ranks) return; // there is a newer question
    if (answer.error) return fault(answer.error);
  }
  const answer = answers.get(ranks), found = answer.algorithms[values.algorithm];
  if (found === undefined) return fault(`there is no algorithm ${values.algorithm}`);
  if (found.error) return fault(found.error);
  const step = now(found);
  $("range").max = found.steps.length - 1;
  $("range").value = step;
  $("drawing").replaceChildren(picture(answer, found, step));
  $("text").textContent = found.steps.map((_, each) => described(answer, found, each)).join("\n");
  say(summary(answer, found, step));
  reveal(answer, found);
}

function fault(sentence) {
  $("drawing").replaceChildren(h("p", { class: "panel fault" }, sentence));
  $("revealed").replaceChildren();
  say("");
}

const now = (found) => Math.min(Math.max(0, values.step), found.steps.length - 1);
const units = (elements, answer) => `${+(elements / answer.elements).toPrecision(3)}\u00a0S`;
const length = (found, [, , start, stop]) => found.slices.slice(start, stop).reduce((a, b) => a + b, 0);
const longest = (found, step) => Math.max(0, ...step.messages.map((message) => length(found, message)));
const whose = (bits) => `{${COLOURS.map((_, r) => r).filter((r) => (bits >> r) & 1).join(", ")}}`;

// ---- the same in words

function phase(answer, found, step) { // parts of sums travel first, then whole sums
  const whole = 2 ** answer.ranks - 1, before = found.steps[step - 1].holds;
  const names = found.steps[step].messages.filter((message) => length(found, message)).map(([from, to, start, stop]) => {
    const done = before[from].slice(start, stop).every((bits) => bits === whole);
    const where = answer.hosts[from] === answer.hosts[to] ? " inside hosts" : " between hosts";
    const name = (PHASES[values.algorithm] ?? ["reduce-scatter", "all-gather"])[Number(done)];
    return name + (values.algorithm === "hierarchical" ? where : "");
  });
  return [...new Set(names)].join(" and ");
}

function summary(answer, found, step) {
  if (step === 0) return "Start: each rank has its own numbers alone. Press Next step.";
  const { messages } = found.steps[step], end = step === found.steps.length - 1;
  return `Step ${step}, ${phase(answer, found, step)}: ${messages.length} message${messages.length === 1 ? "" : "s"}, ` +
    `the longest of ${units(longest(found, found.steps[step]), answer)}.${end ? " Every rank has the whole sum." : ""}`;
}

function described(answer, found, step) {
  const { messages, holds } = found.steps[step];
  const sent = messages.map(([from, to, start, stop]) => {
    const parts = found.steps[step - 1].holds[from].slice(start, stop).map((bits, i) => `slice ${start + i} ${whose(bits)}`);
    return `  rank ${from} sends ${parts.join(", ") || "nothing"} to rank ${to}`;
  });
  const held = holds.map((row, r) => `  rank ${r} holds ${row.map(whose).join(" ")}`);
  return [summary(answer, found, step), ...sent, ...held].join("\n");
}

// ---- the picture: a row per rank, a column per slice

function picture(answer, found, step) {
  const { messages, holds, sent } = found.steps[step], N = answer.ranks, two = values.algorithm === "hierarchical";
  const scale = WIDTH / answer.elements, ends = [0];
  for (const size of found.slices) ends.push(ends.at(-1) + size);
  const x = (slice) => LEFT + ends[slice] * scale;
  const y = (r) => 30 + r * ROW + (two ? answer.hosts[r] * 26 + 14 : 0);
  const most = Math.max(...found.closed) / answer.elements, height = y(N - 1) + CELL + 14;
  const full = LEFT + WIDTH + 20 + Math.max(2, Math.ceil(most)) * UNIT + 60;
  const root = svg("svg", { viewBox: `0 0 ${full} ${height}`, role: "img", "aria-label": described(answer, found, step) });
  Object.assign(root.style, { minWidth: "44rem", width: "64rem" });
  root.append(svg("defs", {}, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8z", fill: "var(--emphasis)" }))));
  const word = (at, top, text, anchor = "middle", fill = "var(--muted)") =>
    root.append(svg("text", { x: at, y: top, "text-anchor": anchor, fill }, text));
  found.slices.forEach((size, slice) => word(x(slice) + (size * scale) / 2, 16, found.slices.length > 1 ? `slice ${slice}` : "the whole array"));
  word(LEFT + WIDTH + 20, 16, "sent so far", "start");
  holds.forEach((row, r) => {
    if (two && answer.hosts[r] !== answer.hosts[r - 1]) word(0, y(r) - 8, `host ${answer.hosts[r]}`, "start");
    root.append(svg("rect", { x: 0, y: y(r) + 8, width: 14, height: 16, rx: 2, fill: COLOURS[r] }));
    word(20, y(r) + 21, `rank ${r}`, "start");
    row.forEach((bits, slice) => root.append(cell(bits, r, slice, N, x(slice), y(r), found.slices[slice] * scale)));
    const bar = { x: LEFT + WIDTH + 20, y: y(r) + 10, height: 12, rx: 2 };
    if (values.guess) root.append(svg("rect", { ...bar, width: (found.closed[r] / answer.elements) * UNIT, fill: "none", stroke: "var(--muted)" },
      svg("title", {}, `closed form: ${units(found.closed[r], answer)}`)));
    root.append(svg("rect", { ...bar, width: (sent[r] / answer.elements) * UNIT, fill: "var(--forward)" }));
    word(bar.x + 6 + (Math.max(sent[r], values.guess ? found.closed[r] : 0) / answer.elements) * UNIT, y(r) + 21, units(sent[r], answer), "start");
  });
  for (const [from, to, start, stop] of messages) if (stop > start) root.append(...arrow(x(start), x(stop), y(from), y(to)));
  return root;
}

function cell(bits, rank, slice, N, left, top, width) {
  const whole = bits === 2 ** N - 1, bar = (width - 10) / N;
  const box = { x: left + 2, y: top, width: width - 4, height: CELL, rx: 3, fill: "var(--surface)", stroke: whole ? "var(--good)" : "var(--border)", "stroke-width": whole ? 2.5 : 1 };
  const bars = COLOURS.slice(0, N).map((colour, r) => (bits >> r) & 1
    ? svg("rect", { x: left + 5 + r * bar, y: top + 5, width: bar - 1, height: CELL - 10, fill: colour })
    : svg("rect", { x: left + 5 + r * bar, y: top + CELL - 8, width: bar - 1, height: 3, fill: "var(--border)" }));
  return svg("g", {}, svg("title", {}, `rank ${rank}, slice ${slice}: ${whose(bits)}`), svg("rect", box), ...bars);
}

function arrow(left, right, from, to) {
  const down = to > from, x = (left + right) / 2, far = Math.abs(to - from) > 2 * CELL + 20;
  const start = down ? from + CELL + 1 : from - 1, end = down ? to - 2 : to + CELL + 2;
  const bend = far ? Math.min((right - left) / 2, 36) / 0.75 : 0; // beside the bars of the rows between
  const box = (top, dash) => svg("rect", { x: left + 1, y: top - 1.5, width: right - left - 2, height: CELL + 3, rx: 4, fill: "none", stroke: "var(--emphasis)", "stroke-width": 2, "stroke-dasharray": dash });
  const path = `M${x} ${start}C${x + bend} ${start + (end - start) * 0.25} ${x + bend} ${start + (end - start) * 0.75} ${x} ${end}`;
  return [box(from, "4 3"), box(to, null),
    svg("path", { d: path, fill: "none", stroke: "var(--emphasis)", "stroke-width": 2.5, "marker-end": "url(#head)" })];
}

// ---- time: from the recorded steps, each of which is one latency and its longest message

function cost(answer, algorithm) {
  const found = answer.algorithms[algorithm];
  if (found.error) return null;
  const share = found.steps.reduce((sum, step) => sum + longest(found, step), 0) / answer.elements;
  const seconds = (bytes) => (found.steps.length - 1) * values.latency * 1e-6 + (share * bytes) / (values.rate * 1e9);
  return { algorithm, found, seconds, steps: found.steps.length - 1, most: Math.max(...found.closed), sent: Math.max(...found.steps.at(-1).sent) };
}

const time = (seconds) => seconds < 1e-3 ? `${(seconds * 1e6).toPrecision(4)}\u00a0µs` : seconds < 1 ? `${(seconds * 1e3).toPrecision(4)}\u00a0ms` : `${seconds.toPrecision(4)}\u00a0s`;

function reveal(answer, found) {
  const shown = values.guess !== "";
  $("again").hidden = !shown;
  $("reveal").hidden = shown;
  for (const label of $("guess").querySelectorAll("label")) label.style.display = shown ? "none" : "";
  if (!shown) return $("revealed").replaceChildren();
  if (!(values.size > 0 && values.rate > 0 && values.latency >= 0)) {
    return $("revealed").replaceChildren(h("p", { class: "panel fault" }, "S and the rate are above 0, the latency is 0 or more"));
  }
  const costs = Object.keys(NAMES).map((name) => cost(answer, name)).filter((each) => each);
  const least = Math.min(...costs.map((each) => each.seconds(values.size)));
  const fastest = costs.filter((each) => each.seconds(values.size) <= least * (1 + 1e-9)).map((each) => each.algorithm);
  const own = costs.find((each) => each.algorithm === values.algorithm);
  const rows = costs.map((each) => h("tr", {}, h("th", { scope: "row" }, NAMES[each.algorithm]),
    ...[each.steps, units(each.sent, answer), units(each.most, answer), time(each.seconds(values.size))].map((text) => h("td", { class: "number" }, text))));
  const heads = ["algorithm", "steps", "busiest rank sent", "by formula", "time"].map((text, i) => h("th", { scope: "col", class: i ? "number" : null }, text));
  $("revealed").replaceChildren(verdict(answer, own, fastest),
    h("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "All algorithms" }, h("table", {}, h("caption", {}, `${answer.ranks} ranks, ${values.size.toLocaleString("en")} bytes each. Time: the sum over the recorded steps.`),
      h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows))),
    chart(costs));
}

function verdict(answer, own, fastest) {
  const [algorithm, ranks, steps, sends, choice] = values.guess.split(",");
  if (algorithm !== values.algorithm || Number(ranks) !== answer.ranks) return h("p", { class: "muted" }, "You predicted another algorithm, or other ranks. To predict this one, press the button above.");
  const right = [Number(steps) === own.steps, Math.abs(Number(sends) - own.most / answer.elements) < 0.006, fastest.includes(choice)];
  const line = (ok, said, is) => h("p", {}, `${ok ? "Right" : "No"}: you said ${said}; it is ${is}.`);
  return h("div", { class: `panel ${right.every(Boolean) ? "good" : ""}` }, line(right[0], `${steps} steps`, own.steps),
    line(right[1], `${sends} S`, units(own.most, answer)), line(right[2], NAMES[choice] ?? choice, fastest.map((name) => NAMES[name]).join(", or ")));
}

function chart(costs) { // both axes logarithmic
  const [low, high] = [2, 10], sizes = Array.from({ length: 81 }, (_, i) => 10 ** (low + i / 10));
  const all = costs.flatMap((each) => [each.seconds(sizes[0]), each.seconds(sizes.at(-1))]);
  const bottom = Math.floor(Math.log10(Math.max(1e-12, Math.min(...all)))), top = Math.ceil(Math.log10(Math.max(...all)));
  const x = (bytes) => 60 + ((Math.log10(bytes) - low) / (high - low)) * 480, y = (s) => 230 - ((Math.log10(Math.max(s, 10 ** bottom)) - bottom) / (top - bottom)) * 210;
  const root = svg("svg", { viewBox: "0 0 750 260", role: "img", "aria-label": `Time against bytes: ${costs.map((each) => `${NAMES[each.algorithm]} ${time(each.seconds(values.size))}`).join(", ")}` });
  for (let e = low; e <= high; e += 2) root.append(svg("path", { d: `M${x(10 ** e)} 20V230`, stroke: "var(--border)" }), svg("text", { x: x(10 ** e), y: 248, "text-anchor": "middle" }, ["100 B", "10 kB", "1 MB", "100 MB", "10 GB"][(e - low) / 2]));
  for (let e = bottom; e <= top; e += 1) root.append(svg("path", { d: `M60 ${y(10 ** e)}H540`, stroke: "var(--border)" }), svg("text", { x: 54, y: y(10 ** e) + 4, "text-anchor": "end" }, time(10 ** e).replace(/\.?0+\u00a0/, "\u00a0")));
  costs.forEach((each) => {
    const at = Object.keys(NAMES).indexOf(each.algorithm), line = { fill: "none", stroke: COLOURS[[0, 5, 2, 3][at]], "stroke-width": 2.5, "stroke-dasharray": DASHES[at] };
    root.append(svg("path", { ...line, d: `M${sizes.map((s) => `${x(s).toFixed(1)} ${y(each.seconds(s)).toFixed(1)}`).join("L")}` }),
      svg("path", { ...line, d: `M556 ${40 + at * 24}h36` }), svg("text", { x: 598, y: 44 + at * 24 }, NAMES[each.algorithm]));
  });
  if (values.size >= 100 && values.size <= 1e10) root.append(svg("path", { d: `M${x(values.size)} 20V230`, stroke: "var(--text)", "stroke-dasharray": "3 3" }), svg("text", { x: x(values.size), y: 14, "text-anchor": "middle" }, "S"));
  Object.assign(root.style, { minWidth: "32rem", width: "48rem" });
  return h("figure", {}, h("div", { class: "drawing", tabindex: 0, role: "group", "aria-label": "Time against bytes" }, root), h("figcaption", {}, "Bytes of the array (to the right) and time (upwards), both logarithmic. Small arrays pay for steps, large arrays for bytes. S: your array."));
}

// ---- steps, and the guess

const go = (by) => {
  const found = answers.get(values.ranks)?.algorithms[values.algorithm];
  if (found?.steps) set({ step: Math.min(Math.max(0, now(found) + by), found.steps.length - 1) });
};
$("next").addEventListener("click", () => go(1));
$("back").addEventListener("click", () => go(-1));
addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], box = event.target.closest(".drawing");
  if (!by || (box && box.scrollWidth > box.clientWidth) || event.target.closest("input, select, textarea, .wide") || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  go(by);
});
$("guess").addEventListener("submit", (event) => {
  event.preventDefault();
  set({ guess: [values.algorithm, values.ranks, $("steps").value, $("sends").value, $("fastest").value].join(",") });
});
$("again").addEventListener("click", () => { $("guess").reset(); set({ guess: "" }); $("steps").focus(); });
draw();
